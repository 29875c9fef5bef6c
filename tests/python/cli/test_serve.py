from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import urllib.request

import numpy as np
import paramwire
import pytest
from paramwire.cli_model import MODEL_NAME, TOKENIZER_NAME, as_served
from paramwire.model_file import to_bf16
from paramwire.safetensors_file import write_safetensors

TIMEOUT = 60.0


@pytest.fixture(scope="module")
def served(cli, tiny_gguf):
    """Facts of a server for tests that only look at it."""
    with cli.serving(tiny_gguf.path) as facts:
        yield facts


def test_serve_and_get_give_back_the_bytes_of_the_file(cli, served, tiny_gguf, tmp_path):
    listed = {record["name"]: record for record in cli.json_lines("ls", served["address"], "--json")}
    assert set(listed) == {*tiny_gguf.tensors, MODEL_NAME, TOKENIZER_NAME}
    for name in ("token_embd.weight", "blk.1.attn_norm.weight"):
        for transport, address in (("shm", served["address"]), ("tcp", cli.tcp_of(served))):
            target = tmp_path / "out.npy"
            (record,) = cli.json_lines("get", address, name, "-o", target, "--transport", transport, "--json")
            assert record["version"] == served["version"]
            assert record["transport"] == transport
            np.testing.assert_array_equal(np.load(target), tiny_gguf.tensors[name])
    target = tmp_path / "rows.npy"
    cli.run("get", served["address"], "token_embd.weight", "--rows", "3:17", "-o", target)
    np.testing.assert_array_equal(np.load(target), tiny_gguf.tensors["token_embd.weight"][3:17])


def test_serve_as_bf16_rounds_and_cuts_large_tensors_in_blocks(cli, tiny_gguf, tmp_path):
    with cli.serving(tiny_gguf.path, "--dtype", "bf16", "--block-bytes", "4KiB") as facts:
        listed = {record["name"]: record for record in cli.json_lines("ls", facts["address"], "--json")}
        embedding = tiny_gguf.tensors["token_embd.weight"]
        assert listed["token_embd.weight"]["dtype"] == "bf16"
        assert listed["token_embd.weight"]["bytes"] == embedding.size * 2
        # 4 KiB hold 16 rows of 128 values of 2 bytes.
        assert listed["token_embd.weight"]["blocks"] == -(-embedding.shape[0] // 16)
        target = tmp_path / "out.npy"
        (record,) = cli.json_lines("get", facts["address"], "token_embd.weight", "-o", target, "--json")
        assert record["file_dtype"] == "uint16"
        np.testing.assert_array_equal(np.load(target), to_bf16(embedding))


def test_weights_that_a_file_holds_twice_are_stored_once(cli, tiny_safetensors):
    with cli.serving(tiny_safetensors.path) as facts:
        listed = {record["name"]: record for record in cli.json_lines("ls", facts["address"], "--json")}
    names = {"lm_head.weight", "model.embed_tokens.weight"}
    aliases = {listed[name]["alias_of"] for name in names}
    assert aliases - {None} < names
    assert len(aliases) == 2


def test_ready_file_and_ready_descriptor_tell_the_address(cli, tiny_gguf, tmp_path):
    reading, writing = os.pipe()
    words = cli.command(
        "serve", tiny_gguf.path, "--quiet", "--stop-on-eof", "--ready-file", tmp_path / "ready", "--ready-fd", writing
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, pass_fds=[writing], text=True) as process:
        os.close(writing)
        with os.fdopen(reading) as file:
            facts = json.load(file)
        assert json.loads((tmp_path / "ready").read_text()) == facts
        assert facts["pid"] == process.pid
        assert facts["address"] in facts["endpoints"]
        out, _ = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_serving_with_status_0_while_a_client_is_connected(cli, tiny_gguf, number):
    process = subprocess.Popen(cli.command("serve", tiny_gguf.path, "--json"), stdout=subprocess.PIPE, text=True)
    try:
        facts = json.loads(process.stdout.readline())
        with paramwire.connect(facts["address"]) as client, client.snapshot() as snapshot:
            view = snapshot.view("token_embd.weight") if client.transport == "shm" else None
            process.send_signal(number)
            assert process.wait(TIMEOUT) == 0
            if view is not None:  # outlives its server
                np.testing.assert_array_equal(view.array, tiny_gguf.tensors["token_embd.weight"])
                view.release()
    finally:
        process.kill()
        process.communicate()


def test_files_that_share_a_name_are_refused_naming_both(cli, tmp_path):
    for name in ("a", "b"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"same": np.zeros(3, np.float32)})
    done = cli.run("serve", tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=1)
    assert "'same'" in done.stderr
    assert "a.safetensors" in done.stderr
    assert "b.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x08\0\0\0\0\0\0\0{}", os.urandom(64)])
def test_a_file_that_is_no_model_is_refused_by_name(cli, tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    done = cli.run("serve", path, status=1)
    assert "broken.safetensors" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line_and_status_1(cli, tiny_gguf):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = cli.run("serve", tiny_gguf.path, "--listen", address, status=1)
    assert address.removeprefix("tcp://") in done.stderr
    assert done.stderr.count("\n") == 1


def test_put_publishes_a_new_version_that_get_reads(cli, tiny_gguf, tmp_path):
    array = np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4))
    np.save(tmp_path / "extra.npy", array)
    with cli.serving(tiny_gguf.path) as facts:
        (put,) = cli.json_lines("put", facts["address"], tmp_path / "extra.npy", "--json")
        assert numbers(put["version"]) > numbers(facts["version"])
        (got,) = cli.json_lines("get", facts["address"], "extra", "-o", tmp_path / "back.npy", "--json")
        assert got["version"] == put["version"]
        np.testing.assert_array_equal(np.load(tmp_path / "back.npy"), array)
        (stat,) = cli.json_lines("stat", facts["address"], "--json")
        assert stat["newest"] == put["version"]
        assert stat["transport"] == "shm"
        (stat,) = cli.json_lines("stat", cli.tcp_of(facts), "--transport", "tcp", "--json")
        assert stat["transport"] == "tcp"
        assert all(entry["reason"] for entry in stat["rejected"])


def numbers(text):
    epoch, counter = text.split(".")
    return int(epoch), int(counter)


def test_put_refuses_objects_and_unknown_files(cli, served, tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.txt").write_text("no model")
    for name in ("objects.npy", "text.txt", "missing.npy"):
        done = cli.run("put", served["address"], tmp_path / name, status=1)
        assert name in done.stderr
        assert done.stderr.count("\n") == 1
    (stat,) = cli.json_lines("stat", served["address"], "--json")
    assert stat["newest"] == served["version"]


def test_get_of_an_unknown_name_says_so(cli, served):
    done = cli.run("get", served["address"], "blk.0.attn_q.weigth", status=1)
    assert "blk.0.attn_q.weigth" in done.stderr
    assert done.stdout == ""


def test_people_see_tables(cli, served, tiny_gguf):
    listed = cli.run("ls", served["address"]).stdout
    assert "blk.0.ffn_down.weight" in listed
    assert "128 x 512" in listed
    assert f"version {served['version']}: {len(tiny_gguf.tensors) + 2} tensors" in listed
    got = cli.run("get", served["address"], "output_norm.weight").stdout
    assert "first values" in got
    assert "f32" in got
    assert "newest version" in cli.run("stat", served["address"]).stdout


def test_floats_become_what_is_served_and_integers_stay():
    values = np.array([1.0, -0.0, np.inf, 3.14159265, 1e-40], np.float32)
    for source in (values, values.astype(np.float64)):
        served, label = as_served(source, None, "bf16")
        assert label == "bf16"
        np.testing.assert_array_equal(served.view(np.uint16), to_bf16(values))
    back, label = as_served(served, "bf16", "f32")
    assert label == "f32"
    np.testing.assert_array_equal(back.view(np.uint32), to_bf16(values).astype(np.uint32) << 16)
    integers = np.arange(3, dtype=np.int32)
    served, label = as_served(integers, None, "bf16")
    assert served is integers
    assert label == "i32"


def test_a_signal_during_fetches_drains_and_ends_with_status_0(cli, tiny_gguf):
    """What a client gets until the end is whole, and then it is told: it never waits for its deadline."""
    process = subprocess.Popen(cli.command("serve", tiny_gguf.path, "--json"), stdout=subprocess.PIPE, text=True)
    name = "token_embd.weight"
    begun = threading.Barrier(4)
    ends: list[BaseException | None] = []

    def fetch_for_ever(address: str, transport: str) -> None:
        end: BaseException | None = None
        try:
            with paramwire.connect(address, transport=transport, timeout=60.0) as client:
                for i in itertools.count():
                    np.testing.assert_array_equal(client.fetch(name), tiny_gguf.tensors[name])
                    if i == 2:
                        begun.wait(TIMEOUT)
        except BaseException as error:
            end = error
        ends.append(end)

    try:
        facts = json.loads(process.stdout.readline())
        ways = [(facts["address"], "shm"), (facts["address"], "tcp"), (cli.tcp_of(facts), "tcp")]
        threads = [threading.Thread(target=fetch_for_ever, args=way) for way in ways]
        for thread in threads:
            thread.start()
        begun.wait(TIMEOUT)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        assert process.wait(TIMEOUT) == 0
        assert [type(end) for end in ends] == [paramwire.UnreachableError] * 3, ends
    finally:
        process.kill()
        process.communicate()


def test_serve_answers_prometheus_and_writes_its_trace_at_the_end(cli, tiny_gguf, tmp_path):
    trace = tmp_path / "serve.json"
    with cli.serving(tiny_gguf.path, "--metrics", "0", "--trace", str(trace)) as facts:
        cli.run("get", facts["address"], "output_norm.weight")
        with urllib.request.urlopen(facts["metrics"], timeout=10) as answer:
            text = answer.read().decode()
    assert "paramwire_server_publishes_total 1\n" in text
    assert 'paramwire_server_request_seconds_bucket{le="+Inf"}' in text
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"finish", "request", "turn"} <= names


def test_serve_refuses_a_metrics_address_that_can_not_be_meant(cli, tiny_gguf):
    for where in ("here", "127.0.0.1:70000", "203.0.113.1:0"):
        done = cli.run("serve", tiny_gguf.path, "--metrics", where, status=1)
        assert f"--metrics {where}" in done.stderr


def test_generate_writes_the_trace_of_its_steps(cli, tiny_gguf, tmp_path):
    trace = tmp_path / "steps.json"
    with cli.serving(tiny_gguf.path) as facts:
        few = ("--prompt", "the thing", "--tokens", "3", "--ignore-end")
        cli.run("generate", facts["address"], *few, "--trace", str(trace))
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("step") == 3
    assert {"piece", "compute", "snapshot"} <= set(names)

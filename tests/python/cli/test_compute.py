from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
from pathlib import Path

import paramwire
import pytest
import sim_cuda_main
from paramwire import cli_demo
from paramwire.cli import main
from paramwire.cli_bench_common import Child
from paramwire.cli_common import CliError
from paramwire.cli_demo import find_model

ROOT = Path(__file__).parents[3]
SIM_DRIVER = ROOT / "build" / "dev" / "tests" / "sim_cuda" / "libcuda.so.1"
PROMPT = ("--prompt", "the thing")


def generate(cli, address, *extra):
    records = cli.json_lines("generate", address, "--json", "--ignore-end", "--tokens", "9", *PROMPT, *extra)
    assert records[0]["event"] == "start"
    assert records[-1]["event"] == "result"
    texts = [record["text"] for record in records[1:-1]]
    assert "".join(texts) == records[-1]["text"]
    return records[-1]


def test_generate_makes_the_same_tokens_however_the_weights_come(cli, tiny_gguf, tiny_safetensors):
    results = []
    for model in (tiny_gguf, tiny_safetensors):
        with cli.serving(model.path, "--block-bytes", "64KiB") as facts:
            for address, *extra in (
                (facts["address"], "--transport", "shm"),
                (facts["address"], "--transport", "shm", "--source", "copy", "--budget", "40%"),
                (facts["address"], "--transport", "shm", "--source", "view", "--budget", "40%"),
                (cli.tcp_of(facts), "--transport", "tcp", "--budget", "40%", "--threads", "1"),
            ):
                result = generate(cli, address, *extra)
                assert result["tokens"] == 9
                assert result["version"] == facts["version"]
                if "--budget" in extra:
                    assert 0 < result["held_bytes_max"] <= result["budget_bytes"] < result["model_bytes"]
                results.append(result["ids"])
    assert all(ids == results[0] for ids in results)


def test_generate_shows_text_on_stdout_and_facts_beside_it(cli, tiny_gguf):
    with cli.serving(tiny_gguf.path) as facts:
        expected = generate(cli, facts["address"])["text"]
        done = cli.run("generate", facts["address"], "--ignore-end", "--tokens", "9", *PROMPT)
    assert done.stdout == expected + "\n"
    assert "tokens/s" in done.stderr


def test_generate_from_a_server_that_describes_no_model_says_what_to_do(cli, tmp_path):
    import numpy as np
    from paramwire.safetensors_file import write_safetensors

    write_safetensors(tmp_path / "bare.safetensors", {"x": np.zeros(4, np.float32)})
    with cli.serving(tmp_path / "bare.safetensors") as facts:
        done = cli.run("generate", facts["address"], *PROMPT, status=1)
    assert "paramwire.model.json" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_budget_too_small_names_one_that_would_do(cli, tiny_gguf):
    with cli.serving(tiny_gguf.path) as facts:
        done = cli.run("generate", facts["address"], "--budget", "16", *PROMPT, status=1)
    assert "budget" in done.stderr


@pytest.mark.skipif(not SIM_DRIVER.exists(), reason="build/dev has no simulated driver: no nvcc, or nothing built")
def test_generate_makes_the_same_tokens_on_a_simulated_device(cli, tiny_gguf):
    with cli.serving(tiny_gguf.path, "--block-bytes", "64KiB") as facts:
        expected = generate(cli, facts["address"])
        for budget in (("--budget", "75%"), ()):
            words = ["generate", facts["address"], "--json", "--ignore-end", "--tokens", "3", *PROMPT, *budget]
            done = subprocess.run(
                [sys.executable, sim_cuda_main.__file__, SIM_DRIVER, *words, "--backend", "cuda:0"],
                check=False,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr
            result = json.loads(done.stdout.splitlines()[-1])
            assert result["ids"] == expected["ids"][:3]
            assert not budget or result["held_bytes_max"] <= result["budget_bytes"] < result["model_bytes"]


@pytest.mark.parametrize("command", [("generate",), ("bench", "generate")])
def test_a_backend_that_this_machine_lacks_is_named_with_the_reason(cli, tiny_gguf, command):
    cuda = next(row for row in paramwire.available()["backends"] if row["name"] == "cuda")
    ordinal = 4096 if cuda["usable"] else 0  # no machine has so many
    words = ("--backend", f"cuda:{ordinal}", "--tokens", "2")
    if command == ("generate",):
        with cli.serving(tiny_gguf.path) as facts:
            done = cli.run(*command, facts["address"], *PROMPT, *words, status=1)
    else:
        done = cli.run(*command, "--json", "--model", tiny_gguf.path, "--budget", "75%", *words, status=1)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("paramwire: ")
    assert f"cuda:{ordinal}" in done.stderr
    if not cuda["usable"]:
        assert cuda["reason"] in done.stderr
    assert done.stdout == ""


def test_the_cpu_can_be_named_as_the_backend(cli, tiny_gguf):
    with cli.serving(tiny_gguf.path) as facts:
        named = generate(cli, facts["address"], "--backend", "cpu")
        assert named["ids"] == generate(cli, facts["address"])["ids"]
    assert named["backend"].startswith("cpu")


FETCH_FIELDS = {
    "bench", "language", "transport", "bytes", "memory", "p50_us", "p99_us", "gb_per_s", "baseline", "baseline_p50_us",
    "baseline_gb_per_s", "ratio", "verified", "retries", "cpu_s_per_gb", "correct",
}  # fmt: skip


def test_bench_fetch_prints_one_whole_record_for_each_figure(cli):
    words = ("--sizes", "4KiB,1MiB", "--rotate", "2MiB", "--seconds", "0.05")
    records = cli.json_lines("bench", "fetch", "--json", *words)
    seen = {(record["transport"], record["bytes"], record["bench"], record["memory"]) for record in records}
    assert len(seen) == len(records)
    for size in (4096, 1 << 20):
        assert {key[2:] for key in seen if key[:2] == ("tcp", size)} == {("fetch", "cold"), ("fetch", "warm")}
        assert {key[2:] for key in seen if key[:2] == ("shm", size)} == {
            ("fetch", "cold"), ("fetch", "warm"), ("fetch_read", "cold"), ("first_view", "cold"), ("view", "warm"),
        }  # fmt: skip
    for record in records:
        assert record.keys() >= FETCH_FIELDS
        assert record["correct"] is True
        assert 0 < record["p50_us"] <= record["p99_us"]
        if record["bench"] == "view":
            assert record["baseline"] is None
            continue
        assert record["retries"] == 0
        assert record["verified"] == record["calls"] > 0
        if record["transport"] == "udp":  # the faster of two plain programs
            assert record["baseline"] in ("plain udp, 64 KiB datagrams", "plain udp, segments")
        else:
            assert record["baseline"] == {"tcp": "plain tcp"}.get(
                record["transport"], "memcpy and read" if record["bench"] == "fetch_read" else "memcpy"
            )
        assert record.get("ratio_min", 0) <= record["ratio"] <= record.get("ratio_max", math.inf)
        assert all(record[name] > 0 for name in ("gb_per_s", "baseline_p50_us", "ratio", "cpu_s_per_gb"))


def test_bench_fetch_for_people_is_a_table(cli):
    done = cli.run("bench", "fetch", "--sizes", "64", "--rotate", "64KiB", "--seconds", "0.02", "--transport", "shm")
    assert "shm, from Python" in done.stdout
    assert "first view" in done.stdout
    assert "tcp" not in done.stdout


def test_bench_fetch_refuses_blocks_that_do_not_fit_into_memory(cli):
    done = cli.run("bench", "fetch", "--sizes", "900GiB", status=1)
    assert "--sizes" in done.stderr


def test_bench_generate_compares_with_local_weights_and_with_the_link(cli, tiny_gguf):
    arguments = ("--model", tiny_gguf.path, "--tokens", "16", "--budget", "75%")
    records = cli.json_lines("bench", "generate", "--json", *arguments)
    seen = [(record["transport"], record["view_pages"]) for record in records]
    assert seen == [("shm", "kept"), ("shm", "dropped"), ("tcp", None)]
    for record in records:
        assert record["correct"] is True
        assert record["ratio"] > 0
        assert record["held_bytes_max"] <= record["budget_bytes"]
    assert records[2]["bound_ratio"] > 0


def test_bench_memory_counts_what_is_needed_beside_the_bytes(cli):
    arguments = ("--model-bytes", "16MiB", "--tensors", "100", "--tiny", "20000")
    records = cli.json_lines("bench", "memory", "--json", *arguments)
    assert [record["bench"] for record in records] == ["fetch_model_memory"] * 2 + ["tiny_tensors_memory"]
    assert all(record["correct"] and record["fits"] for record in records)


def shown(records):
    runs = {record["run"]: record for record in records}
    assert list(runs) == ["shm", "udp", "tcp", "new version"]
    shm, udp, tcp, later = runs.values()
    assert shm["ids"] == udp["ids"] == tcp["ids"]
    assert shm["version"] == udp["version"] == tcp["version"] != later["version"]
    assert tcp["newest"] == later["version"]
    for run in (shm, udp, tcp):
        assert run["fits"] is True
        assert run["parameter_memory"] <= run["budget_bytes"]
        assert run["held_bytes_max"] <= run["budget_bytes"]
    assert shm["local_ratio"] > 0
    assert tcp["bound_ratio"] > 0
    return runs


class NarrowChild(Child):
    """Its pipe holds a page: a compute process of some hundred tokens can't be over before the demo has read of it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        assert fcntl.fcntl(self.stdout, fcntl.F_SETPIPE_SZ, 4096) == 4096


def test_demo_of_a_tiny_model_with_a_key_shows_both_versions(capsys, monkeypatch, tiny_gguf):
    # Pages of memory are larger than the tiny model's budget would be, so it gets one that holds all of it.
    monkeypatch.setattr(cli_demo, "Child", NarrowChild)
    words = ["--model", str(tiny_gguf.path), "--tokens", "400", "--budget", "64MiB", "--key"]
    assert main(["demo", "--json", *words]) == 0
    runs = shown([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert [runs[name]["key"] for name in ("shm", "udp", "tcp")] == [True] * 3


def test_demo_of_the_real_model_keeps_its_budget_of_a_quarter(cli):
    try:
        find_model(None)
    except CliError as error:
        pytest.skip(f"the real model is not installed: {error}")
    runs = shown(cli.json_lines("demo", "--json", "--tokens", "12"))
    assert runs["tcp"]["key"] is False
    assert runs["shm"]["budget_bytes"] * 4 <= runs["shm"]["model_bytes"] < 300_000_000

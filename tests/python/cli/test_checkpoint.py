"""`paramwire checkpoint`, `serve --checkpoint` and model files in pieces, as a user runs them."""

from __future__ import annotations

import json
import random
import signal
import subprocess

import numpy as np
import paramwire as pw
import pytest
from paramwire import checkpoint, cli_model
from paramwire.cli_common import CliError
from paramwire.safetensors_file import SafetensorsFile, write_safetensors

TIMEOUT = 60.0
SEED = 11


def tensors_of(cli, address):
    return {record["name"]: record for record in cli.json_lines("ls", address, "--json")}


def test_a_served_model_is_saved_and_served_from_its_checkpoint(cli, tiny_safetensors, tmp_path):
    folder = tmp_path / "weights"
    with cli.serving(tiny_safetensors.path, "--block-bytes", "64KiB") as facts:
        (saved,) = cli.json_lines("checkpoint", "save", folder, "--from", facts["address"], "--json")
        assert (saved["version"], saved["full"], saved["existed"]) == (facts["version"], True, False)
        assert saved["blocks"] == saved["blocks_full"]
        assert "is in" in cli.run("checkpoint", "save", folder, "--from", cli.tcp_of(facts)).stdout
        before = tensors_of(cli, facts["address"])
        generated = cli.run("generate", facts["address"], "--prompt", "the", "--tokens", "8", "--ignore-end").stdout
    (listed,) = cli.json_lines("checkpoint", "ls", folder, "--json")
    assert (listed["version"], listed["whole"], listed["full"]) == (saved["version"], True, True)
    assert "full" in cli.run("checkpoint", "ls", folder).stdout
    assert "every bit" in cli.run("checkpoint", "verify", folder, "--decode").stdout
    with cli.serving("--checkpoint", folder) as facts:
        assert int(facts["version"].split(".")[0]) > int(saved["version"].split(".")[0]), "versions never go back"
        after = tensors_of(cli, facts["address"])
        assert {name: (r["dtype"], r["shape"], r["blocks"], r["alias_of"]) for name, r in after.items()} == {
            name: (r["dtype"], r["shape"], r["blocks"], r["alias_of"]) for name, r in before.items()
        }
        again = cli.run("generate", facts["address"], "--prompt", "the", "--tokens", "8", "--ignore-end").stdout
        assert again == generated
        # The restored server goes on in the same directory, and what did not change is not written again.
        (next_save,) = cli.json_lines("checkpoint", "save", folder, "--from", facts["address"], "--json")
        assert next_save["blocks_unchanged"] == saved["blocks"]
        assert next_save["written_bytes"] == 0
    target = tmp_path / "out.safetensors"
    (exported,) = cli.json_lines("checkpoint", "restore", folder, "--safetensors", target, "--json")
    assert exported["left_out"] == [cli_model.MODEL_NAME, cli_model.TOKENIZER_NAME]
    with SafetensorsFile(target) as file, SafetensorsFile(tiny_safetensors.path) as source:
        assert sorted(file.entries) == sorted(source.entries)
        for name in source.entries:
            np.testing.assert_array_equal(file.tensor(name).data, source.tensor(name).data)


def test_restoring_publishes_one_version_on_a_running_server(cli, tiny_gguf, tmp_path):
    checkpoint.save(tmp_path / "d", {"only": np.arange(12, dtype=np.float32).reshape(3, 4)})
    with cli.serving(tiny_gguf.path) as facts:
        (done,) = cli.json_lines("checkpoint", "restore", tmp_path / "d", "--to", facts["address"], "--json")
        assert done["version"] > facts["version"]
        listed = tensors_of(cli, facts["address"])
        assert set(listed) == {"only"}
        assert {record["snapshot"] for record in listed.values()} == {done["version"]}


def test_verify_names_every_flipped_bit_and_ends_with_status_1(cli, tmp_path):
    folder = tmp_path / "d"
    arrays = {"w": np.random.default_rng(SEED).standard_normal((300, 301)).astype(np.float32)}
    checkpoint.save(folder, arrays)
    rng = random.Random(SEED)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        if not whole:
            continue
        bit = rng.randrange(len(whole) * 8)
        path.write_bytes(whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :])
        (found,) = map(json.loads, cli.run("checkpoint", "verify", folder, "--json", status=1).stdout.splitlines())
        assert {problem["file"] for problem in found["problems"]} == {path.name}
        shown = cli.run("checkpoint", "verify", folder, status=1).stdout
        assert path.name in shown
        assert "1 problem" in shown
        path.write_bytes(whole)
    cli.run("checkpoint", "verify", folder)


def test_errors_are_one_line_with_the_next_step(cli, tmp_path):
    for words, part in [
        (("ls", tmp_path / "no"), "no"),
        (("verify", tmp_path), "no checkpoint"),
        (("restore", tmp_path, "--safetensors", tmp_path / "x"), "no checkpoint"),
        (("save", tmp_path, "--from", f"unix:{tmp_path}/nobody"), "nobody"),
    ]:
        done = cli.run("checkpoint", *words, status=1)
        assert part in done.stderr
        assert done.stderr.count("\n") == 1
    cli.run("checkpoint", "restore", tmp_path, status=2)
    cli.run("checkpoint", "verify", tmp_path, "--version", "seven", status=2)
    cli.run("serve", "x.gguf", "--checkpoint", tmp_path, status=2)


@pytest.mark.parametrize("drain", [60, 1e-9])
def test_sigterm_finishes_a_save_in_time_or_leaves_it_to_the_next(cli, tmp_path, drain):
    """SIGTERM as soon as there is a data file. With a minute the save is done; with none it says what stays."""
    folder = tmp_path / "d"
    with pw.Server() as server:
        with server.publish() as publish:
            array = np.random.default_rng(SEED).integers(0, 2**32, 24 << 20, dtype=np.uint32)
            publish.put_rows("x", array, 1 << 20)
        checkpoint.save(folder, {"x": np.arange(3)})  # the one before
        words = cli.command("checkpoint", "save", folder, "--from", server.address, "--drain", drain, "--json")
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and not any(path.name.endswith(".tmp") for path in folder.iterdir()):
                pass
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=TIMEOUT)
        if process.returncode == 0:  # done before the signal, or because it had the time
            assert json.loads(out)["version"] == str(server.newest)
        else:
            assert drain < 1
            assert "stay for the next save of this version" in err
            assert "checkpoint 1.1 is whole" in err or "earlier checkpoints" in err
            assert checkpoint.ls(folder)[0].version == (1, 1)
        assert drain < 1 or process.returncode == 0
        with pw.connect(server.address) as client:
            saved = checkpoint.save(folder, client)
        assert saved.existed or saved.version == server.newest
        assert checkpoint.verify(folder, decode=True).problems == ()
        assert checkpoint.restore_arrays(folder)["x"].tobytes() == array.tobytes()


def test_a_killed_save_leaves_the_checkpoint_before(cli, tmp_path):
    """The real command under SIGKILL at a few random moments; checkpoint_kill_test has hundreds."""
    folder = tmp_path / "d"
    rng = random.Random(SEED)
    array = np.random.default_rng(SEED).integers(0, 2**32, 4 << 20, dtype=np.uint32)
    with pw.Server() as server:
        versions = []
        for step in range(4):
            array[:: 1 + step] += 1
            with server.publish() as publish:
                publish.put_rows("x", array, 1 << 18)
            words = cli.command("checkpoint", "save", folder, "--from", server.address, "--json")
            names = rng.randrange(5)
            with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
                seen: set[str] = set()
                while process.poll() is None and len(seen) <= names:
                    seen |= {path.name for path in folder.glob("*")}
                process.kill()
            found = checkpoint.ls(folder) if folder.exists() else []
            assert [item.version for item in found] in (versions, [server.newest, *versions])
            assert all(item.whole for item in found)
            with pw.connect(server.address) as client:
                checkpoint.save(folder, client)
            versions.insert(0, server.newest)
            assert checkpoint.restore_arrays(folder)["x"].tobytes() == array.tobytes()
        assert checkpoint.verify(folder, decode=True).problems == ()


# ---------------------------------------------------------------- model files on their way to a server


def test_an_index_of_several_files_is_served_as_one_model(cli, tiny_safetensors, tmp_path):
    names = sorted(tiny_safetensors.tensors)
    homes = {name: f"model-{index % 3 + 1:05}-of-00003.safetensors" for index, name in enumerate(names)}
    for home in set(homes.values()):
        here = {name: tiny_safetensors.tensors[name] for name in names if homes[name] == home}
        write_safetensors(tmp_path / home, here)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    with cli.serving(index) as facts:
        listed = tensors_of(cli, facts["address"])
        assert set(listed) >= set(names)
        cli.run("get", facts["address"], names[3], "-o", tmp_path / "out.npy")
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), tiny_safetensors.tensors[names[3]])
    for change, part in [
        ({names[0]: homes[names[1]]}, names[0]),
        ({"more": homes[names[0]]}, "'more'"),
        ({names[0]: "../x.safetensors"}, "beside the index"),
        ({names[0]: 7}, "weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": {**homes, **change}}))
        assert part in cli.run("serve", index, status=1).stderr
    index.write_text("{")
    assert "not JSON" in cli.run("serve", index, status=1).stderr


def test_large_tensors_are_published_in_pieces(tmp_path, monkeypatch):
    """Pieces of 64 KiB instead of 64 MiB: the same blocks, ties and casts as of tensors that are read whole."""
    rng = np.random.default_rng(SEED)
    arrays = {name: rng.standard_normal((500, 77)).astype(np.float32) for name in ("a", "b")}
    arrays |= {"a twin": arrays["a"].copy(), "near": arrays["a"].copy(), "vector": rng.standard_normal(90_000)}
    arrays["near"][499, 76] += 1
    path = tmp_path / "m.safetensors"
    write_safetensors(path, arrays)
    found = {}
    for size in (64 << 20, 64 << 10):
        monkeypatch.setattr(cli_model, "PIECE_BYTES", size)
        for dtype in ("keep", "bf16"):
            with pw.Server() as server, cli_model.open_model([path]) as model:
                with server.publish() as publish:
                    publish.put("a", np.zeros((500, 77), np.float32))  # is replaced
                    progress = cli_model.Progress(disable=True)
                    nbytes = cli_model.publish_model(publish, model, dtype, 20_000, progress)
                with pw.connect(server.address) as client, client.snapshot() as snapshot:
                    blocks = {name: [block.shard for block in snapshot.blocks(name)] for name in snapshot}
                    data = {name: snapshot[name].tobytes() for name in snapshot}
                    infos = [(info.name, info.dtype, info.shape, info.alias_of) for info in snapshot.tensors()]
                found.setdefault(dtype, []).append((nbytes, blocks, data, infos))
    for whole, pieces in found.values():
        assert whole == pieces
    assert found["keep"][0][3][1] in (("a twin", "f32", (500, 77), "a"), ("a", "f32", (500, 77), "a twin"))


def test_a_file_that_is_no_index_is_named(tmp_path):
    path = tmp_path / "x.index.json"
    path.write_text("[]")
    with pytest.raises(CliError, match=r"x\.index\.json.*weight_map"), cli_model.open_model([path]):
        pass

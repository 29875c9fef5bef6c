"""Checkpoints as Python sees them: of arrays, of servers, and back; the C++ tests have what goes wrong below."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest
from paramwire import checkpoint
from paramwire.model_file import ModelFileError


def model(seed: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "wide": (rng.standard_normal((700, 331)) * 0.02).astype(np.float32),
        "half": rng.standard_normal((64, 40)).astype(np.float16),
        "ids": rng.integers(0, 1000, 17, dtype=np.int64),
        "scalar": np.float64(rng.standard_normal()).reshape(()),
        "none": np.empty((0, 3), np.float32),
        "flags": rng.integers(0, 2, 9).astype(bool),
        "column": np.asfortranarray(rng.standard_normal((30, 20)).astype(np.float32)),
    }


def assert_same(arrays: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(arrays) == sorted(expected)
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == array.tobytes(), name


@pytest.fixture
def server():
    with pw.Server() as made:
        yield made


@pytest.mark.parametrize("codec", ["planes", "lz4", "raw"])
def test_arrays_come_back_bit_for_bit(tmp_path: Path, codec: str):
    arrays = model()
    saved = checkpoint.save(tmp_path / "d", arrays, codec=codec, block_bytes=100_000, verify=True)
    assert saved.version == (1, 1)
    assert saved.full
    assert saved.blocks == saved.blocks_full > len(arrays)
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), arrays)
    arrays["wide"][5] += 1e-3
    again = checkpoint.save(tmp_path / "d", arrays, codec=codec, block_bytes=100_000)
    assert again.version == (1, 2)
    assert (again.blocks_delta, again.blocks_unchanged) == (1, saved.blocks - 1)
    assert again.written_bytes < 20_000
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), arrays)
    assert_same(checkpoint.restore_arrays(tmp_path / "d", version=(1, 1)), model())
    assert checkpoint.verify(tmp_path / "d", decode=True).problems == ()


def test_names_that_share_memory_are_tied_and_labels_are_kept(tmp_path: Path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    embedding = np.arange(600, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(30, 20)
    packed = np.arange(8, dtype=np.uint8)
    arrays = {"embedding": embedding, "head": embedding, "packed": packed, "fp8": packed.copy()}
    checkpoint.save(tmp_path / "d", arrays, dtypes={"fp8": "f8_e4m3"})
    with pw.Checkpoint(tmp_path / "d") as found:
        infos = {info.name: info for info in found.tensors()}
        assert infos["head"].alias_of == "embedding"
        assert 0 < infos["packed"].stored_nbytes < 200
        assert (infos["embedding"].dtype, infos["fp8"].dtype) == ("bf16", "f8_e4m3")
        assert found.read("head").tobytes() == embedding.tobytes()
        out = np.zeros((20, 30), ml_dtypes.bfloat16).T
        found.read("embedding", out=out)
        assert (out == embedding).all()
        with pytest.raises(pw.InvalidError, match="out"):
            found.read("embedding", out=np.zeros(3, np.float32))
        with pytest.raises(pw.NotFoundError, match="nothing"):
            found.read("nothing")
    with pytest.raises(pw.InvalidError, match="closed"):
        found.read("head")


def test_a_server_is_saved_and_another_one_restored(tmp_path: Path, server):
    arrays = model()
    with server.publish() as publish:
        publish.put_all(arrays)
        publish.put_rows("rows", arrays["wide"], 65536)
        publish.alias("tied", "rows")
    with pw.connect(server.address) as client:
        saved = checkpoint.save(tmp_path / "d", client)
        assert saved.version == server.newest
        assert checkpoint.save(tmp_path / "d", client).existed
        with client.snapshot() as snapshot, pytest.raises(pw.InvalidError, match=r"not 1\.1"):
            checkpoint.save(tmp_path / "d", snapshot, version=(1, 1))
    expected = {**arrays, "rows": arrays["wide"], "tied": arrays["wide"]}
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), expected)
    with pw.Server(epoch_after=saved.version.epoch) as other:
        version = checkpoint.restore(tmp_path / "d", other)
        assert version > saved.version
        with pw.connect(other.address) as client, client.snapshot() as snapshot:
            assert_same(snapshot.fetch_many(list(snapshot)), expected)
            assert snapshot.info("tied").alias_of == "rows"
            # What came from the checkpoint is not written again when it is saved under its new version.
            again = checkpoint.save(tmp_path / "d", snapshot)
            assert again.blocks_unchanged == again.blocks


def test_restoring_replaces_what_a_server_has(tmp_path: Path, server):
    arrays = model()
    checkpoint.save(tmp_path / "d", arrays, block_bytes=100_000)
    with server.publish() as publish:
        publish.put("gone", np.zeros(3, np.float32))
        publish.put("wide", np.zeros((700, 331), np.float32))  # whole, in the checkpoint in rows
        publish.put("half", np.zeros((64, 40), np.float16))
        publish.alias("ids", "half")
    with pw.connect(server.address) as client:
        checkpoint.restore(tmp_path / "d", client)
        with client.snapshot() as snapshot:
            assert_same(snapshot.fetch_many(list(snapshot)), arrays)


def test_what_a_server_holds_encoded_is_saved_as_its_raw_bytes(tmp_path: Path, server):
    arrays = model()
    with server.publish(codec="planes") as publish:
        publish.put_all(arrays)
    with pw.connect(server.address) as client:
        saved = checkpoint.save(tmp_path / "d", client)
        assert_same(checkpoint.restore_arrays(tmp_path / "d"), arrays)
        arrays["half"][3] *= 2
        with server.publish(codec="planes") as publish:
            publish.put("half", arrays["half"])
        again = checkpoint.save(tmp_path / "d", client)
        assert again.blocks_unchanged == saved.blocks - 1
        assert again.blocks_delta == 1
        assert_same(checkpoint.restore_arrays(tmp_path / "d"), arrays)
        # And back, encoded again as the publish says.
        with (
            pw.Checkpoint(tmp_path / "d") as found,
            client.snapshot() as snapshot,
            server.publish(codec="planes") as publish,
        ):
            publish.put_checkpoint(found, replaces=snapshot)
        with client.snapshot() as snapshot:
            assert_same(snapshot.fetch_many(list(snapshot)), arrays)


def test_versions_of_a_server_never_go_back(tmp_path: Path, server):
    checkpoint.save(tmp_path / "d", model(), version=(4_000_000_000, 1))
    with pytest.raises(pw.StaleError, match=r"not above checkpoint 4000000000\.1.*serve --checkpoint"):
        checkpoint.restore(tmp_path / "d", server)
    assert server.newest is None
    with server.publish() as publish:
        publish.put("x", np.zeros(3))
    with pw.connect(server.address) as client, pytest.raises(pw.StaleError, match="versions never go back"):
        checkpoint.save(tmp_path / "d", client)


def test_a_damaged_block_is_never_handed_out(tmp_path: Path, server):
    arrays = model()
    checkpoint.save(tmp_path / "d", arrays, workers=1)
    (data,) = (path for path in (tmp_path / "d").iterdir() if path.suffix == ".blocks")
    rng = random.Random(5)
    whole = data.read_bytes()
    for _ in range(20):
        bit = rng.randrange(64 * 8, len(whole) * 8)
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        data.write_bytes(damaged)
        found = checkpoint.verify(tmp_path / "d")
        assert found.problems, bit
        assert found.problems[0].file == data.name
        assert found.problems[0].versions == ((1, 1),)
        with pytest.raises(pw.CorruptError, match=data.name):
            checkpoint.restore_arrays(tmp_path / "d")
        with pytest.raises(pw.CorruptError):
            checkpoint.restore(tmp_path / "d", server)
        assert server.newest is None
        target = tmp_path / "out.safetensors"
        with pytest.raises(pw.CorruptError):
            checkpoint.export_safetensors(tmp_path / "d", target)
        assert not target.exists()
    data.write_bytes(whole)
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), arrays)


def test_an_exported_file_is_what_the_reference_library_reads(tmp_path: Path):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = model()
    described = {**arrays, "tied": arrays["wide"], "paramwire.model.json": np.zeros(4, np.uint8)}
    checkpoint.save(tmp_path / "d", described, block_bytes=50_000)
    left_out = checkpoint.export_safetensors(tmp_path / "d", tmp_path / "m.safetensors", workers=3)
    assert left_out == ["paramwire.model.json"]
    assert_same(safetensors.load_file(tmp_path / "m.safetensors"), {**arrays, "tied": arrays["wide"]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "m.safetensors"]
    checkpoint.save(tmp_path / "complex", {"c": np.zeros(3, np.complex128)})
    with pytest.raises(ModelFileError, match="c128"):
        checkpoint.export_safetensors(tmp_path / "complex", tmp_path / "m.safetensors")
    assert_same(safetensors.load_file(tmp_path / "m.safetensors"), {**arrays, "tied": arrays["wide"]})


def test_what_is_mapped_from_the_directory_may_be_saved_over(tmp_path: Path):
    """UP-32: a source mapped from files of the directory itself stays as it is while it is saved, and afterwards."""
    arrays = model()
    checkpoint.save(tmp_path / "d", arrays, codec="raw")
    files = {path: np.memmap(path, np.uint8, "r") for path in (tmp_path / "d").iterdir() if path.stat().st_size}
    before = {path: bytes(mapped) for path, mapped in files.items()}
    checkpoint.save(tmp_path / "d", {path.name: mapped for path, mapped in files.items()}, keep=1, full_every=1)
    assert {path: bytes(mapped) for path, mapped in files.items()} == before
    restored = checkpoint.restore_arrays(tmp_path / "d")
    assert {name: array.tobytes() for name, array in restored.items()} == {p.name: c for p, c in before.items()}


def test_keep_and_ls_tell_what_is_there(tmp_path: Path):
    arrays = model()
    for step in range(5):
        arrays["wide"][step] += 1
        saved = checkpoint.save(tmp_path / "d", arrays, keep=2, full_every=3)
    assert saved.removed == ((1, 3),)
    found = checkpoint.ls(tmp_path / "d")
    assert [(str(item.version), item.chain, item.whole) for item in found] == [("1.5", 1, True), ("1.4", 0, True)]
    assert found[0].raw_bytes == sum(array.nbytes for array in arrays.values())
    assert found[0].written_bytes < found[0].stored_bytes
    assert found[0].created is not None
    with pytest.raises(pw.NotFoundError):
        checkpoint.ls(tmp_path / "nowhere")


def test_limits_and_stops(tmp_path: Path):
    arrays = {"x": np.zeros((1000, 1000), np.float32)}
    with pytest.raises(pw.InvalidError, match="memory_limit"):
        checkpoint.save(tmp_path / "d", arrays, block_bytes=1 << 30, memory_limit=1 << 20)
    progress = pw.CheckpointProgress()
    progress.stop()
    with pytest.raises(pw.DeadlineError, match="stay for the next save"):
        checkpoint.save(tmp_path / "d", arrays, progress=progress)
    with pytest.raises(pw.NotFoundError):
        pw.Checkpoint(tmp_path / "d")
    progress = pw.CheckpointProgress()
    assert checkpoint.save(tmp_path / "d", arrays, progress=progress).blocks == progress.blocks_done == progress.blocks
    assert progress.bytes == progress.bytes_done == arrays["x"].nbytes
    for workers in (0, 100):
        with pytest.raises(pw.InvalidError, match="workers"):
            checkpoint.restore_arrays(tmp_path / "d", workers=workers)
    with pytest.raises(pw.InvalidError, match="zip"):
        checkpoint.save(tmp_path / "d", arrays, codec="zip")


def test_a_restore_needs_little_beside_the_arrays(tmp_path: Path):
    """64 MiB in blocks of 1 MiB, with a limit of 32 MiB: the process may not grow by the model a second time."""
    array = np.random.default_rng(1).integers(0, 2**16, (64, 1 << 18), dtype=np.uint32)
    checkpoint.save(tmp_path / "d", {"x": array}, block_bytes=1 << 20)
    script = (
        "import resource, sys, paramwire as pw\n"
        "from paramwire import checkpoint\n"
        "with pw.Checkpoint(sys.argv[1]) as found: found.read_block(found.blocks('x')[0][0])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "arrays = checkpoint.restore_arrays(sys.argv[1], memory_limit=32 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, pw.crc64(arrays['x']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "d"], capture_output=True, text=True, check=True)
    grown, crc = map(int, done.stdout.split())
    assert crc == pw.crc64(array)
    assert grown < (64 + 48) << 10  # KiB


def test_two_saves_at_once_one_is_refused(tmp_path: Path):
    arrays = {"x": np.random.default_rng(1).integers(0, 255, 64 << 20, dtype=np.uint8)}
    begun = pw.CheckpointProgress()
    errors: list[Exception] = []

    def save() -> None:
        try:
            checkpoint.save(tmp_path / "d", arrays, block_bytes=1 << 16, progress=begun)
        except pw.DeadlineError as error:
            errors.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    while not begun.blocks_done and thread.is_alive():
        thread.join(0.001)
    with pytest.raises(pw.BackpressureError, match="another process saves into"):
        checkpoint.save(tmp_path / "d", {"y": np.zeros(3)})
    begun.stop()
    thread.join()


def test_a_directory_that_may_not_be_written_is_named_and_read():
    """As a user who is not root, in a directory that this user can reach: pytest's own ones are closed to others."""
    with tempfile.TemporaryDirectory() as reachable:
        directory = Path(reachable) / "d"
        checkpoint.save(directory, {"x": np.arange(10)})
        (directory / "readers").unlink()
        os.chmod(reachable, 0o755)
        script = (
            "import os, sys, numpy as np, paramwire as pw\n"
            "from paramwire import checkpoint\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "try:\n"
            "    checkpoint.save(sys.argv[1], {'x': np.arange(3)})\n"
            "except pw.UnavailableError as error:\n"
            "    print(error)\n"
            "print(checkpoint.restore_arrays(sys.argv[1])['x'].tolist(), checkpoint.verify(sys.argv[1]).problems)\n"
        )
        directory.chmod(0o555)
        (directory / "lock").chmod(0o444)
        try:
            words = [sys.executable, "-c", script, directory]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        finally:
            directory.chmod(0o755)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "d/lock" in first
    assert "make it writable" in first
    assert second == f"{list(range(10))} ()"


def test_a_file_system_without_room_is_named_and_given_back(tmp_path: Path):
    """RLIMIT_FSIZE stands in for a full disk: EFBIG instead of ENOSPC, which the C++ tests have."""
    script = (
        "import resource, signal, sys, numpy as np, paramwire as pw\n"
        "from paramwire import checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "checkpoint.save(sys.argv[1], {'x': np.arange(10)})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "big = np.random.default_rng(1).integers(0, 255, 4 << 20, dtype=np.uint8)\n"
        "try:\n"
        "    checkpoint.save(sys.argv[1], {'x': big}, codec='raw')\n"
        "except pw.UnavailableError as error:\n"
        "    print(error)\n"
        "print(checkpoint.restore_arrays(sys.argv[1])['x'].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "d"], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "ulimit -f" in first
    assert str(tmp_path / "d") in first
    assert second == str(list(range(10)))


def test_ctrl_c_ends_a_save_and_the_next_one_goes_on(tmp_path: Path):
    script = (
        "import signal, sys, threading, time, numpy as np, paramwire as pw\n"
        "from paramwire import checkpoint\n"
        "arrays = {'x': np.random.default_rng(1).integers(0, 255, 96 << 20, dtype=np.uint8)}\n"
        "progress = pw.CheckpointProgress()\n"
        "def interrupt():\n"
        "    while not progress.blocks_done: pass\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "try:\n"
        "    checkpoint.save(sys.argv[1], arrays, block_bytes=1 << 20, progress=progress)\n"
        "    print('done')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "until = time.monotonic() + 30\n"
        "while time.monotonic() < until:\n"
        "    try:\n"
        "        saved = checkpoint.save(sys.argv[1], arrays, block_bytes=1 << 20)\n"
        "        break\n"
        "    except pw.BackpressureError:\n"
        "        pass\n"
        "print(saved.blocks, saved.existed or saved.blocks_resumed > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "d"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] in ("interrupted", "done")
    assert checkpoint.verify(tmp_path / "d", decode=True).problems == ()
    assert len(checkpoint.ls(tmp_path / "d")) >= 1


@pytest.mark.parametrize("what", ["pipe", "directory", "link to a device"])
def test_what_is_no_file_has_its_own_error_and_is_never_waited_for(tmp_path: Path, what: str):
    make = {"pipe": os.mkfifo, "directory": os.mkdir}.get(what, lambda path: path.symlink_to("/dev/zero"))
    checkpoint.save(tmp_path / "d", model(3))
    checkpoint.save(tmp_path / "d", model(4))
    manifest = sorted((tmp_path / "d").glob("*.manifest"))[-1]
    data = sorted((tmp_path / "d").glob("*.blocks"))[-1]
    kept = manifest.read_bytes()
    manifest.unlink()
    make(manifest)
    newest, before = checkpoint.ls(tmp_path / "d")
    assert not newest.whole
    assert "regular" in newest.problem
    assert before.whole
    assert checkpoint.verify(tmp_path / "d").problems[0].file == manifest.name
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), model(3))
    manifest.rmdir() if what == "directory" else manifest.unlink()
    manifest.write_bytes(kept)
    data.unlink()
    make(data)
    assert "regular" in checkpoint.ls(tmp_path / "d")[0].problem
    assert checkpoint.verify(tmp_path / "d").problems[0].file == data.name
    with pytest.raises(pw.CorruptError, match=rf"{data.name}.*regular ones.*take another checkpoint"):
        checkpoint.restore_arrays(tmp_path / "d")
    assert any("not whole" in note for note in checkpoint.save(tmp_path / "d", model(5)).notes)
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), model(5))


def test_a_pipe_in_place_of_a_lock_is_not_waited_for(tmp_path: Path):
    checkpoint.save(tmp_path / "d", model())
    for name in ("readers", "lock"):
        (tmp_path / "d" / name).unlink()
        os.mkfifo(tmp_path / "d" / name)
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), model())
    assert checkpoint.verify(tmp_path / "d").problems == ()
    with pytest.raises(pw.UnavailableError, match=r"d/lock.*only regular files.*remove"):
        checkpoint.save(tmp_path / "d", model(4))


@pytest.mark.parametrize("name", ["probe.tmp", "checkpoint-0000000001-00000000000000000002.manifest", "lock"])
def test_nothing_is_written_through_a_symbolic_link(tmp_path: Path, name: str):
    checkpoint.save(tmp_path / "d", model())
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    link = tmp_path / "d" / name
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    if name.endswith("manifest"):  # a manifest is read, and renamed over: the link goes, not what it leads to
        checkpoint.save(tmp_path / "d", model(4), version=(1, 2))
        assert not link.is_symlink()
    else:
        with pytest.raises(pw.UnavailableError, match=rf"{name}.*none through a symbolic link: remove"):
            checkpoint.save(tmp_path / "d", model(4))
    assert victim.read_text() == "of somebody else"
    data = tmp_path / "d" / "data-0000000001-00000000000000000003-000000.blocks.tmp"
    if link.is_symlink():
        link.unlink()
    data.symlink_to(victim)
    with pytest.raises(pw.UnavailableError, match=rf"{data.name}.*symbolic link"):
        checkpoint.save(tmp_path / "d", model(5), version=(1, 3))
    assert victim.read_text() == "of somebody else"


def test_a_manifest_of_gigabytes_is_refused_unread(tmp_path: Path):
    checkpoint.save(tmp_path / "d", model())
    path = tmp_path / "d" / "checkpoint-0000000001-00000000000000000002.manifest"
    path.write_bytes(b"PWCK")
    os.truncate(path, 64 << 30)  # a hole; read as a whole it would end the process
    assert "more than the 1073741824" in checkpoint.ls(tmp_path / "d")[0].problem
    assert_same(checkpoint.restore_arrays(tmp_path / "d"), model())


def test_after_the_last_counter_comes_the_next_epoch(tmp_path: Path):
    checkpoint.save(tmp_path / "d", model(), version=(7, 2**64 - 1))
    assert checkpoint.save(tmp_path / "d", model(4)).version == (8, 1)
    checkpoint.save(tmp_path / "d", model(), version=(2**32 - 1, 2**64 - 1))
    with pytest.raises(pw.InvalidError, match="last version there can be: save into another directory"):
        checkpoint.save(tmp_path / "d", model(4))


def test_arguments_that_cannot_be_meant_say_what_can(tmp_path: Path, server):
    arrays = {"x": np.arange(3)}
    checkpoint.save(tmp_path / "d", arrays)
    for source in ([1], None, "unix:/socket", server):
        with pytest.raises(TypeError, match="mapping of names"):
            checkpoint.save(tmp_path / "e", source)
    for name in (3, None, "\ud800"):
        with pytest.raises(TypeError, match="tensor's name must be a str"):
            checkpoint.save(tmp_path / "e", {name: arrays["x"]})
    with pytest.raises(pw.InvalidError, match=r'dtypes has a label for "y".*misspelt'):
        checkpoint.save(tmp_path / "e", arrays, dtypes={"y": "f8_e4m3"})
    with pytest.raises(TypeError, match="dtypes must be a mapping"):
        checkpoint.save(tmp_path / "e", arrays, dtypes="f8_e4m3")
    for limit, error in ((-1, pw.InvalidError), (2**70, pw.InvalidError), ("4GiB", TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="memory_limit must be a number of bytes"):
            checkpoint.save(tmp_path / "e", arrays, memory_limit=limit)
        with pytest.raises(error, match="memory_limit must be a number of bytes"):
            checkpoint.restore_arrays(tmp_path / "d", memory_limit=limit)
    with pytest.raises(TypeError, match="progress must be a CheckpointProgress"):
        checkpoint.verify(tmp_path / "d", progress=3)
    with pytest.raises(TypeError, match=r"Client \(paramwire.connect"):
        checkpoint.restore(tmp_path / "d", server.address)
    with server.publish() as publish:
        with pytest.raises(TypeError, match="checkpoint must be a Checkpoint"):
            publish.put_checkpoint(tmp_path / "d")
        with pw.Checkpoint(tmp_path / "d") as found, pytest.raises(TypeError, match="replaces must be a Snapshot"):
            publish.put_checkpoint(found, replaces=3)
    for workers in (0, -1, 65):
        with pytest.raises(pw.InvalidError, match="1 to 64"):
            checkpoint.export_safetensors(tmp_path / "d", tmp_path / "m.safetensors", workers=workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def test_children_forked_meanwhile_take_no_lock_along(tmp_path: Path):
    """Loaders of a training fork workers whenever they like: while a save goes on, and while somebody reads."""
    script = (
        "import os, sys, threading, numpy as np, paramwire as pw\n"
        "from paramwire import checkpoint\n"
        "directory = sys.argv[1]\n"
        "(end, hold), (ready, done) = os.pipe(), os.pipe()\n"
        "def fork(work=lambda: None):\n"
        "    if os.fork() == 0:\n"
        "        work()\n"
        "        os.close(hold)\n"
        "        os.write(done, b'.')\n"
        "        os.read(end, 1)\n"
        "        os._exit(0)\n"
        "    os.read(ready, 1)\n"
        "arrays = {'x': np.random.default_rng(1).integers(0, 255, 64 << 20, dtype=np.uint8)}\n"
        "progress = pw.CheckpointProgress()\n"
        "def save(): checkpoint.save(directory, arrays, block_bytes=1 << 16, progress=progress)\n"
        "thread = threading.Thread(target=save)\n"
        "thread.start()\n"
        "while not progress.blocks_done and thread.is_alive(): thread.join(0.001)\n"
        "fork()\n"
        "thread.join()\n"
        "print(checkpoint.save(directory, {'x': np.arange(3)}).version)\n"
        "found = pw.Checkpoint(directory)\n"
        "fork(found.close)\n"  # what it closes is its parent's to unlock
        "print(checkpoint.save(directory, {'x': np.arange(4)}, keep=1).notes)\n"
        "found.close()\n"
        "print(checkpoint.save(directory, {'x': np.arange(5)}, keep=1))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "d"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "1.2"
    assert "somebody reads" in second
    assert "notes=()" in third
    assert len(checkpoint.ls(tmp_path / "d")) == 1

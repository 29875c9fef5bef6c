"""The strict safetensors reader and the crash-safe writer. The library `safetensors` is the reference for bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from paramwire.model_file import ModelFileError, ModelTensor, to_bf16
from paramwire.safetensors_file import SafetensorsFile, write_safetensors


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def load_error(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Made by hand from the format page: length 64, a header of 57 bytes padded with spaces, 1.0 and -2.0.
GOLDEN = bytes.fromhex(
    "4000000000000000"
    "7b226162223a7b226474797065223a22463332222c227368617065223a5b322c315d2c22646174615f6f666673657473223a5b302c385d7d7d"
    "20202020202020"
    "0000803f000000c0"
)


def test_writer_gives_the_golden_bytes(tmp_path: Path) -> None:
    for values in (np.array([[1.0], [-2.0]], "<f4"), np.array([[1.0], [-2.0]], ">f4")):
        write_safetensors(tmp_path / "a", {"ab": values})
        assert (tmp_path / "a").read_bytes() == GOLDEN
    with SafetensorsFile(tmp_path / "a") as file:
        assert file.tensor("ab").data.tolist() == [[1.0], [-2.0]]
        assert file.entries["ab"].offset == 72


def test_writer_and_reader_agree_with_the_reference_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    tensors: dict[str, Any] = {
        f"t{index}": rng.integers(0, 2, shape).astype(dtype)
        for index, (dtype, shape) in enumerate(
            [
                ("f4", (3, 4)),
                ("f8", (2,)),
                ("f2", (5,)),
                ("i1", (7,)),
                ("u2", (3,)),
                ("i8", ()),
                ("?", (3,)),
                ("c8", (2,)),
                ("f4", (0, 4)),
            ]
        )
    }
    tensors["日本語 🍎 " + "x" * 300] = np.arange(3, dtype="u4")
    write_safetensors(tmp_path / "ours", tensors, metadata={"format": "pt"})
    theirs = safetensors.numpy.load_file(tmp_path / "ours")
    assert theirs.keys() == tensors.keys()
    for name, values in tensors.items():
        assert theirs[name].dtype == values.dtype
        assert theirs[name].shape == values.shape
        assert np.array_equal(theirs[name], values)
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "theirs") as file:
        assert file.metadata == {"format": "pt"}
        assert set(file.entries) == set(tensors)
        for tensor in file.tensors():
            assert tensor.data.dtype == tensors[tensor.name].dtype
            assert tensor.data.shape == tensors[tensor.name].shape
            assert np.array_equal(tensor.data, tensors[tensor.name])


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (3, 0, 2)])
@pytest.mark.parametrize("dtype", ["bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0", "bool", "c64", "f32", "u64"])
def test_every_shape_and_dtype_comes_back(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    from paramwire.model_file import storage_dtype

    values = np.ones(shape, storage_dtype(dtype))
    write_safetensors(
        tmp_path / "a", {"x": ModelTensor("x", dtype, shape, values), "y": ModelTensor("y", dtype, shape, values)}
    )
    with SafetensorsFile(tmp_path / "a") as file:
        for name in ("x", "y"):
            tensor = file.tensor(name)
            assert (tensor.dtype, tensor.shape, tensor.data.shape) == (dtype, shape, shape)
            assert tensor.data.tobytes() == values.tobytes()


def test_bf16_has_ml_dtypes_type_where_that_is_there_and_bytes_where_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = to_bf16(np.array([1.0, -2.5], np.float32))
    write_safetensors(tmp_path / "a", {"x": ModelTensor("x", "bf16", (2,), bits)})
    import ml_dtypes

    with SafetensorsFile(tmp_path / "a") as file:
        typed = file.tensor("x")
        assert typed.data.dtype == ml_dtypes.bfloat16
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
        plain = file.tensor("x")
    assert plain.dtype == "bf16"
    assert plain.data.dtype == np.uint16
    assert np.array_equal(plain.data, bits)


def test_any_layout_is_written_as_its_logical_elements(tmp_path: Path) -> None:
    base = np.arange(120, dtype=">f4").reshape(4, 5, 6)
    cases = {
        "fortran": np.asfortranarray(base[0]),
        "transposed": base.transpose(2, 0, 1),
        "step": base[::2, :, ::-1],
        "column": base[:, :, 3],
        "block": base[1:3, 2:4, 1:5],
        "complex": np.arange(4).astype(">c8"),
        "short": np.arange(4).astype(">i2"),
    }
    write_safetensors(tmp_path / "a", cases)
    with SafetensorsFile(tmp_path / "a") as file:
        for name, values in cases.items():
            assert np.array_equal(file.tensor(name).data, values), name


BAD = {
    "empty file": (b"", ["byte 0", "0 bytes", "at least 8"]),
    "short length": (b"1234567", ["byte 0", "7 bytes"]),
    "length beyond the file": ((100).to_bytes(8, "little") + b"{}", ["byte 0", "header length is 100", "at most 2"]),
    "length near 2^64": (b"\xff" * 8 + b"{}", ["byte 0", "18446744073709551615"]),
    "empty header": (raw(b""), ["byte 8", "expected '{'"]),
    "a list": (raw(b"[]"), ["byte 8", "'['"]),
    "not JSON": (raw(b'{"a": }'), ["byte 14", "not JSON"]),
    "NaN": (raw(b'{"a": NaN}'), ["NaN"]),
    "text after the object": (raw(b"{}x"), ["byte 10", "not JSON"]),
    "not UTF-8": (raw(b'{"a\xff": 1}'), ["byte 11", "not UTF-8"]),
    "half a surrogate": (raw(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), ["surrogate"]),
    "nested too deep": (raw(b'{"a":' + b"[" * 100000), ["not JSON"]),
    "name twice": (
        raw(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            b"12",
        ),
        ["byte 61", "'a' stands twice"],
    ),
    "field twice": (
        raw(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"),
        ["'dtype' stands twice"],
    ),
    "overlap": (raw({"a": entry(0, 4), "b": entry(2, 6)}, b"123456"), ["'b' overlaps tensor 'a'"]),
    "gap": (raw({"a": entry(0, 4), "b": entry(5, 6)}, b"123456"), ["'b' leaves a gap after tensor 'a'"]),
    "gap at the start": (raw({"a": entry(1, 4)}, b"1234"), ["'a' leaves a gap after the header"]),
    "beyond the end": (raw({"a": entry(0, 9)}, b"1234"), ["'a'", "data ends at byte"]),
    "trailing bytes": (raw({"a": entry(0, 3)}, b"12345"), ["2 bytes after tensor 'a'", "end of the file"]),
    "trailing bytes without tensors": (raw({}, b"12345"), ["byte 10", "5 bytes after the header"]),
    "unknown dtype": (raw({"a": entry(0, 1, dtype="F99")}, b"1"), ["'a'", "'F99'", "BF16"]),
    "dtype no text": (raw({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, b"1"), ["'a'", "['U8']"]),
    "size mismatch": (raw({"a": entry(0, 4, dtype="F32", shape=[2])}, b"1234"), ["'a'", "span 4 bytes", "expected 8"]),
    "size overflow": (raw({"a": entry(0, 0, dtype="F32", shape=[2**62, 2**62])}), ["'a'", "2^63"]),
    "size overflow beside an axis of 0": (raw({"a": entry(0, 0, shape=[0, 2**64])}), ["'a'", "2^63"]),
    "too many axes": (raw({"a": entry(0, 1, shape=[1] * 33)}, b"1"), ["'a'", "33 axes", "at most 32"]),
    "negative axis": (raw({"a": entry(0, 0, shape=[-1])}), ["'a'", "[-1]"]),
    "fractional axis": (raw({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"1"), ["'a'", "[1.0]"]),
    "truth as axis": (raw({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"1"), ["'a'", "[True]"]),
    "offsets reversed": (raw({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}, b"1"), ["'a'", "[1, 0]"]),
    "offsets of three": (
        raw({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"1"),
        ["'a'", "[0, 1, 2]"],
    ),
    "field missing": (raw({"a": {"dtype": "U8", "shape": [1]}}, b"1"), ["'a'", "['dtype', 'shape']"]),
    "field extra": (raw({"a": {**entry(0, 1), "x": 1}}, b"1"), ["'a'", "'x'"]),
    "no object": (raw({"a": 5}), ["'a'", "5"]),
    "tensor named as the metadata": (raw({"__metadata__": entry(0, 1)}, b"1"), ["'__metadata__'", "reserved"]),
    "metadata no strings": (raw({"__metadata__": {"a": 1}}), ["'__metadata__'", "expected an object of strings"]),
}


@pytest.mark.parametrize("name", BAD)
def test_each_malformed_file_has_its_own_error(tmp_path: Path, name: str) -> None:
    content, parts = BAD[name]
    text = load_error(tmp_path, content)
    for part in parts:
        assert part in text


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = raw({"a": entry(0, 300), "日本": entry(300, 700)}, bytes(700))
    header = len(whole) - 700
    for cut in [*range(header), *range(header, len(whole), 7)]:
        load_error(tmp_path, whole[:cut])


def test_files_with_metadata_alone_and_with_padding_load(tmp_path: Path) -> None:
    for content in (raw({"__metadata__": {"a": "ü"}}), raw(b'{"__metadata__":{"a":"\xc3\xbc"}}      '), raw(b"{}")):
        (tmp_path / "a").write_bytes(content)
        with SafetensorsFile(tmp_path / "a") as file:
            assert file.entries == {}
    write_safetensors(tmp_path / "b", {}, metadata={"a": "ü"})
    with SafetensorsFile(tmp_path / "b") as file:
        assert file.metadata == {"a": "ü"}


def test_a_header_beyond_100_megabytes_loads(tmp_path: Path) -> None:
    # 150,000 tensors with long names: 110 MB of header, more than the reference library accepts.
    count = 150_000
    names = [f"{index:06d}" + "n" * 690 for index in range(count)]
    body = ",".join(
        f'"{name}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i, name in enumerate(names)
    )
    path = tmp_path / "large"
    path.write_bytes(raw(b"{" + body.encode() + b"}", bytes(i % 251 for i in range(count))))
    with SafetensorsFile(path) as file:
        assert len(file.entries) == count
        assert file.tensor(names[1000]).data.tolist() == [1000 % 251]


def test_a_length_that_no_header_has_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a"
    # Files of holes, on no disk. Of zeros the first is seen, a length above the limit is not read at all.
    for length, begin, said in ((1 << 29, b"", r"begins with '\\x00'"), (3 << 30, b"{", "at most 1073741824")):
        path.write_bytes(length.to_bytes(8, "little") + begin)
        os.truncate(path, 8 + length)
        tracemalloc.start()
        try:
            with pytest.raises(ModelFileError, match=said):
                SafetensorsFile(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ModelFileError, match="no regular file"):
        SafetensorsFile(tmp_path / "a")


def test_errors_of_writing_name_the_file_and_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make its folder first.*nowhere/a'$"):
        write_safetensors(tmp_path / "nowhere" / "a", {"x": np.zeros(3)})
    with pytest.raises(IsADirectoryError, match="name a file, not a folder"):
        write_safetensors(tmp_path, {"x": np.zeros(3)})
    assert os.listdir(tmp_path) == []
    script = (
        "import resource, signal, sys, numpy as np\n"
        "from paramwire.safetensors_file import write_safetensors\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    write_safetensors(sys.argv[1], {'x': np.zeros(1 << 20)})\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    target = tmp_path / "a"
    done = subprocess.run([sys.executable, "-c", script, target], capture_output=True, text=True, check=True)
    assert "ulimit -f" in done.stdout
    assert str(target) in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_file_cut_while_it_is_open_gives_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_safetensors(path, {"x": np.zeros(100_000, np.float32)})
    with SafetensorsFile(path) as file:
        os.truncate(path, 5000)
        with pytest.raises(ModelFileError, match=r"byte 5000: tensor 'x'.*ends here"):
            file.tensor("x")


def test_load_and_save_on_the_same_path_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_safetensors(path, {"x": np.arange(1000.0), "y": np.arange(7, dtype="i1")}, metadata={"k": "v"})
    before = path.read_bytes()
    with SafetensorsFile(path) as file:
        write_safetensors(path, {tensor.name: tensor for tensor in file.tensors()}, metadata=file.metadata)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_writer_killed_anywhere_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    """Goal: P(old or new) at every moment. Method: a process alternates two contents; it is killed at random points."""
    path = tmp_path / "a"
    contents = [{"x": np.full(200_000, value, np.float32)} for value in (1, 2)]
    expected = []
    for content in contents:
        write_safetensors(path, content)
        expected.append(path.read_bytes())
    script = (
        "import sys, numpy as np\n"
        "from paramwire.safetensors_file import write_safetensors\n"
        "contents = [{'x': np.full(200_000, value, np.float32)} for value in (1, 2)]\n"
        "print('go', flush=True)\n"
        "while True:\n"
        "    for content in contents:\n"
        "        write_safetensors(sys.argv[1], content)\n"
    )
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # noqa: T201
    rng = random.Random(seed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        deadline = time.monotonic() + rng.random() * 0.03
        while time.monotonic() < deadline:
            assert path.read_bytes() in expected
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert path.read_bytes() in expected


def test_a_refused_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_safetensors(path, {"x": np.zeros(3)})
    before = path.read_bytes()
    for tensors, part in [
        ({"x": np.array(["text"])}, "'x'.*no label"),
        ({"x": np.zeros(2, "datetime64[s]")}, "'x'.*no label"),
        ({"__metadata__": np.zeros(1)}, "reserved"),
        ({"\ud800": np.zeros(1)}, "surrogate"),
        ({"x": ModelTensor("x", "c128", (1,), np.zeros(1, "c16"))}, "'x'.*c128"),
        ({"x": ModelTensor("x", "bf16", (2,), np.zeros(2, "f4"))}, "'x'.*float32.*expected bf16"),
    ]:
        with pytest.raises(ModelFileError, match=part):
            write_safetensors(path, tensors)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan() -> None:
    import ml_dtypes

    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = np.arange(65536, dtype=np.uint32) << 16 | 0x8000
    values = np.concatenate(
        [bits, ties, np.array([0, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0xFFFFFFFF], np.uint32)]
    ).view(np.float32)
    ours = to_bf16(values)
    with np.errstate(all="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert np.all((ours[nan] & 0x7F80) == 0x7F80)
    assert np.all((ours[nan] & 0x7F) != 0)
    assert np.array_equal(ours[nan] >> 15, values[nan].view(np.uint32) >> 31)

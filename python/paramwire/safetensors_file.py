"""Read and write safetensors files strictly: whatever is not as the format says is an error that names the place.

Format: 8 bytes header length (little-endian), that many bytes of JSON, then the data, each tensor at its
`data_offsets`, without gaps, overlaps or bytes left over (github.com/huggingface/safetensors, README, "Format").

Files are read with pread, never mapped: a file that is cut or replaced while it is read gives an error, not SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramwire.model_file import DTYPE_BITS, ModelFileError, ModelTensor, label_of, storage_dtype, view_as

__all__ = ["SafetensorsFile", "SafetensorsWriter", "TensorEntry", "write_safetensors"]

# The format's names for our labels.
_LABEL_OF = {
    "BOOL": "bool", "U8": "u8", "I8": "i8", "U16": "u16", "I16": "i16", "U32": "u32", "I32": "i32", "U64": "u64",
    "I64": "i64", "F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f64", "C64": "c64",
    "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2", "F8_E8M0": "f8_e8m0",
}  # fmt: skip
_NAME_OF = {label: name for name, label in _LABEL_OF.items()}
_FIELDS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"
# One read or write: the kernel moves at most 0x7ffff000 bytes in a call (read(2)); less keeps signals answered.
_PIECE_BYTES = 64 * 1024 * 1024
# Largest header that the format's own library reads (MAX_HEADER_SIZE of safetensors/src/tensor.rs), about a million
# tensors. Ours reads longer ones, which the file bounds.
HEADER_BYTES_MAX = 100_000_000
# Elements and bytes are counted in 64 bits everywhere else; a product beyond is a broken file, not a big one.
_MOST_BYTES = 2**63 - 1
# Axes of numpy 1.26; no format that paramwire knows comes near.
_MOST_AXES = 32
# Of a header that is read: some ten million tensors. The format's own library has a tenth of that, too little for some
# models; without a bound a damaged length takes the memory of the machine.
_HEADER_READ_MAX = 1 << 30


class TensorEntry(NamedTuple):
    """What the header says of one tensor. `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class _Duplicate(Exception):
    """A JSON object with a key twice."""


def _open_now(path: str, flags: int) -> int:
    """O_NONBLOCK: a pipe without a writer would be waited for, for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Errors of the file system name the file that is being written, and what to do next."""
    try:
        yield
    except OSError as error:
        step = {
            errno.ENOSPC: "free some room, or write to another file system",
            errno.EDQUOT: "free some of this user's room, or write to another file system",
            errno.EFBIG: "raise the limit of file sizes (ulimit -f), or write to another file system",
            errno.ENOENT: "make its folder first, or check the path",
            errno.EISDIR: "name a file, not a folder",
        }.get(error.errno or 0, "check the path, or name another file")
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno, f"{reason} (nothing was written; {step})", str(path)) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Duplicate(key)
            seen.add(key)
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


class SafetensorsFile:
    """An open safetensors file: `entries` by name (in the order of their data) and `metadata`; a context manager.

    errors: ModelFileError when the header is wrong in any way, naming file, byte offset, tensor, expected and actual;
            OSError when the file can't be opened
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open(self.path, "rb", buffering=0, opener=_open_now)  # noqa: SIM115 - closed by close()
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise self._fail(0, "this is no regular file: pipes and devices have no size; name a file")
            self._size = status.st_size
            header = self._read_header()
            self.entries: dict[str, TensorEntry] = {}
            self.metadata: dict[str, str] = {}
            self._parse(header)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tensor(self, name: str) -> ModelTensor:
        """Read one tensor. errors: KeyError for an unknown name; ModelFileError when the file has become shorter"""
        try:
            entry = self.entries[name]
        except KeyError:
            raise KeyError(f"{self.path}: no tensor {name!r} among {len(self.entries)}") from None
        out: npt.NDArray[Any] = np.empty(entry.shape, storage_dtype(entry.dtype))
        if entry.size_bytes:
            # reshape(-1): a scalar has no axis that could be seen as bytes.
            self._read_into(out.reshape(-1).view(np.uint8).data, entry.offset, f"tensor {name!r}")
        return ModelTensor(name, entry.dtype, entry.shape, view_as(out, entry.dtype))

    def rows(self, name: str, begin: int, end: int) -> ModelTensor:
        """Read rows [begin, end) of a tensor with axes, and no more. errors: as tensor; IndexError outside of it"""
        entry = self.entries[name]
        if not entry.shape or not 0 <= begin <= end <= entry.shape[0]:
            raise IndexError(f"{self.path}: tensor {name!r} {entry.shape} has no rows {begin} to {end}")
        out: npt.NDArray[Any] = np.empty((end - begin, *entry.shape[1:]), storage_dtype(entry.dtype))
        if out.nbytes:
            offset = entry.offset + begin * (entry.size_bytes // entry.shape[0])
            self._read_into(out.reshape(-1).view(np.uint8).data, offset, f"tensor {name!r}")
        return ModelTensor(name, entry.dtype, out.shape, view_as(out, entry.dtype))

    def tensors(self) -> Iterator[ModelTensor]:
        """Every tensor in the order of the file, each read when it is asked for."""
        for name in self.entries:
            yield self.tensor(name)

    def _fail(self, offset: int, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: byte {offset}: {text}")

    def _read_into(self, target: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self._file.fileno(), [target[done : done + _PIECE_BYTES]], offset + done)
            if count == 0:
                raise self._fail(
                    offset + done,
                    f"{what}: the file ends here, expected {len(target) - done} bytes more; it was cut meanwhile",
                )
            done += count

    def _read_header(self) -> bytes:
        if self._size < 8:
            raise self._fail(0, f"the file has {self._size} bytes, expected at least 8 for the header's length")
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0, "header length")
        length = int.from_bytes(prefix, "little")
        if length > self._size - 8:
            raise self._fail(
                0, f"header length is {length}, expected at most {self._size - 8}: the file has {self._size} bytes"
            )
        if length > _HEADER_READ_MAX:
            raise self._fail(0, f"header length is {length}, expected at most {_HEADER_READ_MAX}: write several files")
        # Looked at first: a file of zeros, or of something else, says nothing of what its first bytes ask for.
        begin = bytearray(min(length, 1))
        self._read_into(memoryview(begin), 8, "header")
        if begin != b"{":
            raise self._fail(8, f"header begins with {begin.decode('latin-1')!r}, expected '{{'")
        header = bytearray(length)
        self._read_into(memoryview(header), 8, "header")
        return bytes(header)

    def _parse(self, header: bytes) -> None:
        try:
            text = header.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fail(8 + error.start, f"header is not UTF-8: {error.reason}") from error
        try:
            content: dict[str, Any] = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except _Duplicate as error:
            name = str(error)
            raise self._fail(self._place(header, name, 2), f"name {name!r} stands twice in the header") from None
        except json.JSONDecodeError as error:
            raise self._fail(8 + len(text[: error.pos].encode()), f"header is not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise self._fail(8, f"header is not JSON: {error}") from error

        if _METADATA in content:
            self.metadata = self._parse_metadata(header, content.pop(_METADATA))
        data_begin = 8 + len(header)
        found = [self._parse_entry(header, name, fields, data_begin) for name, fields in content.items()]
        found.sort(key=lambda entry: (entry.offset, entry.size_bytes))
        expected = data_begin
        before = "the header"
        for entry in found:
            if entry.offset != expected:
                kind = "overlaps" if entry.offset < expected else "leaves a gap after"
                raise self._fail(
                    entry.offset,
                    f"tensor {entry.name!r} {kind} {before}: it begins at byte {entry.offset}, expected {expected}",
                )
            expected += entry.size_bytes
            before = f"tensor {entry.name!r}"
        if expected < self._size:
            raise self._fail(expected, f"{self._size - expected} bytes after {before}, expected the end of the file")
        self.entries = {entry.name: entry for entry in found}

    def _parse_metadata(self, header: bytes, value: Any) -> dict[str, str]:
        place = self._place(header, _METADATA, 1)
        if isinstance(value, dict) and value.keys() >= _FIELDS:
            raise self._fail(place, f"{_METADATA!r} is described as a tensor; that name is reserved for text")
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise self._fail(place, f"{_METADATA!r} is {_short(value)}, expected an object of strings")
        return value

    def _parse_entry(self, header: bytes, name: str, fields: Any, data_begin: int) -> TensorEntry:
        def fail(text: str) -> ModelFileError:
            return self._fail(self._place(header, name, 1), f"tensor {name!r}: {text}")

        try:
            name.encode()
        except UnicodeEncodeError:
            raise fail("its name has half a surrogate pair, expected text that UTF-8 can hold") from None
        if not isinstance(fields, dict) or fields.keys() != _FIELDS:
            actual = sorted(fields) if isinstance(fields, dict) else _short(fields)
            raise fail(f"described by {actual}, expected {sorted(_FIELDS)}")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _LABEL_OF:
            raise fail(f"dtype is {_short(dtype)}, expected one of {', '.join(_LABEL_OF)}")
        if not _are_sizes(shape):
            raise fail(f"shape is {_short(shape)}, expected a list of integers, 0 or above")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise fail(f"data_offsets is {_short(offsets)}, expected [begin, end], begin at most end")
        if len(shape) > _MOST_AXES:
            raise fail(f"shape has {len(shape)} axes, expected at most {_MOST_AXES}")
        # Axes of 0 are left out: an empty array needs sizes that fit, too.
        size = DTYPE_BITS[_LABEL_OF[dtype]] // 8
        for axis in shape:
            size *= max(axis, 1)
            if size > _MOST_BYTES:
                raise fail(f"shape is {_short(shape)}: more than 2^63 - 1 bytes, not counting axes of 0")
        if 0 in shape:
            size = 0
        if offsets[1] - offsets[0] != size:
            raise fail(
                f"data_offsets span {offsets[1] - offsets[0]} bytes, expected {size} for {dtype} {_short(shape)}"
            )
        if offsets[1] > self._size - data_begin:
            raise fail(f"data ends at byte {data_begin + offsets[1]}, the file at {self._size}")
        return TensorEntry(name, _LABEL_OF[dtype], tuple(shape), data_begin + offsets[0], size)

    @staticmethod
    def _place(header: bytes, name: str, count: int) -> int:
        """File offset of the `count`-th place where `name` is a key; of the header when it is written otherwise."""
        for key in {json.dumps(name, ensure_ascii=False), json.dumps(name)}:
            at = -1
            for _ in range(count):
                at = header.find(key.encode("utf-8", "surrogatepass"), at + 1)
                if at < 0:
                    break
            if at >= 0:
                return 8 + at
        return 8


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _as_tensor(name: str, value: ModelTensor | npt.ArrayLike) -> tuple[str, npt.NDArray[Any]]:
    """Label and array of one value to write; the array in any layout and byte order."""
    if isinstance(value, ModelTensor):
        stored = storage_dtype(value.dtype)
        if value.data.dtype.itemsize != stored.itemsize or value.data.shape != tuple(value.shape):
            raise ModelFileError(
                f"tensor {name!r}: data is {value.data.dtype} {value.data.shape}, "
                f"expected {value.dtype} {tuple(value.shape)}"
            )
        return value.dtype, value.data
    array = np.asarray(value)
    try:
        return label_of(array.dtype), array
    except ModelFileError as error:
        raise ModelFileError(f"tensor {name!r}: {error}") from None


def _little_endian(label: str, array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The logical elements, row-major, as little-endian bytes; a copy only where layout or byte order need one."""
    if array.dtype.kind in "iufc":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


class SafetensorsWriter:
    """A safetensors file in the making, whose tensors are written piece by piece, in any order and from any thread.

    `names` are in the order of the file. Leaving the context without an exception makes `path` the new file, whole and
    durable; any other end leaves `path` as it was.

    layout:   label and shape of each tensor by name
    metadata: strings, written as `__metadata__`
    header_bytes_max: a longer header is refused
    errors:   ModelFileError naming the tensor whose dtype or name can't be written, the header that is too long, or
              (when leaving) a tensor of which bytes are missing; OSError from the file system
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
        header_bytes_max: int | None = None,
    ) -> None:
        self.path = Path(path)
        header: dict[str, Any] = {}
        if metadata:
            for key, text in metadata.items():
                if not isinstance(key, str) or not isinstance(text, str):
                    raise ModelFileError(f"metadata {key!r} is {text!r}, expected a string")
            header[_METADATA] = dict(metadata)
        for name, (label, _) in layout.items():
            if name == _METADATA:
                raise ModelFileError(f"tensor name {name!r} is reserved for text")
            if label not in _NAME_OF:
                raise ModelFileError(
                    f"tensor {name!r}: dtype {label} has no name in safetensors; known: {', '.join(_NAME_OF)}"
                )
        # Widest elements first, so that each tensor is aligned to its element; then by name, so that the bytes depend
        # on nothing but the content. The reference writer does the same.
        self.names = sorted(layout, key=lambda name: (-DTYPE_BITS[layout[name][0]], name))
        self._places: dict[str, tuple[int, int]] = {}
        at = 0
        for name in self.names:
            label, shape = layout[name]
            size = math.prod(shape) * DTYPE_BITS[label] // 8
            header[name] = {"dtype": _NAME_OF[label], "shape": list(shape), "data_offsets": [at, at + size]}
            self._places[name] = (at, size)
            at += size
        try:
            encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        except UnicodeEncodeError as error:
            raise ModelFileError(f"a name or metadata has half a surrogate pair: {error}") from None
        encoded += b" " * (-len(encoded) % 8)
        if header_bytes_max is not None and len(encoded) > header_bytes_max:
            raise ModelFileError(
                f"{self.path}: {len(layout)} tensors make a header of {len(encoded)} bytes, above {header_bytes_max}, "
                "the most that the format's own library reads: write them into several files"
            )
        self._left = {name: size for name, (_, size) in self._places.items() if size}
        self._lock = threading.Lock()
        self._data_begin = 8 + len(encoded)
        self._temporary = self.path.with_name(f".{self.path.name[:100]}.{secrets.token_hex(8)}.tmp")
        with _writing(self.path):
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._file = self._temporary.open("xb", buffering=0)
            try:
                _write_all(self._file.fileno(), memoryview(len(encoded).to_bytes(8, "little") + encoded), 0)
                os.ftruncate(self._file.fileno(), self._data_begin + at)
            except BaseException:
                self._drop()
                raise

    def write(self, name: str, begin: int, data: npt.NDArray[np.uint8]) -> None:
        """Write bytes [begin, begin + len(data)) of a tensor, little-endian and row-major, each byte once."""
        offset, size = self._places[name]
        if begin < 0 or begin + data.nbytes > size:
            raise ModelFileError(f"tensor {name!r} has {size} bytes, not {data.nbytes} more from byte {begin}")
        if not data.nbytes:
            return
        with _writing(self.path):
            _write_all(self._file.fileno(), data.data, self._data_begin + offset + begin)
        with self._lock:
            self._left[name] -= data.nbytes
            if not self._left[name]:
                del self._left[name]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._drop()
            return
        try:
            if self._left:
                name, count = next(iter(self._left.items()))
                raise ModelFileError(f"{self.path}: {count} bytes of tensor {name!r} were not written")
            with _writing(self.path):
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self.path)
        except BaseException:
            self._drop()
            raise
        # The new name is durable only when its folder is.
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _drop(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, ModelTensor | npt.ArrayLike],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file: `path` is afterwards the new file whole, or what it was before, also after a crash.

    tensors:  ModelTensor, or arrays of a dtype with a label; any strides and byte order, written row-major
              little-endian. They may have been read from `path` itself
    metadata: strings, written as `__metadata__`
    errors:   ModelFileError naming the tensor whose dtype or name can't be written; OSError from the file system
    """
    values = {name: _as_tensor(name, value) for name, value in tensors.items()}
    layout = {name: (label, array.shape) for name, (label, array) in values.items()}
    with SafetensorsWriter(path, layout, metadata=metadata) as writer:
        for name in writer.names:
            writer.write(name, 0, _little_endian(*values[name]))


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _PIECE_BYTES], offset + done)

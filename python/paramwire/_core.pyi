import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import Any, Self, TypedDict, final, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import Buffer  # numpy's arrays are one from Python 3.12 on

from paramwire._types import BertConfig, BlockInfo, DeltaInfo, Durations, LlamaConfig, OnebitInfo, TensorInfo, Version

__version__: str

# ---------------------------------------------------------------- errors

class Error(Exception):
    """Base of what paramwire raises."""

    code: str
    """The word for what to do next, the same as in the command and in C++: "invalid", "stale", ..."""

class InvalidError(Error, ValueError):
    """The call can't be meant: fix it. Also every use of a handle in the child of a fork, and of a closed one."""

class NotFoundError(Error, LookupError):
    """No such name: ask for another, or elsewhere."""

class StaleError(Error):
    """The version asked for is gone, or not there yet: take a newer snapshot, or wait."""

class CorruptError(Error):
    """Bytes failed their check: read another replica."""

class BackpressureError(Error):
    """A named limit is reached: slow down, or raise it."""

class DeadlineError(Error, TimeoutError):
    """The deadline passed: the peer may be frozen."""

class UnreachableError(Error, ConnectionError):
    """The peer is gone: reconnect, or go elsewhere."""

class UnavailableError(Error):
    """This implementation can't work here: choose another."""

class InternalError(Error):
    """A broken invariant: report a bug."""

class DeniedError(Error, PermissionError):
    """The right key is missing: bring it, or mend its file."""

# ---------------------------------------------------------------- checksums

def crc64(data: Buffer | NDArray[Any], /, *, before: int = 0) -> int:
    """CRC-64/XZ of the bytes of `data`; the GIL is released while they are read.

    data:    any contiguous buffer; ValueError when it is not contiguous, TypeError when it is no buffer
    before:  CRC of the bytes that come before these, so that crc64(b, before=crc64(a)) is crc64(a + b)
    """

def crc32c(data: Buffer | NDArray[Any], /, *, before: int = 0) -> int:
    """CRC-32C (Castagnoli) of the bytes of `data`; arguments and errors as for `crc64`."""

def crc_implementation() -> str:
    """Which CRC bodies run on this machine, for example "isa-l"."""

# ---------------------------------------------------------------- deltas; paramwire.delta is what to use

def encode_delta(
    base: Any,
    next: Any,
    *,
    version: tuple[int, int],
    dtype: DTypeLike | str | None = None,
    form: str | None = None,
    classes: int = 16,
    threads: int = 1,
) -> bytes:
    """paramwire.delta.encode"""

def delta_info(delta: Buffer) -> DeltaInfo:
    """paramwire.delta.info"""

def apply_delta(
    delta: Buffer,
    base: Any,
    *,
    out: Any = None,
    version: tuple[int, int] | None = None,
    dtype: DTypeLike | str | None = None,
    threads: int = 1,
) -> tuple[Any, bool]:
    """paramwire.delta.apply"""

def encode_onebit(
    base: Any, tuned: Any, *, version: tuple[int, int], dtype: DTypeLike | str | None = None, scale: str = "row"
) -> bytes:
    """paramwire.delta.encode_onebit. Lossy"""

def onebit_info(delta: Buffer) -> OnebitInfo:
    """paramwire.delta.onebit_info"""

def apply_onebit(
    delta: Buffer,
    base: Any,
    *,
    out: Any = None,
    version: tuple[int, int] | None = None,
    dtype: DTypeLike | str | None = None,
    threads: int = 1,
) -> Any:
    """paramwire.delta.apply_onebit. Lossy"""

# ---------------------------------------------------------------- traces

class Trace:
    """Spans of the clients and servers that it was given to. Any thread. paramwire.Trace adds files."""

    def __init__(self, events: int) -> None:
        """Room for `events` spans of 40 bytes each, taken at once; more are counted and dropped.

        errors: InvalidError for 0 or more than 2**27; BackpressureError when there is no memory
        """

    @property
    def recorded(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    def json(self) -> str:
        """The spans so far, in the Trace Event Format that Perfetto reads; spans go on meanwhile."""

# ---------------------------------------------------------------- what is there

class Availability(TypedDict):
    name: str
    usable: bool
    reason: str
    """Why not; of what is usable, how it would work."""
    next: str
    """What to type to mend it, one command a line; empty where nothing is to mend."""

def available() -> dict[str, list[Availability]]:
    """What this build and this machine have: "transports", "tiers", "codecs", "coordinators", "backends", found by
    looking, each time. What the build knows of and lacks is named, too.
    """

class RdmaGid(TypedDict):
    index: int
    gid: str
    """As an address; of InfiniBand, subnet prefix and port GUID written like one."""
    type: str
    """"RoCE v2", "RoCE v1" or "IB"."""
    interface: str
    """Of this network namespace; empty where none has the address."""
    problem: str
    """Why it can't be used; empty when it can."""

class RdmaPort(TypedDict):
    device: str
    port: int
    link: str
    """"Ethernet" (RoCE) or "InfiniBand"."""
    software: bool
    """Soft-RoCE (rxe): the CPU does it."""
    state: str
    """"ACTIVE", "DOWN", ..."""
    mtu: int
    """RDMA payload of a packet, bytes, as the network allows now."""
    mtu_max: int
    message_bytes_max: int
    reads_max: int
    problem: str
    """Why nothing of it can be used; empty when something may be."""
    gids: list[RdmaGid]

def rdma_ports() -> list[RdmaPort]:
    """Every RDMA device's ports with their GIDs, as they are now; none where the line of "verbs" in available() says
    why.
    """

def build_versions() -> dict[str, str]:
    """The compiler of this module and the OpenSSL that is in it."""

class MemoryRoom(TypedDict):
    available_bytes: int
    limit_bytes: int
    source: str
    """"MemAvailable", or the control group's file that holds the limit."""

def memory_room() -> MemoryRoom:
    """How much memory a server here could take now, and what bounds that."""

# ---------------------------------------------------------------- cluster keys

def new_key(path: str | os.PathLike[str]) -> str:
    """Draw a cluster key and write its file with mode 0600; returns the key's id.

    errors:  InvalidError when there is a file of that name, which is left as it is; UnavailableError with the system's
             reason
    """

def key_id(path: str | os.PathLike[str]) -> str:
    """The id of the key in a file, 16 hex digits: the same on every node that has the same key, and no part of it.

    errors:  NotFoundError; DeniedError when others can use the file, or own it; InvalidError when it is no key file
    """

# ---------------------------------------------------------------- server

class Server:
    """A parameter server in this process. paramwire.Server gives its arguments their defaults."""

    def __init__(
        self,
        listen: Sequence[str],
        *,
        unix_directory: str | os.PathLike[str],
        state: str | os.PathLike[str] | None = None,
        memory_limit: int | None = None,
        arena_bytes: int | None = None,
        huge_pages: str = "no",
        tier: str = "memory",
        lease_ttl_max: float = 60.0,
        lease_age_max: float = 600.0,
        retained: int = 3,
        quarantine_limit: int | None = None,
        udp: bool = True,
        busy_poll: bool = False,
        trace: Trace | None = None,
        key: str | os.PathLike[str] | None = None,
        verbs: str = "auto",
        verbs_gid_index: int | None = None,
        delta_limit: int = ...,
        epoch_after: int = 0,
    ) -> None: ...
    @property
    def address(self) -> str:
        """The best address to give to connect(): unix if there is one, else TCP."""

    @property
    def endpoints(self) -> list[str]:
        """All addresses, as they were bound."""

    @property
    def udp_ports(self) -> list[int]:
        """UDP port of each endpoint; 0 where there is none. Of a unix socket: that at 127.0.0.1."""

    @property
    def epoch(self) -> int:
        """Of all versions that this server publishes."""

    @property
    def incarnation(self) -> str:
        """128 random bits of this start, as 32 hex digits."""

    @property
    def newest(self) -> Version | None:
        """The newest version, None before the first publish."""

    def publish(
        self,
        base: Version | tuple[int, int] | EllipsisType | None = ...,
        *,
        codec: str | None = None,
        encode_threads: int | None = None,
    ) -> Publish:
        """Start a publish from this process; the bytes are copied once, into the store.

        codec:   how tensors are stored, and travel: "raw" (the default), "planes" (byte planes, entropy-coded, no bit
                 is lost), "lz4", or after a cast of float32 tensors "bf16", "fp16", "bf16+planes", ... Tensors that
                 would not get smaller are stored raw. Fetches decode by themselves; views need raw
        encode_threads: the caller's included; by default as many as processors, 4 at most
        base:    omitted: on top of whatever is newest; None: only if nothing is published yet; a version: only on top
                 of exactly that, so that no update is lost
        errors:  StaleError when `base` is not the newest version; BackpressureError when too many publishes are open,
                 or views hold too much; UnreachableError after close()
        """

    def stats(self) -> dict[str, int | str]:
        """Counters since the start, and sizes now. "copies" counts arrays that were copied because of their layout."""

    def durations(self) -> dict[str, Durations]:
        """How long things took: "request" (handling a frame, with the store locked), "turn" (of the event loop: what
        others wait), "finish" (a publish becoming visible, with the store locked)."""

    def close(self, drain: float = 5.0) -> None:
        """Take no new work, send what is queued for up to `drain` seconds, then end. Again is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

# ---------------------------------------------------------------- publish

@final
class Publish:
    """A new version in the making: nobody sees it before finish(), then everybody sees all of it.

    As a context manager it finishes when the block ends well, and aborts when it raises. What is not put keeps its
    value. Calls from several threads take turns.
    """

    def put(
        self,
        name: str,
        array: Any,
        *,
        dtype: str | DTypeLike | None = None,
        shape: int | Iterable[int] | None = None,
        rows: tuple[int, int] | None = None,
        heads: tuple[int, int, int] | None = None,
        codec: str | None = None,
        stream: Any = None,
    ) -> None:
        """Store a tensor, or one part of it.

        array:   whatever hands over its memory: numpy array, DLPack (torch, CuPy, jax, ...), buffer,
                 __array_interface__, in any layout and byte order. C-contiguous little-endian arrays are read where
                 they are; others are copied first, row-major (see `copies`). bf16 and 8-bit floats keep their type
                 through DLPack. In the memory of a CUDA device (DLPack, __cuda_array_interface__): C-contiguous,
                 aligned to its elements; copied to the host first
        dtype:   the label, where numpy lacks the type: "bf16" over uint16, "f8_e4m3" over uint8, "i4" over packed
                 uint8. Nothing is cast but by a codec
        shape:   of the whole tensor, in elements; needed with `rows`, `heads`, and byte views. By default the array's
        rows:    (begin, end): the array is these rows of the tensor
        heads:   (total, begin, end): the array is these of `total` heads, groups of rows of equal size
        codec:   of this tensor, as for Server.publish; by default the publish's
        stream:  of an array in device memory: what it has under way comes first; as Snapshot.fetch
        errors:  TypeError for what is no array; InvalidError naming tensor, expected and given; UnavailableError for
                 an array in device memory where there is no CUDA, naming what is missing; BackpressureError when the
                 store is full; CorruptError when the server stored something else; DeadlineError, UnreachableError. An
                 error of an earlier put to another process may come with a later call
        blocks:  to another process, until the window of unacknowledged puts has room
        """

    def put_rows(
        self,
        name: str,
        array: Any,
        block_bytes: int = 4194304,
        *,
        dtype: str | DTypeLike | None = None,
        shape: int | Iterable[int] | None = None,
        codec: str | None = None,
        stream: Any = None,
    ) -> None:
        """Store a tensor in blocks of at most `block_bytes`, each a range of rows (none is cut). As put otherwise.

        Replaces the tensor, whatever parts it had; a put of a part, or of the whole, needs a remove() before it when
        the tensor is stored in other parts.
        """

    def put_all(self, arrays: Mapping[str, Any], *, codec: str | None = None, stream: Any = None) -> None:
        """Store several tensors. Arrays that are the same memory (start, dtype, shape, strides) are tied: stored
        once, the later names become aliases of the first."""

    def put_checkpoint(
        self,
        checkpoint: Checkpoint,
        *,
        replaces: Snapshot | None = None,
        workers: int = 2,
        memory_limit: int | None = None,
        progress: CheckpointProgress | None = None,
    ) -> None:
        """Store every block and alias of a checkpoint.

        replaces:      snapshot of what is published, the base of this publish: its tensors that the checkpoint lacks,
                       or has cut otherwise, are removed. None: nothing is published yet
        workers, memory_limit, progress: as for checkpoint.restore
        errors:        StaleError when the version of this publish is not above the checkpoint's; CorruptError naming
                       file, block and extent; DeadlineError after progress.stop(); as put
        """

    def alias(self, name: str, target: str) -> None:
        """Make `name` another name of the tensor `target`. A later put of `name` undoes it."""

    def remove(self, name: str) -> None:
        """Drop a tensor, or an alias, from the new version.  errors: NotFoundError."""

    def finish(self, timeout: float | None = None) -> Version:
        """Commit. Repeated after success it gives the same version.

        errors:  StaleError when somebody else published meanwhile; InvalidError for parts that overlap or leave gaps
                 in what they say, and for aliases without target; DeadlineError, UnreachableError
        """

    def abort(self) -> None:
        """Drop it. Does nothing after finish(); never waits."""

    @property
    def version(self) -> Version:
        """That finish() will commit."""

    @property
    def copies(self) -> int:
        """Arrays of this publish that were copied because they were not C-contiguous little-endian."""

    @property
    def given_bytes(self) -> int:
        """Of the arrays put so far."""

    @property
    def stored_bytes(self) -> int:
        """What they were stored as."""

    @property
    def overflowed(self) -> int:
        """Finite values that a codec's cast made infinite."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

# ---------------------------------------------------------------- client

@final
class Client:
    """A connection to one server; make it with paramwire.connect(). Any thread.

    timeout:  of each call, seconds; None takes the client's. Ctrl-C ends the waiting of any call within 200 ms. A fetch
              over 64 MiB or of more than 4096 tensors, a view and a publish go on in the background until their
              deadline, with the arrays they use; any other call is over: its connection is dropped, and arrays that it
              filled are undefined
    """

    def __init__(
        self,
        address: str,
        *,
        transport: str = "auto",
        small_transport: str | None = None,
        small_bytes: int = 65536,
        strict: bool = False,
        timeout: float = 30.0,
        lease_ttl: float = 10.0,
        verify: bool = True,
        busy_poll: bool = False,
        drop_view_pages: bool = False,
        trace: Trace | None = None,
        key: str | os.PathLike[str] | None = None,
        verbs_device: str | None = None,
        verbs_gid_index: int | None = None,
        decode_threads: int | None = None,
    ) -> None: ...
    @property
    def address(self) -> str: ...
    @property
    def transport(self) -> str:
        """In use: "shm", "verbs", "udp" or "tcp"."""

    @property
    def small_transport(self) -> str:
        """In use for fetches of at most `small_bytes`."""

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """Better transports that are not used, with the reason."""

    @property
    def fallbacks(self) -> list[str]:
        """Those of `rejected` that should work here: with `strict` there are none."""

    @property
    def newest(self) -> Version | None:
        """The newest version that this client has seen; None: none yet."""

    @property
    def incarnation(self) -> str:
        """Of the server, 32 hex digits: another one means that it restarted."""

    def snapshot(
        self,
        version: Version | tuple[int, int] | None = None,
        *,
        lease: bool = True,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> Snapshot:
        """Open one version of the whole model.

        version:  None takes the newest
        lease:    True keeps the version readable until close(), renewed in the background; False leaves it to the
                  server's retention, and fetches may end in StaleError
        wait:     how long to wait for the version to be published, seconds
        errors:   NotFoundError when nothing is published; StaleError when `version` is gone, or not there in time
        """

    def fetch(
        self,
        name: str,
        *,
        rows: tuple[int, int] | None = None,
        heads: tuple[int, int, int] | None = None,
        out: Any = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Fetch from the newest version; arguments and errors as for Snapshot.fetch."""

    @overload
    def fetch_many(
        self,
        names: Mapping[str, Any],
        *,
        timeout: float | None = None,
        allow_missing: Iterable[str] = (),
        stream: Any = None,
    ) -> dict[str, Any]: ...
    @overload
    def fetch_many(
        self,
        names: Iterable[str],
        *,
        timeout: float | None = None,
        allow_missing: Iterable[str] = (),
        stream: Any = None,
    ) -> dict[str, NDArray[Any]]:
        """Fetch several tensors, all of the newest version; as Snapshot.fetch_many."""

    def publish(
        self,
        base: Version | tuple[int, int] | EllipsisType | None = ...,
        *,
        codec: str | None = None,
        encode_threads: int | None = None,
        timeout: float | None = None,
    ) -> Publish:
        """Start a publish over a connection of its own; `base`, `codec` and errors as for Server.publish, `timeout`
        for each call.
        """

    def register(self, buffer: Any) -> Registration:
        """Let RDMA devices write fetches straight into `buffer`, a writable array or buffer of one run of memory, or
        into parts of it; over other transports it has no effect. Without, fetches over verbs go through a staging
        buffer of 4 MiB a link, with one copy. Worth it for large `out=` arrays that are used again and again:
        registering pins their pages, some milliseconds for 16 MiB.

        returns:  keeps `buffer` alive; release() it, or leave its `with` block, when no fetch uses it
        errors:   InvalidError, TypeError for a buffer that can't be filled; UnavailableError for memory that devices
                  can't write; BackpressureError when too little memory may be locked (RLIMIT_MEMLOCK), with the numbers
        """

    def stats(self) -> dict[str, Any]:
        """Transports, newest version and counters of this client; link counters of threads at work lag behind.

        "by_transport" has reads, bytes and wire_bytes of each in use; "fallbacks" counts those of `rejected` that
        should work.
        """

    def durations(self) -> dict[str, Durations]:
        """How long calls took, failed ones included: "fetch", "view", "snapshot", "control" (a question to the server
        and its answer)."""

    def server_stats(self, *, timeout: float | None = None) -> dict[str, int]:
        """Counters of the server."""

    def close(self) -> None:
        """End leases and threads. Snapshots raise InvalidError from now on; views stay. Again is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class Mirror:
    """Tensors of a server in this process's memory, brought from version to version.

    What did not change stays; of what did, the server sends the difference where it has it and it is smaller, and the
    block otherwise. An update happens all at once: until it is done, and after an error, the version before is there.
    Any thread.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[str] | None = None,
        *,
        deltas: bool = True,
        delta_wait: float = 0.5,
        threads: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Fetch the newest version.

        tensors:     their names; by default all of each version, aliases included
        deltas:      False: what changed is fetched whole
        delta_wait:  seconds that an update waits for deltas which the server is still making; what is not there by then
                     is fetched whole
        threads:     that apply deltas, the caller's included; by default as many as processors, 4 at most
        errors:      NotFoundError for a tensor that is not there; as Client.snapshot and Snapshot.fetch
        """

    def update(self, *, timeout: float | None = None) -> Version:
        """Bring all of it to the newest version.

        Takes as much memory as the changed tensors have, until nobody holds their arrays of before. A delta counts only
        if it is of exactly the bytes held, and if its result has the CRC that it names, which for blocks stored raw is
        the manifest's.

        returns: the version it is at then
        errors:  as the constructor; after one the mirror is what it was
        """

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A tensor of the present version: read-only, and unchanged by later updates.  errors: NotFoundError."""

    def tensor_version(self, name: str) -> Version:
        """That wrote the tensor's newest block.  errors: NotFoundError."""

    def names(self) -> list[str]: ...
    def __contains__(self, name: str) -> bool: ...
    def __len__(self) -> int: ...
    @property
    def version(self) -> Version: ...
    def stats(self) -> dict[str, int]:
        """"updates"; "kept_bytes" of blocks that had not changed; "deltas", "delta_bytes" that they took, in place of
        "replaced_bytes" as the blocks are stored, and "saved_bytes" between the two; "refused" deltas, which did not
        fit; "fetched" blocks and "fetched_bytes" as they are stored."""

@final
class Registration:
    """Memory that RDMA devices may write; make it with Client.register(). May outlive its client."""

    @property
    def nbytes(self) -> int: ...
    def release(self) -> None:
        """Give the memory back. Not while a fetch reads into it. Again is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class Snapshot:
    """One version of the whole model; a read-only mapping of names to arrays. Any thread. Holds its client open.

    Arrays have the numpy type of their tensor. bf16 and 8-bit floats have the type of ml_dtypes where that is
    installed, else uint16 and uint8; 4-bit types are packed uint8 with one axis. info(name).dtype says what they are.
    """

    @property
    def version(self) -> Version: ...
    @property
    def leased(self) -> bool:
        """Whether a lease keeps it; False too when the lease was lost."""

    @property
    def client(self) -> Client: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]:
        """Names in order, aliases included."""

    def __contains__(self, name: object, /) -> bool: ...
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...
    def tensors(self) -> list[TensorInfo]:
        """All tensors, by name, aliases included."""

    def info(self, name: str) -> TensorInfo:
        """errors:  NotFoundError with the nearest names"""

    def blocks(self, name: str) -> list[BlockInfo]:
        """The blocks of a tensor by first row.  errors: NotFoundError."""

    def fetch(
        self,
        name: str,
        *,
        rows: tuple[int, int] | None = None,
        heads: tuple[int, int, int] | None = None,
        out: Any = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Copy a tensor, or a range of its rows or heads, and check it.

        rows:     (begin, end)
        heads:    (total, begin, end)
        out:      a writable array or buffer to fill: numpy, DLPack, buffer, __array_interface__. C-contiguous: exactly
                  the part's bytes, of any type, filled where it is; undefined after an error. Any other layout (a
                  column slice, a transposed array): of the part's type and shape, filled after success from a copy that
                  takes as much memory again, and counted in stats()["copies"]; with fetch_async, wait() fills it. In
                  the memory of a CUDA device (DLPack, __cuda_array_interface__: torch, CuPy, jax, ...): C-contiguous,
                  aligned to its elements, of the part's bytes. They are there, compared in device memory with what the
                  server sealed, when the call returns; not with fetch_async
        stream:   of an `out` in device memory: what this stream has under way comes first. A CUDA stream object of
                  torch, CuPy or with __cuda_stream__, or its handle; 1 is the legacy default stream, 2 the per-thread
                  one. None: what the array's library has under way on its current stream (DLPack), or on the array's
                  `stream` (__cuda_array_interface__). -1: nothing is ordered
        returns:  a new array; with `out`, `out`
        errors:   NotFoundError; InvalidError for a range outside, an `out` of another size (naming both), a closed
                  snapshot; for an `out` in device memory also when it is not contiguous, not aligned, read-only, of
                  another device than it says, or when `stream` is being captured, with the next step; UnavailableError
                  for one where there is no CUDA, naming what is missing, and when the device is lost; StaleError when
                  the version is gone, or the server restarted; CorruptError; DeadlineError, also when the work before
                  it does not end in time; UnreachableError
        """

    def fetch_block(self, id: int, *, out: Any = None, timeout: float | None = None, stream: Any = None) -> Any:
        """Fetch a whole block by its id (see blocks()); as fetch."""

    @overload
    def fetch_many(
        self,
        names: Mapping[str, Any],
        *,
        timeout: float | None = None,
        allow_missing: Iterable[str] = (),
        stream: Any = None,
    ) -> dict[str, Any]: ...
    @overload
    def fetch_many(
        self,
        names: Iterable[str],
        *,
        timeout: float | None = None,
        allow_missing: Iterable[str] = (),
        stream: Any = None,
    ) -> dict[str, NDArray[Any]]:
        """Fetch several tensors, pipelined.

        names:          names, or a mapping of names to `out` arrays and buffers. Arrays (DLPack included) must have
                        the tensor's dtype and shape (or be uint8 with one axis), other buffers its bytes
        stream:         as fetch, of all arrays in device memory
        allow_missing:  patterns (fnmatch) of names that are left out of the result when they are not there
        errors:         as fetch. Names, shapes and types are looked at first: one error lists all that is wrong
                        (NotFoundError if names are all of it, else InvalidError), and nothing is fetched
        """

    def fetch_async(
        self,
        names: str | Iterable[str] | Mapping[str, Any],
        *,
        rows: tuple[int, int] | None = None,
        heads: tuple[int, int, int] | None = None,
        out: Any = None,
        timeout: float | None = None,
        allow_missing: Iterable[str] = (),
    ) -> Ticket:
        """As fetch (one name) or fetch_many, in a thread of the client, into host memory.  errors: BackpressureError
        past 1024 tickets.
        """

    def view(
        self, name: str, *, rows: tuple[int, int] | None = None, heads: tuple[int, int, int] | None = None
    ) -> View:
        """Look at a part that lies in one block where it is, without a copy. The whole block is checked at its first
        view.

        errors:  UnavailableError on transports without views (tcp); InvalidError for a part that spans blocks; as fetch
        """

    def close(self) -> None:
        """End the lease. Views stay. Again is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class Ticket:
    """A fetch on its way. Dropped before it is done, it goes on, and its arrays stay until then."""

    @property
    def done(self) -> bool: ...
    @property
    def seconds(self) -> float:
        """From submission to completion; 0 until then."""

    def wait(self, timeout: float | None = None) -> Any:
        """The array of fetch_async with one name, else the dict.

        timeout:  seconds; None waits for the deadline of the fetch itself
        errors:   DeadlineError when it is not done in time (it goes on: wait again); as fetch
        """

@final
class View:
    """A block, or a range of one, where it lies: a read-only buffer. Its bytes stay what they are until it is
    released, whatever is published, and when client and server are gone.

    The buffer protocol gives standard types their format; bf16 and 8-bit floats are unsigned integers, 4-bit types
    bytes. DLPack gives every type its own (`torch.from_dlpack(view)`), 4-bit ones packed. At the end of a `with` the
    view is released as soon as no array, memoryview or DLPack tensor of it lives.
    """

    @property
    def array(self) -> NDArray[Any]:
        """A read-only array over the bytes; keeps the view."""

    @property
    def verified_now(self) -> bool:
        """Whether this call ran the check; False: it had been run before."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def released(self) -> bool: ...
    def release(self) -> None:
        """Give the bytes back. Again is fine.  errors: BufferError while arrays, memoryviews or DLPack tensors live."""

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule over the bytes, which stay until the consumer's tensor is gone, in whatever thread that is.

        max_version:  from (1, 0) on a versioned capsule, marked read-only
        copy:         True gives a copy that the consumer may write to, in either form
        errors:       BufferError for a legacy capsule without a copy, which can't say "read-only"; for a stream or a
                      device other than (1, 0); after release()
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): host memory."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

@final
class Labelled:
    """An array with the type that it stands for, as a DLPack producer:
    `torch.from_dlpack(Labelled(array, dtype="bf16"))`.

    For what numpy lacks or does not export: arrays of ml_dtypes, and the integers that stand for them without it.
    Shares the array's memory, in any layout, and keeps it.
    """

    def __init__(
        self, array: Any, *, dtype: str | DTypeLike | None = None, shape: int | Iterable[int] | None = None
    ) -> None:
        """Label `array` (as Publish.put takes it).

        dtype:   the label; by default what the array's own type says
        shape:   in elements, for bytes that are labelled as a type of another width ("i4" over packed uint8)
        errors:  as Publish.put
        """

    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """As View.__dlpack__; writable where the array is."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """(1, 0): host memory."""

# ---------------------------------------------------------------- compute

# ---------------------------------------------------------------- checkpoints

@final
class CheckpointProgress:
    """How far a save, restore or verification is, and a way to stop it. Any thread."""

    def __init__(self) -> None: ...
    @property
    def blocks(self) -> int:
        """To be done in all."""

    @property
    def blocks_done(self) -> int: ...
    @property
    def bytes(self) -> int:
        """To be done in all: raw bytes of blocks; of a verification, bytes of files."""

    @property
    def bytes_done(self) -> int: ...
    def stop(self, after: float = 0.0) -> None:
        """Let the work end within `after` seconds: it is done by then, or gives DeadlineError before its next block."""

@final
class Checkpoint:
    """One checkpoint of a directory, open for reading; while it is, no save removes a file there. Any thread.

    A context manager. Blocks are read with pread and verified; nothing that fails its checks is handed out.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, version: Version | tuple[int, int] | None = None
    ) -> None:
        """version:  by default the newest whose manifest is whole; `notes` says which newer ones are not

        errors:   NotFoundError when there is none, or not that one; CorruptError when its manifest is damaged
        """

    @property
    def version(self) -> Version: ...
    @property
    def created_us(self) -> int:
        """Microseconds since 1970, by the clock of who saved it; 0: not known."""

    @property
    def chain(self) -> int:
        """Saves since the last full one; 0: this is one."""

    @property
    def notes(self) -> list[str]:
        """Newer checkpoints that could not be opened, with the reason."""

    def tensors(self) -> list[TensorInfo]:
        """All tensors, by name, aliases included. `codec` is "raw", as what is handed out; `stored_nbytes` are those of
        all records that a tensor needs."""

    def blocks(self, name: str) -> list[tuple[int, int, int, int]]:
        """(id, first row, end row, bytes) of each block of a tensor, in the order of its rows.

        errors:  NotFoundError
        """

    def read(self, name: str, *, out: Any = None, workers: int = 2, memory_limit: int | None = None) -> Any:
        """One tensor as an array, or into `out` as Snapshot.fetch takes it.

        errors:  NotFoundError; InvalidError for an `out` that does not fit; CorruptError naming file, block and extent
        """

    def read_block(self, id: int) -> NDArray[np.uint8]:
        """The raw bytes of one block.  errors: NotFoundError, CorruptError."""

    def read_all(
        self, *, workers: int = 2, memory_limit: int | None = None, progress: CheckpointProgress | None = None
    ) -> dict[str, NDArray[Any]]:
        """Every tensor as an array, by name; as checkpoint.restore_arrays."""

    def close(self) -> None:
        """Again is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

def save_snapshot(
    directory: str | os.PathLike[str],
    snapshot: Snapshot,
    *,
    workers: int,
    full_every: int,
    keep: int,
    codec: str,
    delta: bool,
    verify: bool,
    memory_limit: int | None,
    created_us: int,
    timeout: float | None,
    progress: CheckpointProgress | None,
) -> dict[str, Any]:
    """checkpoint.save of a snapshot: the fields of checkpoint.Saved."""

def save_arrays(
    directory: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    *,
    version: Version | tuple[int, int],
    dtypes: Mapping[str, Any],
    block_bytes: int,
    workers: int,
    full_every: int,
    keep: int,
    codec: str,
    delta: bool,
    verify: bool,
    memory_limit: int | None,
    created_us: int,
    progress: CheckpointProgress | None,
) -> dict[str, Any]:
    """checkpoint.save of arrays: the fields of checkpoint.Saved."""

def list_checkpoints(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The fields of checkpoint.Summary, newest first."""

def verify_checkpoints(
    directory: str | os.PathLike[str],
    *,
    version: Version | tuple[int, int] | None,
    decode: bool,
    workers: int,
    memory_limit: int | None,
    progress: CheckpointProgress | None,
) -> dict[str, Any]:
    """The fields of checkpoint.Verified, problems as dictionaries."""

@final
class Graph:
    """A checked list of operations with named parameters. Each makes a value, float32 [tokens, width], named by the
    operation.

    errors:  InvalidError naming operation, input or tensor, what was expected and what was given; the graph is then
             unchanged
    """

    def __init__(self) -> None: ...
    @staticmethod
    def llama(
        config: LlamaConfig | Mapping[str, Any], *, naming: str = "gguf", tied: bool | None = None
    ) -> Graph:
        """The operations of a Llama-shaped decoder.

        config:  LlamaConfig, or a mapping with its fields or those of a Hugging Face config.json; other keys are not
                 read
        naming:  which tensor names, and their rotary layout
        tied:    whether the head reads the embedding's tensor; None takes what `config` says
        """

    @staticmethod
    def bert(config: BertConfig | Mapping[str, Any], *, naming: str = "hf", normalise: bool | None = None) -> Graph:
        """The operations of a BERT-shaped encoder; the output is the mean of its last layer's rows.

        A text is one step, and Engine.rewind() comes before the next one.

        config:     BertConfig, or a mapping with its fields or those of a Hugging Face config.json; other keys are not
                    read
        naming:     which tensor names
        normalise:  whether the output has length 1; None takes what `config` says
        """

    def embedding(self, name: str, tensor: str, shape: Iterable[int], *, rows: str = "token") -> None:
        """Rows of `tensor` [rows, width] by "token" or "position", or the "first" for every token."""

    def matmul(self, name: str, input: str, tensor: str, shape: Iterable[int], *, bias: str = "") -> None:
        """x W^T (+ bias), `tensor` [out, in]."""

    def rms_norm(self, name: str, input: str, tensor: str, *, epsilon: float = 1e-05) -> None:
        """x / sqrt(mean(x^2) + epsilon) * w."""

    def layer_norm(self, name: str, input: str, tensor: str, *, bias: str = "", epsilon: float = 1e-05) -> None:
        """(x - mean) / sqrt(variance + epsilon) * w (+ bias), variance of the population."""

    def rotary(
        self,
        name: str,
        input: str,
        *,
        heads: int,
        head_size: int,
        rotary_size: int | None = None,
        base: float = 10000.0,
        layout: str = "interleaved",
    ) -> None:
        """Rotate pairs of each head by position: (2 i, 2 i + 1), or (i, i + size / 2)."""

    def attention(
        self,
        name: str,
        query: str,
        key: str,
        value: str,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        causal: bool = True,
    ) -> None:
        """Attention with grouped heads.

        causal:  over the key/value cache; else all positions of a step see each other, and a text is one step
        """

    def swiglu(self, name: str, gate: str, up: str) -> None:
        """silu(gate) * up."""

    def gelu(self, name: str, input: str, *, form: str = "exact") -> None:
        """x / 2 * (1 + erf(x / sqrt(2))), or its approximation by "tanh"."""

    def add(self, name: str, left: str, right: str) -> None:
        """left + right, of one width."""

    def softmax(self, name: str, input: str) -> None:
        """Along the width."""

    def mean(self, name: str, input: str) -> None:
        """Of all positions of the step: one row."""

    def normalise(self, name: str, input: str, *, epsilon: float = 1e-12) -> None:
        """x / max(|x|, epsilon), |x| the Euclidean norm of a row."""

    def top_k(self, name: str, scores: str, k: int, *, normalise: bool = True) -> None:
        """A routing [2 k] of scores [experts]: the numbers of the k largest, ties to the lower, then their weights.

        normalise:  weights are the soft-max of the k scores; else their part of the soft-max over all experts
        """

    def expert_matmul(self, name: str, input: str, routing: str, tensor: str, shape: Iterable[int]) -> None:
        """x W[e]^T for each expert e of the routing, side by side: [k * out]; `tensor` [experts, out, in].

        Only the experts that a step's routing names are fetched.
        """

    def expert_combine(self, name: str, input: str, routing: str, tensor: str, shape: Iterable[int]) -> None:
        """The sum over slots j of weight j * x_j W[e_j]^T: [out]; x [k * in], `tensor` [experts, out, in]."""

    def head(self, name: str, input: str, tensor: str, shape: Iterable[int]) -> None:
        """As matmul, of the last position alone."""

    @property
    def parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, in the order in which they are first needed."""

    @property
    def operations(self) -> list[tuple[str, str]]:
        """Name and kind, in order."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding by token: the first token id that is refused; 0 without one."""

@final
class Engine:
    """Streams a snapshot's blocks through a graph under a memory budget, prefetching ahead. Calls take turns.

    A newer version takes the place of the one in use, with plan, memory and captured CUDA graphs kept:

        engine.adopt(client.snapshot())     # what changed is fetched in the next step

    With versions=2, prepare(snapshot) in another thread fetches while steps go on, and adopt() moves no byte.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        graph: Graph,
        *,
        budget: int = 0,
        backend: str = "cpu",
        threads: int = 0,
        source: str = "auto",
        context: int = 2048,
        step: int = 256,
        fetch_timeout: float = 30.0,
        versions: int = 1,
    ) -> None:
        """Bind the graph to the snapshot, plan, and start to prefetch.

        budget:         most bytes of parameters held at any time; 0: no limit. Rows of embeddings and experts are
                        fetched as each step picks them
        backend:        "cpu", "cuda:N", or "cuda" for "cuda:0"; on a device `budget` is about its memory
        threads:        that compute, the calling one included; 0: as many as cores
        source:         "view" computes from the blocks where they lie (shm), "copy" from copies, "auto" takes what the
                        transport gives
        context:        positions of the key/value cache
        step:           most tokens of one step
        fetch_timeout:  of one piece, seconds
        versions:       of what stays, that memory holds: 2 lets prepare() fetch another one beside the steps; the
                        budget then counts what stays twice
        errors:         InvalidError when the snapshot does not fit (all differences in one text), or the budget is
                        too small (naming one that would do); UnavailableError for backend or source
        """

    def step(self, tokens: Iterable[int] | NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Compute `tokens` at the next positions.

        returns:  float32 [output width], a copy: the last position's logits, or what an encoder ends with
        errors:   InvalidError, BackpressureError (the engine stays usable); StaleError, CorruptError, DeadlineError,
                  UnreachableError (no step works any more before adopt() of a snapshot that does)
        """

    def rewind(self, position: int = 0) -> None:
        """Forget the positions from `position` on; 0 starts a new text."""

    def adopt(self, snapshot: Snapshot) -> None:
        """Compute the next step, and all after it, with this version of the same model.

        What stays and did not change is kept. So are keys and values, which the old weights made: rewind() for a text
        of the new ones alone.

        errors:  InvalidError naming the first difference of names, dtypes, shapes or cuts into blocks, or what is
                 encoded where nothing was; InvalidError for a closed snapshot; UnavailableError where the engine
                 computes on views and this has none; with versions=2 also those of prepare(). The engine is then
                 as before
        """

    def prepare(self, snapshot: Snapshot) -> None:
        """Fetch and check what this version changes of what stays, beside steps in another thread; adopt() it then.

        With versions=1 it looks whether the snapshot fits, and no more.

        errors:  as adopt(); StaleError, CorruptError, DeadlineError, UnreachableError of fetches. Steps go on as
                 before, and it may be called again
        """

    @property
    def position(self) -> int: ...
    def stats(self) -> dict[str, Any]:
        """Steps, tokens, bytes fetched, seconds of stall, computation and fetching, bytes held, the plan."""

    @property
    def description(self) -> str:
        """Backend, threads, source and plan in one line."""

    def close(self) -> None:
        """End its threads. Again is fine."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

# ---------------------------------------------------------------- codecs

@final
class Encoded:
    """An array as a codec stores it: what `encode` gives and `decode` takes. paramwire.codec has the words for both."""

    def __init__(
        self,
        data: Buffer | NDArray[Any],
        chunks: NDArray[np.uint32],
        *,
        codec: str,
        dtype: str,
        shape: int | Sequence[int],
    ) -> None:
        """Out of parts that were kept somewhere; nothing of `data` is looked at before it is decoded.

        errors:  InvalidError: an unknown codec or dtype, another number of chunks than the shape has
        """

    @property
    def codec(self) -> str:
        """"raw" where what was asked for would not have been smaller."""

    @property
    def dtype(self) -> str:
        """Of what decode() gives: the cast's where there was one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> NDArray[np.uint8]:
        """The stored bytes, read-only."""

    @property
    def chunks(self) -> NDArray[np.uint32]:
        """Stored bytes and their CRC-32C of each 64 KiB of raw bytes, (n, 2), read-only."""

    @property
    def nbytes(self) -> int:
        """Stored bytes."""

    @property
    def raw_nbytes(self) -> int:
        """Bytes of what decode() gives."""

    @property
    def ratio(self) -> float:
        """nbytes over raw_nbytes; 1.0 for an empty array."""

    @property
    def crc64(self) -> int:
        """Of `data`."""

    @property
    def overflowed(self) -> int:
        """Finite values that the cast made infinite."""

def encode(array: Any, codec: str, /, *, dtype: DTypeLike | None = None, threads: int = 1) -> Encoded:
    """Encode an array of any library, as Publish.put takes them; the GIL is released.

    codec:   "raw", "planes", "lz4", "fp16", "bf16", or a cast with a codec: "bf16+planes". Casts apply to float32 and
             leave other types as they are
    dtype:   label of the array's bytes where numpy has no type for it: "bf16" for a uint16 array
    errors:  InvalidError: an unknown codec; TypeError: no array
    """

def decode(encoded: Encoded, /, *, threads: int = 1) -> NDArray[Any]:
    """The array again, bit for bit, checked twice: as it was stored and as it was encoded.

    errors:  CorruptError naming chunk and plane
    """

def cast(
    array: Any, to: str, /, *, dtype: DTypeLike | None = None, saturate: bool = False
) -> tuple[NDArray[Any], int]:
    """float32 to "f16" or "bf16", to nearest with ties to even, or back; and how many finite values overflowed.

    saturate:  those become the largest finite value of their sign, not infinite
    errors:    InvalidError: any other cast
    """

def cast_implementation() -> str:
    """Which vector bodies of casts and planes run on this machine, for example "AVX3"."""

# ---------------------------------------------------------------- timing

class CodecTimes(TypedDict):
    """Seconds of each round, and what came of it."""

    encode_s: list[float]
    decode_s: list[float]
    memcpy_s: list[float]
    raw_bytes: int
    stored_bytes: int
    codec: str
    correct: bool

def time_codec(
    array: Any, codec: str, /, *, dtype: DTypeLike | None = None, threads: int = 1, rounds: int = 5
) -> CodecTimes:
    """Encode, decode, compare and copy `array`, round after round, in memory that was used before."""

def time_casts(array: Any, to: str, /, *, rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each round, over a float32 array: memcpy of it, "cast" to `to`, "split" and "crc" of the result, all
    three "fused" chunk by chunk, and "widen", the way back."""

def time_fetches(snapshot: Snapshot, names: Sequence[str], outs: Sequence[Any], seconds: float) -> NDArray[np.int64]:
    """Fetch one of `names` into its target in `outs` after another, round and round, for `seconds`, with no interpreter
    between the calls: what a C++ program sees.

    returns:  nanoseconds of each call, one at least
    errors:   of the first fetch that fails
    """

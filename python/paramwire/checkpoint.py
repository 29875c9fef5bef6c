"""Checkpoints: versions of a model in a directory, saved whole or not at all, and back bit for bit.

    from paramwire import checkpoint

    checkpoint.save("weights", client, keep=3)            # what a server holds; or a mapping of arrays
    arrays = checkpoint.restore_arrays("weights")         # the newest, as arrays
    checkpoint.restore("weights", server)                 # into a server, as one version
    checkpoint.export_safetensors("weights", "model.safetensors")

A process or machine that stops at any moment leaves every earlier checkpoint whole; the next save takes up what is
there, or removes it. Between full checkpoints only what changed is written, as lossless deltas. Every byte has its
checksum, and what fails it is never handed out. `cpp/paramwire/wire/FORMAT.md` ("Checkpoints") has the bytes.

Sizes are bytes, times are seconds. Every function may be called from any thread; one save at a time goes on in a
directory, whatever the process, and readers are never disturbed. Beside the errors that a function names, all of them
raise BackpressureError when the disk or a quota is full, or somebody else saves there; UnavailableError when the
directory can't be read, written, locked or renamed in; CorruptError when a device gives no bytes. Their texts name the
path, the bytes and the next step. Ctrl-C ends a call soon; a save is then taken up again by the next one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paramwire import _core
from paramwire._core import Checkpoint, CheckpointProgress, Client, InvalidError, NotFoundError, Server, Snapshot
from paramwire._types import Version
from paramwire.safetensors_file import HEADER_BYTES_MAX, SafetensorsWriter

__all__ = [
    "Checkpoint",
    "CheckpointProgress",
    "Problem",
    "Saved",
    "Summary",
    "Verified",
    "export_safetensors",
    "ls",
    "restore",
    "restore_arrays",
    "save",
    "verify",
]

Path = str | os.PathLike[str]
# Names of tensors that describe a served model (`paramwire serve`), and are none of its weights.
RESERVED_PREFIX = "paramwire."
# The last version that there can be.
EPOCH_MAX = 2**32 - 1
COUNTER_MAX = 2**64 - 1
# Threads of one call, as the core has it (kCheckpointWorkersMax).
WORKERS_MAX = 64


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a save did."""

    version: Version
    existed: bool
    """This version was there already: nothing was written."""
    full: bool
    """Every block is written by this save; it needs no file of another one."""
    blocks: int
    """In the version; the next four add up to it."""
    blocks_full: int
    """Written in full."""
    blocks_delta: int
    """Written as a delta to the checkpoint before."""
    blocks_unchanged: int
    """Not written: the record of an earlier save is named."""
    blocks_resumed: int
    """Found whole in what an earlier save of this version left behind."""
    raw_bytes: int
    """Of all blocks, as they are in memory."""
    written_bytes: int
    """To data files."""
    leftovers_removed: int
    """Files of saves that were ended."""
    removed: tuple[Version, ...]
    """Checkpoints that `keep` removed."""
    notes: tuple[str, ...]
    """What went on otherwise than asked, for people: a base that could not be read, old files that are still in use."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One checkpoint of a directory, by its manifest."""

    file: str
    version: Version
    whole: bool
    """Its manifest is sealed, and every data file it needs is there with its size. Bits inside are verify()'s."""
    problem: str
    """Why it is not whole; else empty."""
    created: float | None
    """Seconds since 1970 by the clock of who saved it; None when that is not known."""
    full: bool
    chain: int
    """Saves since the last full one."""
    blocks: int
    raw_bytes: int
    stored_bytes: int
    """Of all records that it needs."""
    written_bytes: int
    """Of those, the ones that its own save wrote."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Bytes that are not those that were written."""

    file: str
    offset: int
    """In the file: of the record that is damaged."""
    block: str
    """Empty: of no single block."""
    extent: int | None
    """64 KiB of the block in which the damage lies, where that is known."""
    text: str
    versions: tuple[Version, ...]
    """Checkpoints that need these bytes; none: no checkpoint does any more."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What verify() read, and what it found."""

    checkpoints: int
    files: int
    records: int
    bytes: int
    problems: tuple[Problem, ...]
    """None: every bit is as it was written."""


def save(
    directory: Path,
    source: Client | Snapshot | Mapping[str, Any],
    *,
    version: Version | tuple[int, int] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    block_bytes: int = 4 << 20,
    workers: int = 2,
    full_every: int = 8,
    keep: int = 0,
    codec: str = "planes",
    delta: bool = True,
    verify: bool = False,
    memory_limit: int | None = None,
    timeout: float | None = None,
    progress: CheckpointProgress | None = None,
) -> Saved:
    """Save a model into `directory`, which is made if its parent is there.

    source:        a client: its server's newest version, leased for as long as it takes; a snapshot: that version; or
                   arrays by name, of whatever hands over its memory, in any layout (names that share memory are tied)
    version:       of a client's server, instead of the newest; of arrays: what the checkpoint will be called, by
                   default one above the newest one there. Versions of a directory never go back
    dtypes:        of arrays: labels by name where numpy lacks the type, as Publish.put takes them
    block_bytes:   of arrays: larger tensors are cut in row ranges of at most this
    workers:       threads that fetch, encode and write, each a block at a time
    full_every:    every N-th save writes all blocks in full, those between only what changed; 1: all are full
    keep:          checkpoints that stay, with this one; older ones go once it is whole, but nothing that one of those
                   needs. 0: all stay
    codec:         of blocks in full: "planes", "lz4" or "raw"; what does not get smaller is stored raw. Never lossy
    delta:         False: changed blocks are written in full, too
    verify:        decode each record and compare, before it is written
    memory_limit:  bytes of block buffers of all workers, default 4 GiB
    timeout:       of each block's fetch; by default the client's
    progress:      counts for other threads, and stop() for them
    returns:       what was done
    errors:        StaleError when the version is below the newest there, or is there with other content; InvalidError
                   for options, or a block larger than `memory_limit` allows; DeadlineError after progress.stop();
                   CorruptError when bytes change while they are saved; those of Snapshot.fetch. After any of them the
                   next save of this version goes on with the blocks that are sealed (not after a full disk, which
                   gets its room back)
    """
    options: dict[str, Any] = {
        "workers": workers,
        "full_every": full_every,
        "keep": keep,
        "codec": codec,
        "delta": delta,
        "verify": verify,
        "memory_limit": memory_limit,
        "created_us": time.time_ns() // 1000,
        "progress": progress,
    }
    if isinstance(source, Client | Snapshot):
        if dtypes is not None:
            raise InvalidError("dtypes are for arrays: a server's tensors have their labels")
        with contextlib.ExitStack() as stack:
            if isinstance(source, Client):
                snapshot = stack.enter_context(source.snapshot(version))
            elif version is not None and tuple(version) != tuple(source.version):
                raise InvalidError(f"the snapshot is of version {source.version}, not {Version(*version)}")
            else:
                snapshot = source
            return Saved(**_core.save_snapshot(directory, snapshot, timeout=timeout, **options))
    if version is None:
        version = _version_after(directory)
    return Saved(
        **_core.save_arrays(directory, source, version=version, dtypes=dtypes or {}, block_bytes=block_bytes, **options)
    )


def _version_after(directory: Path) -> Version:
    try:
        found = ls(directory)
    except NotFoundError:
        found = []
    if not found:
        return Version(1, 1)
    newest = found[0].version
    if newest.counter < COUNTER_MAX:
        return Version(newest.epoch, newest.counter + 1)
    if newest.epoch < EPOCH_MAX:
        return Version(newest.epoch + 1, 1)
    raise InvalidError(
        f"{os.fspath(directory)!r} has {found[0].file}, the last version there can be: save into another directory"
    )


def restore(
    directory: Path,
    target: Client | Server,
    *,
    version: Version | tuple[int, int] | None = None,
    workers: int = 2,
    memory_limit: int | None = None,
    timeout: float | None = None,
    progress: CheckpointProgress | None = None,
) -> Version:
    """Publish a checkpoint on a running server, as one version whose tensors are exactly the checkpoint's.

    target:        a client of the server, or the server itself when it is in this process
    version:       of the checkpoint; by default the newest that is whole
    workers, memory_limit, timeout, progress: as for save
    returns:       the version that the server gave it
    errors:        NotFoundError when there is no such checkpoint; CorruptError naming file, block and extent;
                   StaleError when the server's versions are below the checkpoint's (start it with epoch_after=, as
                   `paramwire serve --checkpoint` does), or somebody else published meanwhile. Nothing is published then
    """
    if not isinstance(target, Client | Server):
        raise TypeError(f"the target is a Client (paramwire.connect(address)) or a Server, not {target!r}")
    with Checkpoint(directory, version=version) as found, contextlib.ExitStack() as stack:
        current: Snapshot | None = None
        if target.newest is not None:
            import paramwire

            client = target if isinstance(target, Client) else stack.enter_context(paramwire.connect(target.address))
            current = stack.enter_context(client.snapshot())
        base = current.version if current is not None else None
        publish = target.publish(base, timeout=timeout) if isinstance(target, Client) else target.publish(base)
        with publish:
            publish.put_checkpoint(
                found, replaces=current, workers=workers, memory_limit=memory_limit, progress=progress
            )
            return publish.finish()


def restore_arrays(
    directory: Path,
    *,
    version: Version | tuple[int, int] | None = None,
    workers: int = 2,
    memory_limit: int | None = None,
    progress: CheckpointProgress | None = None,
) -> dict[str, Any]:
    """Every tensor of a checkpoint as an array in memory, by name; tied names have one array.

    version, workers, memory_limit, progress: as for restore (memory_limit is of buffers, the arrays come on top)
    returns:  arrays as Snapshot.fetch gives them: bf16 and 8-bit floats in ml_dtypes' types where it is installed
    errors:   NotFoundError when there is no such checkpoint, or it has only parts of a tensor; CorruptError naming
              file, block and extent
    """
    with Checkpoint(directory, version=version) as found:
        return found.read_all(workers=workers, memory_limit=memory_limit, progress=progress)


def export_safetensors(
    directory: Path,
    path: Path,
    *,
    version: Version | tuple[int, int] | None = None,
    workers: int = 2,
) -> list[str]:
    """Write a checkpoint as one safetensors file: `path` is afterwards that file whole, or what it was before.

    A block at a time is in memory for each worker. Tied names are written each with their bytes, since the format
    knows no ties. Tensors that describe a served model ("paramwire.model.json", ...) are left out.

    version, workers: as for restore
    returns:  the names that were left out
    errors:   NotFoundError, CorruptError as restore_arrays; ModelFileError for a tensor whose type the format lacks
              (c128, 4-bit integers), or a header above its limit; InvalidError for `workers`; OSError from the file
              system, naming `path` and the next step
    """
    if not 1 <= workers <= WORKERS_MAX:
        raise InvalidError(f"workers is {workers}: 1 to {WORKERS_MAX}")
    with Checkpoint(directory, version=version) as found:
        tensors = [tensor for tensor in found.tensors() if not tensor.name.startswith(RESERVED_PREFIX)]
        left_out = [tensor.name for tensor in found.tensors() if tensor.name.startswith(RESERVED_PREFIX)]
        layout = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        metadata = {"paramwire_version": str(found.version)}
        with SafetensorsWriter(path, layout, metadata=metadata, header_bytes_max=HEADER_BYTES_MAX) as writer:
            pieces = _Shared(_pieces(found, writer.names))
            errors: list[BaseException] = []

            def work() -> None:
                try:
                    for name, block, begin in pieces:
                        if errors:
                            return
                        writer.write(name, begin, found.read_block(block))
                except BaseException as error:  # raised by the caller's thread, whatever it is
                    errors.append(error)

            threads = [threading.Thread(target=work, name="paramwire-export") for _ in range(workers - 1)]
            for thread in threads:
                thread.start()
            work()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
    return left_out


class _Shared:
    """An iterator that several threads draw from."""

    def __init__(self, items: Iterator[tuple[str, int, int]]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def __iter__(self) -> _Shared:
        return self

    def __next__(self) -> tuple[str, int, int]:
        with self._lock:
            return next(self._items)


def _pieces(found: Checkpoint, names: list[str]) -> Iterator[tuple[str, int, int]]:
    """Name, block id and first byte in the tensor of every block, in the order of the file."""
    sizes = {tensor.name: tensor.nbytes for tensor in found.tensors()}
    for name in names:
        begin = 0
        for block, _, _, nbytes in found.blocks(name):
            yield name, block, begin
            begin += nbytes
        if begin != sizes[name]:
            raise NotFoundError(f"tensor {name!r} is only in parts in this checkpoint: {begin} of {sizes[name]} bytes")


def ls(directory: Path) -> list[Summary]:
    """What a directory holds, newest first; those that are not whole are told with the reason.

    errors:  NotFoundError when there is no such directory
    """
    found = []
    for item in _core.list_checkpoints(directory):
        created = item.pop("created_us")
        found.append(Summary(created=created / 1e6 if created else None, **item))
    return found


def verify(
    directory: Path,
    *,
    version: Version | tuple[int, int] | None = None,
    decode: bool = False,
    workers: int = 2,
    memory_limit: int | None = None,
    progress: CheckpointProgress | None = None,
) -> Verified:
    """Read every file of a directory's checkpoints, each once, and find every bit that changed since it was written.

    version:  only what this checkpoint needs; by default all
    decode:   also decode every block of every checkpoint, and check the bytes that come out
    errors:   NotFoundError when there is nothing to verify; DeadlineError after progress.stop(). Damage raises nothing:
              it is in the result
    """
    found = _core.verify_checkpoints(
        directory, version=version, decode=decode, workers=workers, memory_limit=memory_limit, progress=progress
    )
    problems = tuple(Problem(**problem) for problem in found.pop("problems"))
    return Verified(problems=problems, **found)

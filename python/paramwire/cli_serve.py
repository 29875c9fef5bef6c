"""`paramwire serve`: publishes model files and serves them until it is told to stop."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import paramwire
from paramwire import checkpoint
from paramwire.cli_common import CliError, bytes_progress, console, facts, in_bytes, json_line, key_file, notes
from paramwire.cli_model import Model, open_model, publish_model

if TYPE_CHECKING:
    from paramwire.metrics_server import MetricsServer

# How long readers get to take what is queued for them when the server stops, in seconds.
DRAIN_SECONDS = 5.0


class Stop(BaseException):
    """SIGTERM or SIGINT came. No Exception: nothing between the signal and `serve` may take it for an error."""


@contextlib.contextmanager
def stop_signals() -> Iterator[int]:
    """Inside, the first SIGTERM or SIGINT raises Stop in the main thread; a second one ends the process at once.

    gives: a descriptor that becomes readable with the signal, so that a wait on it can't miss one
    """

    def stop(_: int, __: FrameType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        raise Stop

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    former = [(number, signal.signal(number, stop)) for number in (signal.SIGTERM, signal.SIGINT)]
    former_fd = signal.set_wakeup_fd(writing)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(former_fd)
        for number, handler in former:
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def serve(options: argparse.Namespace) -> int:
    if options.ready_fd is not None:
        try:
            os.fstat(options.ready_fd)
        except OSError as error:
            raise CliError(f"--ready-fd {options.ready_fd}: {error.strerror}") from error
    server: paramwire.Server | None = None
    trace = paramwire.Trace() if options.trace is not None else None
    metrics: MetricsServer | None = None
    with contextlib.suppress(Stop), stop_signals() as wake:
        try:
            with open_source(options) as source:
                server = paramwire.Server(
                    options.listen,
                    state=options.state,
                    memory_limit=options.memory_limit,
                    huge_pages=options.huge_pages,
                    trace=trace,
                    key=key_file(options),
                    verbs=options.verbs,
                    epoch_after=newest_epoch(options.checkpoint),
                )
                metrics = open_metrics(server, options.metrics)
                begin = time.perf_counter()
                with server.publish(codec=options.codec) as publish:
                    nbytes = publish_source(publish, source, options)
                    stored = publish.stored_bytes
                    version = publish.finish()
            say(options, server, metrics, version, (nbytes, stored), time.perf_counter() - begin)
            wait_for_end(wake, options.stop_on_eof)
        finally:
            if server is not None:
                server.close(DRAIN_SECONDS)
            if metrics is not None:
                metrics.close()
            if trace is not None:
                trace.write(options.trace)
    return 0


def open_source(options: argparse.Namespace) -> contextlib.AbstractContextManager[Model | paramwire.Checkpoint]:
    """What is to be served. errors: CliError for an option that does not go with it"""
    if options.checkpoint is None:
        return open_model([Path(name) for name in options.models])
    if options.dtype != "keep":
        raise CliError("--dtype is for model files: a checkpoint is served as it was saved")
    found = paramwire.Checkpoint(options.checkpoint)
    for note in found.notes:
        notes().print(f"paramwire: {note}: an older checkpoint is served")
    return found


def newest_epoch(directory: str | None) -> int:
    """Highest epoch of the checkpoints there, those that can't be read by their names: readers may have seen its
    versions. 0 without a directory.
    """
    return max((item.version.epoch for item in checkpoint.ls(directory)), default=0) if directory is not None else 0


def publish_source(
    publish: paramwire.Publish, source: Model | paramwire.Checkpoint, options: argparse.Namespace
) -> int:
    """returns: bytes published"""
    if not isinstance(source, paramwire.Checkpoint):
        with bytes_progress(not options.quiet) as progress:
            return publish_model(publish, source, options.dtype, options.block_bytes, progress)
    publish.put_checkpoint(source)
    return sum(tensor.nbytes for tensor in source.tensors() if tensor.alias_of is None)


def open_metrics(server: paramwire.Server, where: str | None) -> MetricsServer | None:
    """The endpoint of --metrics, if there is to be one."""
    if where is None:
        return None
    from paramwire.metrics_server import MetricsServer  # an HTTP server is not for every start

    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise CliError(f"--metrics {where}: [HOST:]PORT is needed, for example 127.0.0.1:9464")
    try:
        return MetricsServer(server, host.strip("[]") or "127.0.0.1", int(port))
    except OSError as error:
        raise CliError(f"--metrics {where}: {error.strerror or error}") from error


def say(
    options: argparse.Namespace,
    server: paramwire.Server,
    metrics: MetricsServer | None,
    version: paramwire.Version,
    sizes: tuple[int, int],
    spent: float,
) -> None:
    """Tells people and parent processes where the model is."""
    nbytes, stored = sizes
    ready: dict[str, Any] = {
        "address": server.address,
        "endpoints": list(server.endpoints),
        "version": str(version),
        "bytes": nbytes,
        "stored_bytes": stored,
        "pid": os.getpid(),
    }
    if metrics is not None:
        ready["metrics"] = metrics.url
    if options.json:
        json_line(ready)
    elif not options.quiet:
        pairs = [("version", str(version)), ("bytes", f"{in_bytes(nbytes)}, published in {spent:.1f} s")]
        if stored != nbytes:
            pairs.append(("stored", f"{in_bytes(stored)} as {options.codec}, {stored / nbytes:.3f} of it"))
        pairs += [("address", endpoint) for endpoint in server.endpoints]
        pairs += [("metrics", metrics.url)] if metrics is not None else []
        names = ", ".join(Path(name).name for name in options.models or [options.checkpoint])
        console().print(facts(f"serving {names}", pairs))
        console().print("Ctrl-C or SIGTERM stops it.")
        sys.stdout.flush()
    line = json.dumps(ready) + "\n"
    if options.ready_file is not None:
        target = Path(options.ready_file)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_text(line)
        part.replace(target)  # whoever waits for the file never sees half of it
    if options.ready_fd is not None:
        with os.fdopen(options.ready_fd, "w") as file:
            file.write(line)


def wait_for_end(wake: int, stop_on_eof: bool) -> None:
    """Returns at the end of stdin, if wanted; else waits until a signal raises Stop."""
    while True:
        readable, _, _ = select.select([wake, *([sys.stdin] if stop_on_eof else [])], [], [])
        if sys.stdin in readable and not os.read(sys.stdin.fileno(), 4096):
            return

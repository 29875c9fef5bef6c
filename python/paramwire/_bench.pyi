from typing import Any

import numpy.typing as npt

# Anything with a buffer would do; numpy's arrays are what is given.
Array = npt.NDArray[Any]

def copy(target: Array, source: Array) -> None:
    """glibc's memcpy, once. errors: ValueError when sizes differ; BufferError for a target that can't be written."""

def read(source: Array) -> int:
    """Reads every byte, as the consumer of fetched weights does. returns: a sum of them"""

def tcp_options(fd: int) -> None:
    """TCP_NODELAY, as on paramwire's own sockets. errors: OSError."""

def tcp_serve(fd: int, region: Array) -> None:
    """Answers plain requests for parts of `region` until the peer closes. errors: OSError."""

def tcp_fetch(fd: int, offset: int, target: Array) -> None:
    """Fetches the bytes at `offset` of the peer's region into all of `target`. errors: OSError."""

from typing import Any, final

import numpy.typing as npt

# Anything with a buffer would do; numpy's arrays are what is given.
Array = npt.NDArray[Any]

def copy(target: Array, source: Array) -> None:
    """glibc's memcpy, once. errors: ValueError when sizes differ; BufferError for a target that can't be written."""

def read(source: Array) -> int:
    """Reads every byte, as the consumer of fetched weights does. returns: a sum of them"""

def tcp_options(fd: int, timeout: float | None = None) -> None:
    """TCP_NODELAY, as on paramwire's own sockets, and the seconds of silence after which a call on `fd` raises
    TimeoutError; None: never. errors: OSError.
    """

def tcp_serve(fd: int, region: Array) -> None:
    """Answers plain requests for parts of `region` until the peer closes. errors: OSError."""

def tcp_fetch(fd: int, offset: int, target: Array) -> None:
    """Fetches the bytes at `offset` of the peer's region into all of `target`. errors: OSError."""

@final
class UdpClient:
    """A plain UDP client over `fd`, a socket that is connected to one in udp_serve(). One thread."""

    def __init__(self, fd: int, *, segmented: bool, spin: bool, timeout: float) -> None:
        """segmented:  segments of 1472 bytes (1452 over IPv6) by UDP_SEGMENT and UDP_GRO; else datagrams of 64 KiB
        spin:       poll without sleeping, here and at the server
        timeout:    of each fetch, seconds
        errors:     OSError, also when this kernel has no UDP_SEGMENT or UDP_GRO
        """

    def fetch(self, offset: int, target: Array) -> None:
        """Fetches the bytes at `offset` of the server's region into all of `target`.

        errors:  TimeoutError; ConnectionRefusedError when nobody listens; OSError
        """

    def stats(self) -> dict[str, int]:
        """retries, lost_datagrams, late_datagrams, window_chunks, receive_buffer_bytes, segment_bytes (0: none)"""

def udp_serve(fd: int, region: Array) -> None:
    """Answers requests for parts of `region` on a bound UDP socket until it is shut down. errors: OSError."""

from typing_extensions import Buffer

__version__: str

def crc64(data: Buffer, /, *, before: int = 0) -> int:
    """CRC-64/XZ of the bytes of `data`; the GIL is released while they are read.

    data:    any contiguous buffer; ValueError when it is not contiguous, TypeError when it is no buffer
    before:  CRC of the bytes that come before these, so that crc64(b, before=crc64(a)) is crc64(a + b)
    """

def crc32c(data: Buffer, /, *, before: int = 0) -> int:
    """CRC-32C (Castagnoli) of the bytes of `data`; arguments and errors as for `crc64`."""

def crc_implementation() -> str:
    """Which CRC bodies run on this machine, for example "isa-l"."""

"""Model parameters away from compute: versioned, verified blocks, served to stateless nodes."""

from __future__ import annotations

from paramwire._core import __version__, crc32c, crc64

__all__ = ["__version__", "crc32c", "crc64"]

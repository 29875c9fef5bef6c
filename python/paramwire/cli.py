"""The `paramwire` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from paramwire import __version__
from paramwire._core import crc_implementation


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, by default those of the process; returns the exit status."""
    parser = argparse.ArgumentParser(prog="paramwire", description=__doc__)
    version = f"paramwire {__version__} (crc: {crc_implementation()})"
    parser.add_argument("--version", action="version", version=version)
    parser.parse_args(arguments)
    parser.print_help()
    return 0

"""`python -m paramwire` is the `paramwire` command."""

from __future__ import annotations

import sys

from paramwire.cli import main

if __name__ == "__main__":
    sys.exit(main())

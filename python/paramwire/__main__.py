"""`python -m paramwire` is the `paramwire` command."""

from __future__ import annotations

from paramwire.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`paramwire key`: makes cluster keys, and tells which one a file holds. Nothing here ever holds or prints a key."""

from __future__ import annotations

import argparse
import os

import paramwire
from paramwire.cli_common import console, facts, json_line


def new(options: argparse.Namespace) -> int:
    key_id = paramwire.new_key(options.file)
    path = os.path.abspath(options.file)
    if options.json:
        json_line({"file": path, "id": key_id})
        return 0
    console().print(facts("cluster key", [("file", path), ("id", key_id)]))
    console().print("Give this very file to the server and to every client, with --key FILE or PARAMWIRE_KEY=FILE.")
    return 0


def show_id(options: argparse.Namespace) -> int:
    key_id = paramwire.key_id(options.file)
    if options.json:
        json_line({"file": os.path.abspath(options.file), "id": key_id})
    else:
        print(key_id)
    return 0

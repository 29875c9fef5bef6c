"""`paramwire softroce`: a command with two RoCE devices, on a machine that has none."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from paramwire.cli_common import CliError, byte_size, console, json_line, positive, seconds

if TYPE_CHECKING:
    from paramwire.softroce.findings import Row

# Exit statuses of `run` beside the command's own, as timeout(1) and env(1) have them.
TIMED_OUT, NO_STATUS = 124, 125

# Of the doctor's JSON record: goes up when a field goes away or changes its meaning.
SCHEMA = 1


def add_softroce(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "softroce run":
        add_run(parser)
    elif name == "softroce build":
        parser.add_argument("--update", action="store_true", help="the newest of the package lists")
        parser.add_argument("--deb", metavar="FILE", help="the one of this file, a package linux-image-*-amd64")
    else:
        parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--where", choices=("auto", "host", "guest"), default="auto",
                        help="on this kernel or in a QEMU guest; auto (default): here if that works")  # fmt: skip
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="S",
                        help="most seconds for the command, which is ended then (status 124; default 600)")  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="folder that a guest may write: the host's own, at the same path")
    parser.add_argument("--see", action="append", default=[], metavar="PATH",
                        help="path below /tmp, /run or /dev/shm that a guest should see; may be repeated")  # fmt: skip
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", type=assignment,
                        help="set this variable for the command; may be repeated")  # fmt: skip
    parser.add_argument("--mtu", type=mtu, default=4200, metavar="N",
                        help="of the two network devices (default 4200, which gives RDMA an MTU of 4096)")  # fmt: skip
    parser.add_argument("--memory", type=byte_size, default=0, metavar="SIZE",
                        help="of a guest (default: half of what is available, 1GiB to 4GiB)")  # fmt: skip
    parser.add_argument("--cpus", type=positive, default=0, metavar="N", help="of a guest (default: 2 to 4)")
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto",
                        help="of a guest: KVM or an emulated processor; auto (default): KVM if it works")  # fmt: skip
    parser.add_argument("--console", action="store_true", help="show a guest's kernel messages, on stderr")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- CMD...", help="the command and its arguments")


def assignment(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def mtu(text: str) -> int:
    """256 is RDMA's smallest; veth takes up to 65535."""
    if not text.isdecimal() or not 512 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 512 to 65535")
    return int(text)


def note(text: str) -> None:
    print(f"paramwire: softroce: {text}", file=sys.stderr, flush=True)


def command_of(options: argparse.Namespace) -> list[str]:
    given: list[str] = options.argv
    return given[1:] if given[:1] == ["--"] else given


def run(options: argparse.Namespace) -> int:
    from paramwire import softroce

    command = command_of(options)
    if not command:
        raise CliError("no command: paramwire softroce run -- CMD...")
    wanted = softroce.Options(
        command=command,
        environment=dict(os.environ),
        extra=dict(options.env),
        where=options.where,
        accelerator=options.accel,
        out=options.out,
        keep=options.see,
        mtu=options.mtu,
        memory_mib=options.memory >> 20,
        cpus=options.cpus,
        seconds=options.timeout,
        console=2 if options.console else None,
    )
    sys.stdout.flush()
    try:
        return softroce.run(wanted, softroce.cache_folder(os.environ), note)
    except softroce.CommandTimeout as error:
        note(str(error))
        return TIMED_OUT
    except softroce.SoftRoceError as error:
        note(str(error))
        return NO_STATUS


def build(options: argparse.Namespace) -> int:
    from pathlib import Path

    from paramwire import softroce
    from paramwire.softroce import image

    cache = softroce.cache_folder(os.environ)
    try:
        if options.update or options.deb:
            made = image.build(cache, note, Path(options.deb) if options.deb else None)
        else:
            made = image.find_or_build(cache, note)
    except softroce.SoftRoceError as error:
        raise CliError(f"softroce: {error}") from None
    print(f"kernel {made.release} ({made.package} {made.version}) in {made.folder}")
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Status 0: `run` can work some way."""
    from paramwire import softroce
    from paramwire.softroce import findings

    facts = findings.examine(softroce.cache_folder(os.environ), thorough=True)
    rows = [*findings.host_rows(facts), *findings.guest_rows(facts)]
    where = findings.verdict(rows)
    if options.json:
        parts = [dataclasses.asdict(row) for row in rows]
        json_line({"schema": SCHEMA, "where": where, "kernel": facts.release, "rows": parts})
        return 0 if where else 1
    show(rows)
    said = {"host": "on this kernel", "guest": "in a guest", None: "nowhere yet"}[where]
    console().print(f"\nparamwire softroce run works: {said}")
    return 0 if where else 1


def show(rows: Sequence[Row]) -> None:
    titles = {"host": "On this kernel (as root)", "guest": "In a guest"}
    for part, title in titles.items():
        mine = [row for row in rows if row.part == part]
        made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
        made.add_column(style="dim", no_wrap=True)
        made.add_column(no_wrap=True)
        made.add_column(overflow="fold")
        for row in mine:
            text = Text(row.text)
            if row.next and not row.usable:
                text.append(f"\n{row.next}", style="cyan")
            answer = Text("yes", style="green") if row.usable else Text("no", style="yellow")
            made.add_row(row.name, answer, text)
        console().print(made)

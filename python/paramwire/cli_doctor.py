"""`paramwire doctor`: what works here, why the rest does not, and what to type next."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

import paramwire
from paramwire import machine
from paramwire._core import rdma_ports
from paramwire.cli_common import console, facts, in_bytes, json_line

if TYPE_CHECKING:
    from paramwire._core import RdmaPort

# Of the JSON record: goes up when a field goes away or changes its meaning.
SCHEMA = 1

# A server that does not answer within this is as good as not there.
CONNECT_SECONDS = 5.0

OK, WANTED = 0, 1


def doctor(options: argparse.Namespace) -> int:
    record = examine(options.address, options.need or [], options.key)
    if options.json:
        json_line(record)
    else:
        show(record)
    return WANTED if record["missing"] else OK


def examine(address: str | None, need: list[str], key: str | None = None) -> dict[str, Any]:
    """`key`: file of the cluster key; by default the environment's."""
    key = key or os.environ.get(machine.KEY_VARIABLE)
    seams = paramwire.available()
    found = machine.facts()
    server = examine_server(address, key) if address else None
    return {
        "schema": SCHEMA,
        "seams": seams,
        "rdma": rdma_ports(),
        "machine": found,
        "key": machine.key(key),
        "versions": machine.versions(),
        "advice": machine.advice(found),
        "server": server,
        "missing": missing(seams, server, need),
    }


def examine_server(address: str, key: str | None) -> dict[str, Any]:
    """Which transport a client here would get from that server, and why not the others."""
    out: dict[str, Any] = {
        "address": address,
        "transport": None,
        "small_transport": None,
        "rejected": [],
        "newest": None,
        "error": None,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", paramwire.FallbackWarning)  # shown among the rejected
            client = paramwire.connect(address, timeout=CONNECT_SECONDS, key=key or None)
        with client:
            newest = client.newest
            out["transport"] = client.transport
            out["small_transport"] = client.small_transport
            out["rejected"] = [{"name": name, "reason": reason} for name, reason in client.rejected]
            out["newest"] = None if newest is None else str(newest)
    except paramwire.Error as error:
        out["error"] = str(error)
    return out


def missing(seams: dict[str, list[Any]], server: dict[str, Any] | None, need: list[str]) -> list[dict[str, str]]:
    """What was asked for and is not there: parts by name ("udp", or "tiers/memory"), and the server."""
    out = []
    lines = [(seam, line) for seam, rows in seams.items() for line in rows]
    for word in need:
        seam, _, name = word.rpartition("/")
        matches = [line for of, line in lines if line["name"] == name and seam in ("", of)]
        if not matches:
            known = ", ".join(sorted({line["name"] for _, line in lines}))
            out.append({"name": word, "reason": f"not known to this build; known: {known}", "next": ""})
        out += [
            {"name": word, "reason": line["reason"], "next": line["next"]} for line in matches if not line["usable"]
        ]
        refused = [] if server is None else [row for row in server["rejected"] if row["name"] == name]
        out += [{"name": word, "reason": f"with this server: {row['reason']}", "next": ""} for row in refused]
    if server is not None and server["error"]:
        out.append({"name": server["address"], "reason": server["error"], "next": ""})
    return out


# ---------------------------------------------------------------- for people


def show(record: dict[str, Any]) -> None:
    out = console()
    out.print(seam_table(record["seams"]))
    out.print()
    if record["rdma"]:
        out.print(rdma_table(record["rdma"]))
        out.print()
    out.print(facts("This machine", machine_pairs(record)))
    if record["server"] is not None:
        out.print()
        out.print(facts(f"The server at {record['server']['address']}", server_pairs(record["server"])))
    steps = next_steps(record)
    if steps:
        out.print()
        out.print(step_table(steps))
    for row in record["missing"]:
        out.print(Text(f"missing: {row['name']}: {row['reason']}", style="bold red"))


def seam_table(seams: dict[str, list[Any]]) -> Table:
    table = Table(
        title="What works here", title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for seam, lines in seams.items():
        for index, line in enumerate(lines):
            answer = Text("yes", style="green") if line["usable"] else Text("no", style="yellow")
            table.add_row(seam if index == 0 else "", line["name"], answer, Text(line["reason"]))
    return table


def rdma_table(ports: list[RdmaPort]) -> Table:
    """A row a GID; a port that has none, or can't be asked, is one row."""
    table = Table(title="RDMA ports", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("port", "state", "MTU", "GID", "type", "address", "interface", "usable"):
        table.add_column(name, header_style="dim", no_wrap=name != "usable", overflow="fold")
    for port in ports:
        mtu = "" if not port["mtu"] else str(port["mtu"])
        if port["mtu"] != port["mtu_max"]:
            mtu += f" of {port['mtu_max']}"
        about = (f"{port['device']}:{port['port']}", port["state"], mtu)
        if not port["gids"]:
            table.add_row(*about, "", "", "", "", Text(port["problem"], style="yellow"))
        for row in port["gids"]:
            answer = Text(row["problem"], style="yellow") if row["problem"] else Text("yes", style="green")
            table.add_row(*about, str(row["index"]), row["type"], row["gid"], row["interface"], answer)
    return table


def limit(value: int | None, *, size: bool) -> str:
    return "no limit" if value is None else in_bytes(value) if size else f"{value:,}"


def machine_pairs(record: dict[str, Any]) -> list[tuple[str, str | Text]]:
    found, versions, key = record["machine"], dict(record["versions"]), record["key"]
    cpu, memory, huge = found["processor"], found["memory"], found["huge_pages"]
    has = ", ".join(name for name, there in cpu["features"].items() if there) or "none of those that help"
    lacks = ", ".join(name for name, there in cpu["features"].items() if not there)
    shm = found["shared_memory"]["dev_shm_bytes"]
    huge_text = (
        f"transparent {huge['transparent']} (shared memory {huge['transparent_shared']}), {huge['reserved']} reserved"
    )
    sockets = found["sockets"]
    locked, files = found["limits"]["memlock_bytes"], found["limits"]["open_files"]
    named = key["path"] is None or key["path"] in key["state"]
    key_text = key["state"] if named else f"{key['path']}: {key['state']}"
    return [
        ("kernel", f"{found['kernel']}, {found['system']}, user id {found['user']}"),
        ("processor", f"{cpu['model']}, {cpu['cores']} cores for this process"),
        ("instructions", has + (f"; not: {lacks}" if lacks else "")),
        ("checksums by", cpu["crc"]),
        ("memory", f"{in_bytes(memory['available_bytes'])} of {in_bytes(memory['limit_bytes'])} ({memory['source']})"),
        ("/dev/shm", "not there" if shm is None else f"{in_bytes(shm)} (not used: arenas are memfds)"),
        ("huge pages", huge_text),
        ("locked memory", f"{limit(locked['soft'], size=True)}, at most {limit(locked['hard'], size=True)}"),
        ("open files", f"{limit(files['soft'], size=False)}, at most {limit(files['hard'], size=False)}"),
        ("socket buffers", ", ".join(f"{name} {limit(sockets[name], size=True)}" for name in ("rmem_max", "wmem_max"))),
        ("cluster key", key_text),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if name != "executable")),
    ]


def server_pairs(server: dict[str, Any]) -> list[tuple[str, str | Text]]:
    if server["error"]:
        return [("not reached", Text(server["error"], style="yellow"))]
    used = server["transport"]
    if server["small_transport"] != used:
        used += f", {server['small_transport']} for small fetches"
    rows: list[tuple[str, str | Text]] = [("transport", Text(used, style="green"))]
    rows += [(f"not {row['name']}", row["reason"]) for row in server["rejected"]]
    return [*rows, ("newest version", server["newest"] or "none yet")]


def next_steps(record: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(about, why, what to type), commands one a line."""
    lines = [line for rows in record["seams"].values() for line in rows if not line["usable"]]
    steps = [(line["name"], "", line["next"]) for line in lines]
    steps += [(row["about"], row["text"], row["next"]) for row in record["advice"]]
    key = record["key"]
    steps.append(("cluster key", "", key["next"]))
    return [step for step in steps if step[2]]


def step_table(steps: list[tuple[str, str, str]]) -> Table:
    table = Table(
        title="Next, if you want it",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        show_header=False,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for about, why, commands in steps:
        text = Text(f"{why}\n" if why else "")
        text.append(commands, style="cyan")
        table.add_row(about, text)
    return table

"""`paramwire bench generate` and `paramwire bench memory`: a whole model, remote beside local, and its memory."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any, Literal

import numpy as np

import paramwire
from paramwire.cli_bench_common import Child, is_pattern, machine
from paramwire.cli_common import CliError, console, facts, in_bytes, json_line, notes, steps_progress
from paramwire.cli_demo import find_model, link_gb_per_s, serving
from paramwire.cli_generate import engine_budget, in_budget
from paramwire.cli_memory import PeakMemory, memory_now
from paramwire.cli_model import read_served_model

Source = Literal["auto", "view", "copy"]

PROMPT = "Explain in simple words how a parameter server works."
# Tokens that one side makes before the other takes its turn: short enough that a neighbour's load hits both.
TURN_TOKENS = 8
TINY_BYTES = 64
# Limits that the project holds itself to: a fetched model beside its buffers, and a served tiny tensor beside its
# bytes.
BESIDE_BUFFERS_MAX = 64 << 20
BESIDE_TINY_MAX = 128
# The limit of tiny tensors holds for so many: with fewer, what a server needs anyway is shared by fewer.
TINY_COUNT = 1_300_000


class Generation:
    """One engine that goes on with one text, turn by turn."""

    def __init__(
        self,
        snapshot: paramwire.Snapshot,
        options: argparse.Namespace,
        *,
        budget: int | float,
        source: Source,
        threads: int = 0,
    ) -> None:
        model = read_served_model(snapshot)
        graph = model.graph()
        self.model_bytes = model.bytes_of(graph)
        ids = model.encode(PROMPT, chat=True)
        context = len(ids) + options.tokens + 1
        self.limit = in_budget(budget, self.model_bytes)
        self.engine = paramwire.Engine(
            snapshot,
            graph,
            budget=engine_budget(model, self.limit, len(ids), context),
            backend=options.backend,
            threads=options.threads or threads,
            source=source,
            context=context,
        )
        self.threads = int(self.engine.stats()["threads"])
        # The first step reads the prompt, and, without a budget, makes all weights local: it is nobody's figure.
        self.token = int(np.argmax(self.engine.step(ids)))
        self.ids = [self.token]
        self.speeds: list[float] = []
        self.first_bytes = self.engine.stats()["bytes_fetched"]

    def turn(self, count: int) -> None:
        begin = time.perf_counter()
        for _ in range(count):
            self.token = int(np.argmax(self.engine.step([self.token])))
            self.ids.append(self.token)
        self.speeds.append(count / (time.perf_counter() - begin))

    @property
    def bytes_per_token(self) -> float:
        return float(self.engine.stats()["bytes_fetched"] - self.first_bytes) / (len(self.ids) - 1)


def bench_generate(options: argparse.Namespace) -> int:
    path = find_model(options.model)
    if not options.json:
        notes().print(f"starting a server process for {path.name}, weights as bf16")
    with tempfile.TemporaryDirectory() as folder, serving(path, folder) as server:
        ready = server.record()
        tcp = next(endpoint for endpoint in ready["endpoints"] if endpoint.startswith("tcp:"))
        records = [
            remote_beside_local(options, "shm", ready["address"], drop=False),
            remote_beside_local(options, "shm", ready["address"], drop=True),
            remote_beside_local(options, "tcp", tcp, drop=True),
        ]
    for record in records:
        if options.json:
            json_line(record)
        else:
            show_generation(record)
    if not all(record["correct"] for record in records):
        raise CliError("remote and local weights did not make the same tokens")
    return 0


def remote_beside_local(options: argparse.Namespace, transport: str, address: str, *, drop: bool) -> dict[str, Any]:
    """Two engines over one snapshot take turns: one streams under the budget, one has all weights in its own memory.

    drop: give back the pages of views, so that the server's memory counts against the budget; else they stay mapped
    """
    with paramwire.connect(address, transport=transport, drop_view_pages=drop) as client, client.snapshot() as snapshot:
        # The baseline computes with as many threads as the streaming engine: the same backend, all weights local.
        # What all cores would do with local weights stands beside it.
        remote = Generation(snapshot, options, budget=options.budget, source="auto")
        local = Generation(snapshot, options, budget=0, source="copy", threads=remote.threads)
        wide = Generation(snapshot, options, budget=0, source="copy")
        with local.engine, remote.engine, wide.engine, steps_progress() as progress:
            turns = max(1, options.tokens // TURN_TOKENS)
            task = progress.add_task(f"generate over {transport}", total=turns)
            for _ in range(turns):
                local.turn(min(TURN_TOKENS, options.tokens))
                remote.turn(min(TURN_TOKENS, options.tokens))
                wide.turn(min(TURN_TOKENS, options.tokens))
                progress.advance(task)
            stats = remote.engine.stats()
            bytes_per_token = remote.bytes_per_token
            model_bytes, correct = remote.model_bytes, local.ids == remote.ids == wide.ids
    speed, base = statistics.median(remote.speeds), statistics.median(local.speeds)
    ratios = [mine / other for mine, other in zip(remote.speeds, local.speeds, strict=True)]
    link = link_gb_per_s() if transport == "tcp" else None
    bound = link * 1e9 / bytes_per_token if link and bytes_per_token else None
    return {
        "bench": "generate",
        "transport": transport,
        "source": stats["source"],
        "backend": options.backend,
        "view_pages": None if transport == "tcp" else "dropped" if drop else "kept",
        "tokens": len(remote.ids) - 1,
        "model_bytes": model_bytes,
        "budget_bytes": remote.limit,
        "held_bytes_max": stats["held_bytes_max"],
        "bytes_per_token": bytes_per_token,
        "tokens_per_s": speed,
        "baseline": "all weights local",
        "baseline_tokens_per_s": base,
        "threads": remote.threads,
        "all_cores_tokens_per_s": statistics.median(wide.speeds),
        "all_cores_threads": wide.threads,
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "stall_seconds": stats["stall_seconds"],
        "link_gb_per_s": link,
        "bound_tokens_per_s": bound,
        "bound_ratio": speed / bound if bound else None,
        "correct": correct,
        **machine(),
    }


def show_generation(record: dict[str, Any]) -> None:
    limit = f"under a budget of {in_bytes(record['budget_bytes'])}"
    spread = f"{record['ratio_min']:.2f} to {record['ratio_max']:.2f}"
    how = record["source"] + (f", shared pages {record['view_pages']}" if record["view_pages"] else "")
    pairs = [
        ("tokens/s", f"{record['tokens_per_s']:.1f} {limit} ({how})"),
        (
            "  all local",
            f"{record['baseline_tokens_per_s']:.1f}: ratio {record['ratio']:.2f} ({spread}), "
            f"{record['threads']} compute thread(s) each; "
            f"{record['all_cores_tokens_per_s']:.1f} with {record['all_cores_threads']}",
        ),
        ("fetched", f"{in_bytes(record['bytes_per_token'])} a token"),
    ]
    if record["bound_tokens_per_s"]:
        bound = f"{record['bound_tokens_per_s']:.1f} at {record['link_gb_per_s']:.2f} GB/s of plain TCP"
        pairs.append(("  bound by the link", f"{bound}: ratio {record['bound_ratio']:.2f}"))
    pairs.append(("same tokens", "yes" if record["correct"] else "NO"))
    console().print(facts(f"generate over {record['transport']}", pairs))
    console().print()


# ---------------------------------------------------------------- memory


def bench_memory(options: argparse.Namespace) -> int:
    records = [fetched_model(options, transport) for transport in ("shm", "tcp")] + [tiny_tensors(options)]
    for record in records:
        if options.json:
            json_line(record)
    if not options.json:
        show_memory(records)
    wrong = [record for record in records if not record["fits"] or not record["correct"]]
    if wrong:
        raise CliError(f"{wrong[0]['bench']}: more memory than allowed, or wrong bytes; see its record")
    return 0


def fetched_model(options: argparse.Namespace, transport: str) -> dict[str, Any]:
    """A model in many tensors, all fetched into the caller's buffers: what the process needs beside them."""
    size = max(1, options.model_bytes // options.tensors)
    with Child("paramwire.cli_bench_server", ["--size", str(size), "--count", str(options.tensors)]) as server:
        ready = server.record()
        address = (
            ready["address"] if transport == "shm" else next(e for e in ready["endpoints"] if e.startswith("tcp:"))
        )
        target = np.ones(size * options.tensors, np.uint8)
        wanted = {f"block.{index}": target[index * size : (index + 1) * size] for index in range(options.tensors)}
        with PeakMemory() as memory:
            before = memory_now()
            begin = time.perf_counter()
            with (
                paramwire.connect(address, transport=transport, drop_view_pages=True) as client,
                client.snapshot() as snapshot,
            ):
                snapshot.fetch_many(wanted)
                spent = time.perf_counter() - begin
                verified = client.stats()["blocks_verified"]
            peak = memory.peak()
        beside = max(peak.together - before["RssAnon"] - before["RssShmem"], peak.anonymous - before["RssAnon"])
        return {
            "bench": "fetch_model_memory",
            "transport": transport,
            "bytes": target.size,
            "tensors": options.tensors,
            "seconds": spent,
            "gb_per_s": target.size / spent / 1e9,
            "verified": verified,
            "beside_buffers_bytes": beside,
            "of_them_anonymous": peak.anonymous - before["RssAnon"],
            "of_them_shared": peak.shared - before["RssShmem"],
            "allowed_bytes": BESIDE_BUFFERS_MAX,
            "fits": beside <= BESIDE_BUFFERS_MAX,
            "correct": is_pattern(target),
        }


def tiny_tensors(options: argparse.Namespace) -> dict[str, Any]:
    """Very many tensors of 64 bytes on one server: what each costs beside its bytes."""
    with Child("paramwire.cli_bench_server", ["--size", str(TINY_BYTES), "--count", str(options.tiny)]) as server:
        ready = server.record()
        with paramwire.connect(ready["address"]) as client, client.snapshot() as snapshot:
            last = f"block.{options.tiny - 1}"
            expected = ready["last"]
            correct = len(snapshot) == options.tiny and bytes(snapshot.fetch(last)).hex() == expected
    used = int(ready["memory_bytes"])
    beside = used / options.tiny - TINY_BYTES
    return {
        "bench": "tiny_tensors_memory",
        "transport": "shm",
        "bytes": TINY_BYTES * options.tiny,
        "tensors": options.tiny,
        "seconds": ready["publish_seconds"],
        "server_memory_bytes": used,
        "beside_each_bytes": beside,
        "allowed_bytes": BESIDE_TINY_MAX if options.tiny >= TINY_COUNT else None,
        "fits": beside <= BESIDE_TINY_MAX or options.tiny < TINY_COUNT,
        "correct": correct,
    }


def show_memory(records: list[dict[str, Any]]) -> None:
    out = console()
    for record in records:
        fits = "fits" if record["fits"] else "TOO MUCH"
        if record["bench"] == "fetch_model_memory":
            speed = f"{record['seconds']:.2f} s, {record['gb_per_s']:.2f} GB/s, verified"
            beside = f"{in_bytes(record['beside_buffers_bytes'])} of {in_bytes(record['allowed_bytes'])}"
            title = f"{record['tensors']:,} tensors into the caller's buffers over {record['transport']}"
            pairs = [
                ("fetched", f"{in_bytes(record['bytes'])} in {speed}"),
                ("beside the buffers", f"{beside}: {fits}"),
            ]
            out.print(facts(title, pairs))
        else:
            limit = f" of {record['allowed_bytes']} B: {fits}" if record["allowed_bytes"] else ""
            pairs = [
                ("published in", f"{record['seconds']:.1f} s"),
                ("server's memory", in_bytes(record["server_memory_bytes"])),
                ("beside each", f"{record['beside_each_bytes']:.1f} B{limit}"),
            ]
            out.print(facts(f"{record['tensors']:,} tensors of {TINY_BYTES} B on a server", pairs))
        out.print()

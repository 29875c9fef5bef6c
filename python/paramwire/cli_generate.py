"""`paramwire generate`: text from a model whose parameters stay on a server, by a process that has only its address."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

import paramwire
from paramwire.cli_common import CliError, in_bytes, json_line, key_file, notes
from paramwire.cli_memory import Peak, PeakMemory
from paramwire.cli_model import ServedModel, read_served_model

# Tokens of a prompt that go through the model at once.
STEP_TOKENS = 256


@dataclass
class Run:
    """What one generation took. Times in seconds; speeds of the tokens after the first, whose step reads the prompt."""

    version: str
    newest: str
    transport: str
    source: str
    backend: str
    prompt_tokens: int
    tokens: int
    first_token_seconds: float
    seconds: float
    tokens_per_s: float
    bytes_fetched: int
    wire_bytes: int
    bytes_per_token: float
    gb_per_s: float
    blocks_verified: int
    stall_seconds: float
    compute_seconds: float
    model_bytes: int
    budget_bytes: int
    held_bytes_max: int
    text: str
    ids: list[int]


def in_budget(wanted: int | float, model_bytes: int) -> int:
    """Bytes of a budget; a float is a part of the model."""
    return int(wanted * model_bytes) if isinstance(wanted, float) else wanted


def engine_budget(model: ServedModel, limit: int, prompt: int, context: int) -> int:
    """What a budget leaves for parameters, once key/value cache and activations have their part of it; 0: no limit.

    errors: CliError naming both when it leaves nothing
    """
    if limit == 0:
        return 0
    state = model.state_bytes(context, min(prompt, STEP_TOKENS))
    if state >= limit:
        raise CliError(
            f"a budget of {limit} bytes leaves nothing for parameters: {context} tokens of context alone need {state}"
        )
    return limit - state


def greedy(engine: paramwire.Engine, ids: Sequence[int], count: int, ends: frozenset[int]) -> Iterator[int]:
    """Up to `count` most likely tokens after `ids`; the last may be one of `ends`. Long prompts go in several steps."""
    tokens = list(ids)
    for at in range(0, len(tokens), STEP_TOKENS):
        logits = engine.step(tokens[at : at + STEP_TOKENS])
    for done in range(1, count + 1):
        token = int(np.argmax(logits))
        yield token
        if done == count or token in ends:
            return
        logits = engine.step([token])


def verified(client: paramwire.Client) -> int:
    """Blocks whose bytes this process has checked: as they were copied, or at the first view of them."""
    stats = client.stats()
    return int(stats["blocks_verified"]) + int(stats["views_verified"])


def generate(options: argparse.Namespace) -> int:
    trace = paramwire.Trace(options.trace) if options.trace is not None else None
    client = paramwire.connect(
        options.address,
        transport=options.transport,
        timeout=options.timeout,
        drop_view_pages=options.budget != 0,
        trace=trace,
        key=key_file(options),
    )
    with trace or contextlib.nullcontext(), client, client.snapshot() as snapshot:
        model = read_served_model(snapshot)
        ids = model.encode(options.prompt, chat=not options.raw)
        if not ids:
            raise CliError("the prompt has no tokens: give at least one word")
        with PeakMemory() as memory:
            run = one_run(options, client, snapshot, model, ids)
            peak = memory.peak()
    if options.json:
        json_line({"event": "result", **asdict(run), "memory": asdict(peak) | {"method": peak.method}})
    else:
        print()
        summary(run, peak)
    return 0


def one_run(
    options: argparse.Namespace,
    client: paramwire.Client,
    snapshot: paramwire.Snapshot,
    model: ServedModel,
    ids: list[int],
) -> Run:
    graph = model.graph(options.layers)
    model_bytes = model.bytes_of(graph)
    limit = in_budget(options.budget, model_bytes)
    if options.json:
        start = {"event": "start", "version": str(snapshot.version), "transport": client.transport}
        json_line(start | {"prompt_tokens": len(ids), "model_bytes": model_bytes, "budget_bytes": limit})
    context = len(ids) + options.tokens
    verified_before, wire_before = verified(client), int(client.stats()["wire_bytes"])
    with paramwire.Engine(
        snapshot,
        graph,
        budget=engine_budget(model, limit, len(ids), context) if options.layers is None else limit,
        backend=options.backend,
        threads=options.threads or 0,
        source=options.source,
        context=context,
        step=STEP_TOKENS,
        fetch_timeout=options.timeout,
    ) as engine:
        stream = model.tokenizer.stream()
        made: list[int] = []
        pieces: list[str] = []
        begin = time.perf_counter()
        first = 0.0
        fetched_first = 0
        for token in greedy(engine, ids, options.tokens, frozenset() if options.ignore_end else model.ends):
            if not first:
                first = time.perf_counter() - begin
                fetched_first = engine.stats()["bytes_fetched"]
            made.append(token)
            pieces.append(stream.push(token))
            show(options.json, pieces[-1], token)
        spent = time.perf_counter() - begin
        pieces.append(stream.finish())
        show(options.json, pieces[-1])
        stats = engine.stats()
        description = engine.description
    with client.snapshot(lease=False) as now:
        newest = now.version
    later = len(made) - 1
    return Run(
        version=str(snapshot.version),
        newest=str(newest),
        transport=client.transport,
        source=stats["source"],
        backend=description,
        prompt_tokens=len(ids),
        tokens=len(made),
        first_token_seconds=first,
        seconds=spent,
        tokens_per_s=later / (spent - first) if later else 0.0,
        bytes_fetched=stats["bytes_fetched"],
        wire_bytes=int(client.stats()["wire_bytes"]) - wire_before,
        bytes_per_token=(stats["bytes_fetched"] - fetched_first) / later if later else 0.0,
        gb_per_s=stats["bytes_fetched"] / spent / 1e9,
        blocks_verified=verified(client) - verified_before,
        stall_seconds=stats["stall_seconds"],
        compute_seconds=stats["compute_seconds"],
        model_bytes=model_bytes,
        budget_bytes=limit,
        held_bytes_max=stats["held_bytes_max"],
        text="".join(pieces),
        ids=made,
    )


def show(as_json: bool, text: str, token: int | None = None) -> None:
    """What a token completed; without one, what is left at the end."""
    if as_json and (text or token is not None):
        json_line({"event": "token", "id": token, "text": text})
    elif text:
        sys.stdout.write(text)
        sys.stdout.flush()


def summary(run: Run, peak: Peak) -> None:
    """One paragraph on stderr, so that stdout holds the text alone."""
    limit = f"of a budget of {in_bytes(run.budget_bytes)}" if run.budget_bytes else "with no budget"
    notes().print(
        f"\n[dim]{run.tokens} tokens, {run.tokens_per_s:.1f} tokens/s after the first, "
        f"which took {run.first_token_seconds:.2f} s with the prompt's {run.prompt_tokens}; "
        f"version {run.version} over {run.transport} ({run.source}), "
        f"{in_bytes(run.bytes_fetched)} fetched at {run.gb_per_s:.2f} GB/s, {run.blocks_verified:,} blocks verified, "
        f"{run.stall_seconds:.2f} s stalled; "
        f"parameters held: {in_bytes(run.held_bytes_max)} {limit}, of {in_bytes(run.model_bytes)}; "
        f"peak memory {in_bytes(peak.anonymous)} anonymous, {in_bytes(peak.shared)} shared[/dim]"
    )

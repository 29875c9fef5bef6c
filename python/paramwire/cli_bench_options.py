"""Arguments of the benchmarks that are a harness for others: `paramwire bench fetch|latency|incast|mixed|report`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from paramwire._core import available
from paramwire.cli_common import byte_size, byte_sizes, positive, seconds

# Default sizes and seconds of each.
DEFAULTS = {
    "bench fetch": ("64,4KiB,64KiB,1MiB,16MiB,256MiB", 2.0, "time for each figure"),
    "bench latency": ("64,4KiB", 2.0, "time for each figure"),
    "bench incast": ("64KiB,1MiB,16MiB", 4.0, "time for each figure, half of it for one server alone"),
    "bench mixed": ("64", 4.0, "time for each of the four phases"),
}
# What IPv6 needs, and jumbo frames have at most.
MTU_LEAST, MTU_MOST = 1280, 9216
# Past that, a control connection over TCP hardly gets through at all.
LOSS_MOST = 0.5
PEERS = ("iperf3", "ucx", "redis", "zeromq")


def peers(text: str) -> list[str]:
    """Names between commas, or "all". errors: argparse.ArgumentTypeError."""
    names = list(PEERS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no peer: write all, or some of {','.join(PEERS)}")
    return names


def host(text: str) -> str:
    if text not in ("127.0.0.1", "::1"):
        raise argparse.ArgumentTypeError(f"{text!r}: the benchmarks' servers listen on 127.0.0.1 or ::1 only")
    return text


@dataclass(frozen=True)
class NetOptions:
    mtu: int = 1500
    loss: float = 0.0  # probability, of each packet, each way


def net_options(text: str) -> NetOptions:
    """Of "mtu=1500,loss=0.01", either part alone too. errors: argparse.ArgumentTypeError"""
    mtu, loss = NetOptions.mtu, NetOptions.loss
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            if name == "mtu":
                mtu = int(value)
            elif name == "loss":
                loss = float(value)
            else:
                raise argparse.ArgumentTypeError(f"{part!r}: write mtu=BYTES, loss=PROBABILITY, or both with a comma")
        except ValueError:
            raise argparse.ArgumentTypeError(f"{part!r}: {value!r} is no number") from None
    if not MTU_LEAST <= mtu <= MTU_MOST:
        raise argparse.ArgumentTypeError(f"mtu={mtu}: must be from {MTU_LEAST} to {MTU_MOST} bytes")
    if not 0 <= loss <= LOSS_MOST:
        raise argparse.ArgumentTypeError(f"loss={loss:g}: must be a probability from 0 to {LOSS_MOST:g}")
    return NetOptions(mtu, loss)


def rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of versions a second, above 0 and at most 10000")
    return value


def add_harness(name: str, parser: argparse.ArgumentParser) -> None:
    known = [entry["name"] for entry in available()["transports"]]
    parser.add_argument("--transport", choices=[*known, "auto", "all"], default="all",
                        help="auto: what the client would choose (default all that are usable here, each)")  # fmt: skip
    parser.add_argument("--timeout", type=seconds, default=60.0, metavar="S",
                        help="deadline of each call, and of connecting (default 60)")  # fmt: skip
    if name == "bench report":
        add_report(parser)
        return
    sizes, duration, about = DEFAULTS[name]
    parser.add_argument("--sizes", type=byte_sizes, default=byte_sizes(sizes), metavar="LIST",
                        help=f"block sizes between commas (default {sizes})")  # fmt: skip
    parser.add_argument(
        "--seconds", type=seconds, default=duration, metavar="S", help=f"{about} (default {duration:g})"
    )
    parser.add_argument("--host", type=host, default="127.0.0.1", metavar="ADDR",
                        help="loopback address to serve on: 127.0.0.1 (default) or ::1")  # fmt: skip
    if name in ("bench fetch", "bench incast"):
        parser.add_argument("--net", type=net_options, metavar="mtu=N,loss=P",
                            help="the servers on another host, behind a veth pair with that MTU; with loss the "
                                 "baseline is the same without it (needs root)")  # fmt: skip
    if name == "bench mixed":
        parser.add_argument("--bulk", type=byte_size, default=16 << 20, metavar="SIZE",
                            help="of the blocks that bulk reads fetch (default 16MiB)")  # fmt: skip
        parser.add_argument("--publish-rate", type=rate, default=20.0, metavar="N",
                            help="versions a second, each of all blocks (default 20)")  # fmt: skip
    else:
        default = "64MiB" if name == "bench incast" else "1GiB"
        rotates = f"bytes to rotate through on each side (default {default}, less if short)"
        parser.add_argument("--rotate", type=byte_size, default=None, metavar="SIZE", help=rotates)
    if name == "bench incast":
        parser.add_argument("--servers", type=positive, default=8, metavar="N", help="at once (default 8)")
    if name in ("bench fetch", "bench latency"):
        add_key_of_run(parser, "measure with a cluster key, beside the same without one")
    if name == "bench fetch":
        parser.add_argument("--peers", type=peers, default=[], metavar="LIST",
                            help=f"other systems, in the same run: all, or some of {','.join(PEERS)}")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--csv", metavar="FILE", help="write the records as CSV too")
    parser.add_argument("--plot", metavar="FILE", help="draw them as a PNG file (needs paramwire[bench])")


def add_key_of_run(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--key", nargs="?", const="", metavar="FILE",
                        help=f"{about} (alone: a fresh key, gone with the run)")  # fmt: skip


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="*", metavar="FILE",
                        help="JSON lines of earlier runs; without any, a set of benchmarks is run")  # fmt: skip
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page (default report.html)")
    parser.add_argument(
        "--set", choices=("quick", "full"), default="quick", help="which runs (default quick: a minute)"
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), metavar="LIST", help="of the set, only these benchmarks"
    )
    parser.add_argument("--sizes", type=byte_sizes, metavar="LIST", help="instead of the set's")
    parser.add_argument("--seconds", type=seconds, metavar="S", help="instead of the set's")
    parser.add_argument("--keep", metavar="FILE", help="write the records of the runs as JSON lines")
    parser.add_argument("--json", action="store_true", help="say what was written as one JSON line")

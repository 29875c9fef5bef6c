"""`--net mtu=1500,loss=0.01` of the benchmarks: the servers on another host, joined to this one by a veth pair."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramwire
from paramwire.cli_bench_common import Call, Child
from paramwire.cli_bench_options import NetOptions
from paramwire.cli_common import CliError
from paramwire.net_lab import Lab, LabError, obstacle

# For the server's answer about its counters.
COUNTERS_SECONDS = 20.0

# Name of the baseline of figures with loss: the same calls without it.
WITHOUT_LOSS = "the same without loss"


@dataclass
class Network:
    """Both hosts, while a benchmark runs. This process is on the near one."""

    lab: Lab
    host: str  # of the far host
    key: str  # file of the cluster key: paramwire serves no address but loopback without one
    options: NetOptions

    def record(self) -> dict[str, Any]:
        """For each record: what lies between client and server."""
        packets = "each alone" if self.lab.single else "in trains, as they were sent"
        about = {"link": "veth between two network namespaces", "packets": packets, "tcp": "in TLS"}
        return {"net": {"mtu": self.options.mtu, "loss": self.options.loss, **about}}


@contextlib.contextmanager
def network(options: argparse.Namespace) -> Iterator[Network | None]:
    """Makes what --net asks for, and moves this process there for good: options.network. None: it does not.

    errors: CliError that says what is needed
    """
    options.network = None
    if options.net is None:
        yield None
        return
    why = obstacle(*(("iptables", "ip6tables") if options.net.loss else ()))
    if why is not None:
        raise CliError(f"--net: {why}")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paramwire-"))
        try:
            lab = stack.enter_context(Lab(options.net.mtu, single=options.net.loss > 0))
            lab.near.enter()
        except LabError as error:
            raise CliError(f"--net: {error}") from None
        key = str(Path(folder) / "key")
        paramwire.new_key(key)
        options.network = Network(lab, lab.far.ipv6 if ":" in options.host else lab.far.ipv4, key, options.net)
        try:
            yield options.network
        finally:
            options.network = None


class LossyRounds:
    """Loss for the rounds of what is measured, none for those of its baseline; and the bytes of the former, counted."""

    def __init__(self, network: Network, client: paramwire.Client, server: Child, call: Call) -> None:
        self.network = network
        self.client = client
        self.server = server
        self.calls = {WITHOUT_LOSS: call}
        self.needed = self.asked = self.sent = 0
        self.before: tuple[int, int, int] | None = None  # the counters when loss began; None: there is none now

    def counted(self) -> tuple[int, int, int]:
        stats = self.client.stats()
        return stats["udp_bytes_needed"], stats["udp_bytes_asked"], self.server.ask({}, COUNTERS_SECONDS)["udp_bytes"]

    def switch(self, name: str | None) -> None:
        """As measure() wants it."""
        lossy = name is None
        if lossy == (self.before is not None):
            return
        if lossy:
            self.before = self.counted()
        for host in (self.network.lab.near, self.network.lab.far):
            host.lose(self.network.options.loss, on=lossy)
        if not lossy:
            self.count()

    def count(self) -> None:
        if self.before is None:
            return
        needed, asked, sent = (new - old for new, old in zip(self.counted(), self.before, strict=True))
        self.needed, self.asked, self.sent = self.needed + needed, self.asked + asked, self.sent + sent
        self.before = None

    def facts(self) -> dict[str, Any]:
        """Fields of the record; over tcp the kernel sends again, and these bytes are not known."""
        self.switch(WITHOUT_LOSS)
        if self.needed == 0:
            return {"bytes_needed": None, "asked_ratio": None, "sent_ratio": None}
        return {
            "bytes_needed": self.needed,
            "asked_ratio": self.asked / self.needed,
            "sent_ratio": self.sent / self.needed,
        }

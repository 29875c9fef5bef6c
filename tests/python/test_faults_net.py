"""Blocks by UDP over real links: narrow ones, ones that become narrow, ones that lose, a client that nothing reaches.

Hosts are network namespaces (paramwire.net_lab), so all of this needs root.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paramwire as pw
import pytest
from paramwire.net_lab import Host, Lab, address, join, obstacle

pytestmark = pytest.mark.skipif(
    obstacle("iptables", "ip6tables") is not None, reason=obstacle("iptables", "ip6tables") or ""
)

MIB = 1 << 20
TIMEOUT = 60.0
# Bytes of UDP, IP and a DATA datagram's own header before the payload.
HEADERS = {4: 28 + 24, 6: 48 + 24}
PACKET_TOO_BIG = {"iptables": ("-p", "icmp"), "ip6tables": ("-p", "icmpv6", "--icmpv6-type", "packet-too-big")}

# Fetches what it is told to; each answer has the counters since it connected.
CLIENT_PROGRAM = """
import json, sys
import numpy as np
import paramwire as pw

options = json.loads(sys.argv[1])
with pw.connect(**options) as client, client.snapshot() as snapshot:
    print(json.dumps({"connected": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        out = {}
        try:
            values = snapshot.fetch(order["name"], timeout=order["timeout"])
            out["right"] = bool((values == np.arange(values.size).astype(values.dtype).reshape(values.shape)).all())
        except pw.Error as error:
            out["error"] = type(error).__name__
        print(json.dumps(out | {k: v for k, v in client.stats().items() if k.startswith("udp_")}), flush=True)
"""


class ClientProcess:
    """A client on a host of its own."""

    def __init__(self, host: Host, **options: object) -> None:
        options = {"transport": "udp", "timeout": TIMEOUT} | options
        self.process = subprocess.Popen(
            [*host.words, sys.executable, "-c", CLIENT_PROGRAM, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.answer() == {"connected": True}

    def ask(self, name: str = "w", timeout: float = TIMEOUT) -> None:
        print(json.dumps({"name": name, "timeout": timeout}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, int]:
        line = self.process.stdout.readline()
        assert line, f"the client process ended with status {self.process.wait()}"
        return json.loads(line)

    def fetch(self, name: str = "w", timeout: float = TIMEOUT) -> dict[str, int]:
        self.ask(name, timeout)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def key(tmp_path) -> str:
    path = str(tmp_path / "key")
    pw.new_key(path)
    return path


@pytest.fixture
def start_client() -> Iterator:
    with contextlib.ExitStack() as stack:

        def start(host: Host, **options: object) -> ClientProcess:
            made = ClientProcess(host, **options)
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def serve(start_server, key):
    """A server on a host, with a block "w" of so many bytes: itself, and its address."""

    def start(host: Host, family: int, size: int, *, listen: str | None = None):
        name = listen or (host.ipv4 if family == 4 else f"[{host.ipv6}]")
        server = start_server(before=host.words, listen=[f"tcp://{name}:0"], key=key)
        server.publish({"w": ("uint32", (size // 4,))})
        return server, server.address

    return start


def fragments(*hosts: Host) -> int:
    """Made or refused by these hosts, of both families. source: proc(5), net/snmp and net/snmp6"""
    total = 0
    for host in hosts:
        names, values = (
            line.split() for line in host.run("cat", "/proc/net/snmp").splitlines() if line.startswith("Ip:")
        )
        total += sum(int(value) for name, value in zip(names, values, strict=True) if name.startswith("Frag"))
        for line in host.run("cat", "/proc/net/snmp6").splitlines():
            name, value = line.split()
            total += int(value) if name in ("Ip6FragOKs", "Ip6FragFails", "Ip6FragCreates") else 0
    return total


def words(text: str) -> list[str]:
    return text.split()


def received(host: Host, device: str = "pw0") -> int:
    """Bytes that came to the host over its device."""
    (link,) = json.loads(host.run("ip", "-s", "-j", "link", "show", device))
    return link["stats64"]["rx"]["bytes"]


# ---------------------------------------------------------------- size (CASES UP-39)


@pytest.mark.parametrize("family", [4, 6])
def test_a_link_of_1280_bytes_carries_a_block_without_a_fragment(serve, start_client, key, family):
    with Lab(1280) as lab:
        server, where = serve(lab.far, family, 8 * MIB)
        seen = start_client(lab.near, address=where, key=key).fetch()
        assert seen["right"] is True
        assert 1024 < seen["udp_segment_bytes"] <= 1280 - HEADERS[family]
        assert seen["udp_size_steps"] == 0
        assert server.stats()["udp_too_long"] == 0
        assert fragments(lab.near, lab.far) == 0


@pytest.mark.parametrize("family", [4, 6])
def test_a_link_that_is_narrowed_during_a_transfer_is_followed(serve, start_client, key, until, family):
    """Of the server's own device: its sends are refused from then on."""
    with Lab(1500) as lab:
        server, where = serve(lab.far, family, 8 * MIB)
        client = start_client(lab.near, address=where, key=key)
        lab.far.run("tc", *words("qdisc add dev pw0 root tbf rate 200mbit burst 64kb latency 20ms"))
        before = received(lab.near)
        client.ask()
        assert until(lambda: received(lab.near) > before + MIB)
        lab.far.ip("link set pw0 mtu 1280")
        seen = client.answer()
        assert received(lab.near) > before + 8 * MIB
        assert seen["right"] is True
        assert seen["udp_segment_bytes"] <= 1280 - HEADERS[family]
        assert seen["udp_size_steps"] >= 1
        assert server.stats()["udp_too_long"] > 0
        assert fragments(lab.near, lab.far) == 0


@contextlib.contextmanager
def narrow_router(mtu: int) -> Iterator[tuple[Host, Host]]:
    """near and far. Only the router knows how narrow its device towards near is."""
    with (
        Host("near", ("192.0.2.1", "2001:db8:1::1")) as near,
        Host("router") as router,
        Host("far", ("198.51.100.2", "2001:db8:2::2")) as far,
    ):
        join(near, router, 1500)
        join(far, router, 1500, device="pw1")
        address(near, near.ipv4, near.ipv6)
        address(router, "192.0.2.9", "2001:db8:1::9")
        address(router, "198.51.100.9", "2001:db8:2::9", device="pw1")
        address(far, far.ipv4, far.ipv6, device="pw1")
        for host, four, six in ((near, "192.0.2.9", "2001:db8:1::9"), (far, "198.51.100.9", "2001:db8:2::9")):
            host.ip(f"route add default via {four}")
            host.ip(f"-6 route add default via {six}")
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            router.run("sh", "-c", f"echo 1 >/proc/sys/net/{name}")
        router.ip(f"link set pw0 mtu {mtu}")
        yield near, far


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("told", [True, False], ids=["told", "black hole"])
def test_a_router_with_a_narrow_link_is_found_with_and_without_its_icmp(serve, start_client, key, family, told):
    with narrow_router(1280) as (near, far):
        server, where = serve(far, family, 8 * MIB)
        # TCP has its own way to find a black hole, which takes seconds: connections get through, as they would at an
        # operator who clamps their segments.
        for host in (near, far):
            for device in ("pw0",) if host is near else ("pw1",):
                host.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/tcp_mtu_probing")
                host.ip(f"route change default via {'192.0.2.9' if host is near else '198.51.100.9'} advmss 1200")
                host.ip(f"-6 route change default via {'2001:db8:1::9' if host is near else '2001:db8:2::9'} "
                        f"dev {device} advmss 1200")  # fmt: skip
        if not told:
            for tool, match in PACKET_TOO_BIG.items():
                for host in (near, far):
                    host.run(tool, "-w", "-A", "INPUT", *match, "-j", "DROP")
        client = start_client(near, address=where, key=key)
        for _ in range(2):
            seen = client.fetch()
            assert seen["right"] is True
            assert seen["udp_segment_bytes"] <= 1280 - HEADERS[family]
        assert seen["udp_size_steps"] >= 1
        assert (server.stats()["udp_too_long"] > 0) == told
        assert fragments(near, far) == 0


# ---------------------------------------------------------------- loss (CASES UP-41)


def lossy_fetch(serve, start_client, key, near_loss: float, far_loss: float, size: int):
    """One block over a link that loses. returns: the client's counters, the server's, and the payload bytes needed"""
    with Lab(1500, single=True) as lab:
        server, where = serve(lab.far, 4, size)
        client = start_client(lab.near, address=where, key=key)
        for host, loss in ((lab.near, near_loss), (lab.far, far_loss)):
            if loss:
                host.lose(loss, ["udp"])
        seen = client.fetch()
        assert seen["right"] is True
        return seen, server.stats()


def test_a_path_that_loses_one_in_a_hundred_costs_little(serve, start_client, key, soak):
    seen, server = lossy_fetch(serve, start_client, key, 0.01, 0.01, (128 if soak else 8) * MIB)
    assert seen["udp_lost"] > 0
    assert seen["udp_bytes_asked"] < 1.1 * seen["udp_bytes_needed"]
    assert server["udp_bytes"] < 1.1 * seen["udp_bytes_needed"]


def test_answers_of_which_a_fifth_is_lost_are_asked_for_less_than_1_6_times(serve, start_client, key, soak):
    """1.25 times is what the loss itself costs."""
    seen, server = lossy_fetch(serve, start_client, key, 0.2, 0, (128 if soak else 8) * MIB)
    assert seen["udp_bytes_asked"] < 1.6 * seen["udp_bytes_needed"]
    assert server["udp_bytes"] < 1.6 * seen["udp_bytes_needed"]


def test_a_path_that_loses_a_fifth_each_way_is_sent_less_than_1_6_times_what_is_needed(serve, start_client, key, soak):
    """A question that is lost costs nothing but itself: what counts is what is sent."""
    seen, server = lossy_fetch(serve, start_client, key, 0.2, 0.2, (128 if soak else 8) * MIB)
    assert server["udp_bytes"] < 1.6 * seen["udp_bytes_needed"]


def test_a_short_queue_that_overflows_is_not_flooded(serve, start_client, key):
    """20 KB of queue, less than the least window: what it drops is asked for again, and that converges."""
    with Host("one", ("127.0.0.1", "::1")) as host:
        host.run("tc", *words("qdisc add dev lo root tbf rate 50mbit burst 20kb limit 20kb"))
        _, where = serve(host, 4, 2 * MIB)
        seen = start_client(host, address=where, key=key).fetch()
        assert seen["right"] is True
        assert seen["udp_bytes_asked"] < 3 * seen["udp_bytes_needed"]


def test_traffic_to_a_client_that_nothing_reaches_decays_and_others_go_on(serve, start_client, key):
    with Lab(1500) as lab, Host("hole", ("203.0.113.1", "2001:db8:3::1")) as hole:
        join(hole, lab.far, 1500, device="pw1")
        address(hole, hole.ipv4, hole.ipv6, device="pw1")
        address(lab.far, "203.0.113.9", "2001:db8:3::9", device="pw1")
        server, where = serve(lab.far, 4, 8 * MIB, listen="0.0.0.0")
        port = where.rsplit(":", 1)[1]
        near = start_client(lab.near, address=f"tcp://{lab.far.ipv4}:{port}", key=key)
        lost = start_client(hole, address=f"tcp://203.0.113.9:{port}", key=key)
        assert near.fetch()["right"] is True
        hole.drop("-p", "udp", ipv6=False)
        before = received(hole, "pw1")
        lost.ask(timeout=4.0)
        for _ in range(20):
            assert near.fetch()["right"] is True
        seen = lost.answer()
        assert seen["error"] == "DeadlineError"
        # A window at first, the least one at the first silences, a probe at each doubling of the time from then on.
        assert received(hole, "pw1") - before < 1.5 * MIB
        assert seen["udp_bytes_asked"] < 1.5 * MIB
        assert seen["udp_timeouts"] >= 4
        assert near.fetch()["right"] is True
        assert server.stats()["udp_sessions"] >= 1


# ---------------------------------------------------------------- addresses (CASES UP-15)


@pytest.mark.parametrize(("listen", "family"), [("0.0.0.0", 4), ("[::]", 6), ("[::]", 4)])
def test_a_server_on_all_addresses_answers_from_the_one_that_was_asked(serve, start_client, key, listen, family):
    """Its route to the client prefers another address of its own, which the client's socket would not take."""
    with Lab(1500) as lab:
        asked = ("198.51.100.7", "2001:db8:7::7")
        lab.far.ip(f"addr add {asked[0]}/32 dev lo")
        lab.far.ip(f"addr add {asked[1]}/128 dev lo nodad")
        lab.near.ip(f"route add {asked[0]} via {lab.far.ipv4}")
        lab.near.ip(f"-6 route add {asked[1]} via {lab.far.ipv6}")
        _, where = serve(lab.far, family, MIB, listen=listen)
        port = where.rsplit(":", 1)[1]
        for host in (asked[0], lab.far.ipv4) if family == 4 else (f"[{asked[1]}]", f"[{lab.far.ipv6}]"):
            seen = start_client(lab.near, address=f"tcp://{host}:{port}", key=key).fetch()
            assert seen["right"] is True


# ---------------------------------------------------------------- receive buffer (CASES UP-40)

WARNED = """
import json, sys, warnings
import numpy as np
import paramwire as pw

with pw.Server("tcp://127.0.0.1:0") as server, warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with server.publish() as p:
        p.put("w", np.arange(1 << 21, dtype=np.uint32))
    for _ in range(3):
        with pw.connect(server.address, transport="udp") as client:
            right = bool((client.fetch("w") == np.arange(1 << 21)).all())
            stats = client.stats()
print(json.dumps({"told": [[w.category.__name__, str(w.message)] for w in told], "right": right, **{
    name: stats["udp_" + name] for name in ("receive_buffer_bytes", "receive_buffer_asked_bytes", "socket_drops")}}))
"""


@pytest.mark.parametrize("may", [False, True], ids=["without CAP_NET_ADMIN", "with it"])
def test_a_receive_buffer_that_is_clamped_is_told_once_with_the_command(may):
    most = int(Path("/proc/sys/net/core/rmem_max").read_text())
    if most >= 8 * MIB:
        pytest.skip(f"net.core.rmem_max is {most} here: nothing is clamped")
    before = [] if may else ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    done = subprocess.run(
        [*before, sys.executable, "-c", WARNED], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    facts = json.loads(done.stdout)
    assert facts["right"] is True
    assert facts["receive_buffer_asked_bytes"] == 16 * MIB
    if may:
        assert facts["told"] == []
        assert facts["receive_buffer_bytes"] == 16 * MIB
        return
    assert facts["receive_buffer_bytes"] == 2 * most
    ((kind, text),) = facts["told"]
    assert kind == "RuntimeWarning"
    for part in (str(16 * MIB), str(2 * most), f"sysctl -w net.core.rmem_max={8 * MIB}"):
        assert part in text

"""Networks under the RDMA devices that lose packets, go down, lose addresses, or carry other sizes at each end."""

from __future__ import annotations

import time
from pathlib import Path

import network
import paramwire as pw
import programs
import pytest

MIB = 1 << 20
NETWORK_ERRORS = (pw.UnreachableError, pw.UnavailableError, pw.DeadlineError)


def counter(device: str, name: str) -> int:
    return int(Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/{name}").read_text())


def test_a_network_that_loses_2_percent_of_all_packets_delays_fetches_and_changes_no_byte(
    server, connect, near, far, check
):
    server.publish(large=(2 * MIB + 1, 1), small=(5000, 2))
    client = connect(server)
    before = counter(far.device, "duplicate_request")
    with network.queue_discipline(near, "loss", "2%"), network.queue_discipline(far, "loss", "2%"):
        snapshot = client.snapshot()
        for _ in range(3):
            check(snapshot.fetch("large"), 1)
        for _ in range(40):
            check(snapshot.fetch("small"), 2)
        check(client.fetch("large"), 1)
        with connect(server) as other:
            check(other.fetch("small"), 2)
    assert counter(far.device, "duplicate_request") > before, "nothing was lost: nothing was tested"
    assert client.stats()["corrupt"] == 0


@pytest.mark.parametrize("side", ["near", "far"])
def test_a_network_device_that_goes_down_and_comes_up_again_costs_a_typed_error_at_most(
    server, connect, near, far, check, side, until
):
    server.publish(w=(MIB, 1))
    client = connect(server, timeout=8.0)
    snapshot = client.snapshot()
    check(snapshot.fetch("w"), 1)
    with network.down(near if side == "near" else far):
        for fetch in (snapshot.fetch, client.fetch):
            begun = time.monotonic()
            with pytest.raises(NETWORK_ERRORS):
                fetch("w")
            assert time.monotonic() - begun < 8.0 + 4.0
        with pytest.raises(NETWORK_ERRORS):
            connect(server, timeout=8.0)
    check(snapshot.fetch("w", timeout=60.0), 1)
    check(client.fetch("w", timeout=60.0), 1)
    with connect(server) as other:
        check(other.fetch("w"), 1)


def test_a_network_device_that_goes_down_while_a_read_is_under_way_ends_it_within_the_deadline(
    server, connect, near, far, until, check
):
    server.publish(large=(16 * MIB, 1), small=(1000, 2))
    client = connect(server, timeout=20.0)
    with network.queue_discipline(far, "rate", "200mbit"):
        ticket = programs.start_fetch(client, until, lambda: network.packets_received(near.device))
        with network.down(near):
            begun = time.monotonic()
            with pytest.raises(NETWORK_ERRORS):
                ticket.wait()
            assert time.monotonic() - begun < 20.0 + 4.0
    check(client.fetch("small", timeout=60.0), 2)


def gids(device: str) -> dict[str, int]:
    (port,) = [port for port in pw._core.rdma_ports() if port["device"] == device]
    return {row["gid"]: row["index"] for row in port["gids"]}


@pytest.mark.parametrize("side", ["near", "far"])
def test_an_address_that_comes_back_under_another_index_is_found_by_the_next_connect(
    server, connect, near, far, check, side, until
):
    moved = near if side == "near" else far
    server.publish(w=(MIB, 1))
    client = connect(server)
    check(client.fetch("w"), 1)
    before = gids(moved.device)[moved.ipv4]
    with network.moved(moved):
        assert until(lambda: gids(moved.device).get(moved.ipv4, before) != before)
        # By the IPv4 addresses, that one among them, wherever they are in the tables now.
        with connect(server, verbs_gid_index=gids(near.device)[near.ipv4]) as another:
            check(another.fetch("w"), 1)
            path = another.stats()["verbs_path"]
            assert near.ipv4 in path, path
            assert far.ipv4 in path, path
        check(client.fetch("w"), 1)
    assert until(lambda: gids(moved.device).get(moved.ipv4) == before)
    with connect(server) as another:
        check(another.fetch("w"), 1)
    check(client.fetch("w"), 1)


@pytest.mark.parametrize("small", ["near", "far"])
def test_ends_of_different_mtu_agree_on_the_smaller_one(start_server, over_verbs, near, far, check, until, small):
    """A READ of 1 MiB, and one of a byte more, in both directions: the end of the smaller MTU receives, and sends."""
    with network.mtu(near if small == "near" else far, 1500):
        server = start_server()
        server.publish(even=(MIB, 1), odd=(MIB + 1, 2))
        with pw.connect(server.address, **over_verbs) as client:
            assert client.stats()["verbs_mtu_bytes"] == 1024
            check(client.fetch("even"), 1)
            check(client.fetch("odd"), 2)

    def larger_again() -> bool:  # a server reads its ports once a second at most
        with pw.connect(server.address, **over_verbs) as client:
            check(client.fetch("odd"), 2)
            return client.stats()["verbs_mtu_bytes"] == network.RDMA_MTU

    assert until(larger_again)


def test_a_client_in_another_network_namespace_is_told_that_its_device_has_no_address_there(
    start_server, start_peer, over_verbs, tmp_path
):
    server = start_server(listen=["tcp://127.0.0.1:0", f"unix:{tmp_path}/s"], tier="heap")
    server.publish(w=(MIB, 1))
    peer = start_peer(programs.in_another_namespace, f"unix:{tmp_path}/s", over_verbs)
    pinned, auto = peer.answer(), peer.answer()
    assert pinned[0] == "UnavailableError"
    assert "rx0 port 1 GID" in pinned[1]
    assert "no interface of this network namespace has that address" in pinned[1]
    transport, rejected, marks = auto
    assert transport in ("udp", "tcp")
    assert "no interface of this network namespace has that address" in rejected["verbs"]
    assert marks

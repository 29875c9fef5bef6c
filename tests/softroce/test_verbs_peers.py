"""Readers and servers that die or freeze in the middle of a read: nothing of them is left, and the others go on."""

from __future__ import annotations

import time

import network
import paramwire as pw
import peers
import programs
import pytest

MIB = 1 << 20
# What leaves the server, so that 16 MiB take long enough to do something meanwhile on any machine.
SLOW = ("rate", "200mbit")


def footprint(server) -> dict[str, object]:
    """What clients cost their server, by its own account, the kernel's, and that of the RDMA subsystem."""
    stats = server.stats()
    counted = ("connections", "leases", "slots_in_use", "used_bytes", "verbs_queue_pairs", "verbs_regions")
    return {
        **{name: stats[name] for name in counted},
        **{kind: len(network.resources(kind, server.pid)) for kind in ("qp", "cq", "mr", "pd")},
        "descriptors": peers.descriptors(server.pid),
        "threads": peers.thread_names(server.pid),
    }


def test_a_server_killed_while_a_read_is_under_way_is_unreachable_at_once(server, connect, near, far, until):
    server.publish(large=(16 * MIB, 1), small=(1000, 2))
    client = connect(server)
    with network.queue_discipline(far, *SLOW):
        ticket = programs.start_fetch(client, until, lambda: network.packets_received(near.device))
        server.kill()
        begun = time.monotonic()
        with pytest.raises(pw.UnreachableError):
            ticket.wait()
    assert time.monotonic() - begun < 10.0


def test_a_server_frozen_while_a_read_is_under_way_does_not_delay_it(server, connect, near, far, until, check):
    server.publish(large=(16 * MIB, 1), small=(1000, 2))
    client = connect(server)
    with network.queue_discipline(far, *SLOW):
        ticket = programs.start_fetch(client, until, lambda: network.packets_received(near.device))
        server.freeze()
        assert not ticket.done
        check(ticket.wait(), 1)
    server.thaw()


def test_the_21st_reader_works_after_20_were_killed_and_nothing_of_them_is_left(
    server, connect, start_peer, over_verbs, until, check
):
    server.publish(w=(4 * MIB, 1))
    with connect(server) as client:
        check(client.fetch("w"), 1)
    assert until(lambda: server.stats()["connections"] == 0)
    before = footprint(server)
    options = {**over_verbs, "lease_ttl": 0.5}
    readers = [start_peer(programs.read_for_ever, server.address, options, "w", 4 * MIB) for _ in range(20)]
    for reader in readers:
        assert reader.answer() == "reading"
    during = footprint(server)
    assert during["verbs_queue_pairs"] == 20
    assert during["qp"] == before["qp"] + 20
    for reader in readers:
        reader.process.kill()
    with connect(server) as client:
        check(client.fetch("w"), 1)
        assert client.stats()["reconnects"] == client.stats()["retries"] == 0
    assert until(lambda: footprint(server) == before), f"before {before}, after {footprint(server)}"


def test_300_fetches_of_a_client_make_one_connection_of_each_kind(server, connect, check):
    server.publish(w=(1000, 1))
    accepted = server.stats()["accepted"]
    client = connect(server)
    snapshot = client.snapshot()
    for _ in range(150):
        snapshot.fetch("w")
        client.fetch("w")
    check(snapshot.fetch("w"), 1)
    assert client.stats()["reconnects"] == 0
    stats = server.stats()
    assert (stats["accepted"] - accepted, stats["verbs_opened"], stats["verbs_queue_pairs"]) == (2, 1, 1)


def test_of_100_connects_one_after_the_other_none_fails_and_none_is_left(server, start_peer, over_verbs, until):
    server.publish(w=(1000, 1))
    churn = [start_peer(programs.connect_often, server.address, over_verbs, "w", 25) for _ in range(4)]
    assert [peer.answer(180.0) for peer in churn] == [[]] * 4
    stats = server.stats()
    assert (stats["verbs_opened"], stats["verbs_refused"]) == (100, 0)
    assert until(lambda: server.stats()["verbs_queue_pairs"] == 0)
    assert network.resources("qp", server.pid) == []

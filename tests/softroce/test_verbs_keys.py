"""Keys of registered memory that are wrong, or of a server that is gone: an access error, and a new connection."""

from __future__ import annotations

import dataclasses

import paramwire as pw
import pytest
from relay import Relay

REMOTE_ACCESS_ERROR = 10  # enum ibv_wc_status
MIB = 1 << 20


def wrong(regions):
    return [dataclasses.replace(region, key=region.key ^ 0x5A) for region in regions]


def test_a_wrong_key_is_an_access_error_and_the_next_fetch_makes_the_connection_again(server, connect, until, check):
    server.publish(w=(MIB, 1))
    with Relay(server.address) as relay:
        client = connect(relay.address)
        check(client.fetch("w"), 1)
        relay.change = wrong
        with connect(relay.address) as other:
            snapshot = other.snapshot()
            for fetch in (snapshot.fetch, other.fetch):
                with pytest.raises(pw.UnreachableError, match=r"remote access error \(status 10\)"):
                    fetch("w")
            failures = other.stats()["verbs_failures"]
            assert failures > 1, "tried again over new connections, a limited number of times"
            assert other.stats()["verbs_failed_status"] == REMOTE_ACCESS_ERROR
            relay.change = None
            check(snapshot.fetch("w"), 1)
            check(other.fetch("w"), 1)
            assert other.stats()["verbs_failures"] == failures
        check(client.fetch("w"), 1)
    assert until(lambda: server.stats()["verbs_queue_pairs"] == 0)


def test_a_key_that_is_wrong_once_costs_one_connection_and_no_error(server, connect, check):
    server.publish(w=(MIB, 1))
    with Relay(server.address) as relay:
        relay.change = wrong
        client = connect(relay.address)
        relay.change = None
        check(client.fetch("w"), 1)
        stats = client.stats()
    assert (stats["verbs_failures"], stats["reconnects"], stats["corrupt"]) == (1, 1, 0)


def test_keys_and_addresses_of_a_server_that_is_gone_read_nothing_of_the_next_one(start_server, connect, check):
    first = start_server()
    first.publish(w=(MIB, 1))
    with Relay(first.address) as relay:
        with connect(relay.address) as client:
            check(client.fetch("w"), 1)
        gone = list(relay.told)
    first.kill()
    second = start_server()
    second.publish(w=(MIB, 2))
    with Relay(second.address) as relay:
        relay.change = lambda regions: gone[: len(regions)]
        with connect(relay.address) as client:
            with pytest.raises(pw.UnreachableError, match="remote access error"):
                client.fetch("w")
            relay.change = None
            check(client.fetch("w"), 2)
            assert client.stats()["corrupt"] == 0

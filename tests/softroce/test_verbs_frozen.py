"""One-sided reads go past the server's process: they go on while it is frozen, and cost it nothing while it is not."""

from __future__ import annotations

import time

import paramwire as pw
import pytest

MIB = 1 << 20


# So long that no renewal is counted.
LONG_LEASE = 3600.0


def test_fetches_cost_the_server_no_message(start_server, connect, check):
    server = start_server(lease_ttl_max=LONG_LEASE)
    server.publish(w=(MIB, 1), small=(1000, 2))
    client = connect(server, lease_ttl=LONG_LEASE)
    snapshot = client.snapshot()
    snapshot.fetch("w")  # makes the link
    frames = client.server_stats()["frames"]
    for _ in range(20):
        check(snapshot.fetch("w"), 1)
        check(snapshot.fetch("small"), 2)
    assert client.server_stats()["frames"] == frames + 1, "the second question itself"
    assert client.stats()["by_transport"]["verbs"]["reads"] == 41
    assert set(client.stats()["by_transport"]) == {"verbs"}


def test_a_frozen_server_handles_no_message_and_its_blocks_are_read_all_the_same(start_server, connect, check):
    server = start_server(lease_ttl_max=LONG_LEASE)
    server.publish(w=(MIB, 1))
    client = connect(server, lease_ttl=LONG_LEASE)
    snapshot = client.snapshot()
    snapshot.fetch("w")
    frames = client.server_stats()["frames"]
    server.freeze()
    for _ in range(10):
        check(snapshot.fetch("w"), 1)
    server.thaw()
    assert client.server_stats()["frames"] == frames + 1, "the second question itself"


def test_fetches_from_a_frozen_server_complete_until_the_lease_ends_while_control_calls_time_out(
    server, connect, check, until
):
    ttl = 6.0
    server.publish(w=(MIB, 1))
    client = connect(server, lease_ttl=ttl)
    snapshot = client.snapshot()
    check(snapshot.fetch("w"), 1)
    server.freeze()
    begun = time.monotonic()
    calls = (client.snapshot, client.publish, client.server_stats, lambda timeout: connect(server, timeout=timeout))
    for call in calls:
        at = time.monotonic()
        with pytest.raises(pw.DeadlineError):
            call(timeout=0.2)
        assert time.monotonic() - at < 5.0, "far below the default; an emulated processor takes its time"
    fetched = 0
    while time.monotonic() - begun < ttl:
        leased = snapshot.leased
        check(snapshot.fetch("w"), 1)
        fetched += leased
    assert fetched >= 3
    assert until(lambda: not snapshot.leased, 10.0)
    assert client.stats()["leases_lost"] == 1
    # Without a lease too: nothing has changed yet, and a fetch hands out the snapshot's bytes or none.
    check(snapshot.fetch("w"), 1)
    server.thaw()
    check(client.fetch("w"), 1)

    def gone() -> bool:
        """Whether a new version costs the old one its slot: a server that was paused lets renewals go first."""
        server.publish(w=(MIB, 2))
        try:
            check(snapshot.fetch("w"), 1)
        except pw.StaleError as error:
            return "lease" in str(error)
        return False

    assert until(gone)
    check(client.snapshot().fetch("w"), 2)

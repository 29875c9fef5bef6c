"""Which way fetches go, and how a user hears of the ways that they don't."""

from __future__ import annotations

import warnings

import numpy as np
import paramwire as pw
import pytest

SMALL = np.arange(16, dtype=np.float32)
LARGE = np.arange(100_000, dtype=np.float32)


@pytest.fixture
def tcp_alone():
    """A server on this host that nobody can share memory with."""
    with pw.Server(listen="tcp://127.0.0.1:0") as server:
        with server.publish() as p:
            p.put("small", SMALL)
            p.put("large", LARGE)
        yield server


def test_small_fetches_go_by_udp_beside_large_ones_by_tcp(tcp_alone):
    with pw.connect(tcp_alone.address, transport="tcp", small_transport="udp", small_bytes=1024) as client:
        assert (client.transport, client.small_transport) == ("tcp", "udp")
        np.testing.assert_array_equal(client.fetch("small"), SMALL)
        np.testing.assert_array_equal(client.fetch("large"), LARGE)
        ways = client.stats()["by_transport"]
        assert {name: way["bytes"] for name, way in ways.items()} == {"udp": SMALL.nbytes, "tcp": LARGE.nbytes}
        assert all(way["wire_bytes"] >= way["bytes"] for way in ways.values())


def test_a_fallback_is_told_once_with_its_reason_and_counted(tcp_alone):
    with pytest.warns(pw.FallbackWarning, match="shm should work and does not: .*no unix socket") as told:
        client = pw.connect(tcp_alone.address)
    with client:
        assert len(told) == 1
        assert told[0].filename == __file__
        assert client.fallbacks == ["shm"]
        assert client.stats()["fallbacks"] == 1
        np.testing.assert_array_equal(client.fetch("large"), LARGE)


def test_strict_refuses_a_fallback_and_says_what_to_do(tcp_alone):
    with pytest.raises(pw.UnavailableError, match=r'strict: shm to .* should work and does not: .*listen "unix:PATH"'):
        pw.connect(tcp_alone.address, strict=True)


def test_a_pinned_transport_is_no_fallback(tcp_alone):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pw.connect(tcp_alone.address, transport="tcp", strict=True) as client:
            assert (client.transport, client.small_transport, client.rejected) == ("tcp", "tcp", [])


def test_the_best_transport_needs_no_warning():
    with pw.Server() as server, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pw.connect(server.address, strict=True) as client:
            assert (client.transport, client.small_transport, client.fallbacks) == ("shm", "shm", [])


def test_unknown_transports_are_refused(tcp_alone):
    with pytest.raises(pw.InvalidError, match="known: same, shm, verbs, udp, tcp"):
        pw.connect(tcp_alone.address, transport="tcp", small_transport="pigeon")


def test_a_server_that_comes_back_with_another_unix_socket_is_shared_memory_again(tmp_path):
    def serve(name: str, listen: str) -> pw.Server:
        server = pw.Server([listen, f"unix:{tmp_path}/{name}"])
        with server.publish() as p:
            p.put("small", SMALL)
        return server

    first = serve("one", "tcp://127.0.0.1:0")
    address = first.endpoints[0]
    with pw.connect(address) as client:
        np.testing.assert_array_equal(client.fetch("small"), SMALL)
        first.close()
        with serve("two", address):
            np.testing.assert_array_equal(client.fetch("small"), SMALL)
            assert client.transport == "shm"
            assert client.stats()["restarts_seen"] == 1


def test_sizes_below_zero_are_refused(tcp_alone):
    with pytest.raises(pw.InvalidError, match="small_bytes is -1"):
        pw.connect(tcp_alone.address, transport="tcp", small_bytes=-1)

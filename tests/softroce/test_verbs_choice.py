"""Which way is taken, and what is said when the wanted one is not to be had."""

from __future__ import annotations

import warnings

import paramwire as pw
import pytest


def test_rdma_to_a_server_without_it_is_refused_with_the_reason(start_server, over_verbs):
    server = start_server(verbs="off")
    server.publish(w=(1000, 1))
    with pytest.raises(pw.UnavailableError, match=r'"verbs".*can.t be read by RDMA.*tcp is there: use transport="tcp"'):
        pw.connect(server.address, **over_verbs)


def test_auto_to_a_server_without_rdma_goes_another_way_and_says_why(start_server, near, check, tmp_path):
    server = start_server(verbs="off", listen=["tcp://127.0.0.1:0", f"unix:{tmp_path}/s"], tier="heap")
    server.publish(w=(1000, 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = pw.connect(server.address, verbs_device=near.device)
    with client:
        assert client.transport in ("udp", "tcp")
        assert "started without" in dict(client.rejected)["verbs"]
        check(client.fetch("w"), 1)
    told = [str(each.message) for each in caught if issubclass(each.category, pw.FallbackWarning)]
    assert len(told) == 1, told


def test_auto_takes_rdma_where_memory_can_not_be_shared(start_server, near, check):
    server = start_server(tier="heap")
    server.publish(w=(1000, 1))
    with pytest.warns(pw.FallbackWarning, match="shm should work"):
        client = pw.connect(server.address, verbs_device=near.device)
    with client:
        assert client.transport == "verbs"
        check(client.fetch("w"), 1)
        assert list(client.stats()["by_transport"]) == ["verbs"]


def test_a_device_that_is_not_there_is_named_with_the_table_of_those_that_are(server, over_verbs, near, far):
    with pytest.raises(pw.InvalidError, match="no RDMA device rx99") as refused:
        pw.connect(server.address, **{**over_verbs, "verbs_device": "rx99"})
    for side in (near, far):
        assert f"{side.device} port 1 GID" in str(refused.value)
        assert side.ipv4 in str(refused.value)


def test_the_stats_name_the_devices_addresses_and_sizes_in_use(server, connect, near, far):
    server.publish(w=(1000, 1))
    stats = connect(server).stats()
    assert f"{near.device} port 1 GID {stats['verbs_gid_index']}" in stats["verbs_path"]
    assert near.ipv4 in stats["verbs_path"]
    assert f"to GID {far.ipv4}" in stats["verbs_path"]
    assert stats["verbs_mtu_bytes"] == 4096
    assert server.stats()["no_verbs"] == ""


def test_a_server_for_a_device_that_is_not_there_does_not_start():
    with pytest.raises(pw.InvalidError, match="no RDMA device rx99"):
        pw.Server("tcp://127.0.0.1:0", verbs="rx99")

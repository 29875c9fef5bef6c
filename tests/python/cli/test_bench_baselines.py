"""What `paramwire bench` compares with: plain UDP programs, and other systems where they are installed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import struct
import subprocess
import threading

import numpy as np
import pytest
from paramwire import _bench, cli_bench_peers
from paramwire.cli import main
from paramwire.cli_bench_common import fill_pattern, is_pattern, measure
from paramwire.cli_bench_peers import Redis, get_words
from paramwire.cli_bench_setting import TCP, UDP_DATAGRAMS, UDP_SEGMENTS, counters, plain_programs, setting_of
from paramwire.cli_common import CliError

REGION = 1 << 20
# bench/baseline_udp.c, struct request and struct header
REQUEST, HEADER = struct.Struct("=QIIHHI"), struct.Struct("=QII")
CHUNK = 63 * 1024


@pytest.fixture
def region():
    made = np.empty(REGION, np.uint8)
    fill_pattern(made)
    return made


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request):
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((request.param, 0))
    except OSError as error:
        pytest.skip(f"this machine has no {request.param}: {error}")
    return request.param


@contextlib.contextmanager
def answering(host, answer):
    """`answer(socket)` runs in a thread over a bound socket, until it is shut down.  gives: a socket connected to it"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as served, socket.socket(family, socket.SOCK_DGRAM) as client:
        served.bind((host, 0))
        client.connect(served.getsockname()[:2])
        thread = threading.Thread(target=answer, args=(served,))
        thread.start()
        try:
            yield client
        finally:
            with contextlib.suppress(OSError):  # it is not connected, and is shut down all the same
                served.shutdown(socket.SHUT_RDWR)
            thread.join()


def open_client(client, **options):
    try:
        return _bench.UdpClient(client.fileno(), **({"segmented": False, "spin": False, "timeout": 20} | options))
    except OSError as error:
        pytest.skip(f"this kernel has no UDP_SEGMENT or UDP_GRO: {error}")


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
def test_a_plain_udp_fetch_brings_the_bytes_of_any_range(host, region, segmented, spin):
    with answering(host, lambda served: _bench.udp_serve(served.fileno(), region)) as client:
        fetcher = open_client(client, segmented=segmented, spin=spin)
        # One byte, one segment and its neighbours, one chunk and its neighbours, many chunks.
        for size in (1, 64, 1455, 1456, 1457, CHUNK - 1, CHUNK, CHUNK + 1, REGION):
            target = np.zeros(size, np.uint8)
            fetcher.fetch(REGION - size, target)
            assert is_pattern(target, REGION - size)
        wanted = (1452 if ":" in host else 1472) if segmented else 0
        assert fetcher.stats()["segment_bytes"] == wanted
        assert fetcher.stats()["receive_buffer_bytes"] > 0


def test_what_is_lost_is_counted_and_asked_for_again(region):
    """The server leaves every third request without an answer, and answers every seventh twice."""

    def answer(served):
        count = 0
        while True:
            words, peer = served.recvfrom(100)
            if not words:
                return
            offset, size, tag, _, _, _ = REQUEST.unpack(words)
            count += 1
            for _ in range(0 if count % 3 == 0 else 2 if count % 7 == 0 else 1):
                served.sendto(HEADER.pack(offset, size, tag) + region[offset : offset + size].tobytes(), peer)

    with answering("127.0.0.1", answer) as client:
        fetcher = open_client(client)
        target = np.zeros(6 * CHUNK, np.uint8)
        fetcher.fetch(0, target)
        assert is_pattern(target)
        stats = fetcher.stats()
        assert stats["retries"] > 0
        assert stats["lost_datagrams"] > 0


def test_a_plain_udp_fetch_ends_by_its_deadline_when_nobody_answers():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        for spin in (False, True):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.connect(deaf.getsockname())
                fetcher = open_client(client, spin=spin, timeout=0.1)
                with pytest.raises(TimeoutError):
                    fetcher.fetch(0, np.zeros(64, np.uint8))


def test_a_plain_udp_fetch_says_when_nobody_listens():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone:
        gone.bind(("127.0.0.1", 0))
        address = gone.getsockname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect(address)
        with pytest.raises(ConnectionRefusedError):
            open_client(client).fetch(0, np.zeros(64, np.uint8))


def test_a_plain_tcp_fetch_ends_by_its_deadline_when_nobody_answers():
    with socket.create_server(("127.0.0.1", 0)) as deaf, socket.create_connection(deaf.getsockname()) as client:
        _bench.tcp_options(client.fileno(), 0.1)
        with pytest.raises(TimeoutError):
            _bench.tcp_fetch(client.fileno(), 0, np.zeros(64, np.uint8))


def test_requests_that_can_not_be_meant_get_no_answer(region):
    """Garbage, a range outside, a size beyond a chunk, and a segment size of its own; then one that is right."""
    with answering("127.0.0.1", lambda served: _bench.udp_serve(served.fileno(), region)) as client:
        magic = 0x70775542
        for words in (
            b"",
            b"x" * REQUEST.size,
            REQUEST.pack(REGION, 1, 1, 0, 0, magic),
            REQUEST.pack(2**64 - 1, 2, 1, 0, 0, magic),
            REQUEST.pack(0, CHUNK + 1, 1, 0, 0, magic),
            REQUEST.pack(0, 64, 1, 8, 0, magic),
            REQUEST.pack(0, 64, 1, 0, 0, 0),
        ):
            client.send(words)
        client.send(REQUEST.pack(8, 64, 77, 0, 0, magic))
        client.settimeout(20)
        answer = client.recv(1000)
        assert HEADER.unpack(answer[: HEADER.size]) == (8, 64, 77)
        assert answer[HEADER.size :] == region[8:72].tobytes()


def test_client_counters_are_told_by_difference_and_gauges_as_they_are():
    before = {"transport": "udp", "retries": 2, "datagram": {"lost": 1, "window_bytes": 500}}
    after = {"transport": "udp", "retries": 5, "datagram": {"lost": 9, "window_bytes": 700, "new": 4}}
    assert counters(after, before) == {
        "retries": 3, "datagram.lost": 8, "datagram.window_bytes": 700, "datagram.new": 4
    }  # fmt: skip


def test_udp_is_measured_against_the_faster_of_two_plain_programs_with_tcp_beside(host):
    options = argparse.Namespace(host=host, seconds=0.05, timeout=20.0)
    with setting_of(4096, 1 << 16, options) as setting, plain_programs(setting, "udp") as plain:
        assert plain.calls.keys() | plain.missing.keys() == {UDP_SEGMENTS, UDP_DATAGRAMS, TCP}
        figures = measure(
            setting.copy, plain.calls, count=setting.count, size=4096, seconds=0.05, server_pid=setting.server.pid,
            beside=plain.beside,
        )  # fmt: skip
        facts = plain.facts(figures, setting, setting.count)
    assert facts["baselines_correct"] is True
    rivals = {name: figures["baselines"][name] for name in (UDP_SEGMENTS, UDP_DATAGRAMS) if name in plain.calls}
    assert figures["baseline"] == max(rivals, key=lambda name: rivals[name]["gb_per_s"])
    for entry in rivals.values():
        assert entry["correct"] is True
        assert entry["p50_us"] > 0
        assert entry["lost_datagrams"] >= 0
    assert figures["baselines"][TCP]["ratio"] > 0


# ---------------------------------------------------------------- other systems


def peer_records(capsys, name, *words):
    sizes = ("--sizes", "64KiB", "--rotate", "256KiB", "--seconds", "0.02", "--transport", "tcp", "--timeout", "30")
    assert main(["bench", "fetch", "--peers", name, *sizes, *words, "--json"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [record for record in records if record["bench"] == "peer"]


@pytest.mark.parametrize(("name", "package"), [("iperf3", "iperf3"), ("redis", "redis-server"), ("ucx", "ucx-utils")])
def test_a_peer_that_is_absent_is_named_with_its_package(name, package, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    blocks = cli_bench_peers.Blocks(1 << 16, 1, np.zeros(1 << 16, np.uint8), 0.01, 1.0)
    with pytest.raises(cli_bench_peers.Absent, match=f"apt-get install {package}"):
        list(cli_bench_peers.PEERS[name](blocks))


def test_an_absent_peer_leaves_a_record_without_figures(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zmq" else find(name))
    (record,) = peer_records(capsys, "zeromq")
    assert "pip install pyzmq" in record["reason"]
    assert record["gb_per_s"] is record["correct"] is record["bytes"] is None


def test_iperf3_is_measured_in_the_same_run(capsys):
    if shutil.which("iperf3") is None:
        pytest.skip("iperf3 is not installed: apt-get install iperf3")
    (record,) = peer_records(capsys, "iperf3")
    assert record["gb_per_s"] > 0
    assert record["bytes"] == 65536
    assert record["p50_us"] is None  # it has no requests


def test_redis_is_measured_and_its_bytes_are_checked(capsys):
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    (record,) = peer_records(capsys, "redis")
    assert record["correct"] is True
    assert record["gb_per_s"] > 0


def test_zeromq_is_measured_and_its_bytes_are_checked(capsys):
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install pyzmq")
    (record,) = peer_records(capsys, "zeromq")
    assert record["correct"] is True
    assert record["gb_per_s"] > 0


def test_ucx_is_measured_over_shared_memory_and_over_tcp(capsys):
    if shutil.which("ucx_perftest") is None:
        pytest.skip("ucx_perftest is not installed: apt-get install ucx-utils")
    isolate = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else []), "true"]
    if subprocess.run(isolate, capture_output=True, check=False).returncode:
        pytest.skip("this system allows no network namespace")
    records = peer_records(capsys, "ucx")
    assert [record["path"] for record in records] == ["get over shared memory", "get over tcp"]
    assert all(record["gb_per_s"] > 0 and record["p50_us"] > 0 for record in records)


def test_the_redis_client_takes_answers_however_they_are_cut_and_refuses_others():
    block = bytes(range(256)) * 40
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client, target = Redis(ours), bytearray(len(block))

        def get(*parts):
            def send():
                theirs.recv(1000)
                for part in parts:
                    theirs.sendall(part)

            thread = threading.Thread(target=send)
            thread.start()
            try:
                client.get(get_words(b"block.0"), memoryview(target))
            finally:
                thread.join()

        whole = b"$%d\r\n%b\r\n" % (len(block), block)
        for cut in (1, 3, 8, 9, 5000, len(whole) - 1):
            target[:] = bytes(len(block))
            get(whole[:cut], whole[cut:])
            assert target == block
        with pytest.raises(CliError, match="not a block"):
            get(b"$-1\r\n", b"padding, so that the head is whole")

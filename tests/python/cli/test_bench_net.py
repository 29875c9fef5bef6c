"""`--net` of the benchmarks: the servers on another host, what the records say of it, and what is said without root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paramwire import net_lab
from paramwire.cli import main
from paramwire.net_lab import Lab, obstacle

SHORT = ("--rotate", "2MiB", "--sizes", "1MiB", "--seconds", "0.2", "--json")


@pytest.fixture
def _lab_can_be_made():
    why = obstacle("iptables", "ip6tables")
    if why is not None:
        pytest.skip(why)


@pytest.mark.usefixtures("_lab_can_be_made")
@pytest.mark.parametrize(("host", "headers"), [("127.0.0.1", 28), ("::1", 48)])
def test_the_server_is_measured_behind_a_link_of_the_mtu_asked_for(cli, host, headers):
    words = ("bench", "fetch", "--transport", "udp", "--net", "mtu=1400", "--host", host, *SHORT)
    for record in cli.json_lines(*words):
        assert record["correct"] is True
        assert record["net"]["mtu"] == 1400
        assert record["net"]["loss"] == 0
        assert "veth" in record["net"]["link"]
        assert record["baseline"] == "plain udp, segments"
        assert record["baselines"]["plain udp, segments"]["segment_bytes"] == 1400 - headers
        assert record["counters"]["udp_segment_bytes"] <= 1400 - headers - 24
        assert record["ratio"] > 0


@pytest.mark.usefixtures("_lab_can_be_made")
def test_with_loss_the_baseline_is_the_same_without_and_bytes_are_counted(cli):
    words = ("bench", "fetch", "--transport", "udp", "--net", "mtu=1500,loss=0.05", *SHORT)
    for record in cli.json_lines(*words):
        assert record["correct"] is True
        assert record["baseline"] == "the same without loss"
        assert record["net"]["loss"] == 0.05
        assert record["net"]["packets"] == "each alone"
        assert record["counters"]["udp_lost"] > 0
        assert record["bytes_needed"] > 0
        assert 1.0 < record["sent_ratio"] < record["asked_ratio"] < 2


@pytest.mark.usefixtures("_lab_can_be_made")
def test_many_servers_share_the_link(cli):
    words = ("bench", "incast", "--transport", "udp", "--net", "mtu=1500", "--servers", "2", *SHORT)
    (record,) = cli.json_lines(*words)
    assert record["correct"] is True
    assert record["net"]["mtu"] == 1500


def test_without_root_it_says_what_is_needed(capsys, monkeypatch):
    monkeypatch.setattr(net_lab.os, "geteuid", lambda: 65534)
    assert main(["bench", "fetch", "--transport", "udp", "--net", "mtu=1500", *SHORT]) == 1
    said = capsys.readouterr().err
    assert "root" in said or "apt-get install" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("words", ["mtu=1279", "mtu=9217", "mtu=x", "loss=0.6", "loss=-1", "delay=3", "", "loss=nan"])
def test_a_network_that_can_not_be_is_a_usage_error(capsys, words):
    with pytest.raises(SystemExit) as raised:
        main(["bench", "fetch", "--net", words])
    assert raised.value.code == 2
    assert "--net" in capsys.readouterr().err


def test_loss_is_not_for_incast_and_peers_are_not_for_a_network(capsys):
    assert main(["bench", "incast", "--net", "loss=0.1"]) == 1
    assert "mtu only" in capsys.readouterr().err
    assert main(["bench", "fetch", "--net", "mtu=1500", "--peers", "all"]) == 1
    assert "--peers" in capsys.readouterr().err


@pytest.mark.usefixtures("_lab_can_be_made")
def test_a_lab_ends_with_its_process_however_that_ends(until):
    program = """
import sys
from paramwire.net_lab import Lab
with Lab() as lab:
    print(lab.near.holder.pid, lab.far.holder.pid, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        holders = [int(word) for word in process.stdout.readline().split()]
        assert len(holders) == 2
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert until(lambda: not any(Path(f"/proc/{holder}/ns/net").exists() for holder in holders))


@pytest.mark.usefixtures("_lab_can_be_made")
def test_a_link_takes_its_mtu_and_no_more_over_both_families():
    send = """
import socket, sys
host, payload = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in host else socket.AF_INET
level, discover = (41, 23) if ":" in host else (0, 10)  # IPV6_MTU_DISCOVER, IP_MTU_DISCOVER
link = socket.socket(family, socket.SOCK_DGRAM)
link.setsockopt(level, discover, 2)  # DO: no fragments
link.connect((host, 9))
try:
    link.send(bytes(payload))
    print("sent")
except OSError as error:
    print(error.errno)
"""
    with Lab(1280) as lab:
        for host, fits in ((lab.far.ipv4, 1252), (lab.far.ipv6, 1232)):
            for payload, said in ((fits, "sent"), (fits + 1, "90")):  # EMSGSIZE
                assert lab.near.run(sys.executable, "-c", send, host, str(payload)).strip() == said

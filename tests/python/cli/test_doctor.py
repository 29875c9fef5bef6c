"""`paramwire doctor` on this machine: every "no" has the reason that is true here, and the record keeps its shape."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest
from paramwire import machine
from paramwire.cli import main
from paramwire.cli_common import console
from paramwire.cli_doctor import examine, missing, next_steps, rdma_table

SEAMS = {"transports", "tiers", "codecs", "coordinators", "backends"}
TOP = {"schema", "seams", "rdma", "machine", "key", "versions", "advice", "server", "missing"}
STUB = Path(__file__).resolve().parents[2] / "support" / "verbs_stub.c"


def record(capsys, *words):
    status = main(["doctor", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def line(found, seam, name):
    (row,) = [row for row in found["seams"][seam] if row["name"] == name]
    return row


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def test_the_record_has_every_part(capsys):
    status, found = record(capsys)
    assert status == 0
    assert set(found) == TOP
    assert found["schema"] == 1
    assert set(found["seams"]) == SEAMS
    for rows in found["seams"].values():
        for row in rows:
            assert set(row) == {"name", "usable", "reason", "next"}
            assert row["usable"] or row["reason"], row
    assert found["seams"] == pw.available()
    assert set(found["machine"]) == {
        "kernel", "system", "user", "processor", "memory", "shared_memory", "huge_pages", "limits", "sockets",
    }  # fmt: skip
    assert found["machine"]["kernel"] == os.uname().release
    assert found["versions"]["paramwire"] == pw.__version__
    assert {"python", "numpy", "compiler", "openssl", "libc"} <= set(found["versions"])
    assert found["versions"]["openssl"].startswith("3.")
    assert found["server"] is None
    assert found["missing"] == []
    limits = found["machine"]["limits"]
    assert set(limits) == {"memlock_bytes", "open_files"}
    assert set(found["machine"]["sockets"]) == {"rmem_default", "rmem_max", "wmem_default", "wmem_max"}
    assert found["machine"]["memory"]["available_bytes"] > 0


def test_verbs_is_usable_by_a_port_of_the_table_or_refused_with_what_this_machine_lacks(capsys):
    found = record(capsys)[1]
    row = line(found, "transports", "verbs")
    if row["usable"]:
        assert any(f"{port['device']} port {port['port']} GID " in row["reason"] for port in found["rdma"])
        assert not row["next"]
        return
    assert ("libibverbs.so.1" in row["reason"]) == (not loads("libibverbs.so.1"))
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        assert found["rdma"] == []
        assert "/sys/class/infiniband" in row["reason"]
        assert f"kernel {os.uname().release}" in row["reason"] or Path("/sys/module/rdma_rxe").exists()
        others = [path.name for path in Path("/sys/class/net").iterdir() if path.name != "lo"]
        assert not others or any(f"rdma link add rxe0 type rxe netdev {name}" in row["next"] for name in others)


def verbs_beside(library: Path) -> dict[str, object]:
    """The line of "verbs" in a process that finds `library` before the machine's own."""
    program = "import json, paramwire as pw; print(json.dumps(pw.available()['transports']))"
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in json.loads(done.stdout) if row["name"] == "verbs"]
    return row


def test_a_library_that_does_not_load_leaves_everything_else_working(tmp_path):
    (tmp_path / "libibverbs.so.1").write_bytes(b"")
    row = verbs_beside(tmp_path / "libibverbs.so.1")
    assert not row["usable"]
    assert "libibverbs.so.1: file too short" in row["reason"]


def test_a_library_that_lacks_a_function_is_refused_by_that_functions_name(tmp_path):
    library = tmp_path / "libibverbs.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-DSTUB_WITHOUT_REG_MR", "-o", library, STUB], check=True, timeout=60)
    row = verbs_beside(library)
    assert not row["usable"]
    assert "libibverbs.so.1 has no function ibv_reg_mr: rdma-core 32 or newer is needed" in row["reason"]


def test_rdma_ports_are_shown_a_row_a_gid_with_the_reason_of_each_that_is_of_no_use(capsys):
    gids = [
        {"index": 0, "gid": "fe80::1", "type": "RoCE v2", "interface": "", "problem": "no interface has it"},
        {"index": 1, "gid": "10.1.0.1", "type": "RoCE v2", "interface": "v0", "problem": ""},
    ]
    port = {"device": "rx0", "port": 1, "link": "Ethernet", "software": True, "state": "ACTIVE", "mtu": 1024}
    port |= {"mtu_max": 4096, "message_bytes_max": 1 << 23, "reads_max": 128, "problem": "", "gids": gids}
    broken = port | {"device": "rx1", "state": "unknown", "problem": "ibv_open_device: errno 19", "gids": []}
    broken |= {"mtu": 0, "mtu_max": 0}
    console().print(rdma_table([port, broken]))
    rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()]
    assert "rx0:1 ACTIVE 1024 of 4096 0 RoCE v2 fe80::1 no interface has it" in rows
    assert "rx0:1 ACTIVE 1024 of 4096 1 RoCE v2 10.1.0.1 v0 yes" in rows
    assert "rx1:1 unknown ibv_open_device: errno 19" in rows


def test_cuda_is_refused_with_what_this_machine_lacks(capsys):
    row = line(record(capsys)[1], "backends", "cuda")
    if row["usable"]:
        pytest.skip("this machine lacks nothing")
    assert ("libcuda.so.1" in row["reason"]) == (not loads("libcuda.so.1"))
    assert ("no /dev/nvidia*" in row["reason"]) == (
        not any(Path("/dev").glob("nvidia*")) and not Path("/dev/dxg").exists()
    )
    assert row["next"]


def test_etcd_is_refused_and_says_whether_a_server_answers(capsys):
    row = line(record(capsys)[1], "coordinators", "etcd")
    assert not row["usable"]
    assert "not in this build" in row["reason"]
    assert "127.0.0.1:2379" in row["reason"]
    assert "--state" in row["next"]


def test_huge_pages_are_looked_at(capsys):
    row = line(record(capsys)[1], "tiers", "hugetlb")
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if free.exists() and free.read_text().strip() == "0":
        assert not row["usable"]
        assert "vm.nr_hugepages" in row["reason"]
        assert "sysctl -w vm.nr_hugepages" in row["next"]


def test_what_is_needed_and_missing_ends_with_status_1(capsys):
    assert record(capsys, "--need", "shm,tcp,cpu,memory,raw")[0] == 0
    status, found = record(capsys, "--need", "shm,etcd,backends/cuda")
    assert status == 1
    assert [row["name"] for row in found["missing"]] == ["etcd", "backends/cuda"]
    status, found = record(capsys, "--need", "pigeon")
    assert status == 1
    assert "shm" in found["missing"][0]["reason"]
    assert main(["doctor", "--need", "etcd"]) == 1
    assert "missing: etcd: not in this build" in capsys.readouterr().out
    verbs = line(record(capsys)[1], "transports", "verbs")
    assert record(capsys, "--need", "verbs")[0] == (0 if verbs["usable"] else 1)
    assert record(capsys, "--need", "transports/memory")[0] == 1
    assert record(capsys, "--need", "tiers/memory")[0] == 0


def test_a_server_is_reached_as_a_client_would(capsys, tmp_path):
    with pw.Server(["tcp://127.0.0.1:0", f"unix:{tmp_path}/s"]) as server:
        status, found = record(capsys, server.endpoints[1])
        assert status == 0
        assert found["server"]["newest"] is None
        assert set(found["server"]) == {"address", "transport", "small_transport", "rejected", "newest", "error"}
        assert found["server"]["transport"] == "shm"
    with pw.Server("tcp://127.0.0.1:0") as server:
        tcp = server.address
        with server.publish() as p:
            p.put("w", np.zeros(3))
        status, found = record(capsys, tcp, "--need", "shm")
        assert found["server"]["newest"] == str(server.newest)
        assert found["server"]["transport"] != "shm"
        assert "unix socket" in {row["name"]: row["reason"] for row in found["server"]["rejected"]}["shm"]
        assert status == 1
        assert main(["doctor", tcp]) == 0
        printed = capsys.readouterr().out
        assert "not shm" in printed
        assert tcp in printed
    status, found = record(capsys, tcp)
    assert status == 1
    assert found["server"]["error"]
    assert found["missing"][0]["name"] == tcp


def test_people_see_every_line_with_its_reason_and_command(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for rows in pw.available().values():
        for row in rows:
            assert row["name"] in printed
            assert " ".join(row["reason"].split()) in " ".join(printed.split())
            for command in row["next"].splitlines():
                assert row["usable"] or command in printed
    assert os.uname().release in printed


def test_new_lines_of_a_seam_appear_by_themselves(monkeypatch, capsys):
    seams = pw.available()
    seams["transports"].append({"name": "carrier", "usable": False, "reason": "no pigeons", "next": "buy pigeons"})
    seams["weather"] = [{"name": "rain", "usable": True, "reason": "wet", "next": ""}]
    monkeypatch.setattr(pw, "available", lambda: seams)
    assert main(["doctor", "--need", "carrier"]) == 1
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("carrier", "no pigeons", "buy pigeons", "weather", "rain", "wet"))
    assert missing(seams, None, ["weather/rain"]) == []


@pytest.mark.parametrize(
    ("make", "state", "command"),
    [
        (None, "is not set", ""),
        (lambda path: None, "there is no key file", "PARAMWIRE_KEY"),
        (lambda path: (path.mkdir(), path.chmod(0o700)), "is no regular file", "PARAMWIRE_KEY"),
        (lambda path: (path.write_text("0a" * 32), path.chmod(0o644)), "has mode 0644", "chmod 600"),
        (lambda path: (path.write_text("0a" * 31), path.chmod(0o600)), "has 62 bytes", "PARAMWIRE_KEY"),
        (lambda path: (path.write_text("0a" * 32), path.chmod(0o600)), "this user alone", ""),
    ],
)
def test_the_key_file_is_looked_at_and_never_shown(make, state, command, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("PARAMWIRE_KEY", raising=False)
    if make is not None:
        make(tmp_path / "key")
        monkeypatch.setenv("PARAMWIRE_KEY", str(tmp_path / "key"))
    found = examine(None, [])
    key = found["key"]
    assert set(key) == {"path", "mode", "id", "usable", "state", "next"}
    assert state in key["state"]
    assert command in key["next"]
    assert key["usable"] == ("alone" in state)
    assert (("cluster key", "", key["next"]) in next_steps(found)) == bool(key["next"])
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert state in printed
    assert "0a" * 31 not in printed


def test_low_limits_come_with_the_command_that_raises_them():
    found = machine.facts()
    found |= {
        "limits": {"memlock_bytes": {"soft": 65536, "hard": 65536}, "open_files": {"soft": 256, "hard": 256}},
    }
    found["sockets"] |= {"rmem_max": 212992, "wmem_max": None}
    commands = {row["about"]: row["next"] for row in machine.advice(found)}
    assert "ulimit -l unlimited" in commands["memlock"]
    assert "--ulimit memlock=-1" in commands["memlock"]
    assert commands["open files"] == "ulimit -n 4096"
    assert commands["rmem_max"] == "sysctl -w net.core.rmem_max=8388608"
    assert "wmem_max" not in commands
    found["limits"]["memlock_bytes"]["soft"] = None
    found["sockets"]["rmem_max"] = 8 << 20
    found["limits"]["open_files"]["soft"] = 4096
    assert machine.advice(found) == []


def test_it_works_for_a_user_without_rights_and_with_low_limits():
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    program = (
        "import os, resource, sys\n"
        "from paramwire.cli import main\n"  # while the files can be read: a checkout may be closed to others
        "from paramwire.cli_doctor import examine\n"
        "examine(None, [])\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "sys.exit(main(['doctor', '--json', '--need', 'shm,tcp,cpu']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["user"] == 65534
    assert found["machine"]["limits"]["memlock_bytes"]["soft"] == 65536
    assert any(row["about"] == "memlock" for row in found["advice"])

"""`paramwire softroce run` with real guests. A boot takes seconds on an emulated processor, so each one shows much."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import softroce_host_mode
from paramwire import softroce
from paramwire.softroce import guest, image, qemu
from paramwire.softroce.common import SoftRoceError, find_program

pytestmark = pytest.mark.guest

# A busy machine boots a guest ten times slower than an idle one.
PATIENCE = 300.0

# What the first guest does: everything but the last line is for a test of its own.
SCRIPT = r"""
cd "$OUT"
ibv_devices >devices
grep -H . /sys/class/infiniband/*/ports/1/state >states
ibv_devinfo -d rx0 | grep active_mtu >mtu
for end in 1 0; do
  ib_read_bw -d rx0 -x 1 -s 65536 -n 50 -p 1851$end >server$end 2>&1 &
  until grep -q ":$(printf '%04X' 1851$end) " /proc/net/tcp /proc/net/tcp6; do :; done
  ib_read_bw -d rx$end -x 1 -s 65536 -n 50 -p 1851$end 198.18.0.1 >client$end 2>&1
  echo "$end: $?" >>reads
  wait
done
ip -6 -brief address show rxv1 >ipv6
(umask; ulimit -l; pwd; echo "$PARAMWIRE_SOFTROCE $PARAMWIRE_SOFTROCE_DEVICES $GIVEN") >setting
echo changed >"$REPOSITORY/README.md" && cp "$REPOSITORY/README.md" readme
ls /tmp >tmp
tc qdisc add dev rxv0 root netem loss 2% && tc qdisc del dev rxv0 root && echo yes >netem
"$PYTHON" "$HOST_MODE" >host.json 2>host.err
echo to stdout
echo to stderr >&2
echo again >/dev/stdout
sleep 1000 &
exit 7
"""

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache() -> Path:
    """The user's own: what it takes to fill it is paid once."""
    missing = [name for name in ("qemu-system-x86_64", "busybox", "rdma", "ib_read_bw") if find_program(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = softroce.cache_folder(os.environ)
    try:
        image.find_or_build(folder, print)
    except SoftRoceError as error:
        pytest.skip(str(error))
    return folder


class Done:
    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status, self.stdout, self.stderr = status, stdout, stderr


def paramwire(*words: str, environment: dict[str, str] | None = None) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "paramwire", "softroce", "run", "--where", "guest", *words],
        cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def first(cache, tmp_path_factory) -> tuple[Done, Path]:
    """The guest that runs SCRIPT, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("out, of a guest")
    variables = {"OUT": str(out), "REPOSITORY": str(ROOT), "PYTHON": sys.executable, "GIVEN": "a b"}
    variables["HOST_MODE"] = softroce_host_mode.__file__
    given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    return paramwire("--out", str(out), *given, "--", "sh", "-c", SCRIPT), out


def test_both_devices_are_there_and_active(first):
    _, out = first
    assert {line.split()[0] for line in (out / "devices").read_text().splitlines()[2:]} == {"rx0", "rx1"}
    states = (out / "states").read_text().splitlines()
    assert len(states) == 2
    assert all(line.endswith("4: ACTIVE") for line in states)
    assert "4096" in (out / "mtu").read_text()


def test_reads_work_between_the_devices_and_on_one(first):
    _, out = first
    said = "".join((out / name).read_text() for name in ("server1", "client1", "server0", "client0"))
    assert (out / "reads").read_text() == "1: 0\n0: 0\n", said
    assert "fd5a:9c31:e7b4:1::2/64" in (out / "ipv6").read_text()
    assert "fe80::" in (out / "ipv6").read_text()
    assert (out / "netem").read_text() == "yes\n"


def test_status_and_streams_come_back_apart_and_clean(first):
    done, _ = first
    assert done.status == 7
    assert done.stdout == "to stdout\nagain\n"
    lines = done.stderr.splitlines()
    assert lines[-1] == "to stderr"
    assert len(lines) == 2
    assert lines[0].startswith("paramwire: softroce: in a guest (kernel ")
    assert lines[0].endswith(": asked for")


def test_the_command_sees_the_host_and_changes_the_shared_folder_alone(first):
    _, out = first
    assert (out / "setting").read_text() == f"0022\nunlimited\n{out}\nguest rx0 rx1 a b\n"
    assert (out / "readme").read_text() == "changed\n"
    assert (ROOT / "README.md").read_text() != "changed\n"
    # The guest's own is empty but for the ways to what it shares: that folder, the checkout, the interpreter's.
    shared = {Path(path).resolve().parts[1:3] for path in (out, ROOT, sys.prefix)}
    assert set((out / "tmp").read_text().splitlines()) == {name for top, name in shared if top == "tmp"}


def test_host_mode_works_beside_other_devices_and_leaves_nothing(first):
    _, out = first
    said = (out / "host.err").read_text()
    text = (out / "host.json").read_text()
    assert text, said
    found = json.loads(text)
    # A second pair, since the guest has the first one.
    assert found["inside"]["status"] == 3
    assert found["inside"]["devices"] == "rx2 rx3"
    assert found["inside"]["listed"] == ["rx0", "rx1", "rx2", "rx3"]
    assert found["signal"] == 137
    assert found["timeout"] == 124
    assert found["missing"] == 127
    for when in ("after inside", "after signal", "after timeout", "after missing", "after a kill"):
        assert found[when] == {"devices": ["rx0", "rx1"], "links": ["rxv0", "rxv1"], "left": []}, when


def test_host_mode_refuses_a_namespace_that_the_kernel_does_not_serve(first):
    """As the guest's kernel, which knows the first one only; and without the module it says that."""
    _, out = first
    found = json.loads((out / "host.json").read_text())
    assert found["namespace"]["status"] == 125
    assert "serves the first network namespace only" in found["namespace"]["said"]
    assert found["namespace"]["after"] == {"devices": ["rx0", "rx1"], "links": [], "left": []}


# ---------------------------------------------------------------- each a guest of its own


def options(*command: str, **given) -> softroce.Options:
    return softroce.Options(command, dict(os.environ), where="guest", folder=str(ROOT), **given)


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)


def guests() -> set[int]:
    """QEMU processes of this process's."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and "qemu" in (folder / "comm").read_text():
                found.add(int(folder.name))
    return found


def test_kvm_that_starts_no_guest_is_given_up_for_an_emulated_processor(cache, tmp_path, monkeypatch):
    """Whatever this machine has: a signal's status comes back, and what failed is not tried again."""
    copy = tmp_path / "cache"
    shutil.copytree(image.newest(cache).folder, copy / "entry")
    monkeypatch.setattr(guest, "kvm_obstacle", lambda: None)
    monkeypatch.setattr(guest, "KVM_HELLO_SECONDS", 3.0)
    said: list[str] = []
    assert softroce.run(options("sh", "-c", "kill -9 $$"), copy, said.append) == 137
    assert "KVM" in said[0]
    failed = any("emulating instead" in line for line in said)
    assert failed == qemu.kvm_failed_before(copy)
    assert not guests()


def test_a_command_over_its_time_ends_with_its_guest_even_while_it_writes(cache):
    with open(os.devnull, "w") as sink:
        over = options("yes", seconds=1.0, stdout=sink.fileno())
        with pytest.raises(softroce.CommandTimeout, match=r"still running after 1 s"):
            softroce.run(over, cache, lambda line: None)
    assert not guests()


def test_a_guest_that_panics_is_a_failure_with_the_end_of_its_console(cache):
    done = paramwire("--", "sh", "-c", "echo before; echo c >/proc/sysrq-trigger; sleep 100")
    assert done.status == 125
    assert done.stdout == "before\n"
    assert "without a status of the command" in done.stderr
    assert "sysrq triggered crash" in done.stderr


def test_a_guest_that_does_not_come_up_is_a_failure(cache):
    late = qemu.Guest(["true"], {}, "/", boot_seconds=0.5)
    sinks = {"stdout": bytes, "stderr": bytes}
    kernel = qemu.open_image(cache, lambda line: None)
    with kernel, pytest.raises(SoftRoceError, match=r"not up after \d+ s; its console"):
        guest.run_in(late, kernel, "tcg", sinks)
    assert not guests()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_guest_and_leaves_nothing(cache, number, status, tmp_path):
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "paramwire", "softroce", "run", "--where", "guest", "--console", "--", "sleep", "1000"],
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A runner's own may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    # A hang ends, too.
    patience = threading.Timer(PATIENCE, process.kill)
    patience.start()
    with contextlib.ExitStack() as stack:
        stack.callback(patience.cancel)
        stack.enter_context(process)
        # The kernel's first words: QEMU runs.
        assert process.stderr.readline().startswith("paramwire: softroce: in a guest")
        assert process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        gone = os.pidfd_open(int(children[0]))
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) == status
        # Readable when that process has ended.
        assert select.select([gone], [], [], PATIENCE)[0]
        os.close(gone)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_needs_no_root(cache):
    """In a child of this process, which has all modules: the tree may be closed to others."""
    nobody = 65534
    scripts = {name: softroce.qemu.script(name) for name in ("guest-init.sh", "guest-main.sh", "devices.sh")}
    with pipe() as (read, write), tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to others
        shutil.copytree(image.newest(cache).folder, Path(folder) / "entry")
        subprocess.run(["chown", "-R", str(nobody), folder], check=True)
        child = os.fork()
        if child == 0:
            status = 99
            try:
                os.setgroups([])
                os.setresgid(nobody, nobody, nobody)
                os.setresuid(nobody, nobody, nobody)
                qemu.script = scripts.__getitem__
                given = softroce.Options(
                    ["sh", "-c", "id -u; ibv_devices | grep -c rx; cat /etc/shadow 2>&1 | grep -c denied"],
                    dict(os.environ), where="guest", folder="/", stdout=write,
                )  # fmt: skip
                status = softroce.run(given, Path(folder), lambda line: None)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert os.read(read, 4096) == b"0\n2\n1\n"

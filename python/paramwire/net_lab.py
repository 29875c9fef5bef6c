"""Two hosts in one: network namespaces joined by a veth pair, with an MTU, and with loss where it is asked for.

For `paramwire bench --net` and for tests.

    with Lab(mtu=1500) as lab:
        subprocess.run([*lab.far.words, "paramwire", "serve", "--listen", f"tcp://{lab.far.ipv4}:7411", ...])
        lab.near.lose(0.01)   # of what arrives there

The namespaces have no names: a child process holds each, and ends when its stdin does, so nothing is left behind
however this process ends. Sources: network_namespaces(7), veth(4), iptables-extensions(8) for `statistic`. One thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

# Where each program is, and which Debian package has it.
PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
    "ip6tables": "iptables",
}
# Where such programs live too, and what a user's PATH may lack.
SYSTEM_PATH = "/usr/sbin:/sbin"
# For any of the commands that set up: each takes milliseconds.
COMMAND_SECONDS = 30.0
CLONE_NEWNET = 0x40000000  # of sched.h
DEVICE = "pw0"

# Addresses for documentation (RFC 5737, RFC 3849): nothing outside the namespaces has them.
NEAR = ("192.0.2.1", "2001:db8::1")
FAR = ("192.0.2.2", "2001:db8::2")


class LabError(Exception):
    """Why no such network can be made here; the text says what is needed."""


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=SYSTEM_PATH)
    if found is None:
        raise LabError(f"{name} is not installed: apt-get install {PACKAGES.get(name, name)}")
    return found


def obstacle(*programs: str) -> str | None:
    """Why no lab can be made here; None: it can. `programs`: needed beside those that any lab needs."""
    try:
        for name in ("unshare", "nsenter", "ip", *programs):
            program(name)
        if os.geteuid() != 0:
            raise LabError(
                "network namespaces and veth devices need root (CAP_SYS_ADMIN and CAP_NET_ADMIN): run it with sudo"
            )
        Host("trial").close()
    except LabError as error:
        return str(error)
    return None


class Host:
    """A network namespace with its loopback up, held by a child process."""

    def __init__(self, name: str, addresses: tuple[str, str] = ("127.0.0.1", "::1")) -> None:
        """errors: LabError with the system's reason"""
        self.name = name
        self.ipv4, self.ipv6 = addresses
        self.holder = subprocess.Popen(
            [program("unshare"), "--net", "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.holder.stdout is not None
        if not self.holder.stdout.readline():
            _, said = self.holder.communicate()
            raise LabError(f"no network namespace can be made here: {said.decode(errors='replace').strip()}")
        self.namespace = f"/proc/{self.holder.pid}/ns/net"
        # Before a command: it runs there, with the same process id.
        self.words = [program("nsenter"), f"--net={self.namespace}", "--"]
        try:
            self.ip("link set lo up")
        except LabError:
            self.close()
            raise

    def run(self, *words: str) -> str:
        """A command in this namespace. returns: its output. errors: LabError with what it said"""
        done = subprocess.run(
            [*self.words, program(words[0]), *words[1:]],
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise LabError(f"{self.name}: {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def ip(self, command: str) -> None:
        self.run("ip", *command.split())

    def drop(self, *match: str, chain: str = "INPUT", add: bool = True, ipv6: bool = True) -> None:
        """Adds (or takes away) a rule that drops what iptables' words match: "-p", "udp"; of IPv4, and of IPv6 too."""
        for tool in ("iptables", "ip6tables") if ipv6 else ("iptables",):
            self.run(tool, "-w", "-A" if add else "-D", chain, *match, "-j", "DROP")

    def lose(self, probability: float, protocols: Sequence[str] = ("udp", "tcp"), *, on: bool = True) -> None:
        """Drops what arrives here, each packet with that probability; `on` false: no longer."""
        for protocol in protocols:
            self.drop(
                "-p", protocol, "-m", "statistic", "--mode", "random", "--probability", f"{probability:.9f}", add=on
            )

    def limit(self, bits_per_s: float, *, device: str = DEVICE) -> None:
        """A token bucket for what leaves here: no faster than that, whatever the processors could. Again: that rate."""
        # Tokens for 1 ms, or for two of the trains that a veth hands over whole.
        burst = max(int(bits_per_s / 8 / 1000), 128 * 1024)
        words = f"qdisc replace dev {device} root tbf rate {int(bits_per_s)}bit burst {burst} latency 50ms"
        self.run("tc", *words.split())

    def enter(self) -> None:
        """Moves this thread, and those that it starts from now on, into the namespace for good."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(self.namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, CLONE_NEWNET) != 0:
                raise LabError(f"setns: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(descriptor)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.holder.communicate(timeout=COMMAND_SECONDS)

    def __enter__(self) -> Host:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def join(one: Host, other: Host, mtu: int, *, device: str = DEVICE, single: bool = False) -> None:
    """A veth pair, with the device's name on both sides, up; without addresses.

    single:  each packet crosses alone, as on a wire. A veth hands a train of segments over whole otherwise, and what
             drops at random would drop up to 64 at once.
    """
    tail = f" gso_max_segs 1 mtu {mtu}" if single else f" mtu {mtu}"
    one.ip(f"link add {device} mtu {mtu} type veth peer name {device} netns {other.holder.pid}")
    for host in (one, other):
        host.ip(f"link set {device}{tail} up")


def address(host: Host, ipv4: str, ipv6: str, *, device: str = DEVICE) -> None:
    """Gives the device both addresses, each in a network of its own size: /24 and /64."""
    host.ip(f"addr add {ipv4}/24 dev {device}")
    host.ip(f"addr add {ipv6}/64 dev {device} nodad")


class Lab:
    """Two hosts, `near` and `far`, joined by one link. errors: LabError when there can be none."""

    def __init__(self, mtu: int = 1500, *, single: bool = False) -> None:
        why = obstacle()
        if why is not None:
            raise LabError(why)
        self.mtu = mtu
        self.single = single
        with contextlib.ExitStack() as made:
            self.near = made.enter_context(Host("near", NEAR))
            self.far = made.enter_context(Host("far", FAR))
            join(self.near, self.far, mtu, single=single)
            for host in (self.near, self.far):
                address(host, host.ipv4, host.ipv6)
            self._close = made.pop_all()

    def close(self) -> None:
        self._close.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""A command on this kernel with two RoCE devices, which are taken down whatever happens. As root.

One child, devices.sh, makes the devices and holds them: it takes them down when its input ends, so also when this
process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from paramwire.softroce.common import CommandTimeout, NoHostDevices, SoftRoceError, die_with_parent, script

# Between SIGTERM and SIGKILL, for a command whose time is over.
GRACE_SECONDS = 5.0
# Each of the commands in devices.sh takes milliseconds; a kernel that removes a device with open queues takes longer.
DOWN_SECONDS = 60.0

# As shells have it, for a command that was not found or can't be run.
NOT_FOUND, NOT_RUNNABLE = 127, 126


@contextlib.contextmanager
def devices(mtu: int) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Makes them. yields: the process that holds them, and the variables that name them.

    errors: NoHostDevices with the reason; SoftRoceError if they can't be taken down
    """
    holder = subprocess.Popen(
        ["sh", "-c", script("devices.sh").decode(), "devices.sh", "hold", str(mtu)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert holder.stdout is not None
    made: dict[str, str] = {}
    try:
        for line in iter(holder.stdout.readline, "\n"):
            if not line:  # it ended before the empty line
                raise NoHostDevices(end_of(holder))
            name, _, value = line.strip().partition("=")
            made[name] = " ".join(shlex.split(value))
        yield holder, made
    except BaseException:
        end_of(holder)  # what it said matters less than this
        raise
    said = end_of(holder)
    if said:
        raise SoftRoceError(f"taking the devices down: {said}")


def end_of(holder: subprocess.Popen[str]) -> str:
    """Ends its input, and waits for its end. returns: what it said, in one line; "" the second time"""
    if holder.returncode is not None:
        return ""
    try:
        _, said = holder.communicate(timeout=DOWN_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not done after {DOWN_SECONDS:g} s; rdma link and ip link show what is there"
    return " ".join(said.split()) or (f"devices.sh ended with status {holder.returncode}" if holder.returncode else "")


def tell(holder: subprocess.Popen[str], line: str) -> None:
    assert holder.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # end_of() tells its status
        holder.stdin.write(line)
        holder.stdin.flush()


def end_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: str, *, mtu: int, seconds: float, stdout: int,
    stderr: int,
) -> int:  # fmt: skip
    """Runs the command, which gets `environment` and the variables that name its devices. returns: its status.

    errors: NoHostDevices, CommandTimeout, SoftRoceError
    """
    with devices(mtu) as (holder, made):
        try:
            process = subprocess.Popen(
                list(command), env={**environment, **made}, cwd=folder, stdin=subprocess.DEVNULL, stdout=stdout,
                stderr=stderr, start_new_session=True, preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        except OSError as error:
            os.write(stderr, f"{command[0]}: {error.strerror}\n".encode())
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUNNABLE
        try:
            tell(holder, f"{process.pid}\n")
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_group(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
            text = f"the command was still running after {seconds:g} s and was ended (--timeout)"
            raise CommandTimeout(text) from None
        finally:
            # It, and what it left running.
            end_group(process, signal.SIGKILL)
            process.wait()
            tell(holder, "forget\n")
        return status if status >= 0 else 128 - status

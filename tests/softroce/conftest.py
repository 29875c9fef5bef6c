"""Two RoCE devices, servers on one of them in processes that can be frozen or killed, clients on the other.

Run by `make softroce` (`paramwire softroce run` gives the devices). Without devices everything here fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import network
import numpy as np
import paramwire as pw
import peers
import programs
import pytest
from network import Side
from peers import Peer, ServerPeer


@pytest.fixture(scope="session", autouse=True)
def pair() -> tuple[Side, Side]:
    try:
        return network.sides()
    except LookupError as reason:
        pytest.fail(str(reason))


@pytest.fixture(scope="session")
def near(pair: tuple[Side, Side]) -> Side:
    """The clients'."""
    return pair[0]


@pytest.fixture(scope="session")
def far(pair: tuple[Side, Side]) -> Side:
    """The servers'."""
    return pair[1]


@pytest.fixture
def start_server(far: Side) -> Iterator[Callable[..., ServerPeer]]:
    """Starts server processes on the far device, with the options given; they end with the test."""
    started: list[ServerPeer] = []

    def start(**options: Any) -> ServerPeer:
        started.append(ServerPeer(**{"listen": ["tcp://127.0.0.1:0"], "verbs": far.device, **options}))
        return started[-1]

    yield start
    peers.close_all(started)


@pytest.fixture
def server(start_server: Callable[..., ServerPeer]) -> ServerPeer:
    return start_server()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(function: Callable[..., None], *arguments: Any) -> Peer:
        started.append(Peer(function, *arguments))
        return started[-1]

    yield start
    peers.close_all(started)


@pytest.fixture
def over_verbs(near: Side) -> dict[str, Any]:
    """Options of clients: on the near device, and no other way."""
    return {"transport": "verbs", "verbs_device": near.device, "timeout": peers.PATIENCE}


@pytest.fixture
def connect(over_verbs: dict[str, Any]) -> Iterator[Callable[..., pw.Client]]:
    """Clients in this process; they are closed with the test."""
    made: list[pw.Client] = []

    def start(server: ServerPeer | str, **options: Any) -> pw.Client:
        address = server if isinstance(server, str) else server.address
        made.append(pw.connect(address, **{**over_verbs, **options}))
        return made[-1]

    yield start
    for client in made:
        client.close()


@pytest.fixture
def until() -> Callable[..., bool]:
    return peers.wait_until


@pytest.fixture
def check() -> Callable[[np.ndarray, int], None]:
    """Whether an array has exactly the content of `mark`."""

    def compare(array: np.ndarray, mark: int) -> None:
        np.testing.assert_array_equal(array, programs.content(array.nbytes, mark))

    return compare


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[2]

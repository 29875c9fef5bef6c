"""Memory and networks that are not there, and limits that hold: errors with the limit, the number and the next step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest

MIB = 1 << 20


def run_json(program: str, *arguments: str, before: list[str] | None = None) -> dict:
    words = [*(before or []), sys.executable, "-c", program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"status {done.returncode}: {done.stderr}"
    return json.loads(done.stdout)


# ---------------------------------------------------------------- huge pages


@pytest.fixture
def no_huge_pages() -> None:
    with open("/proc/meminfo") as meminfo:
        free = next((int(line.split()[1]) for line in meminfo if line.startswith("HugePages_Free")), 0)
    if free >= 512:
        pytest.skip(f"{free} huge pages are free here: an arena of 1 GiB can be had")


@pytest.mark.parametrize("tier", ["memory", "heap"])
def test_huge_pages_that_are_required_and_not_there_are_named(tmp_path, no_huge_pages, tier):
    with pytest.raises(pw.UnavailableError, match=r"huge pages.*512 pages of 2 MiB.*vm\.nr_hugepages") as caught:
        pw.Server(unix_directory=str(tmp_path / "s"), huge_pages="require", tier=tier)
    assert caught.value.code == "unavailable"
    assert not any((tmp_path / "s").glob("*")), "a server that did not start leaves no socket"


@pytest.mark.parametrize("tier", ["memory", "heap"])
def test_huge_pages_that_are_tried_fall_back_and_say_so(tmp_path, no_huge_pages, tier):
    with pw.Server(unix_directory=str(tmp_path / "s"), huge_pages="try", tier=tier) as server:
        with server.publish() as p:
            p.put("w", np.arange(1000))
        assert "vm.nr_hugepages" in server.stats()["tier_note"]
        told = pytest.warns(pw.FallbackWarning) if tier == "heap" else contextlib.nullcontext()
        with told, pw.connect(server.address) as client:
            np.testing.assert_array_equal(client.fetch("w"), np.arange(1000))
            assert (client.transport == "shm") == (tier == "memory")


@pytest.mark.parametrize("published", [True, False])
def test_a_server_whose_memory_can_not_be_mapped_is_read_by_another_way_and_says_why(tmp_path, published):
    def publish() -> None:
        with server.publish() as p:
            p.put("w", np.arange(1000))

    with pw.Server(unix_directory=str(tmp_path / "s"), tier="heap") as server:
        if published:
            publish()
        with pytest.warns(pw.FallbackWarning, match="shm should work"):
            client = pw.connect(server.address)
        with client:
            if not published:
                publish()
            np.testing.assert_array_equal(client.fetch("w"), np.arange(1000))
            assert client.transport in ("udp", "tcp")
            name, reason = client.rejected[0]
            assert name == "shm"
            assert 'tier="memory"' in reason
        with pytest.raises(pw.UnavailableError, match='tier="memory"'):
            pw.connect(server.address, transport="shm")


# ---------------------------------------------------------------- cgroups


class Cgroup:
    """A memory group for one process, version 1 or 2."""

    def __init__(self, folder: Path, limit_file: str) -> None:
        self.folder, self.limit_file = folder, folder / limit_file

    def close(self) -> None:
        end = time.monotonic() + 20
        while True:  # a group whose last process was reaped may be busy for a moment
            try:
                self.folder.rmdir()
                return
            except OSError:
                if time.monotonic() > end:
                    raise


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    with open("/proc/self/cgroup") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    reasons = []
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            parent, limit_file = Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        elif controllers == "":
            parent, limit_file = Path("/sys/fs/cgroup" + path), "memory.max"
        else:
            continue
        folder = parent / f"paramwire-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        made = Cgroup(folder, limit_file)
        try:
            made.limit_file.write_text(str(256 * MIB))
        except OSError as error:
            reasons.append(f"{made.limit_file}: {error.strerror}")
            made.close()
            continue
        try:
            yield made
        finally:
            made.close()
        return
    pytest.skip(f"no memory cgroup can be made here: {'; '.join(reasons) or 'no memory controller'}")


IN_A_GROUP = """
import json, os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
import numpy as np
import paramwire as pw

with pw.Server(unix_directory=sys.argv[2]) as server, pw.connect(server.address) as client:
    with server.publish() as p:
        p.put("small", np.arange(1000))
    first = p.version
    piece, error, put = np.ones(4 << 20, dtype=np.uint8), None, 0
    publisher = client if sys.argv[3] == "remote" else server
    try:
        with publisher.publish() as p:
            for i in range(200):
                p.put(f"big.{i}", piece)
                put += 1
    except pw.Error as caught:
        error = [type(caught).__name__, str(caught)]
    with server.publish() as p:  # the refused one gave its memory back
        for i in range(8):
            p.put(f"big.{i}", piece)
    print(json.dumps({"error": error, "put": put, "small": client.fetch("small").tolist()[:3],
                      "versions": [first.counter, p.version.counter]}))
"""


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_model_larger_than_its_cgroup_is_refused_with_file_and_numbers(tmp_path, cgroup, where):
    """256 MiB for a model of 800 MiB: without a check the kernel would kill the server."""
    facts = run_json(IN_A_GROUP, str(cgroup.folder), str(tmp_path / "s"), where)
    kind, text = facts["error"]
    assert kind == "BackpressureError"
    assert str(cgroup.limit_file) in text
    assert str(256 * MIB) in text
    assert "raise that limit" in text
    assert 20 < facts["put"] < 64 or where == "remote", "puts to another process are acknowledged later"
    assert facts["small"] == [0, 1, 2]
    assert facts["versions"] == [1, 2]


# ---------------------------------------------------------------- dead loopback

DEAD_LOOPBACK = """
import json, time
import paramwire as pw

out = []
for address in ("tcp://127.0.0.1:9", "tcp://[::1]:9"):
    begun = time.monotonic()
    try:
        pw.connect(address, timeout=20.0)
    except pw.Error as error:
        out.append([type(error).__name__, str(error), time.monotonic() - begun])
print(json.dumps({"errors": out}))
"""


def test_a_loopback_that_is_down_is_named_at_once():
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {tried.stderr.strip()}")
    facts = run_json(DEAD_LOOPBACK, before=["unshare", "-n"])
    assert len(facts["errors"]) == 2
    for kind, text, seconds in facts["errors"]:
        assert kind in ("UnreachableError", "UnavailableError"), text
        assert "lo" in text.split() or '"lo"' in text or "'lo'" in text, text
        assert "down" in text
        assert seconds < 1.0


# ---------------------------------------------------------------- leases


@pytest.mark.parametrize("lease_age_max", [600.0, 0.2])
def test_a_reader_that_renews_for_ever_is_bounded_by_the_greatest_age(tmp_path, transport, until, lease_age_max):
    """Room for three versions; a slow reader keeps an old one. Past the age it is told, and publishes go on."""
    size = 8 * MIB
    with pw.Server(
        unix_directory=str(tmp_path / "s"), memory_limit=28 * MIB, retained=1, lease_age_max=lease_age_max
    ) as server:

        def publish(fill: int) -> pw.Version:
            with server.publish() as p:
                p.put("w", np.full(size, fill, dtype=np.uint8))
            return p.version

        publish(0)
        # Renewed at a third of 0.1 s by a thread of the client, for ever.
        with pw.connect(server.address, transport=transport, lease_ttl=0.1) as slow:
            holders = []
            for fill in range(1, 3):
                holders.append(slow.snapshot())
                publish(fill)
            refused = []

            def goes_on() -> bool:
                try:
                    publish(3)
                except pw.BackpressureError as error:
                    refused.append(str(error))
                    return False
                return True

            if lease_age_max > 100:
                assert not goes_on()
                assert str(28 * MIB) in refused[0]
                assert "memory_limit" in refused[0]
                np.testing.assert_array_equal(holders[0]["w"], np.zeros(size, dtype=np.uint8))
                assert server.stats()["leases_revoked"] == 0
                holders[0].close()
                assert until(goes_on)
                return
            assert until(goes_on)
            assert server.stats()["leases_revoked"] >= 1
            with pytest.raises(pw.StaleError):
                holders[0]["w"]
            assert until(lambda: not holders[0].leased)
            assert slow.fetch("w")[0] == 3


# ---------------------------------------------------------------- memory of a reader

READER = """
import json, sys
import numpy as np
import paramwire as pw
from paramwire.cli_memory import PeakMemory, memory_now

with pw.connect(sys.argv[1], transport=sys.argv[2], drop_view_pages=True, timeout=120.0) as client:
    with client.snapshot() as snapshot:
        outs = {t.name: np.empty(t.nbytes, dtype=np.uint8) for t in snapshot.tensors()}
        for out in outs.values():
            out[:] = 1
        with PeakMemory() as memory:
            before = memory_now()
            snapshot.fetch_many(outs)
            peak = memory.peak()
        total = sum(int(out[-1]) + int(out[0]) for out in outs.values())
print(json.dumps({"beside": peak.resident - before["VmRSS"], "exact": peak.exact, "total": total,
                  "bytes": sum(out.nbytes for out in outs.values())}))
"""


@pytest.mark.parametrize("tensors", ["many", "one"])
def test_a_model_fetched_into_buffers_needs_64_mib_beside_them(server, transport, tensors, soak):
    nbytes = 1024 * MIB if soak else 160 * MIB
    count = {"many": 3000 if soak else 500, "one": 1}[tensors]
    piece = np.full(nbytes // count, 7, dtype=np.uint8)
    with server.publish() as p:
        for i in range(count):
            p.put(f"t.{i}", piece)
    facts = run_json(READER, server.address, transport)
    if not facts["exact"]:
        pytest.skip("the peak of a process can't be reset here (/proc/self/clear_refs)")
    assert facts["bytes"] == piece.nbytes * count
    assert facts["total"] == 14 * count
    assert facts["beside"] <= 64 * MIB


STREAMER = """
import json, sys
import numpy as np
import paramwire as pw
from paramwire.cli_memory import PeakMemory

config = pw.LlamaConfig(layers=6, width=512, ffn_width=1024, vocabulary=2000, heads=8, kv_heads=4, tied_head=True)
graph = pw.Graph.llama(config)
with pw.connect(sys.argv[1], transport="shm", drop_view_pages=True) as client, client.snapshot() as snapshot:
    # Both are new to this process, so the first views, which read every byte, are part of what is measured.
    options = {"budget": int(sys.argv[2]), "source": sys.argv[3], "context": 16}
    with PeakMemory() as memory, pw.Engine(snapshot, graph, **options) as engine:
        streamed = [engine.step([token]).argmax().item() for token in range(8)]
        stats = engine.stats()
        peak = memory.peak()
    with pw.Engine(snapshot, graph, context=16) as engine:
        whole = [engine.step([token]).argmax().item() for token in range(8)]
facts = {"source": stats["source"], "bytes": stats["bytes_fetched"], "walk": stats["walk_bytes"]}
print(json.dumps(facts | {"shared": peak.shared, "streamed": streamed, "whole": whole}))
"""


@pytest.mark.parametrize("source", ["auto", "copy"])
def test_shared_pages_of_a_streaming_engine_stay_within_its_budget(server, rng, source):
    config = pw.LlamaConfig(layers=6, width=512, ffn_width=1024, vocabulary=2000, heads=8, kv_heads=4, tied_head=True)
    with server.publish() as p:
        for name, shape in pw.Graph.llama(config).parameters:
            p.put_rows(name, rng.normal(size=shape).astype(np.float32) / 20, 1 * MIB)
    budget = 24 * MIB
    facts = run_json(STREAMER, server.address, str(budget), source)
    assert facts["source"] == ("view" if source == "auto" else "copy")
    assert facts["walk"] > 2 * budget
    assert facts["bytes"] > 4 * facts["walk"]  # most of each step came anew
    assert facts["shared"] <= budget
    assert facts["streamed"] == facts["whole"]

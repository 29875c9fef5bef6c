"""Traces for Perfetto, histograms, and the Prometheus endpoint."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request

import numpy as np
import paramwire as pw
import pytest
from paramwire.metrics_server import MetricsServer


@pytest.fixture
def published(server):
    with server.publish() as p:
        p.put("w", np.arange(1000, dtype=np.float32))
    return server


def test_a_trace_holds_the_spans_of_client_server_and_engine(tmp_path, transport):
    graph = pw.Graph.llama(pw.LlamaConfig(layers=1, width=32, ffn_width=32, vocabulary=40, heads=2, kv_heads=1))
    rng = np.random.default_rng(1)
    path = tmp_path / "trace.json"
    with pw.Trace(path) as trace:
        with pw.Server(unix_directory=str(tmp_path / "s"), trace=trace) as server:
            with server.publish() as p:
                for name, shape in graph.parameters:
                    p.put(name, rng.normal(size=shape).astype(np.float32))
            with pw.connect(server.address, transport=transport, trace=trace) as client, client.snapshot() as snapshot:
                name = graph.parameters[0][0]
                nbytes = snapshot.fetch(name).nbytes
                with pw.Engine(snapshot, graph) as engine:
                    engine.step([1, 2])
        assert trace.dropped == 0
    document = json.loads(path.read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = {span["name"] for span in spans}
    assert {"finish", "turn", "request", "snapshot", "fetch", "read", "step", "piece", "compute"} <= names
    assert nbytes in [span["args"]["bytes"] for span in spans if span["name"] == "read"]
    assert all(span["dur"] >= 0 and span["ts"] > 0 for span in spans)
    threads = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert {span["tid"] for span in spans} == set(threads)
    assert {"pw-server", "pw-prefetch"} <= set(threads.values())
    # A read lies inside the fetch that it is part of.
    fetches = [s for s in spans if s["name"] == "fetch"]
    for read in (s for s in spans if s["name"] == "read"):
        assert any(f["ts"] <= read["ts"] and read["ts"] + read["dur"] <= f["ts"] + f["dur"] for f in fetches)


def test_a_trace_is_written_when_the_block_raises(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(RuntimeError, match="mine"), pw.Trace(path):
        raise RuntimeError("mine")
    assert json.loads(path.read_text())["traceEvents"] == []
    with pytest.raises(pw.InvalidError):
        pw.Trace(events=0)


def test_durations_count_every_call(client, published):
    with client.snapshot() as snapshot:
        for _ in range(5):
            snapshot.fetch("w")
        with pytest.raises(pw.NotFoundError):
            snapshot.fetch("v")
        durations = client.durations()
    assert durations["fetch"].count >= 5
    assert durations["snapshot"].count == 1
    assert durations["control"].count >= 1
    fetch = durations["fetch"]
    assert fetch.count == sum(n for _, n in fetch.buckets)
    assert 0 < fetch.quantile(0.5) <= fetch.quantile(0.99) <= fetch.buckets[-1][0]
    assert fetch.sum <= sum(upper * n for upper, n in fetch.buckets)
    assert published.durations()["request"].count >= 2
    assert published.durations()["finish"].count == 1


def samples(text):
    """Name and labels to value; every line must be one of the format's."""
    out = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            assert re.fullmatch(r"# TYPE [a-z_]+ (counter|gauge|histogram)", line), line
            continue
        found = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{[^{}]*\})?) (\S+)", line)
        assert found, line
        assert found[1] not in out, line
        out[found[1]] = float(found[2])
    return out


def test_the_endpoint_gives_counters_gauges_and_cumulative_histograms(published, client):
    with client.snapshot() as snapshot:
        snapshot.fetch("w")
    metrics = MetricsServer(published, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(metrics.url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            found = samples(answer.read().decode())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(metrics.url.replace("/metrics", "/"), timeout=10)
        # A scraper that says nothing keeps nobody.
        with socket.create_connection(("127.0.0.1", int(metrics.url.split(":")[2].split("/")[0]))):
            urllib.request.urlopen(metrics.url, timeout=10).close()
    finally:
        metrics.close()
    assert found["paramwire_server_blocks"] == 1
    assert found["paramwire_server_publishes_total"] == 1
    buckets = [v for k, v in found.items() if k.startswith("paramwire_server_request_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == found["paramwire_server_request_seconds_count"] > 0
    mine = samples(pw.prometheus_text(client, {"job": 'a"b\\c\nd'}))
    assert mine['paramwire_client_bytes_total{job="a\\"b\\\\c\\nd"}'] == 4000


def test_without_a_trace_nothing_is_recorded(published, client):
    trace = pw.Trace()
    with client.snapshot() as snapshot:
        snapshot.fetch("w")
    assert trace.recorded == 0


def test_the_ways_of_a_client_are_told_apart(published):
    with pw.connect(published.endpoints[1], transport="tcp", small_transport="udp") as client:
        client.fetch("w")
        text = pw.prometheus_text(client)
    assert 'paramwire_client_transport_bytes_total{transport="udp"} 4000' in text
    assert 'paramwire_client_transport_bytes_total{transport="tcp"} 0' in text
    assert text.count("# TYPE paramwire_client_transport_bytes_total counter") == 1
    assert "\nparamwire_client_fallbacks 0\n" in text

"""The benchmarks as a harness: what records hold, where they go, and that wrong bytes and dead peers are noticed."""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import io
import json
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import paramwire
import pytest
from paramwire import cli_bench_common, cli_bench_latency, cli_bench_options, cli_bench_setting
from paramwire.cli import main
from paramwire.cli_bench_common import HISTOGRAM_STEPS, histogram, is_pattern
from paramwire.cli_bench_output import flat
from paramwire.cli_bench_plot import write_png

COMMON = {
    "bench",
    "language",
    "transport",
    "bytes",
    "correct",
    "at",
    "command",
    "paramwire",
    "machine",
    "load_1_minute",
    "key",
}
TAIL = ["p50_us", "p90_us", "p99_us", "p99_9_us", "max_us"]
# Words of a short run of each.
SHORT = {
    "fetch": ("--sizes", "64", "--rotate", "64KiB", "--seconds", "0.03"),
    # Few blocks: with two sides that poll and two cores, a call of the plain program may cost a turn of the scheduler.
    "latency": ("--sizes", "64,4KiB", "--rotate", "8KiB", "--seconds", "0.03"),
    "incast": ("--sizes", "64KiB", "--rotate", "256KiB", "--seconds", "0.1", "--servers", "2"),
    "mixed": ("--bulk", "128KiB", "--seconds", "0.08", "--publish-rate", "200"),
}


def children() -> set[int]:
    """Processes that this one started and that are not gone."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


@pytest.fixture(autouse=True)
def _no_process_is_left_over():
    before = children()
    yield
    assert children() <= before


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Records of a short run of each benchmark, with the CSV file of the same run."""
    folder = tmp_path_factory.mktemp("bench")
    made = {}
    for name, words in SHORT.items():
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["bench", name, *words, "--json", "--csv", str(folder / f"{name}.csv")]) == 0
        made[name] = [json.loads(line) for line in out.getvalue().splitlines()]
    return folder, made


def run(capsys, *words, status=0):
    """In this process.  returns: records, and what is on stderr"""
    assert main(["bench", *words, "--json"]) == status
    shown = capsys.readouterr()
    return [json.loads(line) for line in shown.out.splitlines()], shown.err


def test_a_record_tells_where_it_comes_from_and_whether_it_is_right(runs):
    for name, records in runs[1].items():
        assert {record["transport"] for record in records} >= {"shm", "tcp"}
        for record in records:
            assert record.keys() >= COMMON
            assert record["correct"] is True
            assert record["key"] is False
            assert record["command"].startswith(
                f"paramwire bench {name} --sizes 64" if name != "mixed" else "paramwire"
            )
            assert record["machine"]["cores"] > 0


def test_latency_has_percentiles_a_histogram_and_cold_and_warm_apart(runs):
    records = runs[1]["latency"]
    seen = {(r["transport"], r["wait"], r["bytes"], r["memory"]) for r in records}
    assert len(seen) == len(records)
    for transport, baseline in (("shm", "memcpy"), ("tcp", "plain tcp")):
        for size in (64, 4096):
            assert {(transport, "blocking", size, memory) for memory in ("cold", "warm")} <= seen
        assert {r["baseline"] for r in records if r["transport"] == transport} == {baseline}
    for record in records:
        assert [record[name] for name in TAIL] == sorted(record[name] for name in TAIL)
        pairs = record["histogram_us_calls"]
        assert pairs == sorted(pairs)
        assert sum(calls for _, calls in pairs) == record["calls"] == record["verified"]
        assert record["max_us"] <= pairs[-1][0] <= record["max_us"] * (1 + 1 / HISTOGRAM_STEPS) + 0.001
        assert record["rotate_bytes"] == (8192 if record["memory"] == "cold" else record["bytes"])
        assert record["warm_up_calls"] >= cli_bench_latency.WARM_UP_CALLS
        for name in ("connect_us", "first_us", "p50_ratio", "cpu_us_per_call", "baseline_p50_us"):
            assert record[name] > 0
        assert record["baselines_correct"] is True


def test_a_histogram_bounds_each_time_from_above_within_a_step(rng):
    times = np.concatenate([np.arange(1, 300), rng.integers(1, 1 << 40, 5000), 1 << np.arange(41)])
    bounds = histogram(times.tolist())
    assert sum(calls for _, calls in bounds) == times.size
    edges = np.array([round(bound * 1000) for bound, _ in bounds])
    assert (np.diff(edges) > 0).all()
    above = edges[np.searchsorted(edges, times)]
    assert (above >= times).all()
    assert (above - times <= np.maximum(times / HISTOGRAM_STEPS, 0)).all()


def test_incast_sets_all_servers_against_one(runs):
    for record in runs[1]["incast"]:
        assert record["servers"] == len(record["servers_gb_per_s"]) == 2
        assert math.isclose(sum(record["servers_gb_per_s"]), record["gb_per_s"], rel_tol=1e-4)
        assert 0.5 <= record["fairness"] <= 1.000001
        assert record["ratio"] > 0
        assert record["verified"] >= record["calls"] > 0
        assert (record["kernel_tcp_segments_resent"] is None) == (record["transport"] != "tcp")
        assert (record["resent_ratio"] is None) == (record["transport"] != "udp")


def test_mixed_reads_several_versions_and_accepts_none_that_is_torn(runs):
    records = runs[1]["mixed"]
    for transport in ("shm", "tcp"):
        mine = {record["phase"]: record for record in records if record["transport"] == transport}
        assert list(mine) == ["alone", "writer", "bulk", "writer and bulk"]
        for phase, record in mine.items():
            assert record["torn_accepted"] == record["wrong_version_accepted"] == 0
            assert (record["publish_per_s"] is None) == ("writer" not in phase)
            assert (record["bulk_gb_per_s"] is None) == ("bulk" not in phase)
            assert record["calls"] == sum(calls for _, calls in record["histogram_us_calls"])
        assert mine["alone"]["p99_ratio"] == 1
        assert mine["writer"]["versions_seen"] > 1


def test_the_csv_file_says_what_the_json_lines_say(runs):
    folder, made = runs
    for name, records in made.items():
        with (folder / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
            cells = {key: "" if value is None else str(value) for key, value in flat(record).items()}
            assert {key: row[key] for key in cells} == cells
            assert {row[key] for key in row.keys() - cells.keys()} <= {""}
            assert json.loads(row["correct"]) is True


# ---------------------------------------------------------------- with a cluster key


@pytest.fixture(scope="module")
def keyed_runs(tmp_path_factory):
    """The same two with a key: a fresh one, and a user's file."""
    path = tmp_path_factory.mktemp("key") / "cluster.key"
    paramwire.new_key(path)
    made = {}
    for name, key in (("fetch", ["--key"]), ("latency", ["--key", str(path)])):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main(["bench", name, *SHORT[name], "--json", *key]) == 0
        made[name] = [json.loads(line) for line in out.getvalue().splitlines()]
    return made


def test_with_a_key_the_baseline_is_the_same_without_one(keyed_runs):
    for records in keyed_runs.values():
        assert {record["transport"] for record in records} == {"udp", "tcp"}
        for record in records:
            assert record["key"] is True
            assert record["transport_used"] == record["transport"]
            assert list(record["baselines"]) == [record["baseline"]] == ["without a key"]
            assert record["correct"] is record["baselines_correct"] is True
            assert record["ratio_min"] <= record["ratio"] <= record["ratio_max"]


def test_of_its_two_servers_one_has_the_key_and_the_other_has_none(tmp_path):
    key = tmp_path / "key"
    paramwire.new_key(key)
    options = argparse.Namespace(host="127.0.0.1", seconds=1.0, timeout=20.0)
    with cli_bench_setting.setting_of(64, 640, options, key=str(key)) as setting:
        keyed, keyless = (cli_bench_setting.address_for("tcp", facts) for facts in (setting.ready, setting.keyless))
        with pytest.raises(paramwire.DeniedError):
            paramwire.connect(keyed)
        with pytest.raises(paramwire.DeniedError):
            paramwire.connect(keyless, key=key)
        for made in (setting.connect("tcp"), setting.connect_keyless("tcp", "blocking")):
            with made as client:
                assert is_pattern(client.fetch("block.9"), 9 * 64)


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_key_is_refused_where_it_costs_nothing(capsys, transport):
    records, error = run(capsys, "fetch", "--key", "--transport", transport, status=1)
    assert records == []
    assert "--transport udp, tcp or all" in error


def test_a_key_that_can_not_be_used_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_bench_common, "PYTHON_MODULE", ("/nonexistent",))
    for name in ("fetch", "latency"):
        _, error = run(capsys, name, *SHORT[name], "--key", str(tmp_path / "none"), status=1)
        assert str(tmp_path / "none") in error
        assert error.startswith("paramwire: ")


def test_the_page_tells_figures_with_a_key_apart(runs, keyed_runs, tmp_path):
    both = {name: runs[1][name] + keyed_runs[name] for name in keyed_runs}
    page = report((tmp_path, both), tmp_path)
    for shown in ("tcp", "tcp, key", "udp, key"):
        assert f"<td class='left'>{shown}</td>" in page


# ---------------------------------------------------------------- pictures and the page


@pytest.fixture
def without_matplotlib(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))


def test_each_benchmark_has_its_plot(runs, tmp_path):
    pytest.importorskip("matplotlib", reason="paramwire[bench] is not installed")
    for name, records in runs[1].items():
        path = tmp_path / f"{name}.png"
        write_png(records, str(path))
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.usefixtures("without_matplotlib")
def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(cli_bench_common, "PYTHON_MODULE", ("/nonexistent",))
    records, error = run(capsys, "latency", "--plot", str(tmp_path / "x.png"), status=1)
    assert records == []
    assert "pip install 'paramwire[bench]'" in error


@pytest.mark.parametrize("option", ["--csv", "--plot"])
def test_a_file_that_can_not_be_written_is_refused_before_anything_is_measured(capsys, tmp_path, monkeypatch, option):
    monkeypatch.setattr(cli_bench_common, "PYTHON_MODULE", ("/nonexistent",))
    records, error = run(capsys, "latency", option, str(tmp_path / "nowhere" / "x"), status=1)
    assert records == []
    assert "nowhere/x can't be written" in error


def report(runs, tmp_path, *words, status=0):
    folder, made = runs
    files = []
    for name, records in made.items():
        files.append(str(folder / f"{name}.jsonl"))
        Path(files[-1]).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["bench", "report", *files, "--out", str(tmp_path / "page.html"), *words]) == status
    return (tmp_path / "page.html").read_text()


def test_the_page_holds_plots_tables_machine_and_commands_and_loads_nothing(runs, tmp_path):
    pytest.importorskip("matplotlib", reason="paramwire[bench] is not installed")
    page = report(runs, tmp_path)
    assert page.count("<svg") == len(SHORT)
    for heading in ("Fetches and views", "Latency", "Incast", "Readers beside a publisher", "Machine", "Made by"):
        assert f"<h2>{heading}" in page
    for records in runs[1].values():
        assert records[0]["command"] in page
    assert runs[1]["fetch"][0]["machine"]["cpu"] in page
    for loading in ("src=", "<link", "<script", "url(http", "@import"):
        assert loading not in page
    assert "NO</td>" not in page


@pytest.mark.usefixtures("without_matplotlib")
def test_the_page_without_matplotlib_has_its_tables_and_says_what_is_missing(runs, tmp_path):
    page = report(runs, tmp_path)
    assert "<svg" not in page
    assert page.count("<table>") == len(SHORT) + 1
    assert "paramwire[bench]" in page


@pytest.mark.usefixtures("without_matplotlib")
def test_the_page_of_wrong_bytes_says_so_and_the_command_fails(runs, tmp_path):
    bad = {name: [record | {"correct": False} for record in records] for name, records in runs[1].items()}
    page = report((runs[0], bad), tmp_path, status=1)
    assert "wrong bytes" in page
    assert "NO</td>" in page


@pytest.mark.parametrize("line", ["{", "[]", '{"a": 1}', '{"bench": "fetch"}', "\udcff"])
def test_a_file_that_holds_no_records_is_refused_by_name(capsys, tmp_path, line):
    path = tmp_path / "records.jsonl"
    path.write_bytes(line.encode(errors="surrogateescape"))
    assert main(["bench", "report", str(path), "--out", str(tmp_path / "page.html")]) == 1
    assert "records.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_report_runs_a_set_itself_and_keeps_its_records(capsys, tmp_path):
    kept, page = tmp_path / "kept.jsonl", tmp_path / "page.html"
    words = ("--only", "latency", "--transport", "shm", "--sizes", "64", "--seconds", "0.02", "--keep", str(kept))
    (facts,), _ = run(capsys, "report", *words, "--out", str(page))
    assert facts == {"page": str(page), "records": 2, "failed_runs": 0}
    assert [json.loads(line)["bench"] for line in kept.read_text().splitlines()] == ["latency"] * 2
    assert "paramwire bench latency --sizes 64" in page.read_text()


# ---------------------------------------------------------------- what must not go unnoticed

# Each is run as `python -c PROGRAM MODULE ARGUMENTS...` in place of `python -m MODULE ARGUMENTS...`.
ONE_BYTE_IS_WRONG = """
import importlib, sys
from paramwire import cli_bench_common

fill = cli_bench_common.fill_pattern

def fill_wrongly(target, offset=0):
    fill(target, offset)
    target[-1] ^= 1

cli_bench_common.fill_pattern = fill_wrongly
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""
STAMPS_ARE_WRONG = """
import sys
from paramwire import cli_bench_writer

class Wrong(cli_bench_writer.Publisher):
    def publish_one(self):
        with self.server.publish() as publish:
            for name, words in self.blocks.items():
                words[:] = publish.version.counter
                if name == "small.1":
                    words[{}:] += 1
                publish.put(name, words)

cli_bench_writer.Publisher = Wrong
del sys.argv[1]
sys.exit(cli_bench_writer.main())
"""
READY_AND_THEN = """
import importlib, os, signal, sys
from paramwire import cli_common

ready = cli_common.json_line

def ready_and_then(record):
    ready(record)
    os.kill(os.getpid(), signal.{})

cli_common.json_line = ready_and_then
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""
NEVER_READY = "import sys; sys.stdin.read()"


def replace_servers(monkeypatch, program):
    monkeypatch.setattr(cli_bench_common, "PYTHON_MODULE", (sys.executable, "-c", program))


@pytest.mark.parametrize("name", ["fetch", "latency", "incast"])
def test_one_wrong_byte_makes_the_record_wrong_and_the_command_fail(capsys, monkeypatch, name):
    replace_servers(monkeypatch, ONE_BYTE_IS_WRONG)
    words = (*SHORT[name], "--transport", "tcp", "--seconds", "0.01")
    records, error = run(capsys, name, *words, status=1)
    assert records
    # The wrong byte is in the last block: figures that stay at the first one are right.
    assert {record["correct"] for record in records if record.get("memory") != "warm"} == {False}
    assert {record["baselines_correct"] for record in records if record.get("memory") == "cold"} <= {False}
    assert "wrong bytes" in error


@pytest.mark.parametrize(("from_word", "counter"), [(4, "torn_accepted"), (0, "wrong_version_accepted")])
def test_a_block_that_is_torn_or_of_another_version_is_counted_and_fails(capsys, monkeypatch, from_word, counter):
    replace_servers(monkeypatch, STAMPS_ARE_WRONG.format(from_word))
    records, error = run(capsys, "mixed", *SHORT["mixed"], "--transport", "shm", status=1)
    assert len(records) == 4
    for record in records:
        assert record[counter] > 0
        assert record["correct"] is False
    assert "wrong bytes" in error


@pytest.mark.parametrize(
    ("name", "number"), [("latency", "SIGKILL"), ("latency", "SIGSTOP"), ("incast", "SIGSTOP"), ("mixed", "SIGSTOP")]
)
def test_a_server_that_dies_or_freezes_ends_the_command_by_its_deadline(capsys, monkeypatch, name, number):
    replace_servers(monkeypatch, READY_AND_THEN.format(number))
    records, error = run(capsys, name, *SHORT[name], "--transport", "tcp", "--timeout", "0.3", status=1)
    assert records == []
    assert error.startswith("paramwire: ")
    assert error.count("\n") == 1


def test_a_server_that_never_gets_ready_ends_the_command_by_its_deadline(capsys, monkeypatch):
    replace_servers(monkeypatch, NEVER_READY)
    monkeypatch.setattr(cli_bench_setting, "START_SECONDS", 0.2)
    _, error = run(capsys, "latency", *SHORT["latency"], status=1)
    assert "said nothing for 0.2" in error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_is_lost_amid_the_rounds_ends_the_command(capsys, monkeypatch, tmp_path, number):
    """The first figure is whole and stays, in the CSV file too."""
    measure, figures = cli_bench_latency.measure, []

    def measure_without_server(*arguments, server_pid, **more):
        figures.append(server_pid)
        if len(figures) == 2:
            os.kill(server_pid, number)
        return measure(*arguments, server_pid=server_pid, **more)

    monkeypatch.setattr(cli_bench_latency, "measure", measure_without_server)
    path = tmp_path / "kept.csv"
    words = (*SHORT["latency"], "--transport", "tcp", "--timeout", "1", "--csv", str(path))
    records, error = run(capsys, "latency", *words, status=1)
    assert [record["memory"] for record in records] == ["cold"]
    assert error.startswith("paramwire: ")
    with path.open(newline="") as file:
        assert [row["memory"] for row in csv.DictReader(file)] == ["cold"]


@pytest.mark.parametrize("words", [["--host", "0.0.0.0"], ["--peers", "memcached"], ["--transport", "pigeon"]])
def test_what_would_leave_this_host_or_is_unknown_is_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "fetch", *words])
    assert ended.value.code == 2
    assert "usage: paramwire bench fetch" in capsys.readouterr().err


def test_publish_rates_are_numbers_above_nothing():
    assert cli_bench_options.rate("2.5") == 2.5
    for text in ("0", "-1", "many", "nan", "1e9"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli_bench_options.rate(text)

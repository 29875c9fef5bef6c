"""The test runner counts what ctest and pytest counted, ends what hangs, and cannot report success for nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import select
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runner(tmp_path):
    spec = importlib.util.spec_from_file_location("run_tests", ROOT / "tools" / "run_tests.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_tests"] = module
    spec.loader.exec_module(module)
    module.LOGS = tmp_path / "logs"
    return module


def outcome_of(runner, action, **changes):
    suite = dataclasses.replace(runner.SUITES[0], name="sample", run=action, needs=(), **changes)
    return runner.run_suite(suite, set())


def test_the_budgets_of_make_test_fit_twenty_minutes(runner):
    assert sum(suite.minutes for suite in runner.choose([], soak=False)) <= runner.TOTAL_MINUTES
    assert sum(suite.minutes for suite in runner.SUITES if not suite.soak) <= runner.TOTAL_MINUTES


def test_every_need_names_a_suite_that_comes_before(runner):
    names = [suite.name for suite in runner.SUITES]
    for suite in runner.SUITES:
        assert set(suite.needs) <= set(names[: names.index(suite.name)])


def test_a_named_suite_brings_what_it_needs(runner):
    assert [suite.name for suite in runner.choose(["unit"], soak=False)] == ["build", "unit"]


def test_an_unknown_suite_is_refused_with_the_known_ones(runner):
    with pytest.raises(SystemExit, match=r"nonsense; there are lint, build"):
        runner.choose(["nonsense"], soak=False)


def test_soak_suites_run_only_when_asked_for(runner):
    assert "asan-all" not in [suite.name for suite in runner.choose([], soak=False)]
    assert "asan-all" in [suite.name for suite in runner.choose([], soak=True)]


# As pytest 9 and ctest 3.25 write them, shortened.
PYTEST = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure>x</failure></testcase>
<testcase name="c"><error>x</error></testcase><testcase name="d"><skipped message="x"/></testcase>
</testsuite></testsuites>"""
CTEST = """<testsuite><testcase name="a" status="run"/><testcase name="b" status="fail"><failure message=""/></testcase>
<testcase name="c" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>
<testcase name="d" status="disabled"/></testsuite>"""


@pytest.mark.parametrize(("text", "expected"), [(PYTEST, (1, 2, 1)), (CTEST, (1, 1, 2))])
def test_junit_files_of_both_tools_are_counted(runner, tmp_path, text, expected):
    path = tmp_path / "junit.xml"
    path.write_text(text)
    assert dataclasses.astuple(runner.read_junit(path)) == expected


def test_a_failing_command_fails_the_suite_and_counts_as_one_failure(runner, capsys):
    outcome = outcome_of(runner, lambda run: run.check("sh", "-c", "echo the cause; exit 3"))
    assert "status 3" in outcome.failure
    assert outcome.counts.failed == 1
    assert "the cause" in capsys.readouterr().out


def test_a_runner_that_ran_no_test_fails_the_suite(runner):
    assert "no test was run" in outcome_of(runner, lambda run: run.counted("true")).failure


def test_a_runner_that_dies_after_its_tests_passed_fails_the_suite(runner):
    script = """printf '<testsuite><testcase name="a"/></testsuite>' > "$0"; kill -9 $$"""
    outcome = outcome_of(runner, lambda run: run.counted("sh", "-c", script, str(run.junit)))
    assert "status -9" in outcome.failure
    assert (outcome.counts.passed, outcome.counts.failed) == (1, 1)


def test_a_hanging_suite_is_ended_with_its_children(runner, tmp_path):
    pid_file = tmp_path / "pid"
    run = runner.Run("hang", stop_after_s=0.5)
    with pytest.raises(runner.SuiteFailed, match="hard stop"):
        run.command("sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait")
    try:
        child = os.pidfd_open(int(pid_file.read_text()))
    except ProcessLookupError:
        return  # ended and reaped already
    try:
        # A pidfd becomes readable when its process ends.
        assert select.select([child], [], [], 10)[0] == [child]
    finally:
        os.close(child)


def test_what_needs_a_failed_suite_is_not_run_and_counts_as_failed(runner):
    ran = []
    suite = dataclasses.replace(runner.SUITES[0], name="sample", run=ran.append, needs=("build",))
    outcome = runner.run_suite(suite, {"build"})
    assert ran == []
    assert "needs build" in outcome.failure
    assert outcome.counts.failed == 1


def test_a_blown_budget_is_loud_and_no_failure(runner):
    outcome = outcome_of(runner, lambda run: run.check("true"), minutes=0)
    assert outcome.failure is None
    assert "OVER BUDGET: sample" in runner.table([outcome])


def test_the_last_line_sums_the_suites(runner):
    outcomes = [outcome_of(runner, lambda run: run.check("true")), outcome_of(runner, lambda run: run.check("false"))]
    assert runner.summary(outcomes) == "1 passed, 1 failed"
    assert re.fullmatch(r"\d+ passed, \d+ failed", runner.summary([]))

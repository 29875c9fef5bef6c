"""docs/cuda-kernels.md is of the tree's kernels, none of which spills; and the check finds what it is there for."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("cuda_kernels", ROOT / "tools" / "cuda_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_kernels"] = module
    spec.loader.exec_module(module)
    return module


tool = load_tool()

# As nvcc 13.0 prints it.
REPORT = """nvcc release 13.0
ptxas info    : Compiling entry function 'pw_{kernel}' for 'sm_90'
ptxas info    : Function properties for pw_{kernel}
    {stack} bytes stack frame, {stores} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 256 bytes smem, 400 bytes cmem[0]
"""


def test_no_kernel_spills_and_the_table_is_of_these_sources():
    assert tool.check(ROOT, None) == []


@pytest.fixture
def tree(tmp_path):
    """A tree of its own with the kernels and their table."""
    for part in (tool.SOURCES, "cmake", "docs"):
        shutil.copytree(ROOT / part, tmp_path / part)
    return tmp_path


def test_report_is_read_as_ptxas_prints_it():
    rows, version = tool.read_report(REPORT.format(kernel="add", stack=8, stores=12))
    assert rows == [tool.Row("add", "sm_90", 40, 16, 8, 256)]
    assert version == "13.0"
    assert tool.read_table(tool.write_table(rows, version, "abc")) == (rows, version, "abc")


def test_changed_code_needs_a_new_table_and_changed_comments_do_not(tree):
    path = tree / tool.SOURCES / "decode_bodies.hpp"
    text = path.read_text()
    path.write_text(text.replace("// ", "// More words: "))
    assert tool.check(tree, None) == []
    path.write_text(text.replace("^ change.a", "| change.a"))
    assert any("is not of these kernels" in finding for finding in tool.check(tree, None))


def test_spills_in_table_or_report_are_found(tree):
    table = tree / tool.TABLE
    rows, version, digest = tool.read_table(table.read_text())
    spilling = [tool.dataclasses.replace(rows[0], spills=4), *rows[1:]]
    table.write_text(tool.write_table(spilling, version, digest))
    told = f"kernel {rows[0].kernel} for {rows[0].architecture} spills 4"
    assert any(told in finding for finding in tool.check(tree, None))
    table.write_text(tool.write_table(rows, version, digest))
    findings = tool.check(tree, REPORT.format(kernel="add", stack=0, stores=8))
    assert any("this build: kernel add for sm_90 spills 12" in finding for finding in findings)


def test_kernel_without_a_row_is_found(tree):
    table = tree / tool.TABLE
    lines = table.read_text().splitlines(True)
    table.write_text("".join(line for line in lines if not line.startswith("| top_k | sm_90")))
    assert any("no row of kernel top_k for sm_90" in finding for finding in tool.check(tree, None))

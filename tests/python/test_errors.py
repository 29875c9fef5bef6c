"""Codes in C++, classes in Python, the stub and docs/errors.md say the same."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import paramwire as pw
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
HEADER = (ROOT / "cpp" / "paramwire" / "base" / "error.hpp").read_text()
SOURCE = (ROOT / "cpp" / "paramwire" / "base" / "error.cpp").read_text()
STUB = ast.parse((ROOT / "python" / "paramwire" / "_core.pyi").read_text())

CODES = re.findall(r"^  (k\w+) = \d+,", HEADER[HEADER.index("enum class Code") : HEADER.index("};")], re.MULTILINE)
WORDS = dict(re.findall(r'case Code::(k\w+): return "([\w ]+)";', SOURCE))
# code, word, class, builtin
ROWS = re.findall(r"^\| `(k\w+)` \| ([\w ]+) \| `(\w+)` \| (?:`(\w+)`)? ?\| [^|]+ \|$", PAGE, re.MULTILINE)
CLASSES = {
    name: kind
    for name, kind in vars(pw).items()
    if isinstance(kind, type) and issubclass(kind, pw.Error) and kind is not pw.Error
}
# Raised by no test, with the reason.
NEVER_RAISED = {"InternalError": "a broken invariant"}


def section(name: str) -> str:
    start = PAGE.index(f"\n## {name}\n")
    end = PAGE.find("\n## ", start + 1)
    return PAGE[start : end if end > 0 else len(PAGE)]


def test_the_page_has_one_row_for_each_code_in_its_order():
    assert len(CODES) == 10
    assert [row[0] for row in ROWS] == CODES
    assert {code: word for code, word, _, _ in ROWS} == WORDS


def test_each_code_has_its_class_and_each_class_its_code():
    assert {name for _, _, name, _ in ROWS} == set(CLASSES)
    for _, word, name, builtin in ROWS:
        assert CLASSES[name].code == word
        bases = [base.__name__ for base in CLASSES[name].__bases__]
        assert bases == ["Error", *([builtin] if builtin else [])]
    assert pw.Error.code == ""


def test_the_stub_has_the_classes_with_the_bases_of_the_page():
    stub = {
        node.name: [base.id for base in node.bases]
        for node in STUB.body
        if isinstance(node, ast.ClassDef) and node.bases
    }
    for _, _, name, builtin in ROWS:
        assert stub[name] == ["Error", *([builtin] if builtin else [])]


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_has_a_section_with_causes_next_steps_and_what_is_left(name):
    text = section(name)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == "| raised when | next step |"
    assert len(rows) >= 3
    for row in rows[2:]:
        cause, step = [cell.strip() for cell in row.strip("|").split("|")]
        assert cause
        assert step
    assert "\nLeft as it was: " in text


def test_each_class_is_expected_by_some_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "python").rglob("test_*.py"))
    expected = set(re.findall(r"raises\(\(?(?:[\w.]+, )*(?:pw|paramwire)\.(\w+)", tests))
    assert set(CLASSES) - expected == set(NEVER_RAISED)
    for name, reason in NEVER_RAISED.items():
        assert reason in (pw.InternalError.__doc__ or "").lower(), name


def test_the_package_exports_every_class():
    assert set(CLASSES) | {"Error"} <= set(pw.__all__)

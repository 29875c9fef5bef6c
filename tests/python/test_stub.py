"""_core.pyi says what _core is: the same names, arguments and defaults, and a docstring where one is needed."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import paramwire
import pytest
from paramwire import _core

STUB = ast.parse((Path(paramwire.__file__).parent / "_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
TYPING_ONLY = {"Availability", "CodecTimes", "MemoryRoom", "RdmaGid", "RdmaPort"}


def functions(nodes):
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def stub_arguments(node):
    """Names with kind and whether there is a default, self left out."""
    arguments = node.args
    out = []
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [False] * (len(positional) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    for argument, default in zip(positional, defaults, strict=True):
        if argument.arg != "self":
            out.append((argument.arg, "positional", default))
    for argument, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        out.append((argument.arg, "keyword", value is not None))
    return out


def module_arguments(function):
    """The same from the signature that pybind11 writes into the docstring."""
    line = function.__doc__.splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    parts, depth, part = [], 0, ""
    for character in inside:
        depth += character in "[(<"
        depth -= character in "])>"
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    parts = [text.strip() for text in [*parts, part] if text.strip()]
    kind, out = "positional", []
    for text in parts:
        if text == "*":
            kind = "keyword"
        elif text != "/" and not text.startswith("self:"):
            out.append((re.match(r"\w+", text)[0], kind, "=" in text))
    return out


def test_the_module_and_its_stub_have_the_same_names():
    public = {name for name in vars(_core) if not name.startswith("_")} | {"__version__"}
    stub = {node.name for node in STUB.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    stub |= {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    assert public == stub - TYPING_ONLY


@pytest.mark.parametrize("name", sorted(set(CLASSES) - TYPING_ONLY))
def test_classes_have_the_members_of_their_stub(name):
    kind = getattr(_core, name)
    stub = functions(CLASSES[name].body)
    if issubclass(kind, Exception):
        assert [base.id for base in CLASSES[name].bases] == [base.__name__ for base in kind.__bases__]
        return
    ours = {member for member in vars(kind) if not member.startswith("_")}
    assert ours == {member for member in stub if not member.startswith("_")}
    for member, node in stub.items():
        if member == "__buffer__":
            continue  # PEP 688: there from Python 3.12 on
        assert hasattr(kind, member), member
        is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
        assert is_property == isinstance(inspect.getattr_static(kind, member), property), member
        if not is_property and member not in ("__iter__", "__len__", "__enter__"):
            assert module_arguments(getattr(kind, member)) in ([*stub_arguments(node)], []), member


@pytest.mark.parametrize("name", sorted(functions(STUB.body)))
def test_functions_have_the_arguments_of_their_stub(name):
    node = functions(STUB.body)[name]
    assert module_arguments(getattr(_core, name)) == stub_arguments(node)
    assert ast.get_docstring(node)


def test_what_needs_words_has_them():
    """Every class, and every method with arguments but for the dunder ones."""
    for name in set(CLASSES) - TYPING_ONLY:
        assert ast.get_docstring(CLASSES[name]), name
        for member, node in functions(CLASSES[name].body).items():
            overloaded = any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
            if len(node.args.args) + len(node.args.kwonlyargs) > 1 and not member.startswith("_") and not overloaded:
                assert ast.get_docstring(node), f"{name}.{member}"


def test_the_package_exports_what_it_lists():
    assert set(paramwire.__all__) <= set(dir(paramwire))
    assert paramwire.__all__ == sorted(paramwire.__all__)

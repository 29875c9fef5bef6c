from __future__ import annotations

import argparse
import json
import os
import socket

import pytest
from paramwire import cli_common
from paramwire.cli import main


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("64K", 65536), ("4MiB", 4 << 20), ("1.5GB", 1_500_000_000), ("2 kib", 2048), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert cli_common.byte_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "4 potatoes", "MiB", "1e6", "0x10", "4MiB4"])
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(argparse.ArgumentTypeError, match="4MiB"):
        cli_common.byte_size(text)


def test_a_budget_is_bytes_or_a_part_of_the_model():
    assert cli_common.budget("25%") == 0.25
    assert cli_common.budget("64MiB") == 64 << 20
    for text in ("0%", "101%", "%", "a quarter"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli_common.budget(text)


def test_rows_are_a_range_that_is_not_empty():
    assert cli_common.row_range("3:7") == (3, 7)
    for text in ("7:3", "3:3", "3", "-1:4", "a:b"):
        with pytest.raises(argparse.ArgumentTypeError):
            cli_common.row_range(text)


def test_json_lines_hold_six_digits_and_no_more(capsys):
    cli_common.json_line({"a": 1 / 3, "b": [2 / 3, {"c": 123456789.5}], "d": 7})
    assert json.loads(capsys.readouterr().out) == {"a": 0.333333, "b": [0.666667, {"c": 123457000.0}], "d": 7}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["ls"],
        ["get", "unix:x", "name", "--rows", "5:1"],
        ["serve", "file", "--block-bytes", "much"],
        ["generate", "unix:x", "--prompt", "x", "--tokens", "0"],
        ["generate", "unix:x", "--prompt", "x", "--backend", "cuda:"],
        ["bench", "generate", "--backend", "gpu"],
        ["bench"],
        ["bench", "fetch", "--sizes", "64,0"],
        ["bench", "fetch", "--seconds", "-1"],
        ["ls", "unix:x", "--transport", "pigeon"],
    ],
)
def test_wrong_usage_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: paramwire" in capsys.readouterr().err


def test_every_command_has_a_help_page(capsys):
    for words in (
        [], ["serve"], ["put"], ["get"], ["ls"], ["stat"], ["generate"], ["demo"],
        ["key"], ["key", "new"], ["key", "show-id"],
        ["bench"], ["bench", "fetch"], ["bench", "latency"], ["bench", "incast"], ["bench", "mixed"],
        ["bench", "report"], ["bench", "generate"], ["bench", "memory"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        assert "usage: paramwire " + " ".join(words) in capsys.readouterr().out


def test_a_failure_is_one_line_on_stderr_and_status_1(tmp_path, capsys):
    assert main(["ls", f"unix:{tmp_path}/nobody", "--timeout", "2"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("paramwire: ")
    assert shown.err.count("\n") == 1
    assert "nobody" in shown.err
    assert "Traceback" not in shown.err


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert main(["ls", f"unix:{tmp_path}/nobody", "--timeout", "2", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_demo_without_its_model_says_how_to_get_it(tmp_path, capsys):
    assert main(["demo", "--model", str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "unix:{nowhere}"], "nobody listens there: start the server"),
        (["checkpoint", "save", "d", "--from", "tcp://127.0.0.1:{free_port}"], "nobody listens there: start"),
        (["codec", "advise", "{nowhere}"], "check the path"),
        (["serve", "{nowhere}"], "check the path"),
        (["serve", "{pipe}"], "no regular file"),
        (["checkpoint", "verify", "{empty}"], "save one first, or check the path"),
        (["checkpoint", "restore", "{empty}", "--safetensors", "x"], "save one first, or check the path"),
    ],
)
def test_what_is_not_there_is_named_with_the_next_step(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.create_server(("127.0.0.1", 0)) as held:
        free_port = held.getsockname()[1]
    words = {name: str(tmp_path / name) for name in ("nowhere", "empty", "pipe")} | {"free_port": str(free_port)}
    assert main([word.format(**words) for word in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("paramwire: ")
    assert said.format(**words) in " ".join(error.split())

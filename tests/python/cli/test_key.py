"""`paramwire key`, `--key` and PARAMWIRE_KEY, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def test_key_new_makes_a_file_once_and_never_prints_the_key(cli, tmp_path):
    path = tmp_path / "k"
    shown = cli.run("key", "new", path)
    text = path.read_text().strip()
    assert text[:16] not in shown.stdout + shown.stderr
    key_id = cli.run("key", "show-id", path).stdout.strip()
    assert key_id in shown.stdout
    assert json.loads(cli.run("key", "show-id", "--json", path).stdout) == {"file": str(path), "id": key_id}
    again = cli.run("key", "new", path, status=1)
    assert again.stderr.count("\n") == 1
    assert "is there already" in again.stderr
    assert path.read_text().strip() == text


def test_key_new_names_its_file_itself(cli, tmp_path):
    done = subprocess.run(
        cli.command("key", "new", "--json"), cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["file"] == str(tmp_path / "paramwire.key")
    assert (tmp_path / "paramwire.key").stat().st_mode & 0o7777 == 0o600


def test_a_key_that_others_can_read_is_refused_with_the_command_that_mends_it(cli, tmp_path):
    path = tmp_path / "k"
    cli.run("key", "new", path)
    path.chmod(0o640)
    for words in (("key", "show-id", path), ("ls", "127.0.0.1:9", "--key", path)):
        refused = cli.run(*words, status=1)
        assert f"chmod 600 {path}" in refused.stderr
        assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("way", ["option", "environment"])
def test_commands_take_the_key_from_the_option_or_the_environment(cli, tiny_safetensors, tmp_path, monkeypatch, way):
    path = tmp_path / "k"
    cli.run("key", "new", path)
    with cli.serving(tiny_safetensors.path, "--key", path, "--listen", "tcp://127.0.0.1:0") as facts:
        address = cli.tcp_of(facts)
        refused = cli.run("ls", address, status=1)
        assert "--key FILE" in refused.stderr
        option = ("--key", path)
        if way == "environment":
            monkeypatch.setenv("PARAMWIRE_KEY", str(path))
            option = ()
        assert cli.json_lines("ls", address, "--json", *option)
        name = next(iter(tiny_safetensors.tensors))
        cli.run("get", address, name, "-o", tmp_path / "w.npy", *option)
        cli.run("put", address, tmp_path / "w.npy", *option)
        assert cli.json_lines("stat", address, "--json", *option)


def test_serve_refuses_other_addresses_without_a_key(cli, tiny_safetensors):
    refused = cli.run("serve", tiny_safetensors.path, "--listen", "tcp://0.0.0.0:0", status=1)
    assert "paramwire key new" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_sigterm_takes_the_key_of_a_run_with_it(tmp_path, until):
    words = ["bench", "latency", "--transport", "tcp", "--sizes", "64", "--seconds", "60", "--rotate", "1MiB", "--key"]
    process = subprocess.Popen(
        [sys.executable, "-m", "paramwire", *words],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert until(lambda: list(tmp_path.glob("*/key")) or process.poll() is not None)
        process.terminate()
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "Traceback" not in said
    assert list(tmp_path.glob("*/key")) == []

"""The cluster key from Python: who is let in, what others see, and OpenSSL's own client as a stranger."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import paramwire as pw
import pytest

KEY_ID_LABEL = b"paramwire cluster key id"


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "cluster.key"
    pw.new_key(path)
    return path


@pytest.fixture
def other_key(tmp_path):
    path = tmp_path / "other.key"
    pw.new_key(path)
    return path


@pytest.fixture
def keyed(tmp_path, key):
    with pw.Server(["tcp://127.0.0.1:0"], key=key) as server:
        with server.publish() as publish:
            publish.put("w", np.arange(6, dtype=np.float32))
        yield server


def port_of(server):
    return int(server.endpoints[0].rsplit(":", 1)[1])


def test_a_key_file_is_64_digits_that_only_its_owner_can_read(key):
    text = key.read_text()
    assert re.fullmatch("[0-9a-f]{64}\n", text)
    assert key.stat().st_mode & 0o7777 == 0o600
    assert pw.key_id(key) == hashlib.sha256(KEY_ID_LABEL + bytes.fromhex(text)).hexdigest()[:16]
    with pytest.raises(pw.InvalidError, match="is there already"):
        pw.new_key(key)
    assert key.read_text() == text


class Named:
    """An object that is no pathlib.Path and names a file all the same."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.mark.parametrize("kind", [str, Path, Named])
def test_every_path_may_be_text_or_a_path_object(tmp_path, kind):
    def name(file):
        return kind(tmp_path / file)

    key_id = pw.new_key(name("k"))
    assert pw.key_id(name("k")) == key_id
    with (
        pw.Server(unix_directory=name("s"), state=name("epoch"), key=name("k")) as server,
        pw.Trace(name("trace.json")) as trace,
        pw.connect(server.address, key=name("k")) as client,
        pw.Client(server.endpoints[0], key=name("k"), trace=trace),
    ):
        assert client.newest is None
        trace.write(name("early.json"))
        assert {path.name for path in tmp_path.iterdir()} >= {"s", "epoch", "early.json"}
    assert (tmp_path / "trace.json").exists()
    with pytest.raises(TypeError):
        pw.new_key(7)
    with pytest.raises(pw.InvalidError, match="empty"):
        pw.key_id("")


def test_the_same_key_on_both_sides_reads_and_publishes(keyed, key):
    with pw.connect(keyed.address, key=key, transport="tcp") as client:
        assert client.fetch("w").tolist() == [0, 1, 2, 3, 4, 5]
        with client.publish() as publish:
            publish.put("v", np.ones(1_000_000, np.float32))
        assert client.fetch("v").sum() == 1_000_000
    assert keyed.stats()["closed_for_key"] == 0


def test_no_key_and_another_key_are_denied_with_the_next_step(keyed, other_key, key):
    with pytest.raises(pw.DeniedError, match="key=FILE"):
        pw.connect(keyed.address)
    with pytest.raises(pw.DeniedError, match="show-id"):
        pw.connect(keyed.address, key=other_key)
    with pw.Server(["tcp://127.0.0.1:0"]) as plain, pytest.raises(pw.DeniedError, match="without TLS"):
        pw.connect(plain.address, key=str(key))
    assert keyed.stats()["closed_for_key"] >= 1


def test_bad_key_files_are_refused_by_both_sides_and_never_shown(tmp_path, key):
    secret = key.read_text().strip()
    cases = []
    for name, mode, text, error in [
        ("open", 0o644, secret, pw.DeniedError),
        ("short", 0o600, secret[:-1], pw.InvalidError),
        ("no-hex", 0o600, secret[:-1] + "g", pw.InvalidError),
        ("none", None, "", pw.NotFoundError),
    ]:
        path = tmp_path / name
        if mode is not None:
            path.write_text(text)
            path.chmod(mode)
        cases.append((path, error))
    link = tmp_path / "link"
    link.symlink_to(key)
    cases.append((link, pw.InvalidError))
    for path, error in cases:
        for call in (
            lambda path=path: pw.connect("tcp://127.0.0.1:9", key=path),
            lambda path=path: pw.Server(["tcp://127.0.0.1:0"], key=path),
            lambda path=path: pw.key_id(path),
        ):
            with pytest.raises(error, match=re.escape(str(path))) as raised:
                call()
            assert secret[:16] not in str(raised.value)
    with pytest.raises(pw.InvalidError, match="empty"):
        pw.connect("tcp://127.0.0.1:9", key="")


def test_other_addresses_than_loopback_are_served_with_a_key_only(key):
    with pytest.raises(pw.InvalidError, match="paramwire key new"):
        pw.Server(["tcp://0.0.0.0:0"])
    with (
        pw.Server(["tcp://0.0.0.0:0"], key=key) as server,
        pw.connect(f"127.0.0.1:{port_of(server)}", key=key, transport="tcp") as client,
    ):
        assert client.newest is None


LEFT_RUNNING = """
import sys, threading
import numpy as np
import paramwire as pw

server = pw.Server(["tcp://127.0.0.1:0"], key=sys.argv[1])
with server.publish() as publish:
    publish.put("w", np.zeros(200_000, np.float32))
client = pw.connect(server.address, key=sys.argv[1], transport="tcp")
begun = threading.Event()

def fetch():
    while True:
        client.fetch("w")
        begun.set()

for _ in range(3):
    threading.Thread(target=fetch, daemon=True).start()
begun.wait()
"""


def test_a_program_may_end_while_its_threads_encrypt(key):
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", LEFT_RUNNING, str(key)], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- OpenSSL's client, as FORMAT.md says

HELLO = struct.pack("<QQI", 1, 2, 0)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def frame(kind: int, meta: bytes) -> bytes:
    head = struct.pack("<IBBHQIIQI", 0x31525750, 1, kind, 0, 7, len(meta), 0, 0, crc32c(meta))
    return head + struct.pack("<I", crc32c(head)) + meta


def s_client(port, *arguments):
    """What came back to a HELLO through `openssl s_client`, and its status if it ended by itself."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command here")
    words = [openssl, "s_client", "-connect", f"127.0.0.1:{port}", "-quiet", *arguments]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(frame(1, HELLO))
            process.stdin.flush()
        out = os.read(process.stdout.fileno(), 65536)  # until the answer, or the end
        if not out:  # it has ended; else it would wait for more, whatever stdin does
            process.wait(timeout=60)
        return out, process.returncode
    finally:
        process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.stderr.close()


def test_openssl_gets_in_with_the_command_of_the_format(keyed, key):
    format_page = Path(__file__).parents[2] / "cpp" / "paramwire" / "wire" / "FORMAT.md"
    line = next(line for line in format_page.read_text().splitlines() if line.startswith("openssl s_client"))
    words = line.split()
    assert words[:4] == ["openssl", "s_client", "-connect", "HOST:PORT"]
    assert words[-1] == "-quiet"
    arguments = [word.replace('"$(cat', key.read_text().strip()) for word in words[4:-1] if word != 'KEYFILE)"']
    answer, _ = s_client(port_of(keyed), *arguments)
    assert answer[:6] == b"PWR1\x01\x02"  # WELCOME
    assert bytes.fromhex(keyed.incarnation) == answer[40:48][::-1] + answer[48:56][::-1]


def test_a_tls_client_without_the_key_gets_nothing(keyed, other_key):
    identity = ("-psk_identity", "paramwire", "-psk")
    right = ("-tls1_3", *identity)
    for arguments in [
        (),
        ("-tls1_3",),
        (*right, other_key.read_text().strip()),
        ("-tls1_3", "-psk_identity", "someone", "-psk", other_key.read_text().strip()),
        ("-tls1_2", *identity, other_key.read_text().strip()),
    ]:
        answer, status = s_client(port_of(keyed), *arguments)
        assert answer == b""
        assert status != 0
    stats = keyed.stats()
    assert stats["closed_for_key"] == 5
    assert stats["closed_for_protocol"] == 0


def test_a_frame_in_place_of_tls_is_answered_with_one_error_in_plain(keyed):
    with socket.create_connection(("127.0.0.1", port_of(keyed)), timeout=20) as stream:
        stream.sendall(frame(1, HELLO))
        answer = b""
        while part := stream.recv(4096):
            answer += part
    assert answer[:6] == b"PWR1\x01\x03"  # ERROR
    assert answer[40] == 10
    assert b"cluster key" in answer

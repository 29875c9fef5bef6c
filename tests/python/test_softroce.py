"""`paramwire softroce` without a guest: what it says about machines, its cache, and how it hands a command over."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import lzma
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from paramwire import softroce
from paramwire.cli import make_parser
from paramwire.softroce import findings, image, qemu
from paramwire.softroce.common import SoftRoceError, find_program
from paramwire.softroce.findings import Facts, guest_rows, host_obstacle, host_rows, verdict
from paramwire.softroce.streams import Lines, MarkedStream, Tail

DEBIAN = {"ID": "debian"}
UBUNTU = {"ID": "ubuntu", "ID_LIKE": "debian"}
ROCKY = {"ID": "rocky", "ID_LIKE": "rhel centos fedora"}
MINT = {"ID": "linuxmint", "ID_LIKE": "ubuntu debian"}

EVERYTHING = Facts(
    release="6.1.0-57-amd64",
    system=DEBIAN,
    architecture="x86_64",
    module="loadable",
    root=True,
    first_namespace=True,
    interface="enp5s0",
    programs=dict.fromkeys(("qemu-system-x86_64", "busybox", "ip", "rdma", "modprobe", "depmod", "dpkg", "apt-get",
                            "apt-cache"), "/usr/bin/x"),
    kvm_obstacle=None,
    cached="linux-image-6.1.0-57-amd64 6.1.1-1",
    candidate="linux-image-6.1.0-57-amd64 6.1.1-1",
    candidate_obstacle=None,
)  # fmt: skip


def facts(**changes) -> Facts:
    return dataclasses.replace(EVERYTHING, **changes)


def without(*names: str) -> dict[str, str | None]:
    return EVERYTHING.programs | dict.fromkeys(names)


def row(rows, name):
    (found,) = [entry for entry in rows if entry.name == name]
    return found


# ---------------------------------------------------------------- doctor


@pytest.mark.parametrize(
    ("system", "release", "package"),
    [
        (DEBIAN, "6.1.0-57-cloud-amd64", "linux-image-amd64"),
        (DEBIAN, "6.12.43+deb13-cloud-amd64", "linux-image-amd64"),
        (DEBIAN, "6.1.0-57-amd64", "linux-image-6.1.0-57-amd64"),
        (DEBIAN, "6.18.44-custom", "linux-image-amd64"),
        (UBUNTU, "6.14.0-1015-aws", "linux-modules-extra-6.14.0-1015-aws"),
        (UBUNTU, "6.8.0-1021-azure", "linux-modules-extra-6.8.0-1021-azure"),
        (UBUNTU, "6.8.0-45-generic", "linux-modules-extra-6.8.0-45-generic"),
        (UBUNTU, "5.15.167.4-microsoft-standard-WSL2", "linux-image-generic"),
        (MINT, "6.8.0-45-generic", "linux-modules-extra-6.8.0-45-generic"),
        (ROCKY, "5.14.0-503.14.1.el9_5.x86_64", "kernel-modules-extra-5.14.0-503.14.1.el9_5.x86_64"),
        (ROCKY, "6.6.0-mine", "kernel-modules-extra"),
    ],
)
def test_a_kernel_without_the_module_gets_the_package_and_lines_with_its_own_interface(system, release, package):
    found = facts(system=system, release=release, module="")
    module = row(host_rows(found), "rdma_rxe")
    assert not module.usable
    assert release in module.text
    assert package in module.text
    assert package in module.next
    assert "modprobe rdma_rxe\nrdma link add rxe0 type rxe netdev enp5s0" in module.next
    assert "eth0" not in module.next
    assert release in host_obstacle(found)
    # The rest of the host is fine, and a guest works.
    assert [entry.name for entry in host_rows(found) if not entry.usable] == ["rdma_rxe"]
    assert verdict([*host_rows(found), *guest_rows(found)]) == "guest"


def test_a_kernel_of_nobody_known_is_told_without_a_package():
    module = row(host_rows(facts(system={"ID": "slackware"}, release="6.6.1", module="")), "rdma_rxe")
    assert "CONFIG_RDMA_RXE" in module.text
    assert module.next.startswith("modprobe rdma_rxe\n")


def test_a_machine_with_everything_runs_on_its_own_kernel():
    rows = [*host_rows(EVERYTHING), *guest_rows(EVERYTHING)]
    assert all(entry.usable for entry in rows)
    assert verdict(rows) == "host"
    assert host_obstacle(EVERYTHING) is None


@pytest.mark.parametrize(
    ("changes", "part", "name", "step"),
    [
        ({"root": False}, "host", "root", "sudo"),
        ({"first_namespace": False}, "host", "network namespace", "--network=host"),
        ({"programs": without("rdma")}, "host", "rdma", "apt-get install iproute2"),
        ({"programs": without("qemu-system-x86_64")}, "guest", "qemu-system-x86_64", "apt-get install qemu-system-x86"),
        ({"programs": without("busybox")}, "guest", "busybox", "apt-get install busybox-static"),
        ({"programs": without("busybox"), "system": ROCKY}, "guest", "busybox", "dnf install busybox-static"),
        ({"architecture": "aarch64"}, "guest", "processor", ""),
        ({"cached": None, "candidate": None, "candidate_obstacle": "no lists"}, "guest", "kernel", "apt-get update"),
        ({"cached": None, "programs": without("depmod")}, "guest", "kernel", "apt-get install kmod"),
    ],
)
def test_each_missing_part_is_one_row_with_the_next_command(changes, part, name, step):
    found = facts(**changes)
    rows = [*host_rows(found), *guest_rows(found)]
    missing = [entry for entry in rows if not entry.usable and entry.part == part]
    assert [entry.name for entry in missing] == [name]
    assert step in missing[0].next
    other = {"host": "guest", "guest": "host"}[part]
    assert verdict(rows) == (other if all(entry.usable for entry in rows if entry.part == other) else None)


def test_with_neither_way_the_verdict_is_none():
    found = facts(module="", programs=without("qemu-system-x86_64"))
    assert verdict([*host_rows(found), *guest_rows(found)]) is None


def test_a_kernel_that_can_be_downloaded_is_no_obstacle():
    kernel = row(guest_rows(facts(cached=None)), "kernel")
    assert kernel.usable
    assert kernel.next == "paramwire softroce build"


def test_doctor_says_the_same_as_json_and_as_status(capsys):
    from paramwire.cli import main

    status = main(["softroce", "doctor", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"schema", "where", "kernel", "rows"}
    assert record["kernel"] == os.uname().release
    assert (status == 0) == (record["where"] is not None)
    for part in ("host", "guest"):
        usable = all(entry["usable"] for entry in record["rows"] if entry["part"] == part)
        assert usable <= (record["where"] in ("host", part))
    assert main(["softroce", "doctor"]) == status
    assert "rdma_rxe" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_another_network_namespace_is_not_taken_for_the_first():
    program = "from paramwire.softroce.findings import in_first_namespace; print(in_first_namespace())"
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() in ("False", "None")  # None: a kernel before 5.14


def test_the_interface_is_that_of_the_default_route(tmp_path):
    (tmp_path / "proc/net").mkdir(parents=True)
    lines = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    lines += ["wlp2s0\t0000A8C0\t00000000\t0001\t0\t0\t600\t00FFFFFF\t0\t0\t0"]
    lines += ["enp5s0\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0"]
    (tmp_path / "proc/net/route").write_text("\n".join(lines) + "\n")
    assert findings.default_interface(tmp_path) == "enp5s0"
    (tmp_path / "proc/net/route").write_text(lines[0] + "\n")
    for name in ("lo", "ens3"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    assert findings.default_interface(tmp_path) == "ens3"


def test_kvm_without_a_processor_behind_it_is_not_tried(tmp_path):
    assert qemu.kvm_obstacle(tmp_path) == "no /dev/kvm"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kvm").touch()
    assert "no processor" in qemu.kvm_obstacle(tmp_path)
    (tmp_path / "sys/module/kvm_intel").mkdir(parents=True)
    assert qemu.kvm_obstacle(tmp_path) is None


def test_a_kvm_that_failed_is_remembered_for_this_boot_only(tmp_path):
    assert not qemu.kvm_failed_before(tmp_path)
    qemu.remember_kvm_failed(tmp_path)
    assert qemu.kvm_failed_before(tmp_path)
    (tmp_path / "kvm.json").write_text(json.dumps({"failed_in_boot": "another"}))
    assert not qemu.kvm_failed_before(tmp_path)
    (tmp_path / "kvm.json").write_text("[")
    assert not qemu.kvm_failed_before(tmp_path)


# ---------------------------------------------------------------- the command


WORDS = ["", " ", "a b", "it's", '"', "$HOME `id` \\", "line\nline\n", "*", "--", "ä", "-n", "a=b"]


def test_the_command_arrives_word_for_word_with_its_folder_and_variables(tmp_path):
    folder = tmp_path / "it's a folder\nof two lines"
    folder.mkdir()
    program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
    one = qemu.Guest([sys.executable, "-c", program, *WORDS], {"A": "it's\n$B", "PATH": "/nowhere"}, str(folder))
    devices = {name: f"{name} of it" for name in qemu.DEVICE_VARIABLES}
    done = subprocess.run(
        ["sh", "-c", qemu.command_script(one)], env=devices, capture_output=True, text=True, check=True, timeout=60
    )
    words, where, environment = json.loads(done.stdout)
    assert words == WORDS
    assert where == str(folder)
    assert {"A": "it's\n$B", "PATH": "/nowhere", **devices}.items() <= environment.items()


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["--", "ls", "-l"], ["ls", "-l"]),
        (["ls", "-l", "--", "x"], ["ls", "-l", "--", "x"]),
        (["--timeout", "5", "--", "--", "x"], ["--", "x"]),
        (["--", "sh", "-c", "", "--json"], ["sh", "-c", "", "--json"]),
    ],
)
def test_all_after_the_options_is_the_command(given, command):
    from paramwire.cli_softroce import command_of

    assert command_of(make_parser().parse_args(["softroce", "run", *given])) == command


@pytest.mark.parametrize(
    "given", [["--timeout", "0", "--", "x"], ["--mtu", "100", "x"], ["--env", "A", "x"], ["--where", "moon", "x"]]
)
def test_wrong_options_are_usage_errors(given, capsys):
    with pytest.raises(SystemExit) as raised:
        make_parser().parse_args(["softroce", "run", *given])
    assert raised.value.code == 2
    assert given[0] in capsys.readouterr().err


def test_no_command_is_an_error_that_shows_how():
    from paramwire.cli_softroce import run

    with pytest.raises(Exception, match=r"paramwire softroce run -- CMD"):
        run(argparse.Namespace(argv=["--"]))


def test_a_guest_gets_what_means_the_same_there():
    given = {"PATH": "/bin", "HOME": "/h", "VIRTUAL_ENV": "/v", "PYTHONPATH": "p", "PARAMWIRE_KEY": "k", "LC_ALL": "C"}
    dropped = {"TMPDIR": "/t", "DISPLAY": ":0", "SSH_AUTH_SOCK": "/s", "XDG_RUNTIME_DIR": "/r", "http_proxy": "x"}
    assert softroce.guest_environment(given | dropped) == given


def test_folders_below_the_empty_ones_are_kept_once():
    given = ["/run/b/c", "/run/b", "/usr/x", "/dev/shm", "/run", "/runs/z", "/dev/shm/q", "/run/b"]
    assert qemu.hidden(given) == ["/dev/shm/q", "/run/b"]


# ---------------------------------------------------------------- streams


def test_a_stream_ends_at_its_mark_however_it_is_cut():
    mark = b"\0end-1234\0"
    text = b"a\0en" + b"\0end-1235\0" + b"\0" * 3 + b"end"
    whole = text + mark + b"after"
    for size in range(1, len(whole) + 1):
        stream = MarkedStream(mark)
        passed = b"".join(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))
        assert passed == text
        assert stream.ended


def test_bytes_that_can_not_be_the_mark_are_not_held_back():
    stream = MarkedStream(b"\0end\0")
    assert stream.feed(b"line\n") == b"line\n"
    assert stream.feed(b"x\0e") == b"x"
    assert stream.feed(b"x") == b"\0ex"
    assert not stream.ended


def test_lines_and_the_last_of_them():
    lines, tail = Lines(), Tail(2)
    for piece in (b"on", b"e\r\ntwo\n", b"\nthree\nfo"):
        tail.add(lines.feed(piece))
    assert tail.text() == "  | two\n  | three"
    assert lines.rest() == ["fo"]


# ---------------------------------------------------------------- the cache


def entry(cache: Path, name: str, **changes) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "kernel").write_bytes(b"k" * 10)
    (folder / "modules.cpio").write_bytes(b"m" * 20)
    sizes = {"kernel": 10, "modules.cpio": 20}
    values = {"recipe": image.recipe(), "package": name, "version": "1", "release": "6.1", "sizes": sizes}
    (folder / "image.json").write_text(json.dumps(values | changes))
    return folder


def test_the_key_covers_kernel_version_and_recipe(monkeypatch):
    one = image.Package("linux-image-6.1.0-57-amd64", "6.1.1-1")
    keys = {image.key(one), image.key(dataclasses.replace(one, version="6.1.1-2")),
            image.key(dataclasses.replace(one, name="linux-image-6.1.0-58-amd64"))}  # fmt: skip
    monkeypatch.setattr(image, "MODULES", (*image.MODULES, "siw"))
    keys.add(image.key(one))
    assert len(keys) == 4


def test_half_an_entry_is_never_used(tmp_path):
    assert image.newest(tmp_path / "none") is None
    whole = entry(tmp_path, "whole")
    assert image.load(whole).release == "6.1"
    (entry(tmp_path, "cut") / "kernel").write_bytes(b"k" * 9)
    (entry(tmp_path, "bare") / "modules.cpio").unlink()
    (entry(tmp_path, "mute") / "image.json").unlink()
    (entry(tmp_path, "torn") / "image.json").write_text('{"recipe": "')
    (entry(tmp_path, "list") / "image.json").write_text("[]")
    entry(tmp_path, "other", recipe="of another version")
    entry(tmp_path, "less", sizes={})
    entry(tmp_path, ".build-x/entry")
    for name in ("cut", "bare", "mute", "torn", "list", "other", "less"):
        assert image.load(tmp_path / name) is None, name
    assert image.newest(tmp_path).folder == whole


def boot_image(kernel: bytes) -> bytes:
    """An x86 boot image as far as its header counts: two sectors of set-up, then the packed kernel and its size."""
    payload = lzma.compress(kernel, lzma.FORMAT_XZ) + struct.pack("<I", len(kernel))
    head = bytearray(3 * 512)
    head[0x1F1] = 2
    head[0x202:0x208] = b"HdrS" + struct.pack("<H", 0x020F)
    struct.pack_into("<II", head, 0x248, 16, len(payload))
    return bytes(head) + b"\x90" * 16 + payload


def test_the_kernel_comes_out_of_its_boot_image():
    kernel = b"\x7fELF" + b"kernel" * 1000
    assert image.elf_kernel(boot_image(kernel)) == kernel
    assert image.elf_kernel(b"\0" * 4096) is None
    assert image.elf_kernel(boot_image(b"not an ELF file")) is None
    assert image.unpacked(gzip.compress(kernel), "x") == kernel
    with pytest.raises(SoftRoceError, match=r"x\.ko\.xz"):
        image.unpacked(lzma.compress(kernel)[:100] + b"\0" * 50, "x.ko.xz")


def test_modules_come_after_what_they_need(monkeypatch):
    monkeypatch.setattr(image, "MODULES", ("rdma_rxe", "crc32_generic", "veth"))
    dependencies = (
        "kernel/a/rdma-rxe.ko.xz: kernel/b/ib_uverbs.ko.xz kernel/b/ib_core.ko.xz\n"
        "kernel/b/ib_uverbs.ko.xz: kernel/b/ib_core.ko.xz\nkernel/b/ib_core.ko.xz:\nkernel/c/veth.ko:\n"
    )
    order = [Path(path).name for path in image.load_order(dependencies, "kernel/crypto/crc32_generic.ko\n")]
    assert order == ["ib_core.ko.xz", "ib_uverbs.ko.xz", "rdma-rxe.ko.xz", "veth.ko"]
    with pytest.raises(SoftRoceError, match="no module crc32_generic: a cloud flavour"):
        image.load_order(dependencies, "")


@pytest.fixture
def package(tmp_path) -> Path:
    """A kernel's package as Debian lays it out, with nothing to boot in it."""
    for name in ("dpkg-deb", "depmod"):
        if find_program(name) is None:
            pytest.skip(f"{name} is not installed")
    release, root = "6.1.0-0-amd64", tmp_path / "package"
    modules = root / "lib/modules" / release / "kernel"
    for folder in (root / "DEBIAN", root / "boot", modules):
        folder.mkdir(parents=True)
    fields = {"Package": f"linux-image-{release}", "Version": "6.1-1", "Architecture": "amd64", "Description": "test"}
    fields["Maintainer"] = "nobody <nobody@localhost>"
    control = "".join(f"{name}: {value}\n" for name, value in fields.items())
    (root / "DEBIAN/control").write_text(control)
    (root / "boot" / f"vmlinuz-{release}").write_bytes(boot_image(b"\x7fELF kernel"))
    for name in image.MODULES:
        (modules / f"{name}.ko").write_bytes(b"\x7fELF " + name.encode())
    for name in ("modules.order", "modules.builtin"):
        (modules.parent / name).touch()
    deb = tmp_path / "kernel.deb"
    subprocess.run(["dpkg-deb", "--build", root, deb], check=True, capture_output=True, timeout=60)
    return deb


def test_builders_at_once_make_one_entry_and_clear_what_killed_ones_left(package, tmp_path):
    cache = tmp_path / "cache"
    (cache / ".build-left/tree").mkdir(parents=True)
    entry(cache, "older")
    made: list[image.Image] = []
    said: list[str] = []

    def build() -> None:
        made.append(image.build(cache, said.append, package))

    builders = [threading.Thread(target=build) for _ in range(4)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len({one.folder for one in made}) == 1
    assert len(made) == 4
    assert sum(line.startswith("making") for line in said) == 1
    assert sorted(path.name for path in cache.iterdir()) == [".lock", made[0].folder.name]
    assert made[0].kernel.read_bytes() == b"\x7fELF kernel"
    assert image.newest(cache) == made[0]


def test_a_build_that_fails_leaves_nothing(package, tmp_path, monkeypatch):
    monkeypatch.setattr(image, "MODULES", (*image.MODULES, "not_there"))
    with pytest.raises(SoftRoceError, match="no module not_there"):
        image.build(tmp_path / "cache", lambda line: None, package)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_file_that_is_no_kernel_package_is_refused(tmp_path):
    (tmp_path / "x.deb").write_bytes(b"no package")
    with pytest.raises(SoftRoceError, match=r"x\.deb"):
        image.build(tmp_path / "cache", lambda line: None, tmp_path / "x.deb")


def test_the_cache_lies_where_the_desktop_specification_has_it():
    assert softroce.cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/paramwire/softroce")
    assert softroce.cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/paramwire/softroce")


def test_a_folder_that_can_not_be_shared_is_refused_before_anything_starts(tmp_path):
    options = softroce.Options(["true"], {}, where="guest", out=str(tmp_path / "none"))
    with pytest.raises(SoftRoceError, match="mkdir it first"):
        softroce.run(options, tmp_path, lambda line: None)

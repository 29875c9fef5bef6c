"""`make gpu-bundle` packs what the build reads, all of it or nothing, and never more than may travel."""

from __future__ import annotations

import re
from pathlib import Path

import gpu_bundle
import gpu_check
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def system(tmp_path):
    """An include and a library folder with a file for everything that is packed. returns: both"""
    include, lib = tmp_path / "include", tmp_path / "lib"
    for package in gpu_bundle.PACKAGES:
        for name in package.headers:
            path = include / name.replace("*", "_x")
            if not path.suffix:
                path = path / "deep" / "header.h"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        for name in package.libraries:
            path = lib / gpu_bundle.PLATFORM / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    return include, lib


@pytest.fixture
def no_objcopy(monkeypatch):
    """The libraries here are texts."""
    monkeypatch.setattr(gpu_bundle.shutil, "which", lambda name: None)


def test_the_prefix_has_no_folders_of_the_platform_and_no_links(system, tmp_path, no_objcopy):
    include, lib = system
    library = lib / gpu_bundle.PLATFORM / "libisal.so"
    library.rename(library.with_suffix(".so.2.0.30"))
    library.symlink_to("libisal.so.2.0.30")
    gpu_bundle.pack(tmp_path / "out", include, lib)
    places = {path.relative_to(tmp_path / "out").as_posix() for path in gpu_bundle.files(tmp_path / "out")}
    assert {
        "lib/libisal.so",
        "lib/blis-serial/libblis.a",
        "include/blis-serial/deep/header.h",
        "include/isa-l/deep/header.h",
    } <= places
    assert not any(gpu_bundle.PLATFORM in place for place in places)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_what_is_not_installed_is_named_with_its_package(system, tmp_path, no_objcopy):
    include, lib = system
    (lib / gpu_bundle.PLATFORM / "liblz4.a").unlink()
    with pytest.raises(gpu_bundle.BundleError, match=r"liblz4\.a \(Debian: liblz4-dev\)"):
        gpu_bundle.pack(tmp_path / "out", include, lib)


def test_a_bundle_that_is_too_large_is_refused_by_its_largest_files(tmp_path):
    with (tmp_path / "large").open("wb") as file:
        file.truncate(gpu_bundle.BYTES_MAX)
    with pytest.raises(
        gpu_bundle.BundleError, match=r"60\.0 MiB, expected less than 60 MiB; the largest: large 60\.0 MiB"
    ):
        gpu_bundle.check_size(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(gpu_bundle.BYTES_MAX - 1)
    assert gpu_bundle.check_size(tmp_path) == gpu_bundle.BYTES_MAX - 1


def test_a_failed_run_leaves_the_former_bundle_as_it_was(tmp_path, monkeypatch):
    def fail(out, *_):
        raise gpu_bundle.BundleError("no room")

    out = tmp_path / "gpu-bundle"
    out.mkdir()
    (out / "kept").touch()
    monkeypatch.setattr(gpu_bundle, "pack", fail)
    with pytest.raises(gpu_bundle.BundleError):
        gpu_bundle.make(out)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-bundle"]
    assert (out / "kept").exists()


def test_a_bundle_that_changed_on_its_way_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bundle, "pack", lambda out: (out / "header.h").write_text("as packed"))
    monkeypatch.setattr(gpu_bundle, "add_wheels", lambda out: None)
    out = tmp_path / "gpu-bundle"
    gpu_bundle.make(out)
    assert gpu_bundle.differences(out) == []
    assert gpu_check.bundle_problem(out) is None
    (out / "header.h").write_text("as changed")
    (out / "more.h").touch()
    assert gpu_bundle.differences(out) == ["header.h", "more.h"]
    problem = gpu_check.bundle_problem(out)
    assert problem.required
    assert "2 files differ" in problem.what
    (out / gpu_bundle.MANIFEST).write_text("{")
    assert gpu_check.bundle_problem(out).required


def test_a_checkout_without_a_bundle_may_build_from_what_the_machine_has(tmp_path):
    assert not gpu_check.bundle_problem(tmp_path / "gpu-bundle").required


def test_every_library_that_cmake_asks_for_is_packed():
    """A new dependency that is not in the bundle would be found out on the offline machine only."""
    text = (ROOT / "cmake" / "dependencies.cmake").read_text() + (ROOT / "CMakeLists.txt").read_text()
    named = set(re.findall(r"(?:Debian: |PACKAGE )([\w+.-]+)", text)) - {"libc6-dev"}
    assert named
    assert named <= {package.name for package in gpu_bundle.PACKAGES}

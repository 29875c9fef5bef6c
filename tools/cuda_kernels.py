"""The table of CUDA kernels: what ptxas says of each, in docs/cuda-kernels.md.

usage: cuda_kernels.py REPORT           writes the table from a build's report (build/dev/cuda/kernels.ptxas)
       cuda_kernels.py --check [REPORT] status 1 and a line for each finding: a kernel that spills or has a stack frame,
                                        a table that is not of these sources, a report (if one is given) that spills,
                                        or that differs from the table although the same nvcc made both

A spill or a stack frame means memory traffic in an inner loop that its author believed to be in registers, so neither
is allowed. The table carries a digest of the kernels' sources without their comments: a change of code needs a new one,
which whoever has nvcc makes; the check needs none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "cpp/paramwire/cuda/kernels"
# Host code, in the same folder.
NOT_KERNELS = ("launches.cpp", "image.S")
TABLE = "docs/cuda-kernels.md"

HEAD = """# CUDA kernels

What `ptxas -v` says of every kernel of `cpp/paramwire/cuda/kernels/list.hpp`, by architecture: registers of a thread,
bytes of spills (stored + loaded), of stack frame and of static shared memory. Dynamic shared memory is what the launch
functions in `launches.cpp` ask for, at most 48 KiB. Made by `tools/cuda_kernels.py` from the report of a build;
`tests/python/test_cuda_kernels.py` fails on any spill or stack frame, and when this table is not of the tree's sources.
Registers bound how many blocks are resident at once, so a jump in that column is a change of speed.

"""


@dataclasses.dataclass(frozen=True)
class Row:
    kernel: str
    architecture: str
    registers: int
    spills: int
    stack: int
    shared: int

    def cells(self) -> str:
        numbers = (self.registers, self.spills, self.stack, self.shared)
        return f"| {self.kernel} | {self.architecture} | " + " | ".join(map(str, numbers)) + " |"


def kernels_of(root: Path) -> list[str]:
    return re.findall(r"^ *X\((\w+),", (root / SOURCES / "list.hpp").read_text(), re.M)


def digest_of(root: Path) -> str:
    """Of the code of the kernels and of how it is compiled: comments and white space don't count."""
    digest = hashlib.sha256()
    files = [path for path in sorted((root / SOURCES).iterdir()) if path.name not in NOT_KERNELS]
    for path in [*files, root / "cmake" / "nvcc.cmake"]:
        text = re.sub(r"//[^\n]*" if path.suffix != ".cmake" else r"#[^\n]*", "", path.read_text())
        digest.update(path.name.encode() + b"\0" + re.sub(r"\s+", " ", text).encode() + b"\0")
    build = (root / "cmake" / "cuda.cmake").read_text()
    architectures = re.search(r"set\(paramwire_cuda_architectures([^)]*)\)", build)
    digest.update((architectures[1] if architectures else "").encode())
    return digest.hexdigest()[:32]


def read_report(text: str) -> tuple[list[Row], str]:
    """Rows in the order of kernel and architecture, and nvcc's version."""
    rows = []
    entry = re.compile(
        r"Compiling entry function 'pw_(?P<kernel>\w+)' for 'sm_(?P<architecture>\d+)'\n"
        r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
        r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.S,
    )
    for match in entry.finditer(text):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        spills = int(match["stores"]) + int(match["loads"])
        rows.append(
            Row(
                match["kernel"],
                f"sm_{match['architecture']}",
                int(match["registers"]),
                spills,
                int(match["stack"]),
                int(shared[1]) if shared else 0,
            )
        )
    version = re.search(r"release ([\d.]+)", text)
    return sorted(rows, key=lambda row: (row.kernel, int(row.architecture[3:]))), version[1] if version else "unknown"


def write_table(rows: list[Row], version: str, digest: str) -> str:
    lines = [
        HEAD,
        f"nvcc {version}, sources {digest}\n\n",
        "| kernel | architecture | registers | spills | stack | static shared |\n|---|---|---:|---:|---:|---:|\n",
    ]
    return "".join(lines) + "".join(row.cells() + "\n" for row in rows)


def read_table(text: str) -> tuple[list[Row], str, str]:
    rows = [
        Row(kernel, architecture, *map(int, numbers))
        for kernel, architecture, *numbers in re.findall(
            r"^\| (\w+) \| (sm_\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M
        )
    ]
    made = re.search(r"^nvcc ([\w.]+), sources (\w+)$", text, re.M)
    return rows, made[1] if made else "", made[2] if made else ""


def spilled(rows: list[Row], where: str) -> list[str]:
    return [
        f"{where}: kernel {row.kernel} for {row.architecture} spills {row.spills} bytes, stack frame {row.stack}"
        for row in rows
        if row.spills or row.stack
    ]


def check(root: Path, report: str | None) -> list[str]:
    rows, version, digest = read_table((root / TABLE).read_text())
    findings = spilled(rows, TABLE)
    if digest != digest_of(root):
        remedy = "build with nvcc, then run tools/cuda_kernels.py build/dev/cuda/kernels.ptxas"
        findings.append(f"{TABLE} is not of these kernels: {remedy}")
    there = {(row.kernel, row.architecture) for row in rows}
    architectures = {architecture for _, architecture in there}
    findings += [
        f"{TABLE}: no row of kernel {kernel} for {architecture}"
        for kernel in kernels_of(root)
        for architecture in sorted(architectures or {"any architecture"})
        if (kernel, architecture) not in there
    ]
    if report is not None:
        built, made_by = read_report(report)
        findings += spilled(built, "this build")
        if not built:
            findings.append("the report of this build names no kernel")
        if made_by == version and digest == digest_of(root) and built != rows:
            findings.append(f"{TABLE} differs from this build's report, by the same nvcc {version}")
    return findings


def main(words: list[str]) -> int:
    if words[:1] == ["--check"] and len(words) <= 2:
        findings = check(ROOT, Path(words[1]).read_text() if len(words) == 2 else None)
        print("\n".join(findings) if findings else "no kernel spills")
        return 1 if findings else 0
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__)
        return 2
    rows, version = read_report(Path(words[0]).read_text())
    (ROOT / TABLE).write_text(write_table(rows, version, digest_of(ROOT)))
    print(f"{TABLE}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

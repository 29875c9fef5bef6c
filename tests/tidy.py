"""Style as a test: what a reviewer should not have to see.

usage: tests/tidy.py        checks the tree that this file lies in; status 1 and one line for each finding, if any

Each check is a function from a Tree (paths and texts) to findings, so tests/python/test_tidy.py can show each a tree in
which it must find something. File and function lengths are a report at the end, never a failure.
"""

from __future__ import annotations

import ast
import concurrent.futures
import dataclasses
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

# ---------------------------------------------------------------- what is allowed: the tables to edit

# Who may include whom (DESIGN.md, "Shape"). The value is a pattern that the unit's name must match, or ANY.
ANY = r"\w+"
# Of the store a client needs tiers, and checkpoints of what its snapshots hold.
CLIENT_STORE = r"(\w+_)?tier|checkpoint\w*"
LAYERS: dict[str, dict[str, str]] = {
    "base": {},
    "wire": {"base": ANY},
    "codec": {"base": ANY},
    "cuda": {"base": ANY},
    "compute": {"base": ANY, "cuda": ANY},
    "optim": {"base": ANY},
    "control": {"base": ANY},
    "store": {"base": ANY, "wire": ANY, "codec": ANY},  # checkpoints are written encoded, and as deltas
    "net": {"base": ANY, "wire": ANY},
    "client": {"base": ANY, "wire": ANY, "codec": ANY, "store": CLIENT_STORE, "net": ANY, "control": ANY},
    "server": {"base": ANY, "wire": ANY, "codec": ANY, "store": ANY, "net": ANY, "control": ANY, "optim": ANY},
    "engine": {"base": ANY, "client": ANY, "compute": ANY},
    "interop": {"base": ANY, "client": ANY, "cuda": ANY},
}
BINDINGS = {
    "base": ANY,
    "codec": ANY,
    "store": r"checkpoint\w*",
    "compute": r"\w*graph\w*|llama|bert",  # llama_graph() and bert_graph() build graphs
    "client": ANY,
    "server": ANY,
    "engine": ANY,
    "interop": r"device_arrays",
}

# Headers of optional hardware and services stay behind one file each, so that a build without them loses one factory.
EDGE_HEADERS = (
    (r"cuda|cublas", "cpp/paramwire/cuda/"),
    (r"infiniband/|rdma/", "cpp/paramwire/net/verbs"),
    (r"curl/|nlohmann/", "cpp/paramwire/control/etcd_"),
)


@dataclasses.dataclass(frozen=True)
class Ban:
    """A pattern over C++ text without comments and strings, banned in `folders` but for `homes` (path prefixes)."""

    what: str
    pattern: str
    folders: tuple[str, ...]
    instead: str
    homes: tuple[str, ...] = ()


# A call at the start of a statement: a method of the same name, declared or called on an object, is something else.
STATEMENT = r"(?:^|[;{}()]|\belse\b)\s*(?:std::|::)?"
CPP_BANS = (
    Ban("getenv", r"\b(secure_)?getenv\s*\(", ("cpp/", "bindings/"), "take it from an options struct"),
    Ban(
        "printing",
        r"\bstd::(cout|cerr|clog)\b|\bv?f?printf\s*\(|\bf?puts\s*\(|\bputchar\s*\(|\bperror\s*\(",
        ("cpp/", "bindings/"),
        "return an Error; a library never prints",
    ),
    Ban(
        "process death",
        STATEMENT + r"(abort\s*\(\s*\)|terminate\s*\(\s*\)|(_exit|_Exit|exit|quick_exit)\s*\()",
        ("cpp/", "bindings/"),
        "return kInternal; a library never ends the process",
    ),
    Ban("throw", r"\bthrow\b", ("cpp/",), "return Result or Status; no exceptions across the core"),
    Ban(
        "sleep",
        r"\bsleep_(for|until)\b|\b(u|nano|clock_nano)sleep\s*\(|(?<![\w.>])sleep\s*\(",
        ("cpp/", "bindings/", "tests/"),
        "wait for an event with a deadline; in tests move a ManualClock",
    ),
    Ban("a disabled test", r"\bDISABLED_\w+", ("tests/",), "mend it or remove it"),
    Ban("dead code", r"^[ \t]*#[ \t]*if[ \t]+0\b", ("cpp/", "bindings/", "tests/", "bench/", "examples/"), "remove it"),
    Ban("a skip without a reason", r"\bGTEST_SKIP\(\)\s*;", ("tests/",), "stream the reason into it"),
)
HEADER_BANS = (
    Ban("using namespace in a header", r"\busing\s+namespace\b", ("cpp/", "bindings/", "tests/"), "name it in full"),
    Ban(
        "a header that changes with a build switch",
        r"^[ \t]*#[ \t]*(el)?if(n?def)?\b.*\b(HAVE|USE|WITH)_",
        ("cpp/",),
        "keep switches in the factory's source file",
    ),
)

# The one place of the package that has a terminal and an environment (a module or a package of that name).
PYTHON_CLI = "python/paramwire/cli"
# Too heavy, or not there, at `import paramwire`.
LAZY_IMPORTS = ("gguf", "jax", "safetensors", "tokenizers", "torch", "transformers")

# Committed files that may name a folder of some machine, with the reason.
MACHINE_PATHS_ALLOWED: dict[str, str] = {}

LONG_FILE_LINES = 400
LONG_FUNCTION_LINES = 70

# ---------------------------------------------------------------- the tree

CPP_SUFFIXES = (".cpp", ".hpp", ".cu", ".cuh", ".c", ".h", ".inc")
SOURCE_SUFFIXES = (".cpp", ".cu", ".c")


@dataclasses.dataclass(frozen=True)
class Finding:
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


class Tree:
    """The committed text files (and those about to be: untracked, not ignored), by path from the root."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        self.root = root
        self.files = files

    @classmethod
    def of(cls, root: Path) -> Tree:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        )
        files = {}
        for name in listed.stdout.decode().split("\0"):
            path = root / name
            if name and not name.startswith("shared/") and path.is_file():
                data = path.read_bytes()
                if b"\0" not in data:
                    files[name] = data.decode(errors="replace")
        return cls(root, files)

    def under(self, prefix: str, suffixes: tuple[str, ...] = ("",)) -> Iterator[tuple[str, str]]:
        for path, text in sorted(self.files.items()):
            if path.startswith(prefix) and path.endswith(suffixes):
                yield path, text


CPP_TOKENS = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r'|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)


def without_comments(text: str, *, keep_strings: bool = False) -> str:
    """C++ text with comments, and the inside of strings, blanked; line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        token = match[0]
        if keep_strings and not token.startswith("/"):
            return token
        inside = re.sub(r"[^\n]", " ", token)
        return inside if token.startswith("/") or len(token) < 2 else '"' + inside[1:-1] + '"'

    return CPP_TOKENS.sub(blank, text)


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def includes(text: str) -> Iterator[tuple[int, str]]:
    plain = without_comments(text, keep_strings=True)
    for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*([<"][^>"]+)[>"]', plain, re.M):
        yield line_of(text, match.start()), match[1]


# ---------------------------------------------------------------- includes


def check_includes(tree: Tree) -> Iterator[Finding]:
    """The layer table, in the includes and in the CMake link lists; edge headers; own header first."""
    for path, text in [*tree.under("cpp/paramwire/", CPP_SUFFIXES), *tree.under("bindings/", CPP_SUFFIXES)]:
        parts = path.split("/")
        layer = parts[2] if parts[0] == "cpp" else "bindings"
        allowed = BINDINGS if layer == "bindings" else LAYERS.get(layer)
        if allowed is None:
            yield Finding(path, 1, f"layer '{layer}' is not in the layer table")
            continue
        found = list(includes(text))
        for line, name in found:
            yield from check_include(tree, path, layer, allowed, line, name)
        own = "paramwire/" + path.removeprefix("cpp/paramwire/").rsplit(".", 1)[0] + ".hpp"
        if path.endswith(SOURCE_SUFFIXES) and "cpp/" + own in tree.files and (not found or found[0][1] != '"' + own):
            yield Finding(path, 1, f'its own header "{own}" comes first, to show that it compiles alone')
    for path, text in tree.under("", ("CMakeLists.txt",)):
        for match in re.finditer(r"paramwire_layer\(\s*(\w+)([^)]*)\)", text):
            for linked in re.findall(r"\bparamwire_(\w+)", match[2]):
                if linked in LAYERS and linked not in LAYERS.get(match[1], {}):
                    text_of = f"layer '{match[1]}' may not link '{linked}' (layer table)"
                    yield Finding(path, line_of(text, match.start()), text_of)


def check_include(
    tree: Tree, path: str, layer: str, allowed: dict[str, str], line: int, name: str
) -> Iterator[Finding]:
    quoted, target = name[0] == '"', name[1:]
    ours = re.fullmatch(r"paramwire/(\w+)/(?:\w+/)*(\w+)\.(hpp|cuh|inc)", target)
    if ours:
        if not quoted:
            yield Finding(path, line, f'write "{target}" with quotes')
        if "cpp/" + target not in tree.files:
            yield Finding(path, line, f"{target} does not exist")
        if ours[1] != layer and not re.fullmatch(allowed.get(ours[1], "(?!)"), ours[2]):
            yield Finding(path, line, f"layer '{layer}' may not include {target} (layer table)")
    elif quoted and layer != "bindings":
        yield Finding(path, line, f'"{target}": include as "paramwire/<layer>/<unit>.hpp"')
    for pattern, home in EDGE_HEADERS:
        if re.match(pattern, target) and not path.startswith(home):
            yield Finding(path, line, f"<{target}> is included in {home}* only")


def cuda_flags(root: Path) -> list[str] | None:
    """Where <cuda.h> is, as nvcc says; None where there is none. It is looked for as in cmake/cuda.cmake."""
    wheels = root.glob(".venv/lib/python3*/site-packages/nvidia/cu13")
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *wheels]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(f"{home}/bin" for home in homes))
    if nvcc is None:
        return None
    words = [nvcc, "--dryrun", "-x", "cu", "-E", os.devnull]
    says = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    top = re.search(r"TOP=(.+)", says)
    return ["-isystem", str(Path(top[1], "include"))] if top else None


def check_headers_alone(tree: Tree, compiler: str = "c++") -> Iterator[Finding]:
    """Each header compiles by itself, warnings as errors; one that passed is not compiled again until it changes.

    Those that need <cuda.h> are passed over where there is no nvcc: such a build leaves them out, too.
    """
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{tree.root / 'cpp'}"]
    cuda = cuda_flags(tree.root)
    flags += cuda or []
    command = [compiler, *flags, "-x", "c++", "-"]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    passed = tree.root / "build" / "tidy-headers"
    passed.mkdir(parents=True, exist_ok=True)

    def closure(path: str, seen: set[str]) -> set[str]:
        if path not in seen and path in tree.files:
            seen.add(path)
            for _, name in includes(tree.files[path]):
                closure("cpp/" + name[1:], seen)
        return seen

    def compile_alone(path: str) -> Finding | None:
        key = hashlib.sha256(version + repr(flags).encode())
        for part in sorted(closure(path, set())):
            key.update(part.encode() + b"\0" + tree.files[part].encode() + b"\0")
        mark = passed / key.hexdigest()
        if mark.exists():
            return None
        source = f'#include "{path.removeprefix("cpp/")}"\n'
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            mark.touch()
            return None
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        return Finding(path, 1, f"does not compile alone: {reason}")

    def needs_cuda(path: str) -> bool:
        return any(name == "<cuda.h" for part in closure(path, set()) for _, name in includes(tree.files[part]))

    headers = [path for path, _ in tree.under("cpp/paramwire/", (".hpp",)) if cuda is not None or not needs_cuda(path)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from filter(None, pool.map(compile_alone, headers))


# ---------------------------------------------------------------- nobody builds it, nobody reads it


def check_used(tree: Tree) -> Iterator[Finding]:
    """Sources that no target builds, headers that nobody includes, Python test files that pytest does not see."""
    built = set()
    for path, text in tree.under("", ("CMakeLists.txt", ".cmake")):
        text = re.sub(r"#[^\n]*", "", text)
        folder = PurePosixPath(path).parent
        for layer in re.finditer(r"paramwire_layer\(\s*(\w+)([^)]*)\)", text):
            built |= {f"cpp/paramwire/{layer[1]}/{word}" for word in layer[2].split()}
        words = re.findall(r"[^\s()\"]+", text)
        built |= {os.path.normpath(folder / word) for word in words}
        # What cmake/ and cpp/ hold is included in the root's scope.
        root = r"\$\{PROJECT_SOURCE_DIR\}/|\$\{CMAKE_CURRENT_SOURCE_DIR\}/(?=cpp/)"
        built |= {re.sub(root, "", word) for word in words}
    included = {"cpp/" + name[1:] for _, text in tree.under("", CPP_SUFFIXES) for _, name in includes(text)}
    included |= {
        os.path.normpath(PurePosixPath(folder) / name[1:])
        for path, text in tree.under("", CPP_SUFFIXES)
        for _, name in includes(text)
        for folder in (PurePosixPath(path).parent, path.split("/")[0])
    }
    for path, _ in tree.under("", CPP_SUFFIXES):
        if path.endswith(SOURCE_SUFFIXES) and path not in built:
            yield Finding(path, 1, "no CMake target builds this source")
        if not path.endswith(SOURCE_SUFFIXES) and path not in included:
            yield Finding(path, 1, "nobody includes this header")
    everything = "\n".join(text for _, text in tree.under("", (".py",)))
    for path, _ in tree.under("tests/python/", (".py",)):
        name = PurePosixPath(path).stem
        seen = name.startswith("test_") or name in ("conftest", "__init__")
        if not seen and not re.search(rf"^\s*(from|import)\s[\w.]*\b{name}\b", everything, re.M):
            yield Finding(path, 1, "neither a test_*.py nor imported by one: pytest never runs it")


def check_one_definition(tree: Tree) -> Iterator[Finding]:
    """No two headers define one type: both are in one library, where the linker takes either's functions for both."""
    seen: dict[tuple[str, str], str] = {}
    definition = re.compile(r"(?:struct|class|enum class) (?:\[\[nodiscard\]\] )?(\w+)(?: final)?(?: :[^;]*)? ?\{")
    for path, text in tree.under("cpp/paramwire/", (".hpp",)):
        space = ""
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            opened = re.match(r"(?:inline )?namespace ([\w:]+) \{", line)
            space = opened[1] if opened else space
            found = definition.match(line)
            if found:
                first = seen.setdefault((space, found[1]), path)
                if first != path:
                    yield Finding(path, number, f"{space}::{found[1]} is defined in {first}, too")


def check_options(tree: Tree) -> Iterator[Finding]:
    """Build options that nothing reads, and presets or pyproject settings of options that do not exist."""
    texts = {path: re.sub(r"#[^\n]*", "", text) for path, text in tree.under("", ("CMakeLists.txt", ".cmake"))}
    declaration = re.compile(r"\boption\(\s*(PARAMWIRE_\w+)|\bset\(\s*(PARAMWIRE_\w+)[^)]*\bCACHE\b")
    options = {}
    for path, text in texts.items():
        for match in declaration.finditer(text):
            options[match[1] or match[2]] = (path, line_of(text, match.start()))
    for name, (path, line) in options.items():
        if sum(len(re.findall(rf"\b{name}\b", text)) for text in texts.values()) < 2:
            yield Finding(path, line, f"option {name} is read nowhere")
    for path in ("CMakePresets.json", "pyproject.toml"):
        for match in re.finditer(r'^\s*"?(PARAMWIRE_\w+)"?\s*[:=]|"(PARAMWIRE_\w+)":', tree.files.get(path, ""), re.M):
            name = match[1] or match[2]
            if name not in options:
                yield Finding(path, line_of(tree.files[path], match.start()), f"{name} is no option of the build")


# ---------------------------------------------------------------- calls out of their homes


def check_cpp_calls(tree: Tree) -> Iterator[Finding]:
    for path, text in tree.under("", CPP_SUFFIXES):
        plain = without_comments(text)
        header = path.endswith((".hpp", ".cuh", ".h"))  # not .inc, which is meant to be included more than once
        if header and "#pragma once" not in plain:
            yield Finding(path, 1, "a header starts with #pragma once")
        for ban in CPP_BANS + (HEADER_BANS if header else ()):
            if path.startswith(ban.folders) and not path.startswith(ban.homes or ("\0",)):
                for match in re.finditer(ban.pattern, plain, re.M):
                    if not calls_own_function(tree, path, plain, match[0]):
                        yield Finding(path, line_of(plain, match.end() - 1), f"{ban.what}: {ban.instead}")


def calls_own_function(tree: Tree, path: str, plain: str, call: str) -> bool:
    """Whether an unqualified call is of a function that this file or its own header declares."""
    name = re.search(r"(?<![\w:])(\w+)\s*\([^(]*$", call)
    if not name or name[1] not in ("abort", "exit", "terminate"):
        return False
    own = plain + without_comments(tree.files.get(path.rsplit(".", 1)[0] + ".hpp", ""))
    return re.search(rf"(?<!return)(?<!else)[\w>&*]\s+{name[1]}\s*\(|\w::{name[1]}\s*\([^;]*\{{", own) is not None


def check_python_calls(tree: Tree) -> Iterator[Finding]:
    for path, text in [*tree.under("python/", (".py",)), *tree.under("tests/", (".py",))]:
        module = ast.parse(text, path)
        package = path.startswith("python/paramwire/")
        quiet = package and not path.startswith(PYTHON_CLI)
        for node in ast.walk(module):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            line = getattr(node, "lineno", 1)
            if name in ("time.sleep", "sleep", "asyncio.sleep"):
                yield Finding(path, line, "sleep: wait for the event, with a deadline")
            if quiet and name == "print":
                yield Finding(path, line, f"print outside {PYTHON_CLI}: use logging")
            if quiet and name in ("sys.exit", "os._exit", "exit", "quit", "os.abort"):
                yield Finding(path, line, f"process death outside {PYTHON_CLI}: raise an error")
            if quiet and (name in ("os.getenv", "getenv") or dotted(node) in ("os.environ", "environ")):
                yield Finding(path, line, f"the environment is read in {PYTHON_CLI} only")
            if name in ("pytest.mark.skip", "pytest.skip", "pytest.mark.xfail") and not (node.args or node.keywords):
                yield Finding(path, line, "a skip without a reason")
        for node in module.body if package else []:
            for imported in imported_names(node):
                if imported in LAZY_IMPORTS and not PurePosixPath(path).stem.startswith(imported):
                    yield Finding(path, node.lineno, f"{imported} at import: import it in the function that needs it")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def imported_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [(node.module or "").split(".")[0]]
    return []


# ---------------------------------------------------------------- wire format

# Widths that depend on the machine or the compiler.
UNFIXED_TYPE = re.compile(r"\b(bool|char|short|int|long|unsigned|signed|size_t|ptrdiff_t|float|double|wchar_t)\b(?!_)")


def without_nested_braces(text: str) -> str:
    """Blanks what is between braces: the bodies of a struct's functions. Line numbers stay."""
    depth, kept = 0, []
    for character in text:
        depth -= character == "}"
        kept.append(character if depth == 0 or character == "\n" else " ")
        depth += character == "{"
    return "".join(kept)


def struct_members(plain: str, name: str) -> Iterator[tuple[int, str, str]]:
    """Line, type and name of the data members of `name` in text without comments."""
    start = re.search(rf"\bstruct\s+(?:alignas\([^)]*\)\s*)?{name}\s*(?:final\s*)?\{{", plain)
    if not start:
        return
    depth, at = 1, start.end()
    while at < len(plain) and depth:
        depth += {"{": 1, "}": -1}.get(plain[at], 0)
        at += 1
    body = without_nested_braces(plain[start.end() : at - 1])
    kind_and_name = r"^[ \t]*((?:[\w:]+(?:<[^;()]*>)?\s+)+)(\w+)\s*"
    member = re.compile(kind_and_name + r"(?:\[[^\]]*\]\s*)*(?:=[^;()]*|\{[^;()]*\})?;", re.M)
    for match in member.finditer(body):
        kind = match[1].split()
        if kind[0] not in ("using", "friend", "return", "static", "struct", "enum", "class"):
            yield line_of(plain, start.end() + match.start(2)), " ".join(kind), match[2]


def check_wire_structs(tree: Tree) -> Iterator[Finding]:
    """Structs whose bytes are sent or stored: asserted size, no padding; members of fixed width."""
    wanted = {
        "static_assert(sizeof(X) == ...)": r"static_assert\(\s*sizeof\((\w+)\)\s*==",
        "static_assert(std::has_unique_object_representations_v<X>)": r"\bhas_unique_object_representations_v<(\w+)>",
    }
    for path, text in tree.under("cpp/paramwire/wire/", (".hpp",)):
        plain = without_comments(text)
        found = {assertion: set(re.findall(pattern, plain)) for assertion, pattern in wanted.items()}
        structs = set().union(*found.values(), re.findall(r"\boffsetof\((\w+)\s*,", plain))
        for name in sorted(structs & set(re.findall(r"\bstruct\s+(?:alignas\([^)]*\)\s*)?(\w+)", plain))):
            for assertion, names in found.items():
                if name not in names:
                    yield Finding(path, 1, f"wire struct {name} lacks {assertion.replace('X', name)}")
            for line, kind, member in struct_members(plain, name):
                if UNFIXED_TYPE.search(kind):
                    yield Finding(path, line, f"wire struct {name}: {member} needs a type of fixed width, not {kind}")


def check_format_page(tree: Tree) -> Iterator[Finding]:
    """Each member of the structs in block_header.hpp, and each message of message.hpp, is described in FORMAT.md."""
    folder = "cpp/paramwire/wire/"
    if not any(tree.under(folder, CPP_SUFFIXES)):
        return
    page = tree.files.get(folder + "FORMAT.md")
    if page is None:
        yield Finding(folder + "FORMAT.md", 1, "the wire format has no page")
        return
    words = set(re.findall(r"\w+", page))
    header = without_comments(tree.files.get(folder + "block_header.hpp", ""))
    for name in re.findall(r"\bstruct\s+(?:alignas\([^)]*\)\s*)?(\w+)\s*(?:final\s*)?\{", header):
        for line, _, member in struct_members(header, name):
            if not words & {member, member.rstrip("_")}:
                yield Finding(folder + "block_header.hpp", line, f"FORMAT.md lacks the field {name}.{member}")
    message = without_comments(tree.files.get(folder + "message.hpp", ""))
    names = {(match.start(), match[1]) for match in re.finditer(r"\bstruct\s+(\w+)\s*(?:final\s*)?\{", message)}
    for block in re.finditer(r"\benum\s+class\s+\w+[^{;]*\{([^}]*)\}", message):
        names |= {(block.start(1) + entry.start(), entry[1]) for entry in re.finditer(r"\bk([A-Z]\w*)", block[1])}
    for offset, name in sorted(names):
        upper = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
        if not words & {name, "k" + name, upper}:
            yield Finding(folder + "message.hpp", line_of(message, offset), f"FORMAT.md lacks the message {name}")


# ---------------------------------------------------------------- any text


def check_text(tree: Tree) -> Iterator[Finding]:
    """No folder of somebody's machine, no package index, nothing left for later."""
    patterns = (
        (r"(?<![\w.~$}*)-])/(home|root|work|tmp)/[a-z]\w*", "a folder of some machine: use a relative one"),
        (r"(?i)index[-_]url|trusted[-_]host|https?://\S+/simple\b", "names a package index"),
        (r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b", "left for later: do it now or leave it out"),
    )
    for path, text in tree.under(""):
        for pattern, why in patterns:
            for match in re.finditer(pattern, text) if path not in MACHINE_PATHS_ALLOWED else ():
                yield Finding(path, line_of(text, match.start()), f"{match[0]}: {why}")


def check_project_file(tree: Tree) -> Iterator[Finding]:
    """Strictness that would be missed silently if it went: mypy strict, pytest strict, warnings as errors."""
    text = tree.files.get("pyproject.toml", "")
    tool = tomllib.loads(text).get("tool", {})
    pytest = tool.get("pytest", {}).get("ini_options", {})
    wanted = {
        "tool.mypy: strict = true": tool.get("mypy", {}).get("strict") is True,
        "tool.pytest.ini_options: xfail_strict = true": pytest.get("xfail_strict") is True,
        'tool.pytest.ini_options: filterwarnings starts with "error"': pytest.get("filterwarnings", [""])[0] == "error",
    }
    for what, there in wanted.items():
        if not there:
            yield Finding("pyproject.toml", 1, f"lacks {what}")
    presets = tree.files.get("CMakePresets.json", "")
    if not re.search(r'"PARAMWIRE_WERROR":\s*"ON"', presets):
        yield Finding("CMakePresets.json", 1, 'lacks "PARAMWIRE_WERROR": "ON"')


CHECKS = (
    check_includes,
    check_headers_alone,
    check_used,
    check_one_definition,
    check_options,
    check_cpp_calls,
    check_python_calls,
    check_wire_structs,
    check_format_page,
    check_text,
    check_project_file,
)

# ---------------------------------------------------------------- lengths, a report


def functions(path: str, text: str) -> Iterator[tuple[int, int, str]]:
    """First line, length and name of each function; C++ by indentation, from a line ") ... {" to its "}"."""
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1, node.name
        return
    lines = without_comments(text).splitlines()
    for number, line in enumerate(lines):
        opening = re.match(r"( {0,4})\S.*\).*\{$", line)
        if opening and not re.match(r"\s*(if|for|while|switch|else|do|struct|class|namespace)\b", line):
            for end in range(number + 1, len(lines)):
                if re.match(opening[1] + r"\}", lines[end]):
                    yield number + 1, end - number + 1, line.strip()
                    break


def report(tree: Tree) -> Iterable[str]:
    for path, text in tree.under("", (".py", *CPP_SUFFIXES)):
        count = text.count("\n")
        if count > LONG_FILE_LINES:
            yield f"{path}: {count} lines"
        for line, length, name in functions(path, text):
            if length > LONG_FUNCTION_LINES:
                yield f"{path}:{line}: {length} lines in {name}"


def main() -> int:
    tree = Tree.of(Path(__file__).resolve().parent.parent)
    findings = [finding for check in CHECKS for finding in check(tree)]
    for finding in findings:
        print(finding)
    for line in report(tree):
        print(f"long, worth a look: {line}")
    print(f"tidy: {len(tree.files)} files, {len(CHECKS)} checks, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

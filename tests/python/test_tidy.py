"""Each check of tests/tidy.py finds what it is there for and spares a good tree: a check that cannot fail is none."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_tidy():
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tests" / "tidy.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["tidy"] = module
    spec.loader.exec_module(module)
    return module


tidy = load_tidy()

HEADER = """// Header of a block.
#pragma once
#include "paramwire/base/error.hpp"
#include <cstdint>
#include <type_traits>
namespace paramwire {
enum class DType : std::uint16_t { kU8 = 1 };
struct BlockHeader {
  std::uint64_t magic = 0;
  DType dtype{};
  std::uint16_t flags = 0;
  std::uint8_t reserved[4] = {};
  bool valid() const { const bool local = magic != 0; return local; }
};
static_assert(sizeof(BlockHeader) == 16);
static_assert(std::is_trivially_copyable_v<BlockHeader>);
static_assert(std::has_unique_object_representations_v<BlockHeader>);
}  // namespace paramwire
"""

# A small tree that breaks no rule, though it says abort, sleep and printf in comments, strings and names of its own.
GOOD = {
    "CMakeLists.txt": 'option(PARAMWIRE_FAST "x" OFF)\nif(PARAMWIRE_FAST)\nendif()\ninclude(cpp/CMakeLists.txt)\n',
    "CMakePresets.json": '{"PARAMWIRE_FAST": "ON", "PARAMWIRE_WERROR": "ON"}\n',
    "pyproject.toml": '[tool.mypy]\nstrict = true\n[tool.pytest.ini_options]\nxfail_strict = true\nfilterwarnings = ["error"]\n',
    "cpp/CMakeLists.txt": (
        'set(PARAMWIRE_WERROR "" CACHE STRING "")\nmessage(${PARAMWIRE_WERROR})\n'
        "paramwire_layer(base SOURCES error.cpp)\nparamwire_layer(wire SOURCES block_header.cpp LINK paramwire_base)\n"
    ),
    "cpp/paramwire/base/error.hpp": "#pragma once\nnamespace paramwire { struct Publish { int abort(); int exit(int); }; }\n",
    "cpp/paramwire/base/error.cpp": (
        '#include "paramwire/base/error.hpp"\n// never abort(); never printf("x"); // sleep(1)\n'
        'const char* text = "abort(); std::cout";\nint paramwire::Publish::abort() {\n  const int million = 1\'000\'000;\n'
        "  return million;\n}\nint stop() {\n  abort();\n  return 1;\n}\nint paramwire::Publish::exit(int a) { return this->abort() + snprintf(nullptr, 0, \"%d\", a); }\n"
    ),
    "cpp/paramwire/wire/block_header.hpp": HEADER,
    "cpp/paramwire/wire/message.hpp": (
        '#pragma once\n#include "paramwire/wire/block_header.hpp"\n#include <cstdint>\n'
        "namespace paramwire {\nenum class MessageType : std::uint8_t { kFetchReply = 1 };\nstruct FetchReply { BlockHeader a; };\n}\n"
    ),
    "cpp/paramwire/wire/block_header.cpp": (
        '#include "paramwire/wire/block_header.hpp"\n#include "paramwire/wire/message.hpp"\n'
    ),
    "cpp/paramwire/wire/FORMAT.md": "| magic | dtype | flags | reserved |\nFETCH_REPLY\n",
    "python/paramwire/__init__.py": "import logging\n\n\ndef load():\n    import torch\n\n    return torch, logging\n",
    "python/paramwire/cli.py": "import os\n\nprint(os.environ)\n",
    "tests/CMakeLists.txt": "paramwire_test(base_test SOURCES cpp/base_test.cpp)\n",
    "tests/cpp/base_test.cpp": '#include "paramwire/base/error.hpp"\nTEST(A, B) { GTEST_SKIP() << "no device"; }\n',
    "tests/python/test_x.py": "from helper import x\n",
    "tests/python/helper.py": "x = 1\n",
}

# check -> (file, text to append or a pair to replace, part of the finding)
BAD = {
    "check_includes": [
        ("cpp/paramwire/base/error.hpp", '#include "paramwire/wire/message.hpp"\n', "layer 'base' may not include"),
        ("cpp/paramwire/base/error.cpp", '#include "error.hpp"\n', 'include as "paramwire'),
        ("cpp/paramwire/base/error.cpp", "#include <paramwire/base/error.hpp>\n", "with quotes"),
        ("cpp/paramwire/base/error.cpp", '#include "paramwire/base/gone.hpp"\n', "does not exist"),
        ("cpp/paramwire/base/error.cpp", "#include <infiniband/verbs.h>\n", "net/verbs* only"),
        ("cpp/paramwire/base/error.cpp", "#include <cuda_runtime.h>\n", "paramwire/cuda/* only"),
        ("cpp/paramwire/base/error.cpp", "#include <curl/curl.h>\n", "control/etcd_* only"),
        ("cpp/paramwire/base/error.cpp", ('#include "paramwire/base/error.hpp"', "#include <cstdint>"), "comes first"),
        ("cpp/paramwire/misc/x.cpp", "int x;\n", "'misc' is not in the layer table"),
        ("cpp/paramwire/client/x.cpp", '#include "paramwire/store/block_store.hpp"\n', "layer 'client' may not include"),
        ("bindings/module.cpp", '#include "paramwire/wire/message.hpp"\n', "layer 'bindings' may not include"),
        ("cpp/CMakeLists.txt", "paramwire_layer(base LINK paramwire_wire)\n", "may not link 'wire'"),
    ],
    "check_headers_alone": [
        ("cpp/paramwire/base/bytes.hpp", "#pragma once\nstd::uint32_t x();\n", "does not compile alone"),
        ("cpp/paramwire/base/bytes.hpp", "#pragma once\ninline int f(int unused) { return 1; }\n", "does not compile alone"),
    ],
    "check_used": [
        ("cpp/paramwire/base/dead.cpp", "int x;\n", "no CMake target builds"),
        ("cpp/paramwire/base/dead.hpp", "#pragma once\n", "nobody includes"),
        ("tests/cpp/dead_test.cpp", "int x;\n", "no CMake target builds"),
        ("tests/CMakeLists.txt", ("paramwire_test(", "# paramwire_test("), "no CMake target builds"),
        ("tests/python/lost.py", "def test_x(): assert False\n", "pytest never runs it"),
    ],
    "check_one_definition": [
        ("cpp/paramwire/wire/more.hpp", "namespace paramwire {\nclass BlockHeader final : public X {\n", "is defined in cpp/paramwire/wire/block_header.hpp, too"),
        ("cpp/paramwire/wire/more.hpp", "namespace paramwire {\nenum class DType : int { kA };\n", "paramwire::DType is defined in"),
    ],
    "check_options": [
        ("CMakeLists.txt", 'option(PARAMWIRE_DEAD "x" ON)\n', "PARAMWIRE_DEAD is read nowhere"),
        ("CMakeLists.txt", 'option(PARAMWIRE_DEAD "x" ON)  # PARAMWIRE_DEAD\n', "PARAMWIRE_DEAD is read nowhere"),
        ("CMakeLists.txt", 'set(PARAMWIRE_DEAD "x" CACHE STRING "")\n', "PARAMWIRE_DEAD is read nowhere"),
        ("CMakePresets.json", '"PARAMWIRE_GONE": "ON"\n', "PARAMWIRE_GONE is no option"),
        ("pyproject.toml", "PARAMWIRE_GONE = true\n", "PARAMWIRE_GONE is no option"),
    ],
    "check_cpp_calls": [
        ("cpp/paramwire/base/error.cpp", 'auto x = std::getenv("X");\n', "getenv"),
        ("cpp/paramwire/base/error.cpp", "void f() { std::cout << 1; }\n", "printing"),
        ("cpp/paramwire/base/error.cpp", 'void f() { std::fprintf(stderr, "x"); }\n', "printing"),
        ("bindings/module.cpp", 'void f() {\n  printf("x");\n}\n', "printing"),
        ("cpp/paramwire/base/error.cpp", "void f() {\n  std::abort();\n}\n", "process death"),
        ("cpp/paramwire/wire/block_header.cpp", "void f() { if (x) abort(); }\n", "process death"),
        ("cpp/paramwire/wire/block_header.cpp", "void f() {\n  exit(1);\n}\n", "process death"),
        ("cpp/paramwire/base/error.cpp", "void f() {\n  ::_exit(1);\n}\n", "process death"),
        ("cpp/paramwire/base/error.cpp", "void f() { throw 1; }\n", "throw"),
        ("tests/cpp/base_test.cpp", "void f() { std::this_thread::sleep_for(x); }\n", "sleep"),
        ("cpp/paramwire/base/error.cpp", "void f() { ::usleep(1); }\n", "sleep"),
        ("tests/cpp/base_test.cpp", "TEST(A, DISABLED_C) {}\n", "a disabled test"),
        ("tests/cpp/base_test.cpp", "#if 0\n#endif\n", "dead code"),
        ("tests/cpp/base_test.cpp", "TEST(A, C) { GTEST_SKIP(); }\n", "a skip without a reason"),
        ("cpp/paramwire/base/error.hpp", "using namespace std;\n", "using namespace"),
        ("cpp/paramwire/base/error.hpp", "#ifdef HAVE_VERBS\n#endif\n", "build switch"),
        ("cpp/paramwire/base/error.hpp", ("#pragma once", ""), "#pragma once"),
    ],
    "check_python_calls": [
        ("python/paramwire/__init__.py", "print(1)\n", "print outside"),
        ("python/paramwire/__init__.py", "import os\nos.environ['X']\n", "the environment"),
        ("python/paramwire/__init__.py", "import os\nos.getenv('X')\n", "the environment"),
        ("python/paramwire/__init__.py", "import sys\nsys.exit(1)\n", "process death"),
        ("python/paramwire/__init__.py", "import torch\n", "torch at import"),
        ("python/paramwire/__init__.py", "from torch.nn import x\n", "torch at import"),
        ("tests/python/test_x.py", "import time\ntime.sleep(1)\n", "sleep"),
        ("tests/python/test_x.py", "pytest.skip()\n", "a skip without a reason"),
    ],
    "check_wire_structs": [
        ("cpp/paramwire/wire/block_header.hpp", ("static_assert(sizeof(BlockHeader) == 16);", ""), "lacks static_assert(sizeof"),
        ("cpp/paramwire/wire/block_header.hpp", ("std::has_unique_object_representations_v<BlockHeader>", "true"), "has_unique"),
        ("cpp/paramwire/wire/block_header.hpp", ("std::uint16_t flags", "bool flags"), "flags needs a type of fixed width"),
        ("cpp/paramwire/wire/block_header.hpp", ("std::uint64_t magic", "std::size_t magic"), "magic needs a type"),
    ],
    "check_format_page": [
        ("cpp/paramwire/wire/FORMAT.md", ("flags", "banners"), "lacks the field BlockHeader.flags"),
        ("cpp/paramwire/wire/FORMAT.md", ("reserved", ""), "lacks the field BlockHeader.reserved"),
        ("cpp/paramwire/wire/FORMAT.md", ("FETCH_REPLY", ""), "lacks the message FetchReply"),
        ("cpp/paramwire/wire/message.hpp", "enum class Kind { kGone };\n", "lacks the message Gone"),
        ("cpp/paramwire/wire/message.hpp", "struct Lost { };\n", "lacks the message Lost"),
        ("cpp/paramwire/wire/FORMAT.md", None, "has no page"),
    ],
    "check_text": [
        ("README.md", "cd /" + "home/someone\n", "folder of some machine"),
        ("README.md", "(/" + "root/x)\n", "folder of some machine"),
        ("Makefile", "x = '/" + "tmp/x'\n", "folder of some machine"),
        ("Makefile", "pip --extra-index" + "-url x\n", "package index"),
        ("cpp/paramwire/base/error.cpp", "// TO" + "DO: later\n", "left for later"),
    ],
    "check_project_file": [
        ("pyproject.toml", ("strict = true\n[tool.pytest", "[tool.pytest"), "strict = true"),
        ("pyproject.toml", ("xfail_strict = true", ""), "xfail_strict"),
        ("pyproject.toml", ('["error"]', '["ignore"]'), "filterwarnings"),
        ("CMakePresets.json", ('"PARAMWIRE_WERROR": "ON"', ""), "PARAMWIRE_WERROR"),
    ],
}


def changed(path, change):
    files = dict(GOOD)
    if change is None:
        del files[path]
    elif isinstance(change, tuple):
        before, after = change
        assert before in files[path], "the snippet no longer fits the good tree"
        files[path] = files[path].replace(before, after)
    else:
        files[path] = files.get(path, "") + change
    return files


def findings(check, files, root):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return [str(finding) for finding in getattr(tidy, check)(tidy.Tree(root, files))]


def test_every_check_has_bad_snippets():
    assert {check.__name__ for check in tidy.CHECKS} == set(BAD)


@pytest.mark.parametrize("check", BAD)
def test_a_good_tree_has_no_findings(check, tmp_path):
    assert findings(check, GOOD, tmp_path) == []


@pytest.mark.parametrize(
    ("check", "path", "change", "expected"), [(check, *snippet) for check, snippets in BAD.items() for snippet in snippets]
)
def test_a_bad_snippet_is_found(check, path, change, expected, tmp_path):
    found = findings(check, changed(path, change), tmp_path)
    assert any(expected in line for line in found), found


def test_a_header_is_compiled_again_when_what_it_includes_changes(tmp_path):
    good = {"cpp/paramwire/base/a.hpp": "#pragma once\ninline int f() { return 1; }\n"}
    good["cpp/paramwire/base/b.hpp"] = '#pragma once\n#include "paramwire/base/a.hpp"\ninline int g() { return f(); }\n'
    assert findings("check_headers_alone", good, tmp_path) == []
    bad = good | {"cpp/paramwire/base/a.hpp": "#pragma once\n"}
    assert "b.hpp" in findings("check_headers_alone", bad, tmp_path)[0]


def test_long_functions_are_reported_in_both_languages(tmp_path):
    body = "".join(f"  x = {number};\n" for number in range(80))
    files = {"a.cpp": "int f(int x) {\n" + body + "}\n", "b.py": "def f():\n" + body.replace(";", "")}
    lines = list(tidy.report(tidy.Tree(tmp_path, files)))
    assert [line.split(":")[0] for line in lines] == ["a.cpp", "b.py"]

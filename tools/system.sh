#!/bin/bash
# Say which system packages `make demo` or `make test` still needs, in one line that installs them; exit 1 if any is missing.
# usage: tools/system.sh demo|test|packages      ("packages" prints all of them, for a fresh machine)
set -euo pipefail

demo_packages="g++ cmake python3 python3-venv git"
test_packages="libgtest-dev clang libclang-rt-dev pkg-config rustc"
if [[ ${1:-} == packages ]]; then
  echo "$demo_packages make $test_packages"
  exit
fi

missing=()
need() { # need PACKAGE COMMAND...: the package is missing if the command fails
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
program='int main() {}'
python=${PYTHON:-python3}
need g++ sh -c "command -v c++"
need cmake cmake --version
need git git --version
need "python3 (>= 3.10)" "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'
need python3-venv "$python" -c 'import venv, ensurepip'
if [[ ${1:-} == test ]]; then
  need libgtest-dev sh -c 'echo "#include <gtest/gtest.h>" | c++ -E -x c++ -'
  need clang clang++ --version
  need libclang-rt-dev sh -c "echo '$program' | clang++ -x c++ - -fsanitize=address -o /dev/null"
  need pkg-config pkg-config --version
fi
if ((${#missing[@]})); then
  echo "missing: ${missing[*]}; on Debian or Ubuntu: apt-get install -y ${missing[*]/ (>= 3.10)/}" >&2
  exit 1
fi

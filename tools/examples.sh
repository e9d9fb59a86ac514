#!/bin/bash
# Build and run every program of examples/ as an outside project would: against an installed library, through find_package, through
# pkg-config, and from Rust.  usage: tools/examples.sh BUILD WORK    (BUILD holds a finished build, WORK is made anew)
set -euo pipefail
build=$1 work=$2
rm -rf "$work"
mkdir -p "$work"
prefix=$PWD/$work/prefix
cmake --install "$build" --prefix "$prefix" >/dev/null

echo "== find_package"
cmake -S examples -B "$work/cmake" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" --log-level=WARNING
cmake --build "$work/cmake"
ctest --test-dir "$work/cmake" --output-on-failure --no-tests=error

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name ffpa.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir ffpa)
for source in examples/*.c; do
  name=$(basename "$source" .c)
  echo "== pkg-config: $name"
  # shellcheck disable=SC2046
  cc -Wall -Wextra -Werror "$source" -o "$work/$name" $(pkg-config --cflags --libs ffpa) -lm "-Wl,-rpath,$libdir"
  "$work/$name"
done

if command -v rustc >/dev/null; then
  for source in examples/*.rs; do
    name=$(basename "$source" .rs)
    echo "== rustc: $name"
    rustc --edition 2021 -D warnings -O "$source" -o "$work/$name-rust" -L "native=$libdir" -l ffpa -C "link-arg=-Wl,-rpath,$libdir"
    "$work/$name-rust"
  done
else
  echo "== rustc: SKIPPED, no rustc here (Debian: apt-get install -y rustc)"
fi

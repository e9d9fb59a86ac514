#!/bin/bash
# Build and run every program of examples/ as an outside project would, against an installed library: C++ through find_package, C
# through pkg-config, Rust by rustc alone.  usage: tools/examples.sh BUILD WORK   (BUILD: a finished build; WORK: made anew)
set -euo pipefail
build=$1 work=$2
rm -rf "$work"
mkdir -p "$work"
prefix=$PWD/$work/prefix
cmake --install "$build" --prefix "$prefix" >/dev/null

echo "== C++, find_package"
cmake -S examples/cpp -B "$work/cpp" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" --log-level=WARNING
cmake --build "$work/cpp"
for source in examples/cpp/*.cpp; do "$work/cpp/$(basename "$source" .cpp)"; done

PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name ffpa.pc)")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir ffpa)
for source in examples/c/*.c; do
  program=$work/$(basename "$source" .c)
  echo "== C, pkg-config: $source"
  # shellcheck disable=SC2046
  cc -std=c11 -Wall -Wextra -Werror "$source" -o "$program" $(pkg-config --cflags --libs ffpa) -lm "-Wl,-rpath,$libdir"
  "$program"
done

source=examples/rust/decode.rs
if command -v rustc >/dev/null; then
  echo "== Rust: $source"
  rustc --edition 2021 -D warnings -O "$source" -o "$work/decode" -L "native=$libdir" -C "link-arg=-Wl,-rpath,$libdir"
  "$work/decode"
else
  echo "== Rust: SKIPPED, there is no rustc (Debian, Ubuntu: apt-get install -y rustc)"
fi

#!/bin/bash
# Run every fuzzer of a build for its share of the seconds, starting from its seeds. New findings are not kept; a crash stays in
# BUILD/crashes and fails the step.  usage: tools/fuzz.sh BUILD SECONDS
set -euo pipefail
build=$1 seconds=$2
fuzzers=("$build"/bin/fuzz_*)
[[ -x ${fuzzers[0]} ]] || { echo "no fuzzer in $build/bin" >&2; exit 1; }
for fuzzer in "${fuzzers[@]}"; do
  name=$(basename "$fuzzer" | sed 's/^fuzz_//')
  corpus=$build/corpus/$name
  mkdir -p "$corpus" "$build/crashes"
  seeds=()
  [[ -d fuzz/seeds/$name ]] && seeds=("fuzz/seeds/$name")
  echo "fuzz $name: $((seconds / ${#fuzzers[@]})) s"
  "$fuzzer" "$corpus" "${seeds[@]}" -max_total_time=$((seconds / ${#fuzzers[@]})) -timeout=20 -rss_limit_mb=4096 \
    -artifact_prefix="$build/crashes/$name-" -print_final_stats=1 -print_funcs=0 -verbosity=0
done

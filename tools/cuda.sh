#!/bin/bash
# Compile every CUDA kernel and look at the machine code; no GPU is needed. Called by `make cuda`, with the number of jobs.
set -euo pipefail
if ! command -v nvcc >/dev/null && [[ ! -x /usr/local/cuda/bin/nvcc ]]; then
  echo "make cuda: skipped, there is no nvcc"
  exit 0
fi
cmake --preset cuda --log-level=WARNING
cmake --build --preset cuda -j "$1" --target ffpa 2>&1 | tee build/cuda/build.log
if grep -E '\(C75[0-9]{2}\)' build/cuda/build.log; then
  echo "make cuda: ptxas would serialise wgmma (messages above)" >&2
  exit 1
fi
PATH=$(echo .venv/lib/python3*/site-packages/nvidia/cu13/bin):$PATH
python tools/check_sm90.py build/cuda/lib/libffpa.so >build/cuda/kernels.log || { grep ^FAIL build/cuda/kernels.log; exit 1; }
tail -1 build/cuda/kernels.log

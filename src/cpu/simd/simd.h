// The vectorised CPU engine: one source per pass, compiled once per target. SPDX-License-Identifier: Apache-2.0
//
//   vec.h       a register of fp32 lanes, exp, tanh
//   tile.h      tiles in cache: packing and products
//   rows.h      query rows and scores of a tile: every option of the contract
//   forward.cc, backward.cc
// CPU tensors of fp32, fp16 and bf16, any head dim, any strides. Memory: the workspace holds each thread's tiles and, where N_kv is
// split, partial rows; nothing grows with N_q * N_kv.
#pragma once

#include <string>

#include "core/kernel.h"

#define FFPA_SIMD_DECLARE(target)                                             \
  namespace ffpa::simd::target {                                              \
  const char* machine_lacks();                                                \
  std::string plan_forward(const Problem& problem, Choice* choice);           \
  std::string plan_backward(const Problem& problem, Choice* choice);          \
  Status run_forward(const Problem&, const Choice&, void* workspace, void*);  \
  Status run_backward(const Problem&, const Choice&, void* workspace, void*); \
  }
FFPA_SIMD_DECLARE(portable)
FFPA_SIMD_DECLARE(avx2)
FFPA_SIMD_DECLARE(avx512)
FFPA_SIMD_DECLARE(avx512bf16)
FFPA_SIMD_DECLARE(amx)
#undef FFPA_SIMD_DECLARE

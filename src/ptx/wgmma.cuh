// wgmma: D[64, n] += A[64, 16] B[16, n], issued by a warpgroup, fp32 accumulators. PTX ISA 9.7.15. SPDX-License-Identifier: Apache-2.0
//
// Accumulator fragment: warp w of the warpgroup holds rows 16w to 16w+15; lane l, register i:
//   row    = 16w + l/4 + 8 * (i/2 % 2)
//   column = 8 * (i/4) + 2 * (l%4) + i%2
// Packing columns pairwise gives the A fragment of a next product: registers 4c to 4c+3 of the packed words are its k16 step c.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ffpa::ptx {

// n in use: gen/wgmma_shapes.cuh. ss takes A from shared memory (K-major), rs from registers. kBRowMajor 0: B lies [n][k]
// (K-major); 1: B lies [k][n] (MN-major).
template <int n>
struct Wgmma;

// wgmma.fence: before the first wgmma, and after registers that one reads or accumulates into were touched
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// wgmma.wait_group: until at most `kPending` committed groups are in flight
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Matrix descriptor, as two words so that only the low one (address and leading offset) ever changes. PTX ISA 9.7.15.5.1.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t low, uint32_t high) {
  uint64_t d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low), "r"(high));
  return d;
}

}  // namespace ffpa::ptx

#include "ptx/gen/wgmma_shapes.cuh"

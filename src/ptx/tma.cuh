// Tensor copies from global to shared memory. PTX ISA 9.7.9.27. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace ffpa::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// cp.async.bulk.tensor.4d
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                         Mbarrier full) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];" ::
          "r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(full.address)
      : "memory");
}
// cp.async.bulk.tensor.5d
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                                         Mbarrier full) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5,%6}], "
      "[%7];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(full.address)
      : "memory");
}

}  // namespace ffpa::ptx

// mbarrier: arrive, expect bytes, wait by parity. PTX ISA 9.7.13.15. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ffpa::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A barrier by its shared-window address, so that a step along an array is an add. `Remote` is another CTA's (see mapa).
struct Mbarrier {
  uint32_t address;
  __device__ __forceinline__ Mbarrier operator[](int i) const { return {address + 8u * static_cast<uint32_t>(i)}; }
};
struct RemoteMbarrier {
  uint32_t address;
};

// mbarrier.init
__device__ __forceinline__ void mbarrier_init(Mbarrier b, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b.address), "r"(arrivals));
}
// fence.mbarrier_init: makes the inits visible to the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(Mbarrier b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b.address) : "memory");
}
// Default scope: `.release.cluster` would cost a MEMBAR.ALL.GPU an arrival. Right only where what it orders is reads that have
// already returned, or data that travels by bulk copy with its own complete_tx.
__device__ __forceinline__ void mbarrier_arrive(RemoteMbarrier b) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b.address) : "memory");
}
// mbarrier.arrive.expect_tx
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b.address), "r"(bytes) : "memory");
}
// mbarrier.try_wait.parity, until the phase of that parity has completed
__device__ __forceinline__ void mbarrier_wait(Mbarrier b, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(b.address),
      "r"(parity)
      : "memory");
}

}  // namespace ffpa::ptx

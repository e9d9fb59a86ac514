// Place in a ring of shared-memory stages, each with a full and an empty barrier. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace ffpa::pipeline {

// Producer and consumers each walk the ring with their own place; `phase` is the parity of the walk through it.
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int n_stages) {
    if (++stage == n_stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

struct Ring {
  ptx::Mbarrier full, empty;
  int n_stages;

  // Producer: the next stage, once its readers have left it, armed for `bytes`.
  __device__ __forceinline__ int fill(RingPlace& place, uint32_t bytes) const {
    const int stage = place.stage;
    ptx::mbarrier_wait(empty[stage], place.phase ^ 1);
    ptx::mbarrier_arrive_expect(full[stage], bytes);
    place.advance(n_stages);
    return stage;
  }
  // Consumer: the next stage, once it is full.
  __device__ __forceinline__ int acquire(RingPlace& place) const {
    const int stage = place.stage;
    ptx::mbarrier_wait(full[stage], place.phase);
    place.advance(n_stages);
    return stage;
  }
};

}  // namespace ffpa::pipeline

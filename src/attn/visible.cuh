// Which keys a query row sees by causality, window and length, and blocks of keys that a tile must visit. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/fwd_params.cuh"
#include "ptx/warp.cuh"

namespace ffpa::attn {

// Keys [begin, end) that row i of a sequence sees; begin >= end means none. Neither end falls as i grows.
struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ KeyRange visible_keys(const ForwardParams& p, int n_q, int n_kv, int i) {
  const int diagonal = p.bottom_right ? i + n_kv - n_q : i;
  return {p.window_left < diagonal ? diagonal - p.window_left : 0,
          p.window_right < n_kv - 1 - diagonal ? max(diagonal + p.window_right + 1, 0) : n_kv};
}

// -inf in the columns that the two rows of an accumulator fragment do not see. `column`: key of the thread's first column.
template <int kColumns>
__device__ __forceinline__ void hide(float* s, int column, const KeyRange (&range)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const unsigned span = static_cast<unsigned>(max(range[r].end - range[r].begin, 0));
    const int first = column - range[r].begin;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (static_cast<unsigned>(first + 8 * i + e) >= span) s[4 * i + 2 * r + e] = -INFINITY;
  }
}

}  // namespace ffpa::attn

// Which keys a query row sees by causality, window and length; where K and V are copied from. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/fwd_params.cuh"
#include "ptx/warp.cuh"

namespace ffpa::attn {

// Keys [begin, end) that row i of a sequence sees; begin >= end means none. Neither end falls as i grows.
struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ KeyRange visible_keys(const AttentionParams& p, int n_q, int n_kv, int i) {
  const int diagonal = p.bottom_right ? i + n_kv - n_q : i;
  return {p.window_left < diagonal ? diagonal - p.window_left : 0,
          p.window_right < n_kv - 1 - diagonal ? max(diagonal + p.window_right + 1, 0) : n_kv};
}

// Where the copy engine finds row j of a sequence: (column, row + j, third, fourth, head). Rows past the sequence's end must arrive
// as zeros, wherever it ends.
//   all sequences of one length   (column, j, batch, 0, head): the tensor's own extents end the copy
//   ragged                        (column, 2^30 - n + j, r + n, 2^30, head) for n rows that start at row r of the memory: the first
//                                 two both step by a row, the third by 2^34 bytes less a row, so all is r + j rows mod 2^64, and
//                                 the first leaves its extent, 2^30, exactly at j = n
struct RowCoordinates {
  int row, third, fourth, head;
};
__device__ __forceinline__ RowCoordinates row_coordinates(bool ragged, int batch, int first_row, int n, int head,
                                                          int batch_rows, int batch_step, int head_step) {
  constexpr int kHalfRange = 1 << 30;
  if (ragged) return {kHalfRange - n, batch * batch_rows + first_row + n, kHalfRange, head * head_step};
  return {0, batch * batch_step, 0, head * head_step};
}
using KvCoordinates = RowCoordinates;
__device__ __forceinline__ KvCoordinates kv_coordinates(const TmaParams& p, int batch, int first_row, int n_kv,
                                                        int kv_head, int batch_rows, int batch_step, int head_step) {
  return row_coordinates(p.ragged, batch, first_row, n_kv, kv_head, batch_rows, batch_step, head_step);
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

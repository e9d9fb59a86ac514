// What the Hopper backward kernels are launched with. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/fwd_params.cuh"

namespace ffpa::attn {

// In the backward the tensor maps of q and dout are made like those of k and v: coordinates by `row_coordinates` with q_ragged, so that
// rows past a sequence's end arrive as zeros. Each kernel is given maps with its own boxes.
struct BackwardParams : TmaParams {
  CUtensorMap dout;  // [B | 1, H_q, N_q | T_q, D_v]
  int dout_head_step = 1, dout_batch_step = 1;
  bool q_ragged = false;                      // packed q: rows of a sequence end within the tensor
  int q_batch_rows = 0, dout_batch_rows = 0;  // for row_coordinates; 0 when packed

  // Written by the delta kernel, one float a query row (packed: a row of T_q), contiguous: [B | 1, H_q, N_q | T_q].
  RowValues lse_log2;  // lse * log2(e); +inf for a row that sees no key, so that its P is 0
  RowValues delta;     // rowsum(dout * o) - dlse; 0 for a row that sees no key

  RowsOut dq, dk, dv;  // data null = not wanted
  float scale = 1.f;   // of scale_log2, without log2(e)
};

}  // namespace ffpa::attn

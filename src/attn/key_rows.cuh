// Score tiles whose rows are keys, as the backward of k and v makes them: visibility, options, dropout. SPDX-License-Identifier: Apache-2.0
//
// Element i of a fragment: key l/4 + 8 * (i/2 % 2) of the warp's 16, query 8 * (i/4) + 2 * (l % 4) + i % 2 of the block. So eight lanes
// (those of one l % 4) hold eight neighbouring keys of a query.
#pragma once

#include "attn/bwd_params.cuh"
#include "attn/options.cuh"
#include "attn/visible.cuh"

namespace ffpa::attn {

// Queries [begin, end) that see key j of a sequence; begin >= end means none. Neither end falls as j grows, up to n_kv.
using QueryRange = KeyRange;
__device__ __forceinline__ QueryRange visible_queries(const AttentionParams& p, int n_q, int n_kv, int j) {
  if (j >= n_kv) return {0, 0};
  const int diagonal = p.bottom_right ? j - n_kv + n_q : j;  // the query that has key j on its diagonal
  return {p.window_right < diagonal ? diagonal - p.window_right : 0,
          p.window_left < n_q - 1 - diagonal ? max(diagonal + p.window_left + 1, 0) : n_q};
}

// Where a thread's two keys stand.
struct KeyRows {
  int seq, head, n_q, n_kv;
  int key;  // the first; the other is +8
  // Row 0 of a broadcast tensor at the column of key r. Keys past N_kv stand at the last one: their rows are never stored.
  __device__ __forceinline__ const char* at(const Broadcast& t, int bytes, int r) const {
    const int64_t j = min(key + 8 * r, n_kv - 1);
    return static_cast<const char*>(t.data) + (seq * t.batch + head * t.head + j * t.column) * bytes;
  }
};

// Which elements dropout keeps, for a block of 64 queries from `query` on. Each lane makes the four Philox calls (two queries, two groups
// of eight keys) of column group l/4, a byte of the word each; `keeps` finds an element's bit in the word of its group.
__device__ __forceinline__ uint32_t draw_keys(const AttentionParams& p, const KeyRows& x, int query) {
  const int lane = threadIdx.x % 32;
  Dropout dropout = p.dropout;
  if (p.dropout_state) {
    dropout.seed = static_cast<uint64_t>(p.dropout_state[0]);
    dropout.offset = static_cast<uint64_t>(p.dropout_state[1]);
  }
  const int group = (x.key - lane / 4) / 8, row = query + 8 * (lane / 4) + 2 * (lane % 4);
  uint32_t word = 0;
#pragma unroll
  for (int call = 0; call < 4; ++call) {
    const Philox4 bits = dropout.bits(static_cast<uint32_t>(x.seq * p.h_q + x.head),
                                      static_cast<uint32_t>(row + call % 2), static_cast<uint32_t>(group + call / 2));
#pragma unroll
    for (int j = 0; j < 8; ++j) word |= dropout.keep(bits, j) ? 1u << (8 * call + j) : 0u;
  }
  return word;
}
// `word`: of the lane that drew the element's column group. r, e: which of the thread's keys, which of its two queries there.
__device__ __forceinline__ bool keeps(uint32_t word, int r, int e) {
  return word >> (8 * (2 * r + e) + threadIdx.x % 32 / 4) & 1u;
}

// Logits in base 2 of the elements (r, 0) and (r, 1) of a column group, from q.k; `slope`: the softcap's derivative at each.
template <class Element>
__device__ __forceinline__ void key_logits(const AttentionParams& p, const KeyRows& x, int r, int query, float (&s)[2],
                                           float (&slope)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const int64_t i = min(query + e, x.n_q - 1);
    if (p.softcap_log2 > 0.f) {  // tanh = 1 - 2y with y = 1 / (1 + e^2z); its derivative 4y (1 - y)
      const float y = ptx::reciprocal_fast(1.f + ptx::exp2_fast(s[e] * p.softcap_inverse));
      slope[e] = 4.f * y * (1.f - y);
      s[e] = fmaf(-2.f * p.softcap_log2, y, p.softcap_log2);
    } else {
      s[e] *= p.scale_log2;
    }
    if (p.bias.data) {
      const float b =
          p.bias_fp32
              ? *reinterpret_cast<const float*>(x.at(p.bias, 4, r) + i * p.bias.row * 4)
              : ptx::unpack<Element>(*reinterpret_cast<const uint16_t*>(x.at(p.bias, 2, r) + i * p.bias.row * 2)).x;
      s[e] = fmaf(b, kLog2e, s[e]);
    }
    if (p.alibi_slopes) {
      const float slope_log2 = p.alibi_slopes[x.seq * p.alibi_batch + x.head * p.alibi_head] * kLog2e;
      s[e] = fmaf(-slope_log2, fabsf(static_cast<float>(query + e + x.n_kv - x.n_q - x.key - 8 * r)), s[e]);
    }
    if (p.mask.data && !*(x.at(p.mask, 1, r) + i * p.mask.row)) s[e] = -INFINITY;
  }
}

}  // namespace ffpa::attn

// The options that act on single scores: softcap, bias, ALiBi, bool mask, dropout. SPDX-License-Identifier: Apache-2.0
//
// Kernels come twice: without these, where scores stay as the tensor cores left them and scale_log2 enters with the exponential,
// and with them, where `apply` turns a fragment into logits in base 2.
#pragma once

#include "attn/visible.cuh"
#include "ptx/warp.cuh"

namespace ffpa::attn {

inline constexpr float kLog2e = 1.4426950408889634f;

// One element of a broadcast tensor, as float.
template <class Element>
__device__ __forceinline__ float broadcast_at(const void* data, bool fp32, int64_t offset) {
  return fp32 ? static_cast<const float*>(data)[offset]
              : ptx::unpack<Element>(static_cast<const uint16_t*>(data)[offset]).x;
}

// What a thread's two rows need; made once a tile.
struct OptionRows {
  int64_t mask[2], bias[2];  // offset of column 0
  float slope_log2;          // ALiBi's, 0 = none
  int row[2];
  int anchor;                // N_kv - N_q
  int n_kv;
  bool exists[2];            // row < N_q: only then may its mask and bias be read
  uint32_t batch_head;
  Dropout dropout;
};

__device__ __forceinline__ OptionRows option_rows(const ForwardParams& p, int seq, int head, int n_q, int n_kv, int row) {
  OptionRows x;
  for (int r = 0; r < 2; ++r) {
    x.row[r] = row + 8 * r;
    x.exists[r] = x.row[r] < n_q;
    x.mask[r] = seq * p.mask.batch + head * p.mask.head + x.row[r] * p.mask.row;
    x.bias[r] = seq * p.bias.batch + head * p.bias.head + x.row[r] * p.bias.row;
  }
  x.slope_log2 = p.alibi_slopes ? p.alibi_slopes[seq * p.alibi_batch + head * p.alibi_head] * kLog2e : 0.f;
  x.anchor = n_kv - n_q;
  x.n_kv = n_kv;
  x.batch_head = static_cast<uint32_t>(seq * p.h_q + head);
  x.dropout = p.dropout;
  if (p.dropout_state) {
    x.dropout.seed = static_cast<uint64_t>(p.dropout_state[0]);
    x.dropout.offset = static_cast<uint64_t>(p.dropout_state[1]);
  }
  return x;
}

// q.k to logits in base 2. `column`: key of the thread's first column.
template <class Element, int kColumns>
__device__ __forceinline__ void apply_options(const ForwardParams& p, const OptionRows& x, float* s, int column) {
  if (p.softcap_log2 > 0.f) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)  // cap tanh(y) = cap - 2 cap / (1 + e^2y): exact to fp32, unlike tanh.approx
      s[i] = fmaf(-2.f * p.softcap_log2, ptx::reciprocal_fast(1.f + ptx::exp2_fast(s[i] * p.softcap_inverse)), p.softcap_log2);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) s[i] *= p.scale_log2;
  }
  if (p.bias.data) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int r = i / 2 % 2, j = column + i / 4 * 8 + i % 2;
      if (x.exists[r] && j < x.n_kv)
        s[i] = fmaf(broadcast_at<Element>(p.bias.data, p.bias_fp32, x.bias[r] + j * p.bias.column), kLog2e, s[i]);
    }
  }
  if (x.slope_log2 != 0.f) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int r = i / 2 % 2, j = column + i / 4 * 8 + i % 2;
      s[i] = fmaf(-x.slope_log2, fabsf(static_cast<float>(x.row[r] + x.anchor - j)), s[i]);
    }
  }
  if (p.mask.data) {
    const uint8_t* mask = static_cast<const uint8_t*>(p.mask.data);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const int r = i / 2 % 2, j = column + i / 4 * 8 + i % 2;
      if (x.exists[r] && j < x.n_kv && !mask[x.mask[r] + j * p.mask.column]) s[i] = -INFINITY;
    }
  }
}

// Bit i of word i/32: keep element i of the fragment (32 elements a word). The four lanes of a quad share the calls: each makes
// one for every fourth group of eight columns, and they trade words.
template <int kColumns>
__device__ __forceinline__ void dropout_bits(const OptionRows& x, int column, uint32_t (&keep)[(kColumns + 63) / 64]) {
  const int part = threadIdx.x % 4;
  for (auto& word : keep) word = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int four = 0; four < (kColumns + 31) / 32; ++four) {
      const Philox4 mine = x.dropout.bits(x.batch_head, static_cast<uint32_t>(x.row[r]),
                                          static_cast<uint32_t>(column / 8 + 4 * four + part));
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // lane part wants word `part` of the call made by lane part ^ k
        const int peer = part ^ k;
        const uint32_t give = peer & 2 ? (peer & 1 ? mine.word[3] : mine.word[2]) : (peer & 1 ? mine.word[1] : mine.word[0]);
        const uint32_t word = __shfl_xor_sync(~0u, give, k);
        const int group = 4 * four + peer;  // column group of eight
        if (group >= kColumns / 8) continue;
        const uint32_t two = ((word & 0xFFFFu) >= x.dropout.threshold ? 1u : 0u) | ((word >> 16) >= x.dropout.threshold ? 2u : 0u);
        const int bit = 4 * group + 2 * r;
#pragma unroll
        for (int w = 0; w < (kColumns + 63) / 64; ++w)
          if (bit / 32 == w) keep[w] |= two << (bit % 32);
      }
    }
}

}  // namespace ffpa::attn

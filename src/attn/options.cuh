// The options that act on single scores: softcap, bias, ALiBi, bool mask, dropout. SPDX-License-Identifier: Apache-2.0
//
// Kernels come twice: without these, where scores stay as the tensor cores left them and scale_log2 enters with the exponential,
// and with them, where `apply` turns a fragment into logits in base 2.
#pragma once

#include "attn/visible.cuh"
#include "ptx/warp.cuh"

namespace ffpa::attn {

inline constexpr float kLog2e = 1.4426950408889634f;

// Where a thread's two rows stand. Rows past N_q take the last row's mask and bias: they are never stored. Pointers are made where they
// are used: kept over the main loop they would spill.
struct OptionRows {
  int seq, head, n_q, n_kv;
  int row;  // the first; the other is +8
  __device__ __forceinline__ const char* at(const Broadcast& t, int bytes, int r) const {
    const int64_t i = min(row + 8 * r, n_q - 1);
    return static_cast<const char*>(t.data) + (seq * t.batch + head * t.head + i * t.row) * bytes;
  }
};

// Calls use(i, low, high) for each pair of neighbouring elements s[i], s[i + 1] with the two elements of a row of a broadcast tensor
// that stand at their columns. `pairs`: neighbours lie together, aligned, and all columns exist. Otherwise columns past N_kv stand at
// the last one: `hide` discards them.
template <int kColumns, class Two, class One, class Use>
__device__ __forceinline__ void for_pairs(const char* const (&rows)[2], bool pairs, int64_t column_stride, int column, int n_kv,
                                          Use use) {
  if (pairs) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const Two two = *reinterpret_cast<const Two*>(rows[i / 2 % 2] + (column + i / 4 * 8) * int(sizeof(One)));
      use(i, two.x, two.y);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 2; i += 2) {
      const One* row = reinterpret_cast<const One*>(rows[i / 2 % 2]);
      const int j = column + i / 4 * 8;
      use(i, row[min(j, n_kv - 1) * column_stride], row[min(j + 1, n_kv - 1) * column_stride]);
    }
  }
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
  const bool inside = column / 8 * 8 + kColumns <= x.n_kv;
  if (p.bias.data) {
    const bool pairs = p.bias_pairs && inside;
    const char* const rows[2] = {x.at(p.bias, p.bias_fp32 ? 4 : 2, 0), x.at(p.bias, p.bias_fp32 ? 4 : 2, 1)};
    if (p.bias_fp32)
      for_pairs<kColumns, float2, float>(rows, pairs, p.bias.column, column, x.n_kv, [&](int i, float low, float high) {
        s[i] = fmaf(low, kLog2e, s[i]);
        s[i + 1] = fmaf(high, kLog2e, s[i + 1]);
      });
    else
      for_pairs<kColumns, ushort2, uint16_t>(rows, pairs, p.bias.column, column, x.n_kv, [&](int i, uint16_t low, uint16_t high) {
        s[i] = fmaf(ptx::unpack<Element>(low).x, kLog2e, s[i]);
        s[i + 1] = fmaf(ptx::unpack<Element>(high).x, kLog2e, s[i + 1]);
      });
  }
  if (p.alibi_slopes) {
    const float slope_log2 = p.alibi_slopes[x.seq * p.alibi_batch + x.head * p.alibi_head] * kLog2e;
    const float distance = static_cast<float>(x.row + x.n_kv - x.n_q - column);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      s[i] = fmaf(-slope_log2, fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), s[i]);
  }
  if (p.mask.data) {
    const char* const rows[2] = {x.at(p.mask, 1, 0), x.at(p.mask, 1, 1)};
    for_pairs<kColumns, uchar2, uint8_t>(rows, p.mask_pairs && inside, p.mask.column, column, x.n_kv,
                                         [&](int i, uint8_t low, uint8_t high) {
                                           s[i] = low ? s[i] : -INFINITY;
                                           s[i + 1] = high ? s[i + 1] : -INFINITY;
                                         });
  }
}

// Dropout of one of the thread's rows (r) over 32 of its columns (from 8 * 4 * four): bits 4 * group + 2 * r and +1 of `keep` for the
// thread's two columns of group `group` (of eight columns), counted from `column`; 8 groups a word. The four lanes of a quad share the
// calls: each makes one for one of the four groups, and they trade words.
__device__ __forceinline__ uint32_t dropout_quarter(const ForwardParams& p, const OptionRows& x, int column, int r, int four) {
  const int part = threadIdx.x % 4;
  Dropout dropout = p.dropout;
  if (p.dropout_state) {
    dropout.seed = static_cast<uint64_t>(p.dropout_state[0]);
    dropout.offset = static_cast<uint64_t>(p.dropout_state[1]);
  }
  const Philox4 mine = dropout.bits(static_cast<uint32_t>(x.seq * p.h_q + x.head), static_cast<uint32_t>(x.row + 8 * r),
                                    static_cast<uint32_t>(column / 8 + 4 * four + part));
  uint32_t keep = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // lane part wants word `part` of the call made by lane part ^ k
    const int peer = part ^ k;
    const uint32_t give = peer & 2 ? (peer & 1 ? mine.word[3] : mine.word[2]) : (peer & 1 ? mine.word[1] : mine.word[0]);
    const uint32_t word = __shfl_xor_sync(~0u, give, k);
    const uint32_t two = ((word & 0xFFFFu) >= dropout.threshold ? 1u : 0u) | ((word >> 16) >= dropout.threshold ? 2u : 0u);
    keep |= two << (4 * peer);
  }
  return keep << (2 * r + 16 * (four & 1));
}

// Bit i of word i/32: keep element i of the fragment.
template <int kColumns>
__device__ __forceinline__ void dropout_bits(const ForwardParams& p, const OptionRows& x, int column, uint32_t (&keep)[(kColumns + 63) / 64]) {
#pragma unroll
  for (int word = 0; word < (kColumns + 63) / 64; ++word) {
    keep[word] = 0;
#pragma unroll
    for (int four = 2 * word; four < 2 * word + 2; ++four)
      if (32 * four < kColumns)
#pragma unroll
        for (int r = 0; r < 2; ++r) keep[word] |= dropout_quarter(p, x, column, r, four);
  }
}

}  // namespace ffpa::attn

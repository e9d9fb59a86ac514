// From scores to dS in the backward, a fragment at a time: rows are queries, columns keys. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/bwd_params.cuh"
#include "attn/options.cuh"

namespace ffpa::attn {

// What the thread's two rows bring to the backward. Rows past N_q have P = 0.
struct BackwardRows {
  float lse_log2[2], delta[2];
  // `row`: the first of the two within its sequence, whose rows begin at (q_batch, q_row)
  __device__ __forceinline__ void load(const BackwardParams& p, int q_batch, int head, int q_row, int row, int n_q) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = row + 8 * r < n_q;
      lse_log2[r] = exists ? *p.lse_log2.at(q_batch, head, q_row + row + 8 * r) : INFINITY;
      delta[r] = exists ? *p.delta.at(q_batch, head, q_row + row + 8 * r) : 0.f;
    }
  }
};

// The softcap's derivative at q.k = dot: 1 - tanh(y)^2 = 4 r (1 - r) with r = 1 / (1 + e^2y). It is a factor of dS on the way back to
// q.k, but not to the bias, which is added later.
__device__ __forceinline__ float softcap_slope(const BackwardParams& p, float dot) {
  const float r = ptx::reciprocal_fast(1.f + ptx::exp2_fast(dot * p.softcap_inverse));
  return 4.f * r * (1.f - r);
}

// q.k to P = exp(logit - lse), at most 1: lse is rounded, and a P above 1 is none. `range`: what the two rows see, read only if
// `partial`. `fetched`: by `fetch` for the same keys; like it and `x` read only with kOptions.
template <class Element, int kColumns, bool kOptions>
__device__ __forceinline__ void probabilities(const BackwardParams& p, const OptionRows& x, float* s, int key,
                                              bool partial, const KeyRange (&range)[2], const float (&lse_log2)[2],
                                              FetchedWords<kColumns>& fetched) {
  if constexpr (kOptions) apply_options<Element, kColumns>(p, x, s, key, fetched);
  if (partial) hide<kColumns>(s, key + static_cast<int>(threadIdx.x % 4) * 2, range);
  const float c = kOptions ? 1.f : p.scale_log2;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) s[i] = ptx::min_nan(ptx::exp2_fast(fmaf(s[i], c, -lse_log2[i / 2 % 2])), 1.f);
}

// dP as the products left it to what P multiplies in dS: with dropout's factor, less delta. `keep` by dropout_bits, read only with
// kOptions and dropout.
template <int kColumns, bool kOptions>
__device__ __forceinline__ void subtract_delta(const BackwardParams& p, float* dp, const float (&delta)[2],
                                               const uint32_t (&keep)[(kColumns + 63) / 64]) {
  if constexpr (kOptions) {
    if (p.dropout.threshold) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) dp[i] = keep[i / 32] >> (i % 32) & 1u ? dp[i] : 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    dp[i] = kOptions ? fmaf(dp[i], p.keep_scale, -delta[i / 2 % 2]) : dp[i] - delta[i / 2 % 2];
}

}  // namespace ffpa::attn

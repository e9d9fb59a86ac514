// Online softmax on accumulator fragments: maxima, references, exponents. Everything in base 2. SPDX-License-Identifier: Apache-2.0
//
// References are whole powers of two, so that moving o, sums and P from one to another never rounds.
#pragma once

#include "ptx/warp.cuh"

namespace ffpa::attn {

inline constexpr float kLag = 8.f;  // a reference may lag a row's maximum by 2^8: most blocks then leave o alone

// Largest of each of the thread's two rows, over the quad.
template <int kColumns>
__device__ __forceinline__ void row_maxima(const float* s, float& a, float& b) {
  a = s[0];
  b = s[2];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    a = fmaxf(a, fmaxf(s[4 * i], s[4 * i + 1]));
    b = fmaxf(b, fmaxf(s[4 * i + 2], s[4 * i + 3]));
  }
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 1));
  b = fmaxf(b, __shfl_xor_sync(~0u, b, 1));
  a = fmaxf(a, __shfl_xor_sync(~0u, a, 2));
  b = fmaxf(b, __shfl_xor_sync(~0u, b, 2));
}

// The reference that follows `maximum`: the old one while the maximum is at most 2^tolerance above it.
__device__ __forceinline__ float follow(float reference, float maximum, float tolerance) {
  return maximum - reference > tolerance ? ceilf(maximum) : reference;
}
// 2^(from - to), 1 when both are -inf
__device__ __forceinline__ float power(float from, float to) { return from == to ? 1.f : ptx::exp2_fast(from - to); }
// What to subtract in the exponent: a row that has seen no key yet has reference -inf, and only -inf to subtract it from.
__device__ __forceinline__ float shift_of(float reference) { return reference == -INFINITY ? 0.f : reference; }

}  // namespace ffpa::attn

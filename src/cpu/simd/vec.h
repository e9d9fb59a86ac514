// One register of fp32 lanes, for any target. SPDX-License-Identifier: Apache-2.0
//
// Included by the kernels of this folder, which are compiled once per target with its own flags and these definitions:
//   FFPA_SIMD_TARGET     namespace of the copy: portable, avx2, avx512, avx512bf16, amx
//   FFPA_SIMD_BYTES      bytes of a vector register: 16, 32, 64
//   FFPA_SIMD_BF16_DOT   bf16 products by the CPU's dot product instruction (else bf16 is widened to fp32)
// The compiler's vector extension does the arithmetic; contraction makes a * b + c one instruction where there is one.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/inline.h"
#include "core/problem.h"

namespace ffpa::simd::FFPA_SIMD_TARGET {

constexpr int kLanes = FFPA_SIMD_BYTES / 4;
typedef float vf __attribute__((vector_size(FFPA_SIMD_BYTES)));
typedef int32_t vi __attribute__((vector_size(FFPA_SIMD_BYTES)));
typedef uint32_t vu __attribute__((vector_size(FFPA_SIMD_BYTES)));
typedef uint16_t vh __attribute__((vector_size(FFPA_SIMD_BYTES / 2)));

FFPA_INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
FFPA_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
FFPA_INLINE vi load(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
FFPA_INLINE vu load(const uint32_t* p) {
  vu v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
FFPA_INLINE void store(uint32_t* p, vu v) { std::memcpy(p, &v, sizeof v); }
FFPA_INLINE vh load(const uint16_t* p) {
  vh v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
FFPA_INLINE void store(uint16_t* p, vh v) { std::memcpy(p, &v, sizeof v); }
FFPA_INLINE vf splat(float x) { return vf{} + x; }
FFPA_INLINE vi splat(int32_t x) { return vi{} + x; }
FFPA_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }
FFPA_INLINE vf max(vf a, vf b) { return a > b ? a : b; }  // b where a is NaN
FFPA_INLINE vi bits(vf v) { return reinterpret_cast<vi>(v); }
FFPA_INLINE vf from_bits(vi v) { return reinterpret_cast<vf>(v); }

constexpr float kInf = __builtin_inff();

// exp(x), relative error below 2e-7 for x in [-87, 88]; 0 below, inf above; NaN stays NaN.
FFPA_INLINE vf exp(vf x) {
  constexpr float kLog2e = 1.44269504f, kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f,
                  kRound = 12582912.f;  // 1.5 * 2^23
  const vf t = x * kLog2e + kRound;     // the integer part stands in the low bits
  const vf n = t - kRound;
  const vf r = (x - n * kLn2High) - n * kLn2Low;
  vf p = splat(1.98412698e-4f);
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vf y = from_bits(bits(p) + ((bits(t) - bits(splat(kRound))) << 23));
  y = select(x < splat(-87.0f), vf{}, y);
  y = select(x > splat(88.0f), splat(kInf), y);
  return select(x == x, y, splat(__builtin_nanf("")));
}

// tanh(x), relative error below 4e-7; NaN stays NaN.
FFPA_INLINE vf tanh(vf x) {
  const vf a = from_bits(bits(x) & 0x7FFFFFFF);
  const vf big = 1.0f - 2.0f / (exp(select(a > splat(20.0f), splat(20.0f), a) * 2.0f) + 1.0f);
  const vf q = a * a;
  vf p = splat(-5.70498872745e-3f);
  p = p * q + 2.06390887954e-2f;
  p = p * q + -5.37397155531e-2f;
  p = p * q + 1.33314422036e-1f;
  p = p * q + -3.33332819422e-1f;
  const vf small = a + a * q * p;
  const vf y = select(a < splat(0.625f), small, big);
  return from_bits(bits(y) | (bits(x) & static_cast<int32_t>(0x80000000)));
}

}  // namespace ffpa::simd::FFPA_SIMD_TARGET

// Writing o, gradients and lse from accumulator fragments. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/fwd_params.cuh"
#include "ptx/warp.cuh"

namespace ffpa::attn {

// 4x4 transpose over the lanes of a quad: w[c] of lane t becomes w[t] of lane c.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    w[i] = odd ? other : w[i];
    w[i + 1] = odd ? w[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
    w[i] = upper ? other : w[i];
    w[i + 2] = upper ? w[i + 2] : other;
  }
}

// Eight columns of a row, those that exist.
template <class Element>
__device__ __forceinline__ void store_piece(const RowsOut& out, const uint32_t (&w)[4], Element* row, int column) {
  if (out.vector && column + 8 <= out.width) {
    *reinterpret_cast<uint4*>(row + column) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(row);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (column + i < out.width) to[(column + i) * out.column] = static_cast<uint16_t>(w[i / 2] >> (16 * (i % 2)));
}

// Columns [first_column, first_column + kColumns) of one of the thread's two rows (r), times `factor`. Lanes of a quad trade words
// so that each writes 16 bytes and the quad 64: full sectors. `row` may be null: the lane takes part but writes nothing.
template <class Element, int kColumns, int r>
__device__ __forceinline__ void store_row(const RowsOut& out, const float* o, float factor, Element* row,
                                          int first_column) {
  static_assert(kColumns % 32 == 0, "a quad writes 32 columns at a time");
#pragma unroll
  for (int c = 0; c < kColumns / 32; ++c) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[i] = ptx::pack<Element>(o[(4 * c + i) * 4 + 2 * r] * factor, o[(4 * c + i) * 4 + 2 * r + 1] * factor);
    quad_transpose(w);
    const int column = first_column + 32 * c + 8 * static_cast<int>(threadIdx.x % 4);
    if (row) store_piece(out, w, row, column);
  }
}

// Sink of a head in base 2; -inf where there is none.
template <class Element>
__device__ __forceinline__ float sink_log2(const AttentionParams& p, int head, bool nobodys) {
  if (!p.sinks || nobodys) return -INFINITY;
  const int64_t at = head * p.sinks_stride;
  const float sink = p.sinks_fp32 ? static_cast<const float*>(p.sinks)[at]
                                  : ptx::unpack<Element>(static_cast<const uint16_t*>(p.sinks)[at]).x;
  return sink * 1.4426950408889634f;
}

// The end of a row's softmax: o is relative to 2^ref with weights summing to `sum`. Gives the factor that o still needs and lse.
// sum = 0 exactly means no visible key (a NaN is not 0).
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd end_row(float ref, float sum, float sink_log2, float keep_scale) {
  const float top = fmaxf(ref, sink_log2);
  if (top == -INFINITY && sum == 0.f) return {0.f, -INFINITY};
  const float shift = ref == top ? 1.f : exp2f(ref - top);
  const float total = sum * shift + (sink_log2 == -INFINITY ? 0.f : exp2f(sink_log2 - top));
  return {sum == 0.f ? 0.f : shift * keep_scale / total, (top + log2f(total)) * 0.6931471805599453f};
}

}  // namespace ffpa::attn

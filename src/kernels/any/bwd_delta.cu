// Preparation of the backward, and the gradient of sinks. SPDX-License-Identifier: Apache-2.0
//
//   delta[row]    = sum over c of dout[row, c] * o[row, c], less dlse[row]     a warp a row, fp32
//   lse_log2[row] = lse[row] * log2(e)
//   dsinks[h]     = -sum over rows of exp2(sink_log2 - lse_log2) * delta       a CTA a head, a fixed tree: deterministic
//
// Bound by memory: o and dout are read once (and dout written once where it has to be copied).
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/any/bwd_delta.h"

namespace ffpa::bwd_delta {
namespace {

constexpr int kThreads = 256;
constexpr float kLog2e = 1.4426950408889634f;

struct Params {
  ffpa_tensor o, dout, lse, dlse;
  float *lse_log2, *delta;
  void* copy;  // or null
  int64_t rows;
  int copy_columns;
  bool vector;  // rows of o and dout can be read 16 bytes at a time
};

template <class Element>
__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
  const Element *x = reinterpret_cast<const Element*>(&a), *y = reinterpret_cast<const Element*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(static_cast<float>(x[i]), static_cast<float>(y[i]), sum);
  return sum;
}

template <class Element>
__global__ void __launch_bounds__(kThreads) delta_rows(const Params p) {
  const int lane = threadIdx.x % 32, d_v = static_cast<int>(p.o.extent[3]);
  for (int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; row < p.rows;
       row += int64_t{gridDim.x} * kThreads / 32) {
    const int64_t i = row % p.o.extent[2], bh = row / p.o.extent[2], h = bh % p.o.extent[1], b = bh / p.o.extent[1];
    const auto place = [&](const ffpa_tensor& t) { return b * t.stride[0] + h * t.stride[1] + i * t.stride[2]; };
    const Element* o = static_cast<const Element*>(p.o.data) + place(p.o);
    const Element* dout = static_cast<const Element*>(p.dout.data) + place(p.dout);
    float sum = 0.f;
    if (p.vector) {
      for (int c = 8 * lane; c < d_v; c += 256)
        sum += dot8<Element>(*reinterpret_cast<const uint4*>(o + c), *reinterpret_cast<const uint4*>(dout + c));
    } else {
      for (int c = lane; c < d_v; c += 32)
        sum = fmaf(static_cast<float>(o[c * p.o.stride[3]]), static_cast<float>(dout[c * p.dout.stride[3]]), sum);
    }
    if (p.copy)
      for (int c = lane; c < p.copy_columns; c += 32)
        static_cast<Element*>(p.copy)[row * p.copy_columns + c] =
            c < d_v ? dout[c * p.dout.stride[3]] : static_cast<Element>(0.f);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) {
      const float lse = static_cast<const float*>(p.lse.data)[place(p.lse)];
      const float dlse = p.dlse.rank ? static_cast<const float*>(p.dlse.data)[place(p.dlse)] : 0.f;
      p.lse_log2[row] = lse == -INFINITY ? INFINITY : lse * kLog2e;
      p.delta[row] = lse == -INFINITY ? 0.f : sum - dlse;
    }
  }
}

struct SinkParams {
  const float *lse_log2, *delta;
  ffpa_tensor sinks, dsinks;
  int64_t batches, heads, rows;  // of lse_log2 and delta
};

template <class Element>
__device__ __forceinline__ float load(const ffpa_tensor& t, int64_t at) {
  return t.dtype == FFPA_FP32 ? static_cast<const float*>(t.data)[at]
                              : static_cast<float>(static_cast<const Element*>(t.data)[at]);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) sum_of_head(const SinkParams p) {
  __shared__ float part[kThreads];
  const int64_t h = blockIdx.x;
  const float sink = load<Element>(p.sinks, h * p.sinks.stride[0]) * kLog2e;
  float sum = 0.f;
  for (int64_t b = 0; b < p.batches; ++b)
    for (int64_t i = threadIdx.x; i < p.rows; i += kThreads) {
      const int64_t row = (b * p.heads + h) * p.rows + i;
      const float weight = exp2f(sink - p.lse_log2[row]);
      if (weight != 0.f) sum -= fminf(weight, 1.f) * p.delta[row];
    }
  part[threadIdx.x] = sum;
  for (int step = kThreads / 2; step; step /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < step) part[threadIdx.x] += part[threadIdx.x + step];
  }
  if (threadIdx.x == 0) {
    const int64_t to = h * p.dsinks.stride[0];
    if (p.dsinks.dtype == FFPA_FP32)
      static_cast<float*>(p.dsinks.data)[to] = part[0];
    else
      static_cast<Element*>(p.dsinks.data)[to] = static_cast<Element>(part[0]);
  }
}

// Rows begin at 16-byte boundaries and are whole 16-byte pieces.
bool in_pieces(const ffpa_tensor& t) {
  for (int axis = 0; axis < 3; ++axis)
    if (t.extent[axis] > 1 && t.stride[axis] % 8) return false;
  return t.stride[3] == 1 && t.extent[3] % 8 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace

int64_t rows(const Problem& p) {
  const ffpa_tensor& q = p.fwd().q;
  return q.extent[0] * q.extent[1] * q.extent[2];
}

void launch(const Problem& p, float* lse_log2, float* delta, void* dout_copy, cudaStream_t stream) {
  Params x{.o = p.fwd().o,
           .dout = p.args.dout,
           .lse = p.fwd().lse,
           .dlse = p.args.dlse,
           .lse_log2 = lse_log2,
           .delta = delta,
           .copy = dout_copy,
           .rows = rows(p),
           .copy_columns = static_cast<int>((p.d_v + 7) / 8 * 8),
           .vector = in_pieces(p.fwd().o) && in_pieces(p.args.dout)};
  if (x.rows == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((x.rows * 32 + kThreads - 1) / kThreads, 1 << 20));
  if (p.fwd().q.dtype == FFPA_BF16)
    delta_rows<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(x);
  else
    delta_rows<__half><<<blocks, kThreads, 0, stream>>>(x);
}

void launch_dsinks(const Problem& p, const float* lse_log2, const float* delta, cudaStream_t stream) {
  const ffpa_tensor& q = p.fwd().q;
  const SinkParams x{lse_log2, delta, p.fwd().sinks, p.args.dsinks, q.extent[0], q.extent[1], q.extent[2]};
  if (x.heads == 0) return;
  if (q.dtype == FFPA_BF16)
    sum_of_head<__nv_bfloat16><<<static_cast<unsigned>(x.heads), kThreads, 0, stream>>>(x);
  else
    sum_of_head<__half><<<static_cast<unsigned>(x.heads), kThreads, 0, stream>>>(x);
}

}  // namespace ffpa::bwd_delta

// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/words.h"
#include "kernels/any/host.h"

namespace ffpa::any {
namespace {

bool multiple_of_8(const ffpa_tensor& t) {
  for (int axis = 0; axis < 3; ++axis)
    if (t.extent[axis] > 1 && t.stride[axis] % 8) return false;
  return t.stride[3] == 1 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

bool in_eights(const ffpa_tensor& t) {
  const int64_t bytes = std::min<int64_t>(8 * dtype_bytes(t.dtype), 16);
  if (!present(t) || broadcast_stride(t, 3) != 1 || reinterpret_cast<uintptr_t>(t.data) % bytes) return false;
  for (int axis = 0; axis < 3; ++axis)
    if (broadcast_stride(t, axis) * dtype_bytes(t.dtype) % bytes) return false;
  return true;
}

attn::Broadcast broadcast(const ffpa_tensor& t) {
  if (!present(t)) return {};
  return {t.data, broadcast_stride(t, 0), broadcast_stride(t, 1), broadcast_stride(t, 2), broadcast_stride(t, 3)};
}

int bounded(int64_t window) {
  return window < 0 || window > attn::kUnbounded ? attn::kUnbounded : static_cast<int>(window);
}

}  // namespace

int processors(int device) {
  static std::atomic<int> known[kMaxDevices];
  int n = known[device].load(std::memory_order_relaxed);
  if (n == 0) {
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    known[device].store(n, std::memory_order_relaxed);
  }
  return n;
}

Status allow_shared_memory(const void* kernel, uint32_t bytes, int device, uint64_t* done) {
  const std::atomic_ref<uint64_t> mark(*done);
  if (mark.load(std::memory_order_relaxed) >> device & 1) return {};
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
      e != cudaSuccess)
    return {FFPA_DEVICE_ERROR, words("cudaFuncSetAttribute: ", cudaGetErrorString(e))};
  mark.fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
  return {};
}

Status launch_status(const char* kernel) {
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess)
    return {FFPA_DEVICE_ERROR, words(kernel, ": ", cudaGetErrorString(e))};
  return {};
}

attn::Features features_needed(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (p.scale <= 0 || f.softcap > 0 || present(f.mask) || present(f.bias) || present(f.alibi_slopes) || f.dropout_p > 0)
    return p.packed_q() ? attn::Features::kAll : attn::Features::kOptions;
  return p.packed_q() ? attn::Features::kPacked : attn::Features::kDense;
}

void fill_attention_params(const Problem& p, attn::AttentionParams* f) {
  const ffpa_forward_problem& a = p.fwd();
  const double log2e = 1.4426950408889634074;
  f->n_seqs = static_cast<int>(p.n_seqs);
  f->h_q = static_cast<int>(p.h_q);
  f->group = static_cast<int>(p.group);
  f->n_q = static_cast<int>(a.q.extent[2]);
  f->kv_rows = static_cast<int>(p.paged() ? a.block_table.extent[1] * p.page_rows : a.k.extent[2]);
  f->n_kv = f->kv_rows;
  f->d_qk = static_cast<int>(p.d_qk);
  f->d_v = static_cast<int>(p.d_v);
  const auto ints = [](const ffpa_tensor& t) { return present(t) ? static_cast<const int*>(t.data) : nullptr; };
  f->cu_seqlens_q = ints(a.cu_seqlens_q);
  f->cu_seqlens_kv = ints(a.cu_seqlens_kv);
  f->seqlens_kv = ints(a.seqlens_kv);
  f->kv_batch_idx = ints(a.kv_batch_idx);

  f->scale_log2 = static_cast<float>(p.scale * log2e);
  f->window_left = bounded(a.window_left);
  f->window_right = a.causal ? 0 : bounded(a.window_right);
  f->bottom_right = a.anchor == FFPA_BOTTOM_RIGHT;
  f->heavy_last = f->window_right != attn::kUnbounded;
  if (present(a.sinks)) {
    f->sinks = a.sinks.data;
    f->sinks_stride = a.sinks.stride[0];
    f->sinks_fp32 = a.sinks.dtype == FFPA_FP32;
  }
  if (a.softcap > 0) {
    f->softcap_log2 = static_cast<float>(a.softcap * log2e);
    f->softcap_inverse = static_cast<float>(2 * p.scale / a.softcap * log2e);
  }
  f->mask = broadcast(a.mask);
  f->bias = broadcast(a.bias);
  f->bias_fp32 = a.bias.dtype == FFPA_FP32;
  f->mask_eights = in_eights(a.mask);
  f->bias_eights = in_eights(a.bias);
  if (present(a.alibi_slopes)) {
    f->alibi_slopes = static_cast<const float*>(a.alibi_slopes.data);
    f->alibi_batch = a.alibi_slopes.rank == 2 && a.alibi_slopes.extent[0] > 1 ? a.alibi_slopes.stride[0] : 0;
    f->alibi_head = a.alibi_slopes.stride[a.alibi_slopes.rank - 1];
  }
  if (a.dropout_p > 0) {
    f->dropout = {a.dropout_seed, a.dropout_offset, static_cast<uint32_t>(std::lround(a.dropout_p * 65536)),
                  a.dropout_p < 1 ? static_cast<float>(1 / (1 - a.dropout_p)) : 0.f};
    f->keep_scale = f->dropout.keep_scale;
    if (present(a.dropout_state)) f->dropout_state = static_cast<const int64_t*>(a.dropout_state.data);
  }
}

Status order_tiles(const Problem& p, int tile_q, attn::AttentionParams* f) {
  const ffpa_forward_problem& a = p.fwd();
  const int64_t row_tiles = a.q.extent[2] / tile_q + 1;
  const int64_t tiles = p.packed_q() ? (row_tiles + p.n_seqs) * p.h_q  // at most
                                     : (a.q.extent[2] + tile_q - 1) / tile_q * p.h_q * p.n_seqs;
  if (tiles > (int64_t{1} << 30))
    return {FFPA_NOT_SUPPORTED, words("q: B * H_q * N_q / ", tile_q, " must be at most 2^30, but is ", tiles)};
  f->n_tiles = static_cast<int>(tiles);
  // Uneven tiles are taken heaviest first over as many heads as keep their K and V in a good half of L2 (60 MB).
  const int64_t head_bytes = std::max<int64_t>(int64_t{f->kv_rows} * (p.d_qk + p.d_v) * 2, 1);
  f->section =
      f->heavy_last ? static_cast<int>(std::clamp<int64_t>((int64_t{40} << 20) / head_bytes, 1, 1 << 20) * p.group) : 1;
  return {};
}

int workers(const attn::AttentionParams& f, int resident) {
  if (f.cu_seqlens_q) return resident;
  return f.heavy_last ? f.n_tiles : f.n_tiles < resident ? f.n_tiles : resident;
}

bool nothing_to_write(const Problem& p) {
  const ffpa_tensor& o = p.fwd().o;
  return o.extent[0] * o.extent[1] * o.extent[2] * o.extent[3] == 0;
}

attn::RowsOut rows_out(const ffpa_tensor& t) {
  if (!present(t)) return {};
  return {t.data, t.stride[0], t.stride[1], t.stride[2], t.stride[3], static_cast<int>(t.extent[3]), multiple_of_8(t)};
}

attn::RowValues row_values(const ffpa_tensor& t) {
  if (!present(t)) return {};
  return {static_cast<float*>(t.data), t.stride[0], t.stride[1], t.stride[2]};
}

}  // namespace ffpa::any

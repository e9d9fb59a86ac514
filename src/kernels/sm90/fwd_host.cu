// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/words.h"
#include "kernels/sm90/fwd_host.h"

namespace ffpa::sm90 {
namespace {

constexpr int kMaxDevices = 64;

using Encode = decltype(&cuTensorMapEncodeTiled);
Encode encode_function() {
  static const Encode found = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result) !=
        cudaSuccess)
      f = nullptr;
    return reinterpret_cast<Encode>(f);
  }();
  return found;
}

bool is_hopper(int device) {
  static std::atomic<int8_t> known[kMaxDevices];  // 0 = not asked, 1 = yes, -1 = no
  if (device < 0 || device >= kMaxDevices) return false;
  int8_t k = known[device].load(std::memory_order_relaxed);
  if (k == 0) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    k = major == 9 && minor == 0 ? 1 : -1;
    known[device].store(k, std::memory_order_relaxed);
  }
  return k > 0;
}

std::string refuses_tensor(const char* name, const ffpa_tensor& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16)
    return words(name, ": must be aligned to 16 bytes for tensor copies, but is not");
  if (t.stride[3] != 1 && t.extent[3] != 1)
    return words(name, ": stride 3 (columns) must be 1 for tensor copies, but is ", t.stride[3]);
  for (int axis = 0; axis < 3; ++axis)
    if (t.extent[axis] > 1 && t.stride[axis] % 8)
      return words(name, ": stride ", axis, " must be a multiple of 8 for tensor copies, but is ", t.stride[axis]);
  if (t.extent[2] > 1 && t.stride[2] == 0)
    return words(name, ": stride 2 (rows) must not be 0 for tensor copies, but is");
  return {};
}

bool has_lengths(const ffpa_forward_problem& f) { return present(f.cu_seqlens_kv) || present(f.seqlens_kv); }

// A dimension that does not move: extent 1, any legal stride.
struct Dimension {
  int64_t extent, stride_bytes;
};
Dimension dimension(const ffpa_tensor& t, int axis) {
  if (t.extent[axis] <= 1 || t.stride[axis] == 0) return {1, 16};
  return {t.extent[axis], t.stride[axis] * 2};
}

bool encode(CUtensorMap* map, const ffpa_tensor& t, int rank, const Dimension* d, int box_rows) {
  cuuint64_t extent[5];
  cuuint64_t stride[4];
  cuuint32_t box[5] = {64, static_cast<cuuint32_t>(box_rows), 1, 1, 1}, step[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank; ++i) extent[i] = static_cast<cuuint64_t>(d[i].extent);
  for (int i = 1; i < rank; ++i) stride[i - 1] = static_cast<cuuint64_t>(d[i].stride_bytes);
  return encode_function()(map,
                           t.dtype == FFPA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                           static_cast<cuuint32_t>(rank), t.data, extent, stride, box, step,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The copy of K or V. Coordinates: see attn::ForwardParams::ragged.
constexpr int64_t kHalfRange = int64_t{1} << 30;
bool encode_kv(CUtensorMap* map, const ffpa_tensor& t, bool ragged, int box_rows) {
  const int64_t rows = t.extent[2], row_bytes = rows > 1                    ? t.stride[2] * 2
                                                : ragged && t.extent[0] > 1 ? t.stride[0] * 2
                                                                            : 16;
  if (!ragged) {
    const Dimension d[5] = {{t.extent[3], 2}, {rows, row_bytes}, dimension(t, 0), {1, 16}, dimension(t, 1)};
    return encode(map, t, 5, d, box_rows);
  }
  const Dimension d[5] = {{t.extent[3], 2},
                          {kHalfRange, row_bytes},
                          {2 * kHalfRange - 1, row_bytes},
                          {kHalfRange + 1, (int64_t{1} << 34) - row_bytes},
                          dimension(t, 1)};
  return encode(map, t, 5, d, box_rows);
}

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

const char* machine_lacks_hopper() {
  static const bool found = [] {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
      cudaGetLastError();  // no driver: not an error of a later call
      return false;
    }
    for (int i = 0; i < n; ++i)
      if (is_hopper(i)) return encode_function() != nullptr;
    return false;
  }();
  return found ? nullptr : "needs a GPU of compute capability 9.0 (Hopper)";
}

std::string tensor_maps_refuse(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (!is_hopper(f.q.device_index))
    return words("q: must lie on a GPU of compute capability 9.0, but device ", f.q.device_index, " is not one");
  if (p.paged()) return "block_table: must be absent, but is given";
  for (const auto& [name, t] : {std::pair<const char*, const ffpa_tensor&>{"q", f.q}, {"k", f.k}, {"v", f.v}})
    if (std::string reason = refuses_tensor(name, t); !reason.empty()) return reason;
  if (has_lengths(f))  // batches are reached by counting rows
    for (const auto& [name, t] : {std::pair<const char*, const ffpa_tensor&>{"k", f.k}, {"v", f.v}})
      if (t.extent[0] > 1 && t.extent[2] > 1) {
        if (t.stride[0] % t.stride[2])
          return words(name, ": with lengths stride 0 must be a multiple of stride 2, ", t.stride[2], ", but is ",
                       t.stride[0]);
        if (t.stride[0] / t.stride[2] * t.extent[0] >= kHalfRange)
          return words(name, ": with lengths stride 0 * extent 0 / stride 2 must be below 2^30, but is ",
                       t.stride[0] / t.stride[2] * t.extent[0]);
      }
  constexpr int64_t kMostRows = int64_t{1} << 29;
  for (const auto& [name, n] : {std::pair{"N_q", p.packed_q() ? f.q.extent[2] : p.n_q}, {"N_kv", f.k.extent[2]}})
    if (n > kMostRows) return words(name, ": must be at most 2^29, but is ", n);
  if (f.num_splits > 1) return words("num_splits: must be 0 or 1, but is ", f.num_splits);
  return {};
}

attn::Features features_needed(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (p.scale <= 0 || f.softcap > 0 || present(f.mask) || present(f.bias) || present(f.alibi_slopes) || f.dropout_p > 0)
    return p.packed_q() ? attn::Features::kAll : attn::Features::kOptions;
  return p.packed_q() ? attn::Features::kPacked : attn::Features::kDense;
}

bool nothing_to_write(const Problem& p) {
  const ffpa_tensor& o = p.fwd().o;
  return o.extent[0] * o.extent[1] * o.extent[2] * o.extent[3] == 0;
}

Status fill_forward_params(const Problem& p, const Boxes& boxes, attn::ForwardParams* f) {
  const ffpa_forward_problem& a = p.fwd();
  const double log2e = 1.4426950408889634074;
  f->kv_rows = static_cast<int>(a.k.extent[2]);
  f->ragged = has_lengths(a);
  const auto batch_rows = [](const ffpa_tensor& t) {  // one row a batch: the batch is the row, see encode_kv
    return t.extent[0] <= 1 ? 0 : t.extent[2] > 1 ? static_cast<int>(t.stride[0] / t.stride[2]) : 1;
  };
  f->k_batch_rows = batch_rows(a.k);
  f->v_batch_rows = batch_rows(a.v);
  const Dimension q[4] = {{a.q.extent[3], 2}, dimension(a.q, 2), dimension(a.q, 1), dimension(a.q, 0)};
  const bool has_keys = a.k.extent[0] > 0 && a.k.extent[2] > 0;  // without, no copy is made
  if (has_keys && !(encode(&f->q, a.q, 4, q, boxes.q_rows) && encode_kv(&f->k, a.k, f->ragged, boxes.k_rows) &&
                    encode_kv(&f->v, a.v, f->ragged, boxes.v_rows)))
    return {FFPA_DEVICE_ERROR, "cuTensorMapEncodeTiled: refused q, k or v"};
  const auto step = [](const ffpa_tensor& t, int axis) { return dimension(t, axis).extent > 1 ? 1 : 0; };
  f->q_head_step = step(a.q, 1);
  f->k_head_step = step(a.k, 1);
  f->v_head_step = step(a.v, 1);
  f->q_batch_step = step(a.q, 0);
  f->k_batch_step = step(a.k, 0);
  f->v_batch_step = step(a.v, 0);

  f->o = {a.o.data,      a.o.stride[0],           a.o.stride[1],     a.o.stride[2],
          a.o.stride[3], static_cast<int>(p.d_v), multiple_of_8(a.o)};
  if (present(a.lse)) f->lse = {static_cast<float*>(a.lse.data), a.lse.stride[0], a.lse.stride[1], a.lse.stride[2]};
  f->n_seqs = static_cast<int>(p.n_seqs);
  f->h_q = static_cast<int>(p.h_q);
  f->group = static_cast<int>(p.group);
  f->n_q = static_cast<int>(a.q.extent[2]);
  f->n_kv = static_cast<int>(a.k.extent[2]);
  f->d_qk = static_cast<int>(p.d_qk);
  f->d_v = static_cast<int>(p.d_v);
  const int64_t row_tiles = a.q.extent[2] / boxes.tile_q + 1;
  const int64_t tiles = p.packed_q() ? (row_tiles + p.n_seqs) * p.h_q  // at most
                                     : (a.q.extent[2] + boxes.tile_q - 1) / boxes.tile_q * p.h_q * p.n_seqs;
  if (tiles > (int64_t{1} << 30))
    return {FFPA_NOT_SUPPORTED, words("q: B * H_q * N_q / ", boxes.tile_q, " must be at most 2^30, but is ", tiles)};
  f->n_tiles = static_cast<int>(tiles);
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
  // Uneven tiles are taken heaviest first over as many heads as keep their K and V in a good half of L2 (60 MB).
  const int64_t head_bytes = std::max<int64_t>(a.k.extent[2] * (p.d_qk + p.d_v) * 2, 1);
  f->section =
      f->heavy_last ? static_cast<int>(std::clamp<int64_t>((int64_t{40} << 20) / head_bytes, 1, 1 << 20) * p.group) : 1;
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
  return {};
}

int processors(int device) {
  static std::atomic<int> known[kMaxDevices];
  int n = known[device].load(std::memory_order_relaxed);
  if (n == 0) {
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    known[device].store(n, std::memory_order_relaxed);
  }
  return n;
}

int workers(const attn::ForwardParams& f, int resident) {
  if (f.cu_seqlens_q) return resident;
  return f.heavy_last ? f.n_tiles : f.n_tiles < resident ? f.n_tiles : resident;
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

}  // namespace ffpa::sm90

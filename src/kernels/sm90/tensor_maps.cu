// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>
#include <tuple>

#include "core/words.h"
#include "kernels/sm90/tensor_maps.h"

namespace ffpa::sm90 {
namespace {

constexpr int64_t kHalfRange = int64_t{1} << 30;  // see attn::row_coordinates
constexpr int64_t kMostRows = int64_t{1} << 29;

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

}  // namespace

bool tensor_maps_here() { return encode_function() != nullptr; }

std::string tensor_map_refuses(const char* name, const ffpa_tensor& t, bool ragged) {
  if (reinterpret_cast<uintptr_t>(t.data) % 16)
    return words(name, ": must be aligned to 16 bytes for tensor copies, but is not");
  if (t.stride[3] != 1 && t.extent[3] != 1)
    return words(name, ": stride 3 (columns) must be 1 for tensor copies, but is ", t.stride[3]);
  for (int axis = 0; axis < 3; ++axis)
    if (t.extent[axis] > 1 && t.stride[axis] % 8)
      return words(name, ": stride ", axis, " must be a multiple of 8 for tensor copies, but is ", t.stride[axis]);
  if (t.extent[2] > 1 && t.stride[2] == 0)
    return words(name, ": stride 2 (rows) must not be 0 for tensor copies, but is");
  if (ragged && t.extent[0] > 1 && t.extent[2] > 1) {  // batches are reached by counting rows
    if (t.stride[0] % t.stride[2])
      return words(name, ": with lengths stride 0 must be a multiple of stride 2, ", t.stride[2], ", but is ",
                   t.stride[0]);
    if (t.stride[0] / t.stride[2] * t.extent[0] >= kHalfRange)
      return words(name, ": with lengths stride 0 * extent 0 / stride 2 must be below 2^30, but is ",
                   t.stride[0] / t.stride[2] * t.extent[0]);
  }
  if (t.extent[2] > kMostRows) return words(name, ": extent 2 (rows) must be at most 2^29, but is ", t.extent[2]);
  return {};
}

std::string tensor_maps_refuse(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (p.paged()) return "block_table: must be absent, but is given";
  for (const auto& [name, t, ragged] : {std::tuple<const char*, const ffpa_tensor&, bool>{"q", f.q, ragged_q(p)},
                                        {"k", f.k, ragged_kv(p)},
                                        {"v", f.v, ragged_kv(p)}})
    if (std::string reason = tensor_map_refuses(name, t, ragged); !reason.empty()) return reason;
  return {};
}

bool ragged_q(const Problem& p) { return p.packed_q(); }
bool ragged_kv(const Problem& p) { return p.packed_kv() || present(p.fwd().seqlens_kv); }

bool encode_rows(CUtensorMap* map, const ffpa_tensor& t, int box_rows) {
  const Dimension d[4] = {{t.extent[3], 2}, dimension(t, 2), dimension(t, 1), dimension(t, 0)};
  return encode(map, t, 4, d, box_rows);
}

bool encode_sequences(CUtensorMap* map, const ffpa_tensor& t, bool ragged, int box_rows) {
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

int map_step(const ffpa_tensor& t, int axis) { return dimension(t, axis).extent > 1 ? 1 : 0; }

int map_batch_rows(const ffpa_tensor& t) {  // one row a batch: the batch is the row, see encode_sequences
  return t.extent[0] <= 1 ? 0 : t.extent[2] > 1 ? static_cast<int>(t.stride[0] / t.stride[2]) : 1;
}

}  // namespace ffpa::sm90

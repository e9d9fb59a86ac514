// What kernels are launched with: what both passes share, what the copy engine needs, and the forward's outputs. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/philox.h"

namespace ffpa::attn {

inline constexpr int kUnbounded = 1 << 30;  // window side without a bound

// A tensor that broadcasts to [B, H_q, N_q, N_kv]; strides in elements, 0 where it repeats. data null = absent.
struct Broadcast {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0;
};

// What an instance of a kernel carries beside dense attention with causality, windows, lengths and sinks.
enum class Features {
  kDense,    // nothing
  kPacked,   // cu_seqlens
  kOptions,  // what acts on single scores: softcap, bias, mask, ALiBi, dropout, a scale of 0 or below
  kAll,      // both
};

constexpr bool has_options(Features f) { return f == Features::kOptions || f == Features::kAll; }
constexpr bool has_packed(Features f) { return f == Features::kPacked || f == Features::kAll; }

// [B | 1, H, N | T, width]: rows that a kernel writes; strides in elements.
struct RowsOut {
  void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 1;
  int width = 0;
  bool vector = false;  // can be written 16 bytes at a time
  template <class Element>
  __device__ __forceinline__ Element* at(int64_t b, int64_t h, int64_t i) const {
    return static_cast<Element*>(data) + b * batch + h * head + i * row;
  }
};

// [B | 1, H_q, N_q | T_q]: a float for each query row; strides in elements. data null = absent.
struct RowValues {
  float* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  __device__ __forceinline__ float* at(int64_t b, int64_t h, int64_t i) const {
    return data + b * batch + h * head + i * row;
  }
};

// What every kernel of either pass reads, beside q, k and v themselves.
struct AttentionParams {
  int n_seqs = 0, h_q = 0, group = 1;
  int n_q = 0, n_kv = 0;  // rows of a dense sequence; T_q, T_kv when packed
  int d_qk = 0, d_v = 0;
  int n_tiles = 0;  // dense: tiles in all
  int kv_rows = 0;  // rows of k and v in memory; paged: of one sequence

  const int* cu_seqlens_q = nullptr;   // [B + 1] or null
  const int* cu_seqlens_kv = nullptr;  // [B + 1] or null
  const int* seqlens_kv = nullptr;     // [B] or null
  const int* kv_batch_idx = nullptr;   // [B] or null

  float scale_log2 = 0.f;                                   // scale * log2(e)
  int window_left = kUnbounded, window_right = kUnbounded;  // causal is window_right = 0
  bool bottom_right = false;
  bool heavy_last = false;  // later rows see more keys: take them first
  int section = 1;          // query heads whose tiles are listed together, heaviest first

  const void* sinks = nullptr;  // [H_q] or null
  int64_t sinks_stride = 0;
  bool sinks_fp32 = false;

  // Read by the kernels built with options only.
  float softcap_log2 = 0.f, softcap_inverse = 0.f;  // softcap * log2(e); 2 * scale / softcap * log2(e)
  Broadcast mask, bias;
  bool bias_fp32 = false;
  // Neighbouring columns lie together, and every eighth is aligned for a load of eight (or of 16 bytes, if that is less).
  bool mask_eights = false, bias_eights = false;
  const float* alibi_slopes = nullptr;
  int64_t alibi_batch = 0, alibi_head = 0;
  Dropout dropout;  // threshold 0 = none
  const int64_t* dropout_state = nullptr;
  float keep_scale = 1.f;
};

// The same with tensor maps, for kernels that leave copies to the copy engine.
struct TmaParams : AttentionParams {
  // q [B | 1, H_q, N_q | T_q, D_qk] as (column, row, head, batch); k and v as KvCoordinates says. Boxes of 64 columns; columns past D
  // arrive as zeros.
  CUtensorMap q, k, v;
  bool ragged = false;                     // sequences have lengths of their own, see KvCoordinates
  int k_batch_rows = 0, v_batch_rows = 0;  // ragged: rows from one batch to the next
  // 0 where the tensor repeats
  int q_head_step = 1, k_head_step = 1, v_head_step = 1, q_batch_step = 1, k_batch_step = 1, v_batch_step = 1;
};

struct ForwardParams : TmaParams {
  RowsOut o;      // width D_v
  RowValues lse;  // may be absent
};

}  // namespace ffpa::attn

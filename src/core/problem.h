// The validated problem: what every engine, kernel and heuristic reads. Plain C++, no CUDA. SPDX-License-Identifier: Apache-2.0
//
// `Problem` is made once, by src/api/validate.cc, from the caller's ffpa_forward_problem or ffpa_backward_problem. Behind it
// extents agree, dtypes are known, devices match and absent tensors are all zero: engines check nothing again.
// The rules of visibility (causal, window, lengths) and of addressing (packed, paged) live here and nowhere else on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/inline.h"
#include "ffpa/ffpa.h"

namespace ffpa {

enum class Pass : int32_t { kForward = 0, kBackward = 1 };

FFPA_INLINE bool present(const ffpa_tensor& t) { return t.rank != 0; }
FFPA_INLINE bool has_elements(const ffpa_tensor& t) {
  return present(t) && std::all_of(t.extent, t.extent + t.rank, [](int64_t extent) { return extent > 0; });
}

FFPA_INLINE constexpr int64_t dtype_bytes(int32_t dtype) {
  switch (dtype) {
    case FFPA_FP64:
    case FFPA_INT64: return 8;
    case FFPA_FP32:
    case FFPA_INT32: return 4;
    case FFPA_FP16:
    case FFPA_BF16: return 2;
    case FFPA_BOOL:
    case FFPA_FP8_E4M3:
    case FFPA_INT8: return 1;
    default: return 0;
  }
}

struct Problem {
  Pass pass = Pass::kForward;
  ffpa_backward_problem args{};  // the caller's tensors and options; only args.forward is set in the forward pass

  // Derived by validation.
  int64_t n_seqs = 0;         // B
  int64_t h_q = 0, h_kv = 0;  // heads
  int64_t group = 1;          // G = H_q / H_kv (1 when there are no heads)
  int64_t n_q = 0, n_kv = 0;  // rows; packed or paged: an upper bound for any sequence
  int64_t d_qk = 0, d_v = 0;
  int64_t page_rows = 0;  // 0 = not paged
  double scale = 1.0;     // resolved: 1/sqrt(D_qk) unless given (1 when D_qk is 0)

  FFPA_INLINE const ffpa_forward_problem& fwd() const { return args.forward; }
  FFPA_INLINE bool packed_q() const { return present(fwd().cu_seqlens_q); }
  FFPA_INLINE bool packed_kv() const { return present(fwd().cu_seqlens_kv); }
  FFPA_INLINE bool paged() const { return present(fwd().block_table); }
  FFPA_INLINE bool has_window() const { return fwd().window_left >= 0 || fwd().window_right >= 0; }
  FFPA_INLINE bool on_cpu() const { return fwd().q.device_type == FFPA_CPU; }
};

// One sequence of a problem whose lengths lie in host memory: where its rows are. Rows of q, o, lse, dq start at (q_batch, q_row);
// rows of k, v, dk, dv at (kv_batch, kv_row), unless paged.
struct Sequence {
  int64_t b = 0;
  int64_t q_batch = 0, q_row = 0, n_q = 0;
  int64_t kv_batch = 0, kv_row = 0, n_kv = 0;
};

FFPA_INLINE int64_t int32_at(const ffpa_tensor& t, int64_t index) {
  return static_cast<const int32_t*>(t.data)[index * t.stride[0]];
}

FFPA_INLINE Sequence sequence_at(const Problem& p, int64_t b) {
  const ffpa_forward_problem& f = p.fwd();
  Sequence s;
  s.b = b;
  if (p.packed_q()) {
    s.q_row = int32_at(f.cu_seqlens_q, b);
    s.n_q = int32_at(f.cu_seqlens_q, b + 1) - s.q_row;
  } else {
    s.q_batch = b;
    s.n_q = p.n_q;
  }
  if (p.packed_kv()) {
    s.kv_row = int32_at(f.cu_seqlens_kv, b);
    s.n_kv = int32_at(f.cu_seqlens_kv, b + 1) - s.kv_row;
  } else {
    s.kv_batch = present(f.kv_batch_idx) ? int32_at(f.kv_batch_idx, b) : b;
    s.n_kv = p.n_kv;
  }
  if (present(f.seqlens_kv)) s.n_kv = int32_at(f.seqlens_kv, b);
  return s;
}

// Element offset of key row j of one sequence and KV head in k or v (or dk, dv); add column * stride[3].
FFPA_INLINE int64_t kv_row_offset(const Problem& p, const Sequence& s, const ffpa_tensor& t, int64_t head, int64_t j) {
  int64_t batch = s.kv_batch, row = s.kv_row + j;
  if (p.paged()) {
    const ffpa_tensor& table = p.fwd().block_table;
    batch = static_cast<const int32_t*>(table.data)[s.b * table.stride[0] + (j / p.page_rows) * table.stride[1]];
    row = j % p.page_rows;
  }
  return batch * t.stride[0] + head * t.stride[1] + row * t.stride[2];
}

// Element offset of query row i of one sequence in q, o, dout or dq; for lse take the same with rank 3.
FFPA_INLINE int64_t q_row_offset(const Sequence& s, const ffpa_tensor& t, int64_t head, int64_t i) {
  return s.q_batch * t.stride[0] + head * t.stride[1] + (s.q_row + i) * t.stride[2];
}

// The keys [begin, end) that causality, the window and the length leave visible to row i; begin >= end means none. The bool mask
// and -inf in the bias hide further ones. Both ends never fall as i grows.
struct KeyRange {
  int64_t begin = 0, end = 0;
};

FFPA_INLINE KeyRange visible_keys(const Problem& p, const Sequence& s, int64_t i) {
  const ffpa_forward_problem& f = p.fwd();
  const int64_t diagonal = f.anchor == FFPA_BOTTOM_RIGHT ? i + s.n_kv - s.n_q : i;
  KeyRange r{0, s.n_kv};
  if (f.causal) r.end = std::min(r.end, diagonal + 1);
  if (f.window_right >= 0 && f.window_right < r.end - diagonal - 1) r.end = diagonal + f.window_right + 1;
  if (f.window_left >= 0 && f.window_left < diagonal) r.begin = diagonal - f.window_left;
  r.end = std::max<int64_t>(r.end, 0);
  return r;
}

// Element offset of a broadcastable [B|1, H|1, N_q|1, N_kv|1] tensor (mask, bias, dbias) at column 0; columns then step by
// broadcast_stride(t, 3).
FFPA_INLINE int64_t broadcast_stride(const ffpa_tensor& t, int axis) {
  return t.extent[axis] == 1 ? 0 : t.stride[axis];
}
FFPA_INLINE int64_t broadcast_row_offset(const ffpa_tensor& t, int64_t b, int64_t h, int64_t i) {
  return b * broadcast_stride(t, 0) + h * broadcast_stride(t, 1) + i * broadcast_stride(t, 2);
}

}  // namespace ffpa

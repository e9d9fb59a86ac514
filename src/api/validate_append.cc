// The rules of ffpa_append. SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <vector>

#include "api/checks.h"
#include "api/validate.h"
#include "core/tensors.h"

namespace ffpa {
namespace {

struct AppendArgs {
  explicit AppendArgs(const ffpa_append_problem& p)
      : k_new{"k_new", p.k_new},
        v_new{"v_new", p.v_new},
        k_cache{"k_cache", p.k_cache},
        v_cache{"v_cache", p.v_cache},
        seqlens_kv{"seqlens_kv", p.seqlens_kv},
        block_table{"block_table", p.block_table},
        kv_batch_idx{"kv_batch_idx", p.kv_batch_idx},
        rotary_cos{"rotary_cos", p.rotary_cos},
        rotary_sin{"rotary_sin", p.rotary_sin},
        q{"q", p.q},
        q_rotated{"q_rotated", p.q_rotated} {}
  Arg k_new, v_new, k_cache, v_cache, seqlens_kv, block_table, kv_batch_idx, rotary_cos, rotary_sin, q, q_rotated;
};

// New rows and the cache they go to.
void check_rows(const AppendArgs& a, Append* p) {
  check_tensor(a.k_new, 4, Use::kRead, a.k_new);
  check_dtype(a.k_new, {FFPA_FP64, FFPA_FP32, FFPA_FP16, FFPA_BF16}, "fp64, fp32, fp16 or bf16");
  p->n_seqs = a.k_new.extent(0);
  p->h_kv = a.k_new.extent(1);
  p->n_new = a.k_new.extent(2);
  p->d_qk = a.k_new.extent(3);
  const bool paged = given(a.block_table);
  const char* rows = paged ? "page rows" : "capacity";

  check_tensor(a.k_cache, 4, Use::kWritten, a.k_new);
  check_dtype_of(a.k_cache, a.k_new);
  check_extent(a.k_cache, 1, "H_kv", "k_new's", p->h_kv);
  check_extent(a.k_cache, 3, "D_qk", "k_new's", p->d_qk);

  if (!given(a.v_new)) {
    check_absent(a.v_cache, "must be absent when v_new is");
  } else {
    check_tensor(a.v_new, 4, Use::kRead, a.k_new);
    check_dtype_of(a.v_new, a.k_new);
    check_extent(a.v_new, 0, "B", "k_new's", p->n_seqs);
    check_extent(a.v_new, 1, "H_kv", "k_new's", p->h_kv);
    check_extent(a.v_new, 2, "N_new", "k_new's", p->n_new);
    p->d_v = a.v_new.extent(3);
    check_tensor(a.v_cache, 4, Use::kWritten, a.k_new);
    check_dtype_of(a.v_cache, a.k_new);
    check_extent(a.v_cache, 0, paged ? "P" : "B_cache", "k_cache's", a.k_cache.extent(0));
    check_extent(a.v_cache, 1, "H_kv", "k_new's", p->h_kv);
    check_extent(a.v_cache, 2, rows, "k_cache's", a.k_cache.extent(2));
    check_extent(a.v_cache, 3, "D_v", "v_new's", p->d_v);
  }
}

// Where each sequence's rows go; positions within the cache; no two sequences to one place.
void check_places(const AppendArgs& a, Append* p) {
  int64_t capacity = a.k_cache.extent(2);
  if (present(a.block_table.t)) {
    check_absent(a.kv_batch_idx, "must be absent with block_table, which already says where each sequence lies");
    check_block_table(a.block_table, a.k_cache, "k_new's", p->n_seqs, a.k_new);
    p->page_rows = a.k_cache.extent(2);
    capacity = a.block_table.extent(1) * p->page_rows;
  } else if (given(a.kv_batch_idx)) {
    check_int32_vector(a.kv_batch_idx, "B", "k_new's", p->n_seqs, a.k_new);
    check_entries(a.kv_batch_idx, a.k_cache.extent(0) - 1, "k_cache's last batch row");
  } else if (a.k_cache.extent(0) < p->n_seqs) {
    refuse("k_cache: extent 0 (B_cache) must be at least k_new's B, ", p->n_seqs, ", but is ", a.k_cache.extent(0));
  }
  if (given(a.seqlens_kv)) check_int32_vector(a.seqlens_kv, "B", "k_new's", p->n_seqs, a.k_new);
  if (a.k_new.t.device_type != FFPA_CPU) return;

  std::vector<int64_t> targets;  // batch rows or pages written to
  for (int64_t b = 0; b < p->n_seqs; ++b) {
    const int64_t length = present(a.seqlens_kv.t) ? int32_at(a.seqlens_kv.t, b) : 0;
    if (length < 0 || length > capacity - p->n_new)
      refuse("seqlens_kv: entry ", b, " plus N_new, ", p->n_new, ", must be from ", p->n_new,
             " to the cache's capacity, ", capacity, ", but the entry is ", length);
    if (p->n_new == 0) continue;
    if (!p->page_rows) {
      targets.push_back(present(a.kv_batch_idx.t) ? int32_at(a.kv_batch_idx.t, b) : b);
      continue;
    }
    const ffpa_tensor& table = a.block_table.t;
    for (int64_t i = length / p->page_rows; i <= (length + p->n_new - 1) / p->page_rows; ++i) {
      const int64_t page = static_cast<const int32_t*>(table.data)[b * table.stride[0] + i * table.stride[1]];
      if (page < 0 || page >= a.k_cache.extent(0))
        refuse("block_table: entry [", b, ", ", i, "] must be a page, from 0 to ", a.k_cache.extent(0) - 1, ", but is ",
               page);
      targets.push_back(page);
    }
  }
  std::sort(targets.begin(), targets.end());
  if (const auto twice = std::adjacent_find(targets.begin(), targets.end()); twice != targets.end())
    refuse(p->page_rows ? "block_table: a page" : "kv_batch_idx: a batch row",
           " must be appended to once only, but two places name ", *twice);
}

void check_rotation(const AppendArgs& a, Append* p) {
  check_flag("rotary_interleaved", p->args.rotary_interleaved);
  check_flag("rotary_q_fixed", p->args.rotary_q_fixed);
  check_range("num_threads", p->args.num_threads, 0, 4096);
  if (!given(a.rotary_cos)) {
    check_absent(a.rotary_sin, "must be absent when rotary_cos is");
    check_absent(a.q, "must be absent when rotary_cos is: there is nothing to do to it");
    check_absent(a.q_rotated, "must be absent when q is");
    return;
  }
  for (const Arg& table : {a.rotary_cos, a.rotary_sin}) {
    check_tensor(table, 2, Use::kRead, a.k_new);
    check_fp32_or_dtype_of(table, a.k_new);
  }
  check_dtype_of(a.rotary_sin, a.rotary_cos);
  check_extent(a.rotary_sin, 0, "positions", "rotary_cos's", a.rotary_cos.extent(0));
  check_extent(a.rotary_sin, 1, "R/2", "rotary_cos's", a.rotary_cos.extent(1));
  if (a.rotary_cos.extent(1) > p->d_qk / 2)
    refuse("rotary_cos: extent 1 (R/2) must be at most half of D_qk, ", p->d_qk / 2, ", but is ",
           a.rotary_cos.extent(1));
  p->rotary_columns = 2 * a.rotary_cos.extent(1);

  int64_t n_q = 0;
  if (given(a.q)) {
    check_tensor(a.q, 4, Use::kRead, a.k_new);
    check_dtype_of(a.q, a.k_new);
    check_extent(a.q, 0, "B", "k_new's", p->n_seqs);
    check_extent(a.q, 3, "D_qk", "k_new's", p->d_qk);
    check_tensor(a.q_rotated, 4, Use::kWritten, a.k_new);
    check_dtype_of(a.q_rotated, a.k_new);
    for (int axis = 0; axis < 4; ++axis)
      check_extent(a.q_rotated, axis, std::array{"B", "H_q", "N_q", "D_qk"}[axis], "q's", a.q.extent(axis));
    n_q = p->args.rotary_q_fixed ? std::min<int64_t>(a.q.extent(2), 1) : a.q.extent(2);
  } else {
    check_absent(a.q_rotated, "must be absent when q is");
  }
  if (a.k_new.t.device_type != FFPA_CPU) return;
  const int64_t rows = std::max(p->n_new, n_q);
  for (int64_t b = 0; b < p->n_seqs; ++b)
    if (const int64_t length = present(a.seqlens_kv.t) ? int32_at(a.seqlens_kv.t, b) : 0;
        length > a.rotary_cos.extent(0) - rows)
      refuse("rotary_cos: extent 0 (positions) must be at least ", length + rows, " for sequence ", b, ", but is ",
             a.rotary_cos.extent(0));
}

// In place is fine for q; everything else written must stand apart.
void check_memory(const AppendArgs& a, Append* p) {
  const ffpa_tensor &q = a.q.t, &rotated = a.q_rotated.t;
  const bool in_place = q.data == rotated.data && std::equal(q.stride, q.stride + FFPA_MAX_RANK, rotated.stride);
  append_tensors(p->args, [&](const char* name, const ffpa_tensor& t) {
    check_apart(a.k_cache, {name, t});
    check_apart(a.v_cache, {name, t});
    if (&t != &q || !in_place) check_apart(a.q_rotated, {name, t});
  });
  append_tensors(p->args, [](const char*, ffpa_tensor& t) { give_address(t); });
}

}  // namespace

Status validate(const ffpa_append_problem* caller, Append* append) {
  return worded([&] {
    if (!caller) refuse("problem: must not be null");
    if (caller->struct_size != sizeof(ffpa_append_problem))
      refuse("struct_size: must be ", sizeof(ffpa_append_problem), " (set by ffpa_append_problem_init), but is ",
             caller->struct_size);
    *append = Append{};
    append->args = *caller;
    const AppendArgs a(append->args);
    check_rows(a, append);
    check_places(a, append);
    check_rotation(a, append);
    check_memory(a, append);
  });
}

}  // namespace ffpa

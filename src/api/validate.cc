// SPDX-License-Identifier: Apache-2.0
#include "api/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/checks.h"
#include "core/tensors.h"

namespace ffpa {
namespace {

constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

template <class Struct>
void check_struct(const char* name, const Struct* problem, const char* init) {
  if (!problem) refuse(name, ": must not be null");
  if (problem->struct_size != sizeof(Struct))
    refuse(name, ".struct_size: must be ", sizeof(Struct), " (set by ", init, "), but is ", problem->struct_size);
}

// The tensors of a forward problem with their names.
struct Args {
  explicit Args(const ffpa_forward_problem& f)
      : q{"q", f.q},
        k{"k", f.k},
        v{"v", f.v},
        o{"o", f.o},
        lse{"lse", f.lse},
        mask{"mask", f.mask},
        bias{"bias", f.bias},
        alibi_slopes{"alibi_slopes", f.alibi_slopes},
        sinks{"sinks", f.sinks},
        cu_seqlens_q{"cu_seqlens_q", f.cu_seqlens_q},
        cu_seqlens_kv{"cu_seqlens_kv", f.cu_seqlens_kv},
        seqlens_kv{"seqlens_kv", f.seqlens_kv},
        block_table{"block_table", f.block_table},
        kv_batch_idx{"kv_batch_idx", f.kv_batch_idx},
        dropout_state{"dropout_state", f.dropout_state} {}
  Arg q, k, v, o, lse, mask, bias, alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_kv, seqlens_kv, block_table,
      kv_batch_idx, dropout_state;
};

void check_options(const ffpa_forward_problem& f) {
  check_flag("has_scale", f.has_scale);
  check_flag("causal", f.causal);
  check_flag("deterministic", f.deterministic);
  check_flag("batch_invariant", f.batch_invariant);
  if (f.anchor != FFPA_TOP_LEFT && f.anchor != FFPA_BOTTOM_RIGHT)
    refuse("anchor: must be 0 (top left) or 1 (bottom right), but is ", f.anchor);
  if (f.engine < FFPA_ENGINE_AUTO || f.engine > FFPA_ENGINE_CUDA)
    refuse("engine: must be one of ffpa_engine, from 0 to 3, but is ", f.engine);
  constexpr double kMost = std::numeric_limits<float>::max();  // kernels compute in fp32
  if (f.has_scale && !(std::abs(f.scale) <= kMost)) refuse("scale: must be finite in fp32, but is ", f.scale);
  if (!(f.softcap >= 0 && f.softcap <= kMost))
    refuse("softcap: must be 0 or a positive number that is finite in fp32, but is ", f.softcap);
  if (!(f.dropout_p >= 0 && f.dropout_p <= 1)) refuse("dropout_p: must be from 0 to 1, but is ", f.dropout_p);
  check_range("window_left", f.window_left, -1, kUnbounded);
  check_range("window_right", f.window_right, -1, kUnbounded);
  check_range("max_seqlen_q", f.max_seqlen_q, 0, kUnbounded);
  check_range("max_seqlen_kv", f.max_seqlen_kv, 0, kUnbounded);
  check_range("num_splits", f.num_splits, 0, 1024);
  check_range("num_threads", f.num_threads, 0, 4096);
}

void check_qkv(const Args& a, Problem* p) {
  check_tensor(a.q, 4, Use::kRead, a.q);
  if (a.q.t.dtype == FFPA_FP8_E4M3 || a.q.t.dtype == FFPA_FP4_E2M1)
    not_supported("q: dtype ", dtype_name(a.q.t.dtype), " is reserved for quantised inputs and not computed yet");
  check_dtype(a.q, {FFPA_FP64, FFPA_FP32, FFPA_FP16, FFPA_BF16}, "fp64, fp32, fp16 or bf16");
  check_tensor(a.k, 4, Use::kRead, a.q);
  check_tensor(a.v, 4, Use::kRead, a.q);
  for (const Arg& arg : {a.k, a.v}) {
    if (arg.t.dtype == FFPA_FP8_E4M3 || arg.t.dtype == FFPA_FP4_E2M1 || arg.t.dtype == FFPA_INT8)
      not_supported(arg.name, ": dtype ", dtype_name(arg.t.dtype),
                    " is reserved for quantised inputs and not computed yet");
    check_dtype_of(arg, a.q);
  }
  p->h_q = a.q.extent(1);
  p->h_kv = a.k.extent(1);
  p->d_qk = a.q.extent(3);
  p->d_v = a.v.extent(3);
  check_extent(a.k, 3, "D_qk", "q's", p->d_qk);
  check_extent(a.v, 0, present(a.block_table.t) ? "P" : "B", "k's", a.k.extent(0));
  check_extent(a.v, 1, "H_kv", "k's", p->h_kv);
  check_extent(a.v, 2, present(a.block_table.t) ? "page rows" : "N_kv", "k's", a.k.extent(2));
  if (p->h_kv == 0 ? p->h_q != 0 : p->h_q % p->h_kv != 0)
    refuse("q: extent 1 (H_q) must be a multiple of k's (H_kv), ", p->h_kv, ", but is ", p->h_q);
  p->group = p->h_kv && p->h_q ? p->h_q / p->h_kv : 1;
}

void check_packed(const Arg& arg, const char* cu) {
  if (arg.extent(0) != 1) refuse(arg.name, ": extent 0 must be 1 with ", cu, " (packed rows), but is ", arg.extent(0));
}

// cu_seqlens: starts at 0, never falls, ends within the packed rows.
void check_cumulative(const Arg& cu, const char* symbol, int64_t rows) {
  if (!readable(cu)) return;
  if (const int64_t first = int32_at(cu.t, 0); first != 0) refuse(cu.name, ": entry 0 must be 0, but is ", first);
  for (int64_t b = 1; b < cu.extent(0); ++b)
    if (const int64_t previous = int32_at(cu.t, b - 1), value = int32_at(cu.t, b); value < previous)
      refuse(cu.name, ": entry ", b, " must be at least the one before it, ", previous, ", but is ", value);
  const int64_t last = cu.extent(0) - 1;
  if (const int64_t end = int32_at(cu.t, last); end > rows)
    refuse(cu.name, ": entry ", last, " must be at most ", symbol, ", ", rows, ", but is ", end);
}

// Which rows belong to which sequence: packed, paged, dense; their combinations; bounds for any sequence.
void check_sequences(const Args& a, Problem* p) {
  const ffpa_forward_problem& f = p->fwd();
  if (given(a.cu_seqlens_q)) {
    check_tensor(a.cu_seqlens_q, 1, Use::kRead, a.q);
    check_dtype(a.cu_seqlens_q, {FFPA_INT32}, "int32");
    if (a.cu_seqlens_q.extent(0) < 1) refuse("cu_seqlens_q: extent 0 (B + 1) must be at least 1, but is 0");
    check_packed(a.q, "cu_seqlens_q");
    check_cumulative(a.cu_seqlens_q, "T_q", a.q.extent(2));
    p->n_seqs = a.cu_seqlens_q.extent(0) - 1;
  } else {
    check_absent(a.cu_seqlens_kv, "must come with cu_seqlens_q: packed k and v need packed q");
    p->n_seqs = a.q.extent(0);
  }
  const int64_t rows_q = a.q.extent(2);
  p->n_q = p->packed_q() && f.max_seqlen_q ? std::min(f.max_seqlen_q, rows_q) : rows_q;

  int64_t capacity = a.k.extent(2);  // keys that one sequence may have
  if (given(a.cu_seqlens_kv)) {
    check_absent(a.block_table, "must be absent with cu_seqlens_kv: k and v are packed or paged, not both");
    check_absent(a.kv_batch_idx, "must be absent with cu_seqlens_kv: packed k and v have one batch");
    check_int32_vector(a.cu_seqlens_kv, "B + 1", "cu_seqlens_q's", p->n_seqs + 1, a.q);
    check_packed(a.k, "cu_seqlens_kv");
    check_cumulative(a.cu_seqlens_kv, "T_kv", capacity);
  } else if (given(a.block_table)) {
    check_absent(a.kv_batch_idx, "must be absent with block_table, which already says where each sequence lies");
    check_block_table(a.block_table, a.k, "the number of sequences", p->n_seqs, a.q);
    p->page_rows = a.k.extent(2);
    capacity = a.block_table.extent(1) * p->page_rows;
  } else if (given(a.kv_batch_idx)) {
    check_int32_vector(a.kv_batch_idx, "B", "the number of sequences", p->n_seqs, a.q);
    check_entries(a.kv_batch_idx, a.k.extent(0) - 1, "k's last batch row");
  } else {
    check_extent(a.k, 0, "B", p->packed_q() ? "the number of sequences" : "q's", p->n_seqs);
  }
  const bool tight = (p->packed_kv() || p->paged()) && f.max_seqlen_kv;
  p->n_kv = tight ? std::min(f.max_seqlen_kv, capacity) : capacity;

  if (given(a.seqlens_kv)) check_int32_vector(a.seqlens_kv, "B", "the number of sequences", p->n_seqs, a.q);
}

struct Longest {
  int64_t q = -1, kv = -1;  // rows; -1 = not known to the host
};

// Each sequence's lengths against what its memory holds and what the caller promised.
Longest check_lengths(const Args& a, const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (!p.on_cpu()) {  // dense extents are known anyway; packed ones, lengths and tables are promised
    Longest longest;
    if (!p.packed_q()) longest.q = p.n_q;
    if (!p.packed_kv() && !p.paged()) longest.kv = p.n_kv;
    return longest;
  }
  const bool alike =
      !p.packed_q() && !p.packed_kv() && !p.paged() && !present(f.seqlens_kv);  // dense: one speaks for all
  Longest longest{0, 0};
  for (int64_t b = 0; b < (alike ? std::min<int64_t>(p.n_seqs, 1) : p.n_seqs); ++b) {
    int64_t holds = p.paged() ? a.block_table.extent(1) * p.page_rows : a.k.extent(2);
    if (p.packed_kv()) holds = int32_at(f.cu_seqlens_kv, b + 1) - int32_at(f.cu_seqlens_kv, b);
    if (present(f.seqlens_kv))
      if (const int64_t length = int32_at(f.seqlens_kv, b); length < 0 || length > holds)
        refuse("seqlens_kv: entry ", b, " must be from 0 to what its k and v hold, ", holds, ", but is ", length);
    const Sequence s = sequence_at(p, b);
    if (f.max_seqlen_q && s.n_q > f.max_seqlen_q)
      refuse("max_seqlen_q: must be at least every sequence's rows, ", s.n_q, " in sequence ", b, ", but is ",
             f.max_seqlen_q);
    const int64_t n_kv = p.paged() && !present(f.seqlens_kv) ? holds : s.n_kv;
    if (f.max_seqlen_kv && n_kv > f.max_seqlen_kv)
      refuse("max_seqlen_kv: must be at least every sequence's keys, ", n_kv, " in sequence ", b, ", but is ",
             f.max_seqlen_kv);
    if (p.paged()) check_pages(a.block_table, b, n_kv, p.page_rows, a.k.extent(0));
    longest.q = std::max(longest.q, s.n_q);
    longest.kv = std::max(longest.kv, n_kv);
  }
  return longest;
}

// Broadcastable [B|1, H_q|1, N_q|1, N_kv|1]. Packed or paged rows may be more than the longest sequence's: the rest is
// not read.
void check_score_shape(const Arg& arg, const Problem& p, const Longest& longest) {
  check_broadcast(arg, 0, "B", p.n_seqs);
  check_broadcast(arg, 1, "H_q", p.h_q);
  const auto rows = [&](int axis, const char* symbol, bool ragged, int64_t dense, int64_t known, const char* bound_name,
                        int64_t bound) {
    if (!ragged) return check_broadcast(arg, axis, symbol, dense);
    if (arg.extent(axis) == 1) return;
    if (known < 0 && bound == 0)
      refuse(bound_name, ": must be given with ", arg.name, " when lengths lie in device memory, but is 0");
    const int64_t needed = known < 0 ? bound : known;
    if (arg.extent(axis) < needed)
      refuse(arg.name, ": extent ", axis, " must be 1 or at least the longest sequence's ", symbol, ", ", needed,
             ", but is ", arg.extent(axis));
  };
  rows(2, "N_q", p.packed_q(), p.n_q, longest.q, "max_seqlen_q", p.fwd().max_seqlen_q);
  rows(3, "N_kv", p.packed_kv() || p.paged(), p.n_kv, longest.kv, "max_seqlen_kv", p.fwd().max_seqlen_kv);
}

void check_score_options(const Args& a, const Problem& p, const Longest& longest) {
  if (given(a.mask)) {
    check_tensor(a.mask, 4, Use::kRead, a.q);
    check_dtype(a.mask, {FFPA_BOOL}, "bool");
    check_score_shape(a.mask, p, longest);
  }
  if (given(a.bias)) {
    check_tensor(a.bias, 4, Use::kRead, a.q);
    check_fp32_or_dtype_of(a.bias, a.q);
    check_score_shape(a.bias, p, longest);
  }
  if (given(a.alibi_slopes)) {
    const int rank = a.alibi_slopes.t.rank == 2 ? 2 : 1;
    check_tensor(a.alibi_slopes, rank, Use::kRead, a.q);
    check_dtype(a.alibi_slopes, {FFPA_FP32}, "fp32");
    if (rank == 2) check_extent(a.alibi_slopes, 0, "B", "the number of sequences", p.n_seqs);
    check_extent(a.alibi_slopes, rank - 1, "H_q", "q's", p.h_q);
  }
  if (given(a.sinks)) {
    check_tensor(a.sinks, 1, Use::kRead, a.q);
    check_fp32_or_dtype_of(a.sinks, a.q);
    check_extent(a.sinks, 0, "H_q", "q's", p.h_q);
  }
  if (given(a.dropout_state)) {
    check_tensor(a.dropout_state, 1, Use::kRead, a.q);
    check_dtype(a.dropout_state, {FFPA_INT64}, "int64");
    if (a.dropout_state.extent(0) != 2)
      refuse("dropout_state: extent 0 (seed, offset) must be 2, but is ", a.dropout_state.extent(0));
  }
}

// o or dout: q's rows, v's width.
void check_like_o(const Arg& arg, Use use, const Args& a, const Problem& p) {
  check_tensor(arg, 4, use, a.q);
  check_dtype_of(arg, a.q);
  check_extent(arg, 0, "B", "q's", a.q.extent(0));
  check_extent(arg, 1, "H_q", "q's", p.h_q);
  check_extent(arg, 2, p.packed_q() ? "T_q" : "N_q", "q's", a.q.extent(2));
  check_extent(arg, 3, "D_v", "v's", p.d_v);
}

// lse or dlse.
void check_like_lse(const Arg& arg, Use use, const Args& a, const Problem& p) {
  const int32_t dtype = a.q.t.dtype == FFPA_FP64 ? FFPA_FP64 : FFPA_FP32;
  check_tensor(arg, 3, use, a.q);
  if (arg.t.dtype != dtype)
    refuse(arg.name, ": dtype must be ", dtype_name(dtype), " when q is ", dtype_name(a.q.t.dtype), ", but is ",
           dtype_name(arg.t.dtype));
  check_extent(arg, 0, "B", "q's", a.q.extent(0));
  check_extent(arg, 1, "H_q", "q's", p.h_q);
  check_extent(arg, 2, p.packed_q() ? "T_q" : "N_q", "q's", a.q.extent(2));
}

void check_forward(const Args& a, Problem* p) {
  const ffpa_forward_problem& f = p->fwd();
  const Use outputs = p->pass == Pass::kForward ? Use::kWritten : Use::kRead;
  check_options(f);
  for (const Arg& reserved : {Arg{"q_scale", f.q_scale}, Arg{"k_scale", f.k_scale}, Arg{"v_scale", f.v_scale}})
    if (given(reserved)) not_supported(reserved.name, ": is reserved for quantised inputs and must be absent");
  check_qkv(a, p);
  check_sequences(a, p);
  const Longest longest = check_lengths(a, *p);
  check_score_options(a, *p, longest);
  check_like_o(a.o, outputs, a, *p);
  if (given(a.lse)) check_like_lse(a.lse, outputs, a, *p);
  p->scale = f.has_scale ? f.scale : p->d_qk > 0 ? 1.0 / std::sqrt(static_cast<double>(p->d_qk)) : 1.0;
}

void check_gradient(const Arg& gradient, const Arg& of, const Arg& q) {
  check_tensor(gradient, of.t.rank, Use::kWritten, q);
  check_dtype_of(gradient, of);
  for (int axis = 0; axis < of.t.rank; ++axis)
    if (gradient.extent(axis) != of.extent(axis))
      refuse(gradient.name, ": extent ", axis, " must equal ", of.name, "'s, ", of.extent(axis), ", but is ",
             gradient.extent(axis));
}

void finish(std::initializer_list<Arg> written, Problem* problem) {
  for (const Arg& arg : written)
    backward_tensors(problem->args, [&](const char* name, const ffpa_tensor& t) { check_apart(arg, {name, t}); });
  backward_tensors(problem->args, [](const char*, ffpa_tensor& t) { give_address(t); });
}

}  // namespace

Status validate(const ffpa_forward_problem* caller, Problem* problem) {
  return worded([&] {
    check_struct("problem", caller, "ffpa_forward_problem_init");
    *problem = Problem{};
    problem->pass = Pass::kForward;
    problem->args.forward = *caller;
    const Args a(problem->args.forward);
    check_forward(a, problem);
    finish({a.o, a.lse}, problem);
  });
}

Status validate(const ffpa_backward_problem* caller, Problem* problem) {
  return worded([&] {
    check_struct("problem", caller, "ffpa_backward_problem_init");
    check_struct("problem.forward", &caller->forward, "ffpa_forward_problem_init");
    *problem = Problem{};
    problem->pass = Pass::kBackward;
    problem->args = *caller;
    const ffpa_backward_problem& args = problem->args;
    const Args a(args.forward);
    const Arg dout{"dout", args.dout}, dlse{"dlse", args.dlse}, dq{"dq", args.dq}, dk{"dk", args.dk}, dv{"dv", args.dv},
        dbias{"dbias", args.dbias}, dsinks{"dsinks", args.dsinks};
    check_forward(a, problem);
    if (present(a.block_table.t))
      not_supported("block_table: must be absent in the backward, which takes no paged k and v");
    check_given(a.lse);
    check_like_o(dout, Use::kRead, a, *problem);
    if (given(dlse)) check_like_lse(dlse, Use::kRead, a, *problem);
    if (!present(a.bias.t)) check_absent(dbias, "must be absent when bias is");
    if (!present(a.sinks.t)) check_absent(dsinks, "must be absent when sinks is");
    const std::pair<Arg, Arg> gradients[] = {{dq, a.q}, {dk, a.k}, {dv, a.v}, {dbias, a.bias}, {dsinks, a.sinks}};
    bool any = false;
    for (const auto& [gradient, of] : gradients)
      if (given(gradient)) check_gradient(gradient, of, a.q), any = true;
    if (!any) refuse("dq, dk, dv, dbias, dsinks: at least one must be given, but all are absent");
    finish({dq, dk, dv, dbias, dsinks}, problem);
  });
}

}  // namespace ffpa

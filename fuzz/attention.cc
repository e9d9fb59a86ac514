// Fuzzes validation, planning and every CPU kernel through the C ABI. SPDX-License-Identifier: Apache-2.0
//
// An input becomes a small forward or backward problem, mostly valid, with any options and layouts. It must be refused
// in words, or: run without touching memory it does not own (AddressSanitizer), give the same bits when outputs and
// workspace held something else before (so every output is written and nothing stale is read), and agree with the
// reference engine.
#include <cmath>
#include <cstdio>

#include "core/element.h"
#include "ffpa/ffpa.h"
#include "input.h"

namespace ffpa::fuzz {
namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz: %s; last error: %s\n", what, ffpa_last_error());
  std::abort();
}

// ---------------------------------------------------------------------------------------------------------- problems

struct Shape {
  int64_t b, h_kv, group, n_q, n_kv, d_qk, d_v, page_rows = 0;
  int32_t dtype, accumulated;  // of lse
};

std::vector<int32_t> cumulative(Input& in, int64_t parts, int64_t total) {
  std::vector<int32_t> ends = numbers(in, parts + 1, total);
  std::sort(ends.begin(), ends.end());
  if (!in.rarely()) ends[0] = 0;
  return ends;
}

void fill_tensors(Input& in, Tensors& m, ffpa_forward_problem& p, const Shape& s) {
  const int64_t h_q = s.h_kv * s.group;
  int64_t n_q = s.n_q, n_kv = s.n_kv, q_batch = s.b, kv_batch = s.b;
  const int64_t mode = in.upto(4);  // dense, batch index, paged, packed q over dense k, packed
  if (mode >= 3 || (mode == 2 && in.coin())) {
    n_q *= std::max<int64_t>(s.b, 1);
    q_batch = 1;
    p.cu_seqlens_q = m.int32s(cumulative(in, s.b, n_q));
  }
  if (mode == 1) kv_batch = 1 + in.upto(3), p.kv_batch_idx = m.int32s(numbers(in, s.b, kv_batch - 1));
  if (mode == 2) {
    const int64_t rows = 1 + in.upto(4), per_sequence = (s.n_kv + rows - 1) / rows;
    kv_batch = 1 + in.upto(7);
    n_kv = rows;
    p.block_table = m.int32s(numbers(in, s.b * std::max<int64_t>(per_sequence, 1), kv_batch - 1),
                             std::max<int64_t>(per_sequence, 1));
    p.seqlens_kv = m.int32s(numbers(in, s.b, per_sequence * rows));
  }
  if (mode == 4) {
    n_kv *= std::max<int64_t>(s.b, 1);
    kv_batch = 1;
    p.cu_seqlens_kv = m.int32s(cumulative(in, s.b, n_kv));
  }
  if (mode < 2 && in.coin()) p.seqlens_kv = m.int32s(numbers(in, s.b, n_kv));
  p.q = m.make(s.dtype, {q_batch, h_q, n_q, s.d_qk});
  p.k = m.make(s.dtype, {kv_batch, s.h_kv, n_kv, s.d_qk});
  p.v = m.make(s.dtype, {kv_batch, s.h_kv, n_kv, s.d_v});
  p.o = m.make(s.dtype, {q_batch, h_q, n_q, s.d_v}, true);
  if (in.byte() % 4) p.lse = m.make(s.accumulated, {q_batch, h_q, n_q}, true);
  const uint8_t extras = in.byte();
  const int64_t columns = mode == 2 ? s.n_kv + 4 : n_kv;
  const auto extent = [&](int64_t full) { return in.byte() % 4 == 3 ? 1 : full - in.rarely(); };
  if (extras & 1) p.mask = m.make(FFPA_BOOL, {extent(s.b), extent(h_q), extent(n_q), extent(columns)});
  if (extras & 2)
    p.bias = m.make(extras & 4 ? s.dtype : FFPA_FP32, {extent(s.b), extent(h_q), extent(n_q), extent(columns)});
  if (extras & 8) p.alibi_slopes = extras & 16 ? m.make(FFPA_FP32, {h_q}) : m.make(FFPA_FP32, {s.b, h_q});
  if (extras & 32) p.sinks = m.make(extras & 64 ? s.dtype : FFPA_FP32, {h_q});
  if (extras & 128) p.dropout_state = m.make(FFPA_INT64, {2});
}

void fill_options(Input& in, ffpa_forward_problem& p) {
  const uint8_t flags = in.byte();
  p.causal = flags & 1;
  p.anchor = flags >> 1 & 1;
  p.deterministic = flags >> 2 & 1;
  p.batch_invariant = flags >> 3 & 1;
  p.has_scale = flags >> 4 & 1;
  if (p.has_scale) p.scale = (static_cast<double>(in.byte()) - 128) / 64;
  if (flags & 32) p.softcap = static_cast<double>(in.byte()) / 8;
  if (flags & 64)
    p.dropout_p = static_cast<double>(in.byte() % 10) / 10, p.dropout_seed = in.word(), p.dropout_offset = in.word();
  if (flags & 128) p.window_left = in.upto(12) - 1, p.window_right = in.upto(12) - 1;
  p.num_splits = static_cast<int32_t>(in.byte() % 4 ? 0 : in.upto(5));
  p.num_threads = 1 + in.byte() % 2;
  if (in.rarely()) {
    const auto number = odd_number(in);
    switch (in.upto(12)) {
      case 11: p.num_splits = static_cast<int32_t>(number); break;
      case 12: p.batch_invariant = static_cast<int32_t>(number); break;
      case 0: p.causal = static_cast<int32_t>(number); break;
      case 1: p.anchor = static_cast<int32_t>(number); break;
      case 2: p.window_left = number; break;
      case 3: p.window_right = number; break;
      case 4: p.max_seqlen_q = number; break;
      case 5: p.max_seqlen_kv = number; break;
      case 6: p.engine = static_cast<int32_t>(number); break;
      case 7: p.softcap = static_cast<double>(number); break;
      case 8: p.dropout_p = static_cast<double>(number); break;
      case 9: p.struct_size = static_cast<uint64_t>(number); break;
      default: p.kernel = "no such kernel"; break;
    }
  }
}

// Which kernel: the dispatcher's choice, an engine, or a row of the table.
void force(Input& in, ffpa_forward_problem& p, int32_t pass) {
  const int64_t pick = in.byte();
  if (pick < 64) return;
  if (pick < 72) p.engine = static_cast<int32_t>(pick & 3);
  ffpa_kernel_info info{};
  info.struct_size = sizeof info;
  if (pick < 72 || ffpa_kernel_at(static_cast<int>(pick % ffpa_kernel_count()), &info) != FFPA_OK) return;
  if (info.pass == pass && info.usable) p.kernel = info.name;
}

// --------------------------------------------------------------------------------------------------------------
// running

struct Pass {
  ffpa_forward_problem* forward;    // or
  ffpa_backward_problem* backward;  // not null in the backward

  ffpa_forward_problem& options() const { return backward ? backward->forward : *forward; }
  std::vector<ffpa_tensor> outputs() const {
    std::vector<ffpa_tensor> all;
    if (backward)
      all = {backward->dq, backward->dk, backward->dv, backward->dbias, backward->dsinks};
    else
      all = {forward->o, forward->lse};
    std::erase_if(all, [](const ffpa_tensor& t) { return !present(t) || !t.data; });
    return all;
  }
  ffpa_status plan(ffpa_plan* p) const {
    return backward ? ffpa_backward_plan(backward, p) : ffpa_forward_plan(forward, p);
  }
  ffpa_status run(const ffpa_plan& p, void* workspace, size_t bytes) const {
    return backward ? ffpa_backward_run(backward, &p, workspace, bytes, nullptr)
                    : ffpa_forward_run(forward, &p, workspace, bytes, nullptr);
  }
};

// body(offset) for each element of a tensor, in order.
template <class Body>
void for_each_element(const ffpa_tensor& t, Body&& body) {
  int64_t e[FFPA_MAX_RANK], s[FFPA_MAX_RANK];
  for (int axis = 0; axis < FFPA_MAX_RANK; ++axis) {
    e[axis] = axis < t.rank ? t.extent[axis] : 1;
    s[axis] = axis < t.rank ? t.stride[axis] : 0;
  }
  for (int64_t a = 0; a < e[0]; ++a)
    for (int64_t b = 0; b < e[1]; ++b)
      for (int64_t c = 0; c < e[2]; ++c)
        for (int64_t d = 0; d < e[3]; ++d) body(a * s[0] + b * s[1] + c * s[2] + d * s[3]);
}

// Bytes of an output's block that belong to no element must keep the poison.
void check_gaps(const ffpa_tensor& t, const uint8_t* block, size_t bytes, uint8_t poison) {
  std::vector<bool> owned(bytes, false);
  const auto base = static_cast<int64_t>(static_cast<const uint8_t*>(t.data) - block), size = dtype_bytes(t.dtype);
  for_each_element(t, [&](int64_t i) { std::fill_n(owned.begin() + base + i * size, size, true); });
  for (size_t i = 0; i < bytes; ++i)
    if (!owned[i] && block[i] != poison) fail("a byte between an output's elements was written");
}

std::vector<std::vector<double>> run_on_poison(const Pass& pass, Tensors& m, const ffpa_plan& plan, uint8_t poison) {
  const auto outputs = pass.outputs();
  for (const ffpa_tensor& t : outputs)
    if (const auto [start, bytes] = m.block_of(t); start) std::memset(start, poison, bytes);
  void* workspace = plan.workspace_bytes ? m.raw(plan.workspace_bytes, 256) : nullptr;
  if (workspace) std::memset(workspace, poison, plan.workspace_bytes);
  if (pass.run(plan, workspace, plan.workspace_bytes) != FFPA_OK) fail("a planned problem did not run");
  std::vector<std::vector<double>> results;
  for (const ffpa_tensor& t : outputs) {
    results.emplace_back();
    for_each_element(t, [&](int64_t i) { results.back().push_back(load_element(t, i)); });
    if (const auto [start, bytes] = m.block_of(t); start) check_gaps(t, start, bytes, poison);
  }
  return results;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void exercise(const Pass& pass, Tensors& m) {
  ffpa_plan plan;
  const ffpa_status status = pass.plan(&plan);
  char text[64];
  const size_t needed = pass.backward ? ffpa_backward_explain(pass.backward, text, sizeof text)
                                      : ffpa_forward_explain(pass.forward, text, sizeof text);
  if (needed < 2 || std::strlen(text) >= sizeof text) fail("explain says nothing");
  if (status != FFPA_OK) {
    if (!*ffpa_last_error()) fail("a refusal without words");
    if (status == FFPA_INTERNAL) fail("an internal error");
    return;
  }
  if (plan.workspace_bytes > 64 << 20) fail("an absurd workspace for a small problem");
  const auto first = run_on_poison(pass, m, plan, 0xFF), again = run_on_poison(pass, m, plan, 0x3A);
  const bool repeats = !pass.backward || pass.options().deterministic || pass.options().num_threads == 1;
  if (repeats)
    for (size_t t = 0; t < first.size(); ++t)
      for (size_t i = 0; i < first[t].size(); ++i)
        if (!same(first[t][i], again[t][i])) fail("results depend on what outputs or workspace held before");

  ffpa_forward_problem& options = pass.options();
  if (m.wild) return;
  options.kernel = nullptr;
  options.engine = FFPA_ENGINE_REF;
  ffpa_plan reference_plan;
  if (pass.plan(&reference_plan) != FFPA_OK) fail("the reference does not take what another kernel took");
  const auto reference = run_on_poison(pass, m, reference_plan, 0);
  // Errors that rounding explains: of p and o, made larger by dropout's factor; in the backward, delta sums D_v products with the
  // stored o, and gradients of broadcast tensors sum rows.
  const double unit = options.q.dtype == FFPA_BF16 ? 0x1p-8 : options.q.dtype == FFPA_FP16 ? 0x1p-11 : 0x1p-17;
  const double keep_scale = options.dropout_p < 1 ? 1 / (1 - options.dropout_p) : 1;
  const double d_v = static_cast<double>(options.v.extent[3]);
  const double allowed = unit * keep_scale * (pass.backward ? 32 + 8 * d_v : 16);
  for (size_t t = 0; t < first.size(); ++t) {
    double largest = 1;
    for (double x : reference[t]) largest = std::max(largest, std::isfinite(x) ? std::abs(x) : 0);
    for (size_t i = 0; i < first[t].size(); ++i)
      if (!same(first[t][i], reference[t][i]) && !(std::abs(first[t][i] - reference[t][i]) <= allowed * largest)) {
        std::fprintf(stderr, "output %zu element %zu: %g, reference %g\n", t, i, first[t][i], reference[t][i]);
        fail("a kernel differs from the reference");
      }
  }
}

void one_input(Input in) {
  Tensors m(in);
  m.wild = in.byte() % 8 == 7;
  Shape s{};
  s.b = in.byte() % 8 ? 1 + in.upto(2) : in.upto(1);
  s.h_kv = in.byte() % 16 ? 1 + in.upto(1) : 0;
  s.group = 1 + in.upto(2);
  s.n_q = in.upto(9);
  s.n_kv = in.upto(20);
  s.d_qk = in.upto(20);
  s.d_v = in.upto(20);
  constexpr int32_t kTypes[] = {FFPA_FP32, FFPA_BF16, FFPA_FP16, FFPA_FP64};
  s.dtype = kTypes[in.byte() % 4];
  s.accumulated = s.dtype == FFPA_FP64 ? FFPA_FP64 : FFPA_FP32;
  const bool backward = in.coin();

  ffpa_backward_problem p;
  ffpa_backward_problem_init(&p);
  fill_tensors(in, m, p.forward, s);
  fill_options(in, p.forward);
  force(in, p.forward, 0);
  if (!backward) return exercise({&p.forward, nullptr}, m);

  // o and lse as the forward writes them.
  ffpa_forward_problem forward = p.forward;
  forward.kernel = nullptr;
  forward.engine = FFPA_ENGINE_REF;
  ffpa_plan plan;
  if (ffpa_forward_plan(&forward, &plan) == FFPA_OK)
    run_on_poison({&forward, nullptr}, m, plan, 0);
  else
    m.wild = true;  // o and lse stay noise: kernels that read them and the reference, which does not, may differ
  const auto like = [&](const ffpa_tensor& t, bool written = true) {
    return t.rank == 4   ? m.make(t.dtype, {t.extent[0], t.extent[1], t.extent[2], t.extent[3]}, written)
           : t.rank == 3 ? m.make(t.dtype, {t.extent[0], t.extent[1], t.extent[2]}, written)
           : t.rank == 1 ? m.make(t.dtype, {t.extent[0]}, written)
                         : ffpa_tensor{};
  };
  const uint8_t wanted = in.byte();
  p.dout = like(p.forward.o, false);
  if (wanted & 1) p.dlse = like(p.forward.lse, false);
  if (!(wanted & 2)) p.dq = like(p.forward.q);
  if (!(wanted & 4)) p.dk = like(p.forward.k);
  if (!(wanted & 8)) p.dv = like(p.forward.v);
  if (wanted & 16) p.dbias = like(p.forward.bias);
  if (wanted & 32) p.dsinks = like(p.forward.sinks);
  p.forward.kernel = nullptr;
  if (p.forward.engine >= 0 && p.forward.engine <= 3) force(in, p.forward, 1);
  exercise({nullptr, &p}, m);
}

}  // namespace
}  // namespace ffpa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ffpa::fuzz::one_input(ffpa::fuzz::Input(data, size));
  return 0;
}

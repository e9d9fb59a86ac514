// Random problems with all options combined, memory poisoned wherever a kernel may not look. SPDX-License-Identifier: Apache-2.0
//
// One seed gives one problem, whatever the dtype and the poison byte. Inputs have random strides, gaps and offsets; every byte
// that belongs to no element of a sequence (gaps, rows past a length, pages not in use, rows of nobody) holds the poison, as do
// outputs before a run. 0xFF is NaN in every floating dtype.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "api/validate.h"
#include "core/element.h"
#include "core/kernel.h"
#include "core/problem.h"
#include "ffpa/ffpa.h"

namespace ffpa::test {

class Rng {
 public:
  explicit Rng(uint64_t seed) : engine_(seed) {}
  int64_t between(int64_t low, int64_t high) {  // both ends included
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  double uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(2 * 3.14159265358979323846 * uniform()); }

 private:
  std::mt19937_64 engine_;
};

// Blocks of memory that hold one tensor each.
class Blocks {
 public:
  explicit Blocks(uint8_t poison) : poison_(poison) {}

  // Random order of axes (the last one mostly innermost), gaps, offset from alignment; `broadcast`: strides of 0 may occur.
  ffpa_tensor tensor(Rng& rng, int32_t dtype, const std::vector<int64_t>& extents, bool broadcast = false) {
    ffpa_tensor t{};
    t.dtype = dtype;
    t.rank = static_cast<int32_t>(extents.size());
    std::copy(extents.begin(), extents.end(), t.extent);
    std::vector<int> order(extents.size());  // innermost first
    for (int axis = 0; axis < t.rank; ++axis) order[static_cast<size_t>(axis)] = t.rank - 1 - axis;
    if (rng.chance(0.3) && t.rank > 2) std::swap(order[1], order[2]);
    if (rng.chance(0.1) && t.rank > 1) std::swap(order[0], order[1]);
    int64_t count = 1;
    for (const int axis : order) {
      const bool gap = rng.chance(0.25), zero = broadcast && rng.chance(0.04);
      t.stride[axis] = count + (gap ? axis == order[0] ? 1 : rng.between(1, 5) : 0);
      count = t.stride[axis] * std::max<int64_t>(t.extent[axis], 1);
      if (zero) t.stride[axis] = 0;
    }
    const int64_t offset = rng.chance(0.4) ? rng.between(1, 3) : 0;
    const size_t bytes = static_cast<size_t>((offset + count) * dtype_bytes(dtype));
    blocks_.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)), &std::free);
    std::memset(blocks_.back().get(), poison_, bytes);
    t.data = blocks_.back().get() + offset * dtype_bytes(dtype);
    return t;
  }

  uint8_t poison() const { return poison_; }

 private:
  uint8_t poison_;
  std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> blocks_;
};

// Calls visit(element offset) for every element, in order of the axes.
template <class Visit>
void for_each_offset(const ffpa_tensor& t, Visit visit) {
  int64_t extent[4] = {1, 1, 1, 1}, stride[4] = {};
  for (int axis = 0; axis < t.rank; ++axis) extent[axis] = t.extent[axis], stride[axis] = t.stride[axis];
  for (int64_t a = 0; a < extent[0]; ++a)
    for (int64_t b = 0; b < extent[1]; ++b)
      for (int64_t c = 0; c < extent[2]; ++c)
        for (int64_t d = 0; d < extent[3]; ++d) visit(a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
}

inline std::vector<double> values(const ffpa_tensor& t) {
  std::vector<double> all;
  if (present(t)) for_each_offset(t, [&](int64_t offset) { all.push_back(load_element(t, offset)); });
  return all;
}

// Every byte of an output's block, elements and gaps; the bytes an overrun would change.
inline size_t span_bytes(const ffpa_tensor& t) {
  int64_t last = 0;
  for (int axis = 0; axis < t.rank; ++axis) {
    if (t.extent[axis] == 0) return 0;
    last += (t.extent[axis] - 1) * t.stride[axis];
  }
  return static_cast<size_t>((last + 1) * dtype_bytes(t.dtype));
}

inline void poison(const ffpa_tensor& t, uint8_t byte) {
  if (present(t)) std::memset(t.data, byte, span_bytes(t));
}

// Gaps between the elements of an output still hold the poison.
inline bool gaps_untouched(const ffpa_tensor& t, uint8_t byte) {
  if (!present(t)) return true;
  const size_t element = static_cast<size_t>(dtype_bytes(t.dtype));
  std::vector<uint8_t> copy(span_bytes(t));
  if (!copy.empty()) std::memcpy(copy.data(), t.data, copy.size());
  for_each_offset(t, [&](int64_t at) { std::memset(copy.data() + static_cast<size_t>(at) * element, byte, element); });
  return std::all_of(copy.begin(), copy.end(), [&](uint8_t b) { return b == byte; });
}

struct Limits {
  int32_t dtype = FFPA_FP32;
  int64_t rows = 24, keys = 40, d = 24;  // most per sequence
  bool backward = false;
  bool widest = false;    // bias and sinks in q's dtype, never in fp32
  bool broadcast = true;  // inputs may have strides of 0
  double spread = 1.0;    // of q and k
};

class RandomProblem {
 public:
  ffpa_backward_problem p;
  std::string text;  // what it is, for failures

  RandomProblem(uint64_t seed, const Limits& limits, uint8_t poison = 0xFF)
      : limits_(limits), rng_(seed), values_(seed ^ 0x9E3779B97F4A7C15u), blocks_(poison) {
    ffpa_backward_problem_init(&p);
    shapes();
    options();
    outputs();
    Problem checked;
    const Status status = p.forward.o.rank && limits.backward ? validate(&p, &checked) : validate(&p.forward, &checked);
    EXPECT_EQ(status.code, FFPA_OK) << status.text << text;
    if (status.code == FFPA_OK) fill(checked);
    std::ostringstream out;
    const ffpa_forward_problem& f = p.forward;
    out << "\nseed " << seed << ": B " << n_seqs_ << " H " << f.q.extent[1] << "/" << f.k.extent[1] << " N "
        << f.q.extent[2] << " x " << f.k.extent[2] << " D " << f.q.extent[3] << "/" << f.v.extent[3] << " causal "
        << f.causal << " anchor " << f.anchor << " window " << f.window_left << "," << f.window_right << " softcap "
        << f.softcap << " scale " << (f.has_scale ? f.scale : NAN) << " dropout " << f.dropout_p << " splits "
        << f.num_splits << " threads " << f.num_threads;
    for (const auto& [name, t] : {std::pair{"mask", &f.mask},
                                  {"bias", &f.bias},
                                  {"alibi", &f.alibi_slopes},
                                  {"sinks", &f.sinks},
                                  {"cu_q", &f.cu_seqlens_q},
                                  {"cu_kv", &f.cu_seqlens_kv},
                                  {"seqlens", &f.seqlens_kv},
                                  {"pages", &f.block_table},
                                  {"batch_idx", &f.kv_batch_idx},
                                  {"dlse", &p.dlse},
                                  {"dq", &p.dq},
                                  {"dk", &p.dk},
                                  {"dv", &p.dv},
                                  {"dbias", &p.dbias},
                                  {"dsinks", &p.dsinks}})
      if (present(*t)) out << " " << name;
    text += out.str();
  }

  // The gradients that exist, for a loop.
  std::vector<std::pair<const char*, ffpa_tensor*>> gradients() {
    std::vector<std::pair<const char*, ffpa_tensor*>> all{
        {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}, {"dbias", &p.dbias}, {"dsinks", &p.dsinks}};
    std::erase_if(all, [](const auto& named) { return !present(*named.second); });
    return all;
  }
  uint8_t poison_byte() const { return blocks_.poison(); }

 private:
  ffpa_tensor ints(const std::vector<int64_t>& extents, const std::vector<int64_t>& content) {
    ffpa_tensor t = blocks_.tensor(rng_, FFPA_INT32, extents);
    size_t next = 0;
    for_each_offset(t, [&](int64_t at) { static_cast<int32_t*>(t.data)[at] = static_cast<int32_t>(content[next++]); });
    return t;
  }

  // Lengths of all sequences, and the rows of nobody behind them.
  int64_t cumulate(const std::vector<int64_t>& lengths, ffpa_tensor* cu) {
    std::vector<int64_t> ends{0};
    for (const int64_t n : lengths) ends.push_back(ends.back() + n);
    *cu = ints({static_cast<int64_t>(ends.size())}, ends);
    return ends.back() + (rng_.chance(0.3) ? 2 : 0);
  }

  std::vector<int64_t> lengths(int64_t most) {
    std::vector<int64_t> all(static_cast<size_t>(n_seqs_));
    for (int64_t& n : all) n = rng_.chance(0.1) ? 0 : rng_.between(1, most);
    return all;
  }

  int64_t extent(int64_t low, int64_t high) { return rng_.chance(0.02) ? 0 : rng_.between(low, high); }

  void shapes() {
    ffpa_forward_problem& f = p.forward;
    n_seqs_ = extent(1, 3);
    const int64_t h_kv = rng_.between(1, 2), h_q = h_kv * (rng_.chance(0.5) ? 1 : rng_.between(2, 4));
    const int64_t d_qk = extent(1, limits_.d), d_v = rng_.chance(0.5) && d_qk > 0 ? d_qk : extent(1, limits_.d);
    const bool packed_q = rng_.chance(0.3);
    const bool packed_kv = packed_q && rng_.chance(0.6), paged = !packed_kv && !limits_.backward && rng_.chance(0.25);
    int64_t b_q = n_seqs_, rows = extent(1, limits_.rows), b_kv = n_seqs_, keys = extent(1, limits_.keys);
    longest_q_ = rows;
    longest_kv_ = keys;
    if (packed_q) {
      const std::vector<int64_t> n = lengths(limits_.rows);
      b_q = 1;
      rows = cumulate(n, &f.cu_seqlens_q);
      longest_q_ = n.empty() ? 0 : *std::max_element(n.begin(), n.end());
      if (rng_.chance(0.5)) f.max_seqlen_q = longest_q_;
    }
    std::vector<int64_t> holds(static_cast<size_t>(n_seqs_), keys);
    if (packed_kv) {
      holds = lengths(limits_.keys);
      b_kv = 1;
      keys = cumulate(holds, &f.cu_seqlens_kv);
      longest_kv_ = holds.empty() ? 0 : *std::max_element(holds.begin(), holds.end());
      if (rng_.chance(0.5)) f.max_seqlen_kv = longest_kv_;
    }
    if (rng_.chance(0.25) || paged) {
      std::vector<int64_t> n(holds.size());
      for (size_t b = 0; b < n.size(); ++b) n[b] = rng_.chance(0.2) ? holds[b] : rng_.between(0, holds[b]);
      f.seqlens_kv = ints({n_seqs_}, n);
      if (paged) holds = n;
    }
    if (paged) {
      constexpr int64_t kPageRows[] = {1, 3, 16, 19};
      const int64_t page_rows = kPageRows[rng_.between(0, 3)], columns = (longest_kv_ + page_rows - 1) / page_rows + 1;
      std::vector<int64_t> pages(static_cast<size_t>(n_seqs_ * columns + 1)), table;
      std::iota(pages.begin(), pages.end(), 0);
      for (size_t i = pages.size(); i > 1; --i)
        std::swap(pages[i - 1], pages[static_cast<size_t>(rng_.between(0, static_cast<int64_t>(i) - 1))]);
      for (int64_t b = 0; b < n_seqs_; ++b)
        for (int64_t c = 0; c < columns; ++c)
          table.push_back(c * page_rows < holds[static_cast<size_t>(b)] ? pages[static_cast<size_t>(b * columns + c)]
                          : c % 2                                       ? -7
                                                                        : 1 << 30);
      f.block_table = ints({n_seqs_, columns}, table);
      b_kv = static_cast<int64_t>(pages.size());
      keys = page_rows;
      longest_kv_ = columns * page_rows;
    }
    if (!packed_kv && !paged && rng_.chance(0.2) && n_seqs_ > 0) {
      b_kv = rng_.between(1, 4);
      std::vector<int64_t> index(static_cast<size_t>(n_seqs_));
      for (int64_t& b : index) b = rng_.between(0, b_kv - 1);
      f.kv_batch_idx = ints({n_seqs_}, index);
    }
    f.q = blocks_.tensor(rng_, limits_.dtype, {b_q, h_q, rows, d_qk}, limits_.broadcast);
    f.k = blocks_.tensor(rng_, limits_.dtype, {b_kv, h_kv, keys, d_qk}, limits_.broadcast);
    f.v = blocks_.tensor(rng_, limits_.dtype, {b_kv, h_kv, keys, d_v}, limits_.broadcast);
  }

  // [B|1, H_q|1, N_q|1, N_kv|1]; ragged rows may be more than the longest sequence's.
  std::vector<int64_t> score_extents() {
    const bool ragged_q = present(p.forward.cu_seqlens_q),
               ragged_kv = present(p.forward.cu_seqlens_kv) || present(p.forward.block_table);
    std::vector<int64_t> e{n_seqs_, p.forward.q.extent[1], longest_q_ + (ragged_q ? rng_.between(0, 2) : 0),
                           longest_kv_ + (ragged_kv ? rng_.between(0, 2) : 0)};
    for (int64_t& x : e)
      if (rng_.chance(0.35)) x = 1;
    return e;
  }

  void options() {
    ffpa_forward_problem& f = p.forward;
    const int32_t wide = limits_.dtype == FFPA_FP64 ? FFPA_FP64 : FFPA_FP32;
    const auto dtype = [&] {
      return rng_.chance(0.5) || limits_.widest ? limits_.dtype : static_cast<int32_t>(FFPA_FP32);
    };
    f.causal = rng_.chance(0.4);
    f.anchor = rng_.chance(0.5) ? FFPA_BOTTOM_RIGHT : FFPA_TOP_LEFT;
    if (rng_.chance(0.3)) f.window_left = rng_.between(-1, limits_.keys / 2);
    if (rng_.chance(0.3)) f.window_right = rng_.between(-1, limits_.keys / 2);
    if (rng_.chance(0.25)) f.softcap = rng_.chance(0.5) ? 0.5 : 4.0;
    if (rng_.chance(0.3)) f.has_scale = 1, f.scale = rng_.chance(0.2) ? 0.0 : 0.5 * rng_.normal();
    if (rng_.chance(0.3)) f.mask = blocks_.tensor(rng_, FFPA_BOOL, score_extents(), true);
    if (rng_.chance(0.3)) f.bias = blocks_.tensor(rng_, dtype(), score_extents(), !limits_.backward);
    if (rng_.chance(0.2)) {
      const int64_t h = f.q.extent[1];
      f.alibi_slopes =
          rng_.chance(0.5) ? blocks_.tensor(rng_, FFPA_FP32, {h}) : blocks_.tensor(rng_, FFPA_FP32, {n_seqs_, h});
    }
    if (rng_.chance(0.25)) f.sinks = blocks_.tensor(rng_, dtype(), {f.q.extent[1]});
    if (rng_.chance(0.25)) {
      f.dropout_p = rng_.chance(0.1) ? 1.0 : 0.8 * rng_.uniform();
      f.dropout_seed = static_cast<uint64_t>(rng_.between(0, INT64_MAX - 1));
      f.dropout_offset = static_cast<uint64_t>(rng_.between(0, 1 << 20)) << 20;
      if (rng_.chance(0.5)) {
        f.dropout_state = blocks_.tensor(rng_, FFPA_INT64, {2});
        auto* state = static_cast<int64_t*>(f.dropout_state.data);
        state[0] = static_cast<int64_t>(f.dropout_seed);
        state[f.dropout_state.stride[0]] = static_cast<int64_t>(f.dropout_offset);
        f.dropout_seed = f.dropout_offset = 0;
      }
    }
    f.num_threads = static_cast<int32_t>(rng_.between(1, 4));
    f.num_splits = rng_.chance(0.5) ? 0 : static_cast<int32_t>(rng_.between(1, 5));
    f.batch_invariant = rng_.chance(0.2);
    f.deterministic = rng_.chance(0.5);
    const ffpa_tensor& q = f.q;
    f.o = blocks_.tensor(rng_, limits_.dtype, {q.extent[0], q.extent[1], q.extent[2], f.v.extent[3]});
    if (limits_.backward || rng_.chance(0.8))
      f.lse = blocks_.tensor(rng_, wide, {q.extent[0], q.extent[1], q.extent[2]});
  }

  void outputs() {
    if (!limits_.backward) return;
    const auto like = [&](const ffpa_tensor& t, bool broadcast) {
      return blocks_.tensor(rng_, t.dtype, std::vector<int64_t>(t.extent, t.extent + t.rank), broadcast);
    };
    const ffpa_forward_problem& f = p.forward;
    p.dout = like(f.o, limits_.broadcast);
    if (rng_.chance(0.4)) p.dlse = like(f.lse, limits_.broadcast);
    const int64_t wanted = rng_.between(1, 31);  // one bit a gradient; all of them as often as any other set, or more
    const bool all = rng_.chance(0.4);
    if (all || wanted & 1) p.dq = like(f.q, false);
    if (all || wanted & 2) p.dk = like(f.k, false);
    if (all || wanted & 4 || wanted > 7) p.dv = like(f.v, false);
    if (present(f.bias) && (all || wanted & 8)) p.dbias = like(f.bias, false);
    if (present(f.sinks) && (all || wanted & 16)) p.dsinks = like(f.sinks, false);
  }

  void put(const ffpa_tensor& t, int64_t offset, double value) { store_element(t, offset, value); }

  // Elements that the contract lets a kernel read; the rest keeps the poison.
  void fill(const Problem& checked) {
    const ffpa_forward_problem& f = p.forward;
    const double spread = limits_.spread;
    for (int64_t b = 0; b < checked.n_seqs; ++b) {
      const Sequence s = sequence_at(checked, b);
      for (int64_t h = 0; h < checked.h_q; ++h)
        for (int64_t i = 0; i < s.n_q; ++i) {
          for (int64_t d = 0; d < checked.d_qk; ++d)
            put(f.q, q_row_offset(s, f.q, h, i) + d * f.q.stride[3], spread * values_.normal());
          if (limits_.backward) {
            for (int64_t d = 0; d < checked.d_v; ++d)
              put(p.dout, q_row_offset(s, p.dout, h, i) + d * p.dout.stride[3], values_.normal());
            if (present(p.dlse)) put(p.dlse, q_row_offset(s, p.dlse, h, i), values_.normal());
          }
          for (int64_t j = 0; j < s.n_kv; ++j) {
            if (present(f.mask))
              static_cast<uint8_t*>(
                  f.mask.data)[broadcast_row_offset(f.mask, b, h, i) + j * broadcast_stride(f.mask, 3)] =
                  values_.chance(0.8);
            if (present(f.bias))
              put(f.bias, broadcast_row_offset(f.bias, b, h, i) + j * broadcast_stride(f.bias, 3),
                  values_.chance(0.1) ? -std::numeric_limits<double>::infinity() : values_.normal());
          }
        }
      for (int64_t h = 0; h < checked.h_kv; ++h)
        for (int64_t j = 0; j < s.n_kv; ++j) {
          for (int64_t d = 0; d < checked.d_qk; ++d)
            put(f.k, kv_row_offset(checked, s, f.k, h, j) + d * f.k.stride[3], spread * values_.normal());
          for (int64_t d = 0; d < checked.d_v; ++d)
            put(f.v, kv_row_offset(checked, s, f.v, h, j) + d * f.v.stride[3], values_.normal());
        }
    }
    if (present(f.alibi_slopes))
      for_each_offset(f.alibi_slopes, [&](int64_t at) { put(f.alibi_slopes, at, 0.3 * values_.uniform()); });
    if (present(f.sinks))
      for_each_offset(f.sinks, [&](int64_t at) {
        put(f.sinks, at, values_.chance(0.1) ? -std::numeric_limits<double>::infinity() : values_.normal());
      });
  }

  const Limits limits_;
  Rng rng_, values_;  // structure and content
  Blocks blocks_;
  int64_t n_seqs_ = 0, longest_q_ = 0, longest_kv_ = 0;
};

// Plans and runs through the C interface, in a workspace of exactly the size planned, poisoned too.
struct Ran {
  ffpa_status status = FFPA_OK;
  std::string error;
};

template <class Problem, class Plan, class Run>
Ran plan_and_run(const Problem& p, uint8_t poison, Plan plan_it, Run run_it) {
  ffpa_plan plan;
  if (const ffpa_status status = plan_it(&p, &plan); status != FFPA_OK) return {status, ffpa_last_error()};
  std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(256, (plan.workspace_bytes + 256) / 256 * 256),
                                                   &std::free);
  std::memset(workspace.get(), poison, plan.workspace_bytes + 1);
  auto* guard = static_cast<uint8_t*>(workspace.get()) + plan.workspace_bytes;
  *guard = 0xA5;
  const ffpa_status status = run_it(&p, &plan, workspace.get(), plan.workspace_bytes, nullptr);
  EXPECT_EQ(*guard, 0xA5) << "workspace overrun";
  return {status, status == FFPA_OK ? "" : ffpa_last_error()};
}

inline Ran run_forward(ffpa_forward_problem p, const char* kernel, uint8_t byte = 0xFF) {
  p.kernel = kernel;
  poison(p.o, byte);
  poison(p.lse, byte);
  return plan_and_run(p, byte, ffpa_forward_plan, ffpa_forward_run);
}

inline Ran run_backward(ffpa_backward_problem p, const char* kernel, uint8_t byte = 0xFF) {
  p.forward.kernel = kernel;
  for (const ffpa_tensor* t : {&p.dq, &p.dk, &p.dv, &p.dbias, &p.dsinks}) poison(*t, byte);
  return plan_and_run(p, byte, ffpa_backward_plan, ffpa_backward_run);
}

}  // namespace ffpa::test

// The reference engine. The maths is in include/ffpa/ffpa.h; gradients, for one row i of one head:
//   dp[j]  = dout[i] . v[j] * drop[j]              delta = sum_j p[j] * dp[j]
//   ds[j]  = p[j] * (dp[j] - delta + dlse[i])      dbias[j] += ds[j]      dsink += p_sink * (dlse[i] - delta)
//   dr[j]  = ds[j] * (1 - tanh^2(r[j] / softcap))  with r = scale * q.k
//   dq[i] += scale * dr[j] * k[j]                  dk[j] += scale * dr[j] * q[i]      dv[j] += p[j] * drop[j] * dout[i]
// SPDX-License-Identifier: Apache-2.0
#include "cpu/ref/ref.h"

#include <cmath>
#include <limits>
#include <vector>

#include "core/element.h"
#include "core/philox.h"

namespace ffpa::ref {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Calls visit(dense index, element offset) for every element of t.
template <class Visit>
void for_each_element(const ffpa_tensor& t, Visit visit) {
  int64_t extent[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};
  for (int axis = 0; axis < t.rank; ++axis) extent[axis] = t.extent[axis], stride[axis] = t.stride[axis];
  int64_t index = 0;
  for (int64_t a = 0; a < extent[0]; ++a)
    for (int64_t b = 0; b < extent[1]; ++b)
      for (int64_t c = 0; c < extent[2]; ++c)
        for (int64_t d = 0; d < extent[3]; ++d)
          visit(index++, a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
}

void fill(const ffpa_tensor& t, double value) {
  if (present(t)) for_each_element(t, [&](int64_t, int64_t offset) { store_element(t, offset, value); });
}

// A gradient that many rows add to: dense doubles of its extents, stored once at the end.
struct Sum {
  const ffpa_tensor& t;
  std::vector<double> values;

  explicit Sum(const ffpa_tensor& tensor) : t(tensor) {
    int64_t count = present(t) ? 1 : 0;
    for (int axis = 0; axis < t.rank; ++axis) count *= t.extent[axis];
    values.resize(static_cast<size_t>(count), 0.0);
  }
  double* row(int64_t a, int64_t b, int64_t c) {
    return values.data() + ((a * t.extent[1] + b) * t.extent[2] + c) * t.extent[3];
  }
  void finish() const {
    if (present(t))
      for_each_element(t, [&](int64_t i, int64_t offset) { store_element(t, offset, values[static_cast<size_t>(i)]); });
  }
};

// One row of the softmax: everything both passes need.
struct Row {
  std::vector<int64_t> keys;  // visible keys
  std::vector<double> slope;  // d score / d (scale * q.k): 1 - tanh^2 under a softcap, else 1
  std::vector<double> p;      // exp(score - lse)
  std::vector<double> drop;   // 0, or 1 / (1 - dropout_p)
  double p_sink = 0.0;
  double lse = -kInf;
};

struct Loops {
  const Problem& p;
  const ffpa_forward_problem& f = p.fwd();
  Dropout dropout{};

  explicit Loops(const Problem& problem) : p(problem) {
    dropout.seed = f.dropout_seed;
    dropout.offset = f.dropout_offset;
    if (present(f.dropout_state)) {
      const auto* state = static_cast<const int64_t*>(f.dropout_state.data);
      dropout.seed = static_cast<uint64_t>(state[0]);
      dropout.offset = static_cast<uint64_t>(state[f.dropout_state.stride[0]]);
    }
    dropout.threshold = dropout_threshold(f.dropout_p);
  }

  double drop_factor(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    if (f.dropout_p == 0.0) return 1.0;
    const Philox4 bits =
        dropout.bits(static_cast<uint32_t>(s.b * p.h_q + h), static_cast<uint32_t>(i), static_cast<uint32_t>(j / 8));
    return dropout.keep(bits, static_cast<int>(j % 8)) ? 1.0 / (1.0 - f.dropout_p) : 0.0;
  }

  double bias_at(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    double bias = 0.0;
    if (present(f.bias))
      bias = load_element(f.bias, broadcast_row_offset(f.bias, s.b, h, i) + j * broadcast_stride(f.bias, 3));
    if (present(f.alibi_slopes)) {
      const ffpa_tensor& a = f.alibi_slopes;
      const double slope = load_element(a, a.rank == 2 ? s.b * a.stride[0] + h * a.stride[1] : h * a.stride[0]);
      bias -= slope * std::abs(static_cast<double>(i + s.n_kv - s.n_q - j));
    }
    return bias;
  }

  bool hidden(const Sequence& s, int64_t h, int64_t i, int64_t j) const {
    if (present(f.mask) && !static_cast<const uint8_t*>(
                               f.mask.data)[broadcast_row_offset(f.mask, s.b, h, i) + j * broadcast_stride(f.mask, 3)])
      return true;
    return present(f.bias) &&
           load_element(f.bias, broadcast_row_offset(f.bias, s.b, h, i) + j * broadcast_stride(f.bias, 3)) == -kInf;
  }

  Row softmax(const Sequence& s, int64_t h, int64_t i) const {
    Row r;
    std::vector<double> score;
    const int64_t q = q_row_offset(s, f.q, h, i);
    const KeyRange range = visible_keys(p, s, i);
    for (int64_t j = range.begin; j < range.end; ++j) {
      if (hidden(s, h, i, j)) continue;
      const int64_t k = kv_row_offset(p, s, f.k, h / p.group, j);
      double dot = 0.0;
      for (int64_t d = 0; d < p.d_qk; ++d)
        dot += load_element(f.q, q + d * f.q.stride[3]) * load_element(f.k, k + d * f.k.stride[3]);
      double x = p.scale * dot, slope = 1.0;
      if (f.softcap > 0.0) {
        const double t = std::tanh(x / f.softcap);
        x = f.softcap * t;
        slope = 1.0 - t * t;
      }
      r.keys.push_back(j);
      r.slope.push_back(slope);
      r.drop.push_back(drop_factor(s, h, i, j));
      score.push_back(x + bias_at(s, h, i, j));
    }
    const double sink = present(f.sinks) ? load_element(f.sinks, h * f.sinks.stride[0]) : -kInf;
    if (r.keys.empty() && sink == -kInf) return r;
    double max = sink;
    for (const double x : score)
      if (!(x <= max)) max = x;  // NaN wins here, and then spreads by itself
    double sum = std::exp(sink - max);
    for (const double x : score) sum += std::exp(x - max);
    r.lse = max + std::log(sum);
    for (const double x : score) r.p.push_back(std::exp(x - max) / sum);
    r.p_sink = std::exp(sink - max) / sum;
    return r;
  }

  void forward() const {
    fill(f.o, 0.0);
    fill(f.lse, -kInf);
    std::vector<double> o(static_cast<size_t>(p.d_v));
    for_each_row([&](const Sequence& s, int64_t h, int64_t i) {
      const Row r = softmax(s, h, i);
      o.assign(o.size(), 0.0);
      for (size_t n = 0; n < r.keys.size(); ++n) {
        if (r.drop[n] == 0.0) continue;
        const int64_t v = kv_row_offset(p, s, f.v, h / p.group, r.keys[n]);
        for (int64_t d = 0; d < p.d_v; ++d)
          o[static_cast<size_t>(d)] += r.p[n] * r.drop[n] * load_element(f.v, v + d * f.v.stride[3]);
      }
      const int64_t out = q_row_offset(s, f.o, h, i);
      for (int64_t d = 0; d < p.d_v; ++d) store_element(f.o, out + d * f.o.stride[3], o[static_cast<size_t>(d)]);
      if (present(f.lse)) store_element(f.lse, q_row_offset(s, f.lse, h, i), r.lse);
    });
  }

  void backward() const {
    const ffpa_backward_problem& g = p.args;
    Sum dk(g.dk), dv(g.dv), dbias(g.dbias), dsinks(g.dsinks);
    fill(g.dq, 0.0);
    std::vector<double> dq(static_cast<size_t>(p.d_qk));
    for_each_row([&](const Sequence& s, int64_t h, int64_t i) {
      const Row r = softmax(s, h, i);
      const int64_t h_kv = h / p.group, q = q_row_offset(s, f.q, h, i), dout = q_row_offset(s, g.dout, h, i);
      const double dlse = present(g.dlse) ? load_element(g.dlse, q_row_offset(s, g.dlse, h, i)) : 0.0;
      std::vector<double> dp(r.keys.size());
      double delta = 0.0;
      for (size_t n = 0; n < r.keys.size(); ++n) {
        if (r.drop[n] == 0.0) continue;
        const int64_t v = kv_row_offset(p, s, f.v, h_kv, r.keys[n]);
        for (int64_t d = 0; d < p.d_v; ++d)
          dp[n] += load_element(g.dout, dout + d * g.dout.stride[3]) * load_element(f.v, v + d * f.v.stride[3]);
        dp[n] *= r.drop[n];
        delta += r.p[n] * dp[n];
      }
      if (present(g.dsinks) && r.p_sink != 0.0) dsinks.values[static_cast<size_t>(h)] += r.p_sink * (dlse - delta);
      dq.assign(dq.size(), 0.0);
      for (size_t n = 0; n < r.keys.size(); ++n) {
        const int64_t j = r.keys[n];
        const int64_t k = kv_row_offset(p, s, f.k, h_kv, j);
        const double ds = r.p[n] * (dp[n] - delta + dlse);
        const double dr = p.scale * ds * r.slope[n];
        if (present(g.dbias)) {
          const auto index = [&](int axis, int64_t at) { return g.dbias.extent[axis] == 1 ? 0 : at; };
          dbias.row(index(0, s.b), index(1, h), index(2, i))[index(3, j)] += ds;
        }
        for (int64_t d = 0; d < p.d_qk; ++d)
          dq[static_cast<size_t>(d)] += dr * load_element(f.k, k + d * f.k.stride[3]);
        if (present(g.dk)) {
          double* row = dk.row(s.kv_batch, h_kv, s.kv_row + j);
          for (int64_t d = 0; d < p.d_qk; ++d) row[d] += dr * load_element(f.q, q + d * f.q.stride[3]);
        }
        if (present(g.dv)) {
          double* row = dv.row(s.kv_batch, h_kv, s.kv_row + j);
          for (int64_t d = 0; d < p.d_v; ++d)
            row[d] += r.p[n] * r.drop[n] * load_element(g.dout, dout + d * g.dout.stride[3]);
        }
      }
      if (present(g.dq)) {
        const int64_t out = q_row_offset(s, g.dq, h, i);
        for (int64_t d = 0; d < p.d_qk; ++d) store_element(g.dq, out + d * g.dq.stride[3], dq[static_cast<size_t>(d)]);
      }
    });
    for (const Sum* sum : {&dk, &dv, &dbias, &dsinks}) sum->finish();
  }

  template <class Visit>
  void for_each_row(Visit visit) const {
    for (int64_t b = 0; b < p.n_seqs; ++b) {
      const Sequence s = sequence_at(p, b);
      for (int64_t h = 0; h < p.h_q; ++h)
        for (int64_t i = 0; i < s.n_q; ++i) visit(s, h, i);
    }
  }

  // As core/philox.h words it.
  static uint32_t dropout_threshold(double probability) {
    return static_cast<uint32_t>(std::lround(probability * 65536.0));
  }
};

}  // namespace

const char* machine_lacks() { return nullptr; }

std::string plan_forward(const Problem&, Choice*) { return {}; }
std::string plan_backward(const Problem&, Choice*) { return {}; }

Status run_forward(const Problem& problem, const Choice&, void*, void*) {
  Loops(problem).forward();
  return {};
}

Status run_backward(const Problem& problem, const Choice&, void*, void*) {
  Loops(problem).backward();
  return {};
}

}  // namespace ffpa::ref

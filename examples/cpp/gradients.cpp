// Forward and backward through ffpa.hpp: a window, a softcap, sinks. SPDX-License-Identifier: Apache-2.0
// Checks gradients against central differences; exits with 1 if they disagree.
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "ffpa/ffpa.hpp"

int main() {
  constexpr int64_t B = 1, H_q = 4, H_kv = 2, N = 10, D_qk = 96, D_v = 32;
  const auto numbers = [](int64_t count, double step) {
    std::vector<double> x(static_cast<size_t>(count));
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(step * static_cast<double>(i * i % 1009));
    return x;
  };
  auto q = numbers(B * H_q * N * D_qk, 0.11), k = numbers(B * H_kv * N * D_qk, 0.17), sinks = numbers(H_q, 0.7);
  auto v = numbers(B * H_kv * N * D_v, 0.23), dout = numbers(B * H_q * N * D_v, 0.31);
  std::vector<double> o(dout.size()), lse(B * H_q * N), dq(q.size()), dk(k.size()), dsinks(sinks.size());
  try {
    ffpa::ForwardProblem p;
    p.q = ffpa::tensor(q, {B, H_q, N, D_qk});
    p.k = ffpa::tensor(k, {B, H_kv, N, D_qk});
    p.v = ffpa::tensor(v, {B, H_kv, N, D_v});
    p.o = ffpa::tensor(o, {B, H_q, N, D_v});
    p.lse = ffpa::tensor(lse, {B, H_q, N});
    p.sinks = ffpa::tensor(sinks, {H_q});
    p.causal = 1, p.window_left = 4, p.softcap = 20;
    std::printf("%s", ffpa::explain(p).c_str());
    const ffpa_plan plan = ffpa::plan(p);
    ffpa::Workspace workspace;
    const auto loss = [&] {  // sum(o * dout)
      ffpa::run(p, plan, workspace);
      return std::inner_product(o.begin(), o.end(), dout.begin(), 0.0);
    };
    ffpa::BackwardProblem b;
    b.forward = (loss(), p);  // o and lse are written by now
    b.dout = ffpa::tensor(dout, {B, H_q, N, D_v});
    b.dq = ffpa::tensor(dq, {B, H_q, N, D_qk});
    b.dk = ffpa::tensor(dk, {B, H_kv, N, D_qk});
    b.dsinks = ffpa::tensor(dsinks, {H_q});
    ffpa::run(b);
    double worst = 0;
    const auto compare = [&](const char* name, std::vector<double>& x, size_t i, double gradient) {
      x[i] += 1e-5;
      const double above = loss();
      x[i] -= 2e-5;
      const double difference = (above - loss()) / 2e-5;
      x[i] += 1e-5;
      worst = std::fmax(worst, std::fabs(difference - gradient));
      std::printf("d loss / d %s[%zu]: backward %+.9f, differences %+.9f\n", name, i, gradient, difference);
    };
    compare("q", q, 100, dq[100]);
    compare("k", k, 777, dk[777]);
    compare("sinks", sinks, 2, dsinks[2]);
    return worst < 1e-7 ? 0 : 1;
  } catch (const ffpa::Error& e) {
    return std::printf("%s: %s\n", ffpa_status_name(e.status()), e.what()), 1;
  }
}

// The oracle against what needs no oracle: finite differences, and problems whose answer is known.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "random_problem.h"

namespace ffpa::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr const char *kForward = "ref_fwd_loops", *kBackward = "ref_bwd_loops";

void expect_ok(const Ran& ran, const std::string& text) { ASSERT_EQ(ran.status, FFPA_OK) << ran.error << text; }

// sum(o * dout) + sum(lse * dlse), over the rows of sequences.
double loss(RandomProblem& r) {
  const ffpa_forward_problem& f = r.p.forward;
  expect_ok(run_forward(f, kForward), r.text);
  Problem checked;
  EXPECT_EQ(validate(&r.p, &checked).code, FFPA_OK);
  double sum = 0;
  for (int64_t b = 0; b < checked.n_seqs; ++b) {
    const Sequence s = sequence_at(checked, b);
    for (int64_t h = 0; h < checked.h_q; ++h)
      for (int64_t i = 0; i < s.n_q; ++i) {
        const int64_t o = q_row_offset(s, f.o, h, i), dout = q_row_offset(s, r.p.dout, h, i);
        for (int64_t d = 0; d < checked.d_v; ++d)
          sum += load_element(f.o, o + d * f.o.stride[3]) * load_element(r.p.dout, dout + d * r.p.dout.stride[3]);
        const double lse = load_element(f.lse, q_row_offset(s, f.lse, h, i));
        if (present(r.p.dlse) && lse != -kInf) sum += lse * load_element(r.p.dlse, q_row_offset(s, r.p.dlse, h, i));
      }
  }
  return sum;
}

class FiniteDifferences : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Random, FiniteDifferences, testing::Range(0, 8));

TEST_P(FiniteDifferences, EveryGradientUnderAllOptions) {
  int64_t elements[5] = {};
  for (uint64_t seed = 0; seed < 100; ++seed) {
    RandomProblem r(
        1000 * static_cast<uint64_t>(GetParam()) + seed,
        {.dtype = FFPA_FP64, .rows = 7, .keys = 9, .d = 5, .backward = true, .widest = true, .broadcast = false});
    if (HasFailure()) return;
    loss(r);
    expect_ok(run_backward(r.p, kBackward), r.text);
    const ffpa_forward_problem& f = r.p.forward;
    const std::pair<const ffpa_tensor*, const ffpa_tensor*> pairs[] = {
        {&f.q, &r.p.dq}, {&f.k, &r.p.dk}, {&f.v, &r.p.dv}, {&f.bias, &r.p.dbias}, {&f.sinks, &r.p.dsinks}};
    Rng pick(seed);
    for (size_t which = 0; which < 5; ++which) {
      const ffpa_tensor &x = *pairs[which].first, &gradient = *pairs[which].second;
      if (!present(gradient) || !has_elements(x)) continue;
      std::vector<int64_t> at, gradient_at;
      for_each_offset(x, [&](int64_t offset) { at.push_back(offset); });
      for_each_offset(gradient, [&](int64_t offset) { gradient_at.push_back(offset); });
      for (int n = 0; n < 8; ++n) {
        const auto e = static_cast<size_t>(pick.between(0, static_cast<int64_t>(at.size()) - 1));
        const double value = load_element(x, at[e]), got = load_element(gradient, gradient_at[e]);
        if (!std::isfinite(value)) {  // memory of nobody, a hidden key, no sink
          ASSERT_EQ(got, 0.0) << which << r.text;
          continue;
        }
        constexpr double kStep = 1e-5;
        store_element(x, at[e], value + kStep);
        const double up = loss(r);
        store_element(x, at[e], value - kStep);
        const double down = loss(r);
        store_element(x, at[e], value);
        ASSERT_NEAR(got, (up - down) / (2 * kStep), 2e-7 * (1 + std::abs(got))) << which << r.text;
        elements[which] += got != 0;
      }
    }
  }
  for (const int64_t n : elements) EXPECT_GT(n, 10) << "too few gradients other than 0 were looked at";
}

// The same problem in fp64, fp32, fp16 and bf16: from the same values come the same results, rounded once.
TEST(Dtypes, ResultsAreTheDoublesRounded) {
  for (const int32_t dtype : {FFPA_FP32, FFPA_FP16, FFPA_BF16})
    for (uint64_t seed = 0; seed < 60; ++seed) {
      RandomProblem narrow(seed, {.dtype = dtype, .rows = 9, .keys = 12, .d = 6, .backward = true});
      RandomProblem wide(seed, {.dtype = FFPA_FP64, .rows = 9, .keys = 12, .d = 6, .backward = true});
      if (HasFailure()) return;
      const auto copy = [](const ffpa_tensor& to, const ffpa_tensor& from) {
        const std::vector<double> all = values(from);
        size_t next = 0;
        if (present(to)) for_each_offset(to, [&](int64_t at) { store_element(to, at, all[next++]); });
      };
      ffpa_forward_problem &n = narrow.p.forward, &w = wide.p.forward;
      for (auto tensor : {&ffpa_forward_problem::q, &ffpa_forward_problem::k, &ffpa_forward_problem::v,
                          &ffpa_forward_problem::bias, &ffpa_forward_problem::sinks})
        copy(w.*tensor, n.*tensor);
      copy(wide.p.dout, narrow.p.dout);
      copy(wide.p.dlse, narrow.p.dlse);
      for (RandomProblem* r : {&narrow, &wide}) {
        expect_ok(run_forward(r->p.forward, kForward), r->text);
        expect_ok(run_backward(r->p, kBackward), r->text);
        EXPECT_TRUE(gaps_untouched(r->p.forward.o, 0xFF) && gaps_untouched(r->p.forward.lse, 0xFF)) << r->text;
        for (const auto& [name, t] : r->gradients()) EXPECT_TRUE(gaps_untouched(*t, 0xFF)) << name << r->text;
      }
      const auto same = [&](const char* name, const ffpa_tensor& a, const ffpa_tensor& b) {
        const std::vector<double> x = values(a), y = values(b);
        ASSERT_EQ(x.size(), y.size());
        double element[1];
        ffpa_tensor one{};
        one.data = element;
        one.dtype = a.dtype;
        for (size_t i = 0; i < x.size(); ++i) {
          store_element(one, 0, y[i]);
          ASSERT_EQ(x[i], load_element(one, 0)) << name << narrow.text;
        }
      };
      same("o", n.o, w.o);
      same("lse", n.lse, w.lse);
      for (size_t g = 0; g < narrow.gradients().size(); ++g)
        same(narrow.gradients()[g].first, *narrow.gradients()[g].second, *wide.gradients()[g].second);
    }
}

// With V the identity, o is the matrix of probabilities: which keys are seen is read off it.
TEST(Visibility, WindowsAndAnchors) {
  Blocks blocks(0);
  Rng rng(1);
  for (const auto& [n_q, n_kv] : {std::pair<int64_t, int64_t>{5, 5}, {2, 5}, {5, 2}, {1, 5}, {7, 12}})
    for (const int anchor : {FFPA_TOP_LEFT, FFPA_BOTTOM_RIGHT})
      for (const int causal : {0, 1})
        for (const int64_t left : {int64_t{-1}, int64_t{0}, int64_t{1}, n_kv - 1, n_kv, int64_t{1} << 40})
          for (const int64_t right : {int64_t{-1}, int64_t{0}, int64_t{2}, n_kv - 1, int64_t{1} << 40}) {
            ffpa_forward_problem f;
            ffpa_forward_problem_init(&f);
            f.q = blocks.tensor(rng, FFPA_FP64, {1, 1, n_q, 3});
            f.k = blocks.tensor(rng, FFPA_FP64, {1, 1, n_kv, 3});
            f.v = blocks.tensor(rng, FFPA_FP64, {1, 1, n_kv, n_kv});
            f.o = blocks.tensor(rng, FFPA_FP64, {1, 1, n_q, n_kv});
            f.lse = blocks.tensor(rng, FFPA_FP64, {1, 1, n_q});
            for (int64_t j = 0; j < n_kv; ++j) store_element(f.v, j * (f.v.stride[2] + f.v.stride[3]), 1.0);
            f.anchor = anchor;
            f.causal = causal;
            f.window_left = left;
            f.window_right = right;
            expect_ok(run_forward(f, kForward), "");
            for (int64_t i = 0; i < n_q; ++i) {
              const int64_t diagonal = anchor == FFPA_TOP_LEFT ? i : i + n_kv - n_q;
              const auto sees = [&](int64_t j) {
                return !(causal && j > diagonal) && !(left >= 0 && j < diagonal - left) &&
                       !(right >= 0 && j > diagonal + right);
              };
              int64_t seen = 0;
              for (int64_t j = 0; j < n_kv; ++j) seen += sees(j);
              for (int64_t j = 0; j < n_kv; ++j)
                ASSERT_EQ(load_element(f.o, i * f.o.stride[2] + j * f.o.stride[3]),
                          sees(j) ? 1.0 / static_cast<double>(seen) : 0.0)
                    << n_q << "x" << n_kv << " anchor " << anchor << " causal " << causal << " window " << left << ","
                    << right << " row " << i << " key " << j;
              ASSERT_EQ(load_element(f.lse, i * f.lse.stride[2]), seen ? std::log(static_cast<double>(seen)) : -kInf);
            }
          }
}

struct Small {  // one head, fp64
  Blocks blocks{0};
  Rng rng{2};
  ffpa_forward_problem f;
  Small(int64_t n_q, int64_t n_kv, int64_t d_qk, int64_t d_v) {
    ffpa_forward_problem_init(&f);
    f.q = blocks.tensor(rng, FFPA_FP64, {1, 1, n_q, d_qk});
    f.k = blocks.tensor(rng, FFPA_FP64, {1, 1, n_kv, d_qk});
    f.v = blocks.tensor(rng, FFPA_FP64, {1, 1, n_kv, d_v});
    f.o = blocks.tensor(rng, FFPA_FP64, {1, 1, n_q, d_v});
    f.lse = blocks.tensor(rng, FFPA_FP64, {1, 1, n_q});
  }
  void set(const ffpa_tensor& t, std::vector<double> content) {
    size_t next = 0;
    for_each_offset(t, [&](int64_t at) { store_element(t, at, content[next++]); });
  }
  void run() { expect_ok(run_forward(f, kForward), ""); }
};

TEST(Extremes, LogitsOfAnySizeGiveTheMean) {
  for (const double logit : {0.0, -1e5, 1e5, -1e300, 1e300}) {
    Small s(1, 4, 1, 1);
    s.f.has_scale = 1, s.f.scale = 1;
    s.set(s.f.q, {logit});
    s.set(s.f.k, {1, 1, 1, 1});
    s.set(s.f.v, {0, 1, 2, 3});
    s.run();
    EXPECT_EQ(values(s.f.o)[0], 1.5);
    EXPECT_DOUBLE_EQ(values(s.f.lse)[0], logit + std::log(4.0));
  }
}

TEST(Extremes, NanIsSeenOnlyWhereItIsVisible) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Small s(2, 3, 1, 1);
  s.f.causal = 1;
  s.set(s.f.q, {1, 1});
  s.set(s.f.k, {0, nan, 0});
  s.set(s.f.v, {5, 7, 9});
  s.run();
  EXPECT_EQ(values(s.f.o)[0], 5.0);
  EXPECT_TRUE(std::isnan(values(s.f.o)[1]));
  EXPECT_TRUE(std::isnan(values(s.f.lse)[1]));
}

TEST(Extremes, AFiniteMaskIsAMeanAndAnInfiniteOneHides) {
  Small s(2, 3, 1, 1);
  s.f.bias = s.blocks.tensor(s.rng, FFPA_FP32, {1, 1, 2, 3});
  const double lowest = std::numeric_limits<float>::lowest();
  s.set(s.f.bias, {lowest, lowest, lowest, -kInf, -kInf, -kInf});
  s.set(s.f.v, {1, 2, 6});
  s.run();
  EXPECT_EQ(values(s.f.o), (std::vector<double>{3, 0}));
  EXPECT_EQ(values(s.f.lse)[1], -kInf);
}

TEST(Sinks, JoinTheSoftmaxWithoutAValue) {
  for (const double sink : {0.5, 100.0, -100.0, -kInf}) {
    Small s(2, 3, 1, 1);
    s.f.sinks = s.blocks.tensor(s.rng, FFPA_FP64, {1});
    s.set(s.f.sinks, {sink});
    s.f.mask = s.blocks.tensor(s.rng, FFPA_BOOL, {1, 1, 2, 1});
    static_cast<uint8_t*>(s.f.mask.data)[0] = 1;  // row 1 sees nothing
    s.set(s.f.v, {1, 2, 6});
    s.run();
    const double total = 3 + std::exp(sink);
    EXPECT_NEAR(values(s.f.o)[0], 9 / total, 1e-12);
    EXPECT_NEAR(values(s.f.lse)[0], std::log(total), 1e-12);
    EXPECT_EQ(values(s.f.o)[1], 0.0);
    EXPECT_EQ(values(s.f.lse)[1], sink);
  }
}

TEST(Dropout, KeepsTheShareThatWasAskedForAndNothingElseChanges) {
  constexpr int64_t kRows = 64, kKeys = 96;
  for (const double probability : {0.0, 0.25, 0.5, 1.0}) {
    Small s(kRows, kKeys, 1, kKeys);
    for (int64_t j = 0; j < kKeys; ++j) store_element(s.f.v, j * (s.f.v.stride[2] + s.f.v.stride[3]), 1.0);
    s.f.dropout_p = probability;
    s.f.dropout_seed = 11;
    s.run();
    int64_t kept = 0;
    for (const double x : values(s.f.o)) {
      ASSERT_TRUE(x == 0 || std::abs(x * kKeys * (1 - probability) - 1) < 1e-12) << x;
      kept += x != 0;
    }
    EXPECT_NEAR(static_cast<double>(kept) / (kRows * kKeys), 1 - probability, 0.03);
    for (const double lse : values(s.f.lse)) ASSERT_NEAR(lse, std::log(static_cast<double>(kKeys)), 1e-12);
  }
}

}  // namespace
}  // namespace ffpa::test

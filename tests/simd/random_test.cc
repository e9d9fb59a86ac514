// Every vectorised kernel, forced by name, against the reference: random problems with all options combined.
// SPDX-License-Identifier: Apache-2.0
#include "random_problem.h"

namespace ffpa::test {
namespace {

struct Kernel {
  std::string name;
  int32_t dtype;
};

std::vector<Kernel> kernels(int pass) {
  std::vector<Kernel> all;
  for (int i = 0; i < ffpa_kernel_count(); ++i) {
    ffpa_kernel_info info{};
    info.struct_size = sizeof info;
    if (ffpa_kernel_at(i, &info) != FFPA_OK || info.pass != pass || info.engine != FFPA_ENGINE_CPU) continue;
    for (const int32_t dtype : {FFPA_FP32, FFPA_FP16, FFPA_BF16})
      if (info.dtypes >> dtype & 1) all.push_back({info.name, dtype});
  }
  return all;
}

bool usable(const std::string& name) {
  for (int i = 0; i < ffpa_kernel_count(); ++i) {
    ffpa_kernel_info info{};
    info.struct_size = sizeof info;
    if (ffpa_kernel_at(i, &info) == FFPA_OK && name == info.name) return info.usable;
  }
  return false;
}

std::string label(const testing::TestParamInfo<Kernel>& info) {
  const char* dtype = info.param.dtype == FFPA_FP32 ? "fp32" : info.param.dtype == FFPA_FP16 ? "fp16" : "bf16";
  return info.param.name + "_" + dtype;
}

// Roughly: the rounding of results and, in 16 bits, of probabilities. Relative to the tensor's rms, and to what its terms are worth
// where they cancel.
struct Tolerance {
  double relative, floor;
};
Tolerance tolerance(int32_t dtype) {
  switch (dtype) {
    case FFPA_FP32: return {3e-6, 3e-6};
    case FFPA_FP16: return {1e-3, 1e-3};
    default: return {6e-3, 8e-3};
  }
}

void expect_close(const char* name, const std::vector<double>& got, const std::vector<double>& expected,
                  Tolerance bound, const std::string& text) {
  ASSERT_EQ(got.size(), expected.size());
  double square = 0, error = 0, worst = 0, largest = 0;
  size_t at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) {  // infinities too
      if (std::isfinite(expected[i]))
        square += expected[i] * expected[i], largest = std::max(largest, std::abs(expected[i]));
      continue;
    }
    ASSERT_TRUE(std::isfinite(got[i])) << name << "[" << i << "] = " << got[i] << ", not " << expected[i] << text;
    const double off = std::abs(got[i] - expected[i]);
    if (off > worst) worst = off, at = i;
    error += off * off;
    square += expected[i] * expected[i];
    largest = std::max(largest, std::abs(expected[i]));
  }
  const double n = std::max<double>(1, static_cast<double>(got.size()));
  EXPECT_LE(std::sqrt(error / n), bound.relative * std::sqrt(square / n) + bound.floor) << name << text;
  EXPECT_LE(worst, 4 * bound.relative * largest + 8 * bound.floor)
      << name << "[" << at << "] = " << got[at] << ", not " << expected[at] << text;
}

bool sees_a_key(const Problem& p, const Sequence& s, int64_t h, int64_t i) {
  const ffpa_forward_problem& f = p.fwd();
  const KeyRange range = visible_keys(p, s, i);
  for (int64_t j = range.begin; j < range.end; ++j) {
    const bool masked =
        present(f.mask) && !static_cast<const uint8_t*>(
                               f.mask.data)[broadcast_row_offset(f.mask, s.b, h, i) + j * broadcast_stride(f.mask, 3)];
    const bool biased =
        present(f.bias) &&
        std::isinf(load_element(f.bias, broadcast_row_offset(f.bias, s.b, h, i) + j * broadcast_stride(f.bias, 3)));
    if (!masked && !biased) return true;
  }
  return false;
}

// Rows that see no key are exactly 0, in o (or dq).
void expect_exact_zeros(RandomProblem& r, const ffpa_tensor& t) {
  Problem p;
  ASSERT_EQ(validate(&r.p.forward, &p).code, FFPA_OK);
  for (int64_t b = 0; b < p.n_seqs; ++b) {
    const Sequence s = sequence_at(p, b);
    for (int64_t h = 0; h < p.h_q; ++h)
      for (int64_t i = 0; i < s.n_q; ++i)
        for (int64_t d = 0; d < t.extent[3] && !sees_a_key(p, s, h, i); ++d)
          ASSERT_EQ(load_element(t, q_row_offset(s, t, h, i) + d * t.stride[3]), 0.0) << "row without keys" << r.text;
  }
}

std::vector<std::vector<double>> results(RandomProblem& r, bool backward) {
  if (!backward) return {values(r.p.forward.o), values(r.p.forward.lse)};
  std::vector<std::vector<double>> all;
  for (const auto& [name, t] : r.gradients()) all.push_back(values(*t));
  return all;
}

bool same_bits(const std::vector<std::vector<double>>& a, const std::vector<std::vector<double>>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i].size() != b[i].size() ||
        (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(double))))
      return false;
  return true;
}

class SimdForward : public testing::TestWithParam<Kernel> {
  void SetUp() override {
    if (!usable(GetParam().name)) GTEST_SKIP() << "this machine cannot run " << GetParam().name;
  }
};
class SimdBackward : public SimdForward {};
INSTANTIATE_TEST_SUITE_P(All, SimdForward, testing::ValuesIn(kernels(0)), label);
INSTANTIATE_TEST_SUITE_P(All, SimdBackward, testing::ValuesIn(kernels(1)), label);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SimdForward);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SimdBackward);

Limits limits(int32_t dtype, uint64_t seed, bool backward) {
  Limits l{.dtype = dtype, .backward = backward};
  if (seed % 4 == 3) l.rows = 150, l.keys = 170, l.d = 40;  // more than a tile of rows and of keys
  if (seed % 8 == 5) l.rows = 5, l.keys = 300, l.d = 20;
  if (seed % 16 == 6) l.rows = 10, l.keys = 20, l.d = 300;
  return l;
}

void check_forward(const Kernel& kernel, uint64_t seed) {
  const Limits l = limits(kernel.dtype, seed, false);
  RandomProblem r(seed, l);
  ASSERT_EQ(run_forward(r.p.forward, "ref_fwd_loops").status, FFPA_OK) << ffpa_last_error() << r.text;
  const auto expected = results(r, false);
  const Ran ran = run_forward(r.p.forward, kernel.name.c_str());
  ASSERT_EQ(ran.status, FFPA_OK) << ran.error << r.text;
  const auto got = results(r, false);
  expect_close("o", got[0], expected[0], tolerance(kernel.dtype), r.text);
  if (present(r.p.forward.lse))
    expect_close("lse", got[1], expected[1], kernel.dtype == FFPA_FP32 ? Tolerance{3e-6, 2e-6} : Tolerance{3e-6, 1e-4},
                 r.text);
  expect_exact_zeros(r, r.p.forward.o);
  EXPECT_TRUE(gaps_untouched(r.p.forward.o, 0xFF) && gaps_untouched(r.p.forward.lse, 0xFF)) << r.text;

  RandomProblem zeros(seed, l, 0x00);  // what lies elsewhere changes no bit
  ASSERT_EQ(run_forward(zeros.p.forward, kernel.name.c_str(), 0x00).status, FFPA_OK) << r.text;
  EXPECT_TRUE(same_bits(got, results(zeros, false))) << "bits depend on memory that may not be read" << r.text;
  if (r.p.forward.num_splits == 0) return;
  for (const int threads : {1, 2, 3}) {
    r.p.forward.num_threads = threads;
    ASSERT_EQ(run_forward(r.p.forward, kernel.name.c_str()).status, FFPA_OK);
    EXPECT_TRUE(same_bits(got, results(r, false))) << "bits depend on " << threads << " threads" << r.text;
  }
}

TEST_P(SimdForward, FollowsTheReference) {
  for (uint64_t seed = 0; seed < 250 && !HasFailure(); ++seed) check_forward(GetParam(), seed);
}

void check_backward(const Kernel& kernel, uint64_t seed) {
  const Limits l = limits(kernel.dtype, seed, true);
  RandomProblem r(seed, l);
  ASSERT_EQ(run_forward(r.p.forward, "ref_fwd_loops").status, FFPA_OK) << ffpa_last_error() << r.text;
  ASSERT_EQ(run_backward(r.p, "ref_bwd_loops").status, FFPA_OK) << ffpa_last_error() << r.text;
  const auto expected = results(r, true);
  const Ran ran = run_backward(r.p, kernel.name.c_str());
  ASSERT_EQ(ran.status, FFPA_OK) << ran.error << r.text;
  const auto got = results(r, true);
  for (size_t i = 0; i < got.size(); ++i) {
    Tolerance bound = tolerance(kernel.dtype);
    // Sums over broadcast axes, heads and rows add up the rounding of their terms.
    bound.floor *= std::sqrt(static_cast<double>(std::max({l.rows, l.keys, l.d}))) / 2;
    expect_close(r.gradients()[i].first, got[i], expected[i], bound, r.text);
    EXPECT_TRUE(gaps_untouched(*r.gradients()[i].second, 0xFF)) << r.gradients()[i].first << r.text;
  }
  if (present(r.p.dq)) expect_exact_zeros(r, r.p.dq);
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_EQ(run_backward(r.p, kernel.name.c_str()).status, FFPA_OK);
    EXPECT_TRUE(same_bits(got, results(r, true))) << "bits change from run to run" << r.text;
  }
  RandomProblem zeros(seed, l, 0x00);
  ASSERT_EQ(run_forward(zeros.p.forward, "ref_fwd_loops", 0x00).status, FFPA_OK) << r.text;
  ASSERT_EQ(run_backward(zeros.p, kernel.name.c_str(), 0x00).status, FFPA_OK) << r.text;
  EXPECT_TRUE(same_bits(got, results(zeros, true))) << "bits depend on memory that may not be read" << r.text;

  // A gradient alone has the bits that it has among all.
  for (const auto& [name, t] : r.gradients()) {
    ffpa_backward_problem alone = r.p;
    for (ffpa_tensor* other : {&alone.dq, &alone.dk, &alone.dv, &alone.dbias, &alone.dsinks})
      if (other->data != t->data) *other = {};
    const std::vector<double> before = values(*t);
    ASSERT_EQ(run_backward(alone, kernel.name.c_str()).status, FFPA_OK) << name << r.text;
    EXPECT_TRUE(same_bits({values(*t)}, {before})) << name << " depends on which others are asked for" << r.text;
  }
}

TEST_P(SimdBackward, FollowsTheReference) {
  for (uint64_t seed = 0; seed < 250 && !HasFailure(); ++seed) check_backward(GetParam(), seed);
}

}  // namespace
}  // namespace ffpa::test

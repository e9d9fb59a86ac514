// Values near the largest of their dtype: o is a mean of v, and finite, though sums of exp(s - m) v are not.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "api/problems.h"
#include "core/element.h"
#include "random_problem.h"

namespace ffpa::test {
namespace {

// Rows of v at +-0.9 of the largest: columns with one sign overflow a plain sum, columns of both signs give inf - inf there.
void check(const char* kernel, int32_t dtype, int32_t splits) {
  SCOPED_TRACE(testing::Message() << kernel << " dtype " << dtype << " splits " << splits);
  constexpr int64_t kKeys = 700;
  const auto f = dense({.b = 1, .h_q = 2, .h_kv = 1, .n_q = 5, .n_kv = kKeys, .d_qk = 8, .d_v = 20, .dtype = dtype});
  ffpa_forward_problem& p = f->p;
  p.num_splits = splits;
  const double large = dtype == FFPA_FP16 ? 0.9 * 65504 : 0.9 * 3.38e38;
  for_each_offset(p.v, [&](int64_t at) {
    const int64_t key = at / 20, column = at % 20;
    store_element(p.v, at, column < 10 || key % 2 ? large : -large);
  });
  for_each_offset(p.k, [&](int64_t at) { store_element(p.k, at, at % 7 * 0.1); });
  for_each_offset(p.q, [&](int64_t at) { store_element(p.q, at, at % 5 * 0.1); });
  ASSERT_EQ(run_forward(p, "ref_fwd_loops").status, FFPA_OK);
  const auto o = values(p.o), lse = values(p.lse);
  ASSERT_EQ(run_forward(p, kernel).status, FFPA_OK) << ffpa_last_error();
  const auto got = values(p.o), got_lse = values(p.lse);
  for (size_t i = 0; i < o.size(); ++i) ASSERT_LE(std::abs(got[i] - o[i]), 0.01 * large) << i << ": " << got[i];
  for (size_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(got_lse[i], lse[i], 1e-3);
}

TEST(Overflow, LargeValuesGiveTheirMean) {
  for (int i = 0; i < ffpa_kernel_count(); ++i) {
    ffpa_kernel_info info{};
    info.struct_size = sizeof info;
    ASSERT_EQ(ffpa_kernel_at(i, &info), FFPA_OK);
    if (info.pass != 0 || info.engine != FFPA_ENGINE_CPU || !info.usable) continue;
    for (const int32_t dtype : {FFPA_FP32, FFPA_FP16, FFPA_BF16})
      for (const int32_t splits : {1, 3})
        if (info.dtypes >> dtype & 1) check(info.name, dtype, splits);
  }
}

}  // namespace
}  // namespace ffpa::test

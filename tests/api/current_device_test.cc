// A run on a GPU other than the thread's current one: right, and the current one is what it was. Needs two GPUs.
// SPDX-License-Identifier: Apache-2.0
#if defined(FFPA_WITH_CUDA)
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "api/problems.h"
#include "core/half.h"

namespace ffpa::test {
namespace {

TEST(CurrentDevice, RunsWhereTheTensorsAreAndIsRestored) {
  constexpr int kOther = 1;
  if (ffpa_device_count(FFPA_CUDA) <= kOther) GTEST_SKIP() << "needs two GPUs";
  constexpr int64_t kRows = 5, kWidth = 64;
  const std::vector<uint16_t> value(kWidth, bf16_from_float(3.f));

  ASSERT_EQ(cudaSetDevice(kOther), cudaSuccess);
  const auto tensor = [](int64_t rows) {
    ffpa_tensor t{
        nullptr, FFPA_BF16, FFPA_CUDA, kOther, 4, {1, 1, rows, kWidth}, {rows * kWidth, rows * kWidth, kWidth, 1}};
    EXPECT_EQ(cudaMalloc(&t.data, static_cast<size_t>(rows * kWidth * 2)), cudaSuccess);
    EXPECT_EQ(cudaMemset(t.data, 0, static_cast<size_t>(rows * kWidth * 2)), cudaSuccess);
    return t;
  };
  ffpa_forward_problem p;
  ffpa_forward_problem_init(&p);
  p.q = tensor(kRows);
  p.k = tensor(1);  // one key: every row of o is v
  p.v = tensor(1);
  p.o = tensor(kRows);
  ASSERT_EQ(cudaMemcpy(p.v.data, value.data(), kWidth * 2, cudaMemcpyHostToDevice), cudaSuccess);

  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ffpa_plan plan;
  if (ffpa_forward_plan(&p, &plan) == FFPA_NOT_SUPPORTED) GTEST_SKIP() << ffpa_last_error();
  ASSERT_EQ(plan.workspace_bytes, 0u);
  ASSERT_EQ(ffpa_forward_run(&p, &plan, nullptr, 0, nullptr), FFPA_OK) << ffpa_last_error();
  int current = -1;
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 0);

  std::vector<uint16_t> o(kRows * kWidth);
  ASSERT_EQ(cudaSetDevice(kOther), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(o.data(), p.o.data, o.size() * 2, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(o, std::vector<uint16_t>(o.size(), value[0]));
  for (const ffpa_tensor* t : {&p.q, &p.k, &p.v, &p.o}) cudaFree(t->data);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

}  // namespace
}  // namespace ffpa::test
#endif

// ffpa.hpp: views, workspace, exceptions. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "ffpa/ffpa.hpp"

namespace {

template <class Body>
void expect_error(ffpa_status status, const std::string& text, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "no exception; wanted: " << text;
  } catch (const ffpa::Error& e) {
    EXPECT_EQ(e.status(), status);
    EXPECT_EQ(std::string(e.what()), text);
  }
}

TEST(Cpp, TensorViews) {
  std::vector<float> x(24);
  const ffpa_tensor t = ffpa::tensor(x, {2, 3, 4});
  EXPECT_EQ(t.data, x.data());
  EXPECT_EQ(t.dtype, FFPA_FP32);
  EXPECT_EQ(t.rank, 3);
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[1], 4);
  EXPECT_EQ(t.stride[2], 1);
  EXPECT_EQ(ffpa::tensor(std::span<const float>(x), {24}, {0}).stride[0], 0);
  const std::array<std::int32_t, 2> ints{1, 2};
  EXPECT_EQ(ffpa::tensor(ints, {2}).dtype, FFPA_INT32);
  EXPECT_EQ(ffpa::tensor(static_cast<ffpa::BFloat16*>(nullptr), {0}).dtype, FFPA_BF16);
  const ffpa_tensor on_gpu = ffpa::tensor(x.data(), {24}, {}, {FFPA_CUDA, 1});
  EXPECT_EQ(on_gpu.device_type, FFPA_CUDA);
  EXPECT_EQ(on_gpu.device_index, 1);
  EXPECT_EQ(ffpa::tensor(x, {0, 1000}).extent[1], 1000) << "an empty view reaches nothing";
}

TEST(Cpp, TensorsThatReachTooFar) {
  std::vector<float> x(24);
  expect_error(FFPA_INVALID_ARGUMENT,
               "tensor: extents and strides must stay within the range's 24 elements, but reach 25",
               [&] { ffpa::tensor(x, {5, 5}); });
  expect_error(FFPA_INVALID_ARGUMENT,
               "tensor: extents and strides must stay within the range's 24 elements, but reach 31",
               [&] { ffpa::tensor(x, {4, 1}, {10, 1}); });
  expect_error(FFPA_INVALID_ARGUMENT, "tensor: must have 1 to 4 extents, but has 5",
               [&] { ffpa::tensor(x, {1, 1, 1, 1, 1}); });
  expect_error(FFPA_INVALID_ARGUMENT, "tensor: must have as many strides as extents, 2, but has 1",
               [&] { ffpa::tensor(x, {2, 2}, {1}); });
  expect_error(FFPA_INVALID_ARGUMENT, "tensor: extents must multiply to less than 2^63",
               [&] { ffpa::tensor(x.data(), {INT64_MAX, 3}); });
}

struct Mean {  // q = 0: every row is the mean of v
  std::vector<float> q, k, v, o, lse;
  ffpa::ForwardProblem p;
  explicit Mean(int64_t n_kv) : q(4), k(n_kv * 4, 1.f), v(n_kv * 2), o(2), lse(1) {
    for (int64_t j = 0; j < n_kv; ++j) v[j * 2] = static_cast<float>(j), v[j * 2 + 1] = 1;
    p.q = ffpa::tensor(q, {1, 1, 1, 4});
    p.k = ffpa::tensor(k, {1, 1, n_kv, 4});
    p.v = ffpa::tensor(v, {1, 1, n_kv, 2});
    p.o = ffpa::tensor(o, {1, 1, 1, 2});
    p.lse = ffpa::tensor(lse, {1, 1, 1});
  }
};

TEST(Cpp, PlansAndRuns) {
  Mean once(9);
  ffpa::run(once.p);
  EXPECT_FLOAT_EQ(once.o[0], 4);
  EXPECT_FLOAT_EQ(once.o[1], 1);
  EXPECT_NEAR(once.lse[0], std::log(9.0), 1e-6);

  ffpa::Workspace workspace(1);
  for (int64_t n : {3, 101, 3}) {
    Mean m(n);
    const ffpa_plan plan = ffpa::plan(m.p);
    ffpa::run(m.p, plan, workspace);
    EXPECT_NEAR(m.o[0], static_cast<double>(n - 1) / 2, 1e-4);
    EXPECT_GE(workspace.bytes(), plan.workspace_bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.at_least(plan.workspace_bytes)) % 256, 0u);
  }
  EXPECT_NE(ffpa::explain(once.p).find("kernel: "), std::string::npos);
}

TEST(Cpp, Backward) {
  Mean m(2);
  ffpa::run(m.p);
  ffpa::BackwardProblem b;
  b.forward = m.p;
  std::vector<float> dout{1, 0}, dv(4);
  b.dout = ffpa::tensor(dout, {1, 1, 1, 2});
  b.dv = ffpa::tensor(dv, {1, 1, 2, 2});
  ffpa::run(b);
  EXPECT_EQ(dv, (std::vector<float>{0.5f, 0, 0.5f, 0}));
  EXPECT_NE(ffpa::explain(b).find("kernel: "), std::string::npos);
}

TEST(Cpp, ErrorsCarryStatusAndText) {
  Mean m(2);
  m.p.softcap = -1;
  expect_error(FFPA_INVALID_ARGUMENT, "softcap: must be 0 or a positive number that is finite in fp32, but is -1",
               [&] { ffpa::run(m.p); });
  m.p.softcap = 0;
  const ffpa_plan plan = ffpa::plan(m.p);
  m.p.causal = 1;
  EXPECT_THROW(ffpa::run(m.p, plan, std::span<std::byte>{}), ffpa::Error);
  ffpa::AppendProblem a;
  expect_error(FFPA_INVALID_ARGUMENT, "k_new: must be given, but is absent", [&] { ffpa::append(a); });
}

TEST(Cpp, Machine) {
  EXPECT_EQ(ffpa::version(), "0.1.0");
  EXPECT_EQ(ffpa::kernels().size(), static_cast<size_t>(ffpa_kernel_count()));
  ASSERT_EQ(ffpa::devices(FFPA_CPU).size(), 1u);
  EXPECT_GT(ffpa::devices(FFPA_CPU)[0].processors, 0);
}

}  // namespace

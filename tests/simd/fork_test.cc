// Children and grandchildren of a process compute, with the parent's bits, whoever used OpenMP before the fork.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "api/problems.h"
#include "cpu/features.h"

namespace ffpa::test {
namespace {

constexpr int64_t kHeads = 4, kRows = 300, kWidth = 64, kElements = kHeads * kRows * kWidth;
constexpr int64_t kResults = 4 * kElements;  // o, dq, dk, dv
constexpr unsigned kSeconds = 60;            // a child that hangs ends by SIGALRM

// Forward and backward of one problem on two threads. False if a call fails.
bool compute(float* results) {
  Backward b;
  ffpa_forward_problem& f = b.p.forward;
  uint32_t noise = 1;
  const auto tensor = [&] {
    ffpa_tensor t = b.memory.tensor(FFPA_FP32, {1, kHeads, kRows, kWidth});
    for (int64_t i = 0; i < kElements; ++i) {
      noise = noise * 1664525u + 1013904223u;
      static_cast<float*>(t.data)[i] = static_cast<float>(noise >> 8) * 0x1p-23f - 1.f;
    }
    return t;
  };
  for (ffpa_tensor* t : {&f.q, &f.k, &f.v, &f.o, &b.p.dout, &b.p.dq, &b.p.dk, &b.p.dv}) *t = tensor();
  f.lse = b.memory.tensor(FFPA_FP32, {1, kHeads, kRows});
  f.engine = FFPA_ENGINE_CPU;
  f.num_threads = 2;

  ffpa_plan plan;
  if (ffpa_forward_plan(&f, &plan) != FFPA_OK || plan.num_threads != 2) return false;
  ffpa_tensor workspace = b.memory.tensor(FFPA_BOOL, {static_cast<int64_t>(plan.workspace_bytes) + 256});
  const auto aligned = [](const ffpa_tensor& t) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(t.data) + 255) / 256 * 256);
  };
  if (ffpa_forward_run(&f, &plan, aligned(workspace), plan.workspace_bytes, nullptr) != FFPA_OK) return false;
  if (ffpa_backward_plan(&b.p, &plan) != FFPA_OK || plan.num_threads != 2) return false;
  workspace = b.memory.tensor(FFPA_BOOL, {static_cast<int64_t>(plan.workspace_bytes) + 256});
  if (ffpa_backward_run(&b.p, &plan, aligned(workspace), plan.workspace_bytes, nullptr) != FFPA_OK) return false;
  for (const ffpa_tensor* t : {&f.o, &b.p.dq, &b.p.dk, &b.p.dv}) {
    std::memcpy(results, t->data, kElements * sizeof(float));
    results += kElements;
  }
  return true;
}

// Forks `generations` deep; each computes its slot of `shared` and waits for its child. True if all of them came back well.
bool descend(int generations, float* shared) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSeconds);
    const bool well = compute(shared) && (generations == 1 || descend(generations - 1, shared + kResults));
    _exit(well ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

enum class Before { kNothing, kOurs, kAnothers };  // use of OpenMP

class Fork : public testing::TestWithParam<Before> {};
INSTANTIATE_TEST_SUITE_P(After, Fork, testing::Values(Before::kNothing, Before::kOurs, Before::kAnothers),
                         [](const auto& info) {
                           return info.param == Before::kNothing ? "Nothing"
                                  : info.param == Before::kOurs  ? "OurUse"
                                                                 : "AnothersUse";
                         });

TEST_P(Fork, DescendantsHaveTheParentsBits) {
  if (features().processors < 2) GTEST_SKIP() << "needs two processors";
  constexpr int kGenerations = 2;
  constexpr size_t kBytes = kGenerations * kResults * sizeof(float);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* shared = static_cast<float*>(memory);
  std::vector<float> own(kResults);
  if (GetParam() == Before::kOurs) {
    ASSERT_TRUE(compute(own.data())) << ffpa_last_error();
  }
  if (GetParam() == Before::kAnothers) {
    int threads = 0;
#pragma omp parallel num_threads(2) reduction(+ : threads)
    ++threads;
    ASSERT_GT(threads, 0);
  }
  EXPECT_TRUE(descend(kGenerations, shared)) << "a descendant failed or hung";
  ASSERT_TRUE(compute(own.data())) << ffpa_last_error();
  for (int g = 0; g < kGenerations; ++g)
    EXPECT_EQ(std::memcmp(own.data(), shared + g * kResults, kResults * sizeof(float)), 0) << "generation " << g + 1;
  munmap(memory, kBytes);
}

}  // namespace
}  // namespace ffpa::test

// Plans, explanations, forcing, fingerprints, errors per thread. SPDX-License-Identifier: Apache-2.0
#include "dispatch/dispatch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "api/problems.h"
#include "api/validate.h"

namespace ffpa::test {
namespace {

std::string kernel_name(const ffpa_plan& plan) {
  ffpa_kernel_info info{};
  info.struct_size = sizeof info;
  EXPECT_EQ(ffpa_kernel_at(plan.kernel, &info), FFPA_OK);
  return info.name;
}

std::string explained(const ffpa_forward_problem& p) {
  std::string text(ffpa_forward_explain(&p, nullptr, 0), 'x');
  EXPECT_EQ(ffpa_forward_explain(&p, text.data(), text.size()), text.size());
  EXPECT_EQ(text.back(), '\0');
  text.pop_back();
  return text;
}

// Sets an environment variable for one scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* name_;
};

TEST(Table, RowsAreWellFormed) {
  std::set<std::string> names;
  ffpa_engine last[2] = {FFPA_ENGINE_CUDA, FFPA_ENGINE_CUDA};
  for (const Kernel& k : kernel_table()) {
    SCOPED_TRACE(k.name);
    EXPECT_TRUE(names.insert(k.name).second) << "twice";
    const std::string pass = k.pass == Pass::kForward ? "_fwd_" : "_bwd_";
    EXPECT_NE(std::string(k.name).find(pass), std::string::npos) << "the name says its pass";
    EXPECT_GT(k.dtypes, 0u);
    EXPECT_TRUE(k.machine_lacks && k.plan && k.run);
    EXPECT_LE(k.engine, last[static_cast<int>(k.pass)]) << "engines stand best first: cuda, cpu, ref";
    last[static_cast<int>(k.pass)] = k.engine;
  }
  EXPECT_EQ(last[0], FFPA_ENGINE_REF) << "the forward ends in the reference";
  EXPECT_EQ(last[1], FFPA_ENGINE_REF) << "so does the backward";
}

TEST(Table, IndexIsChecked) {
  ffpa_kernel_info info{};
  EXPECT_EQ(ffpa_kernel_at(0, &info), FFPA_INVALID_ARGUMENT);
  EXPECT_EQ(ffpa_last_error(),
            "info: struct_size must be sizeof(ffpa_kernel_info), " + std::to_string(sizeof info) + ", but is 0");
  info.struct_size = sizeof info;
  EXPECT_EQ(ffpa_kernel_at(-1, &info), FFPA_INVALID_ARGUMENT);
  EXPECT_EQ(ffpa_last_error(), "index: must be from 0 to " + std::to_string(ffpa_kernel_count() - 1) + ", but is -1");
  EXPECT_EQ(ffpa_kernel_at(ffpa_kernel_count(), &info), FFPA_INVALID_ARGUMENT);
  EXPECT_EQ(ffpa_kernel_at(0, nullptr), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "info: must not be null");
  ffpa_device_info device{};
  device.struct_size = sizeof device;
  EXPECT_EQ(ffpa_device_at(FFPA_CPU, 1, &device), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "index: must be below the number of devices of that type, 1, but is 1");
}

TEST(Plan, TakesTheFirstThatTakesIt) {
  const auto f = dense();
  ffpa_plan plan;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  EXPECT_NE(plan.fingerprint, 0u);
  const std::string text = explained(f->p);
  EXPECT_EQ(text.find("kernel: " + kernel_name(plan) + "\nengine: "), 0u) << text;
  EXPECT_NE(text.find("\nworkspace: " + std::to_string(plan.workspace_bytes) + " bytes\nsplits: "), std::string::npos)
      << text;
  for (int i = 0; i < plan.kernel; ++i) {  // each better one of this pass is named with a reason
    const Kernel& k = kernel_table()[i];
    if (k.pass != Pass::kForward) continue;
    EXPECT_NE(text.find(std::string("\nrefused ") + k.name + ": "), std::string::npos) << text;
  }
}

TEST(Plan, ForcedByEngineAndByName) {
  const auto f = dense();
  ffpa_plan plan;
  f->p.engine = FFPA_ENGINE_REF;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  EXPECT_EQ(kernel_name(plan), "ref_fwd_loops");
  f->p.engine = FFPA_ENGINE_AUTO;
  f->p.kernel = "ref_fwd_loops";
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  EXPECT_EQ(kernel_name(plan), "ref_fwd_loops");
  f->p.kernel = nullptr;
  f->p.engine = FFPA_ENGINE_CUDA;  // the tensors lie in host memory
  EXPECT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_NOT_SUPPORTED);
  EXPECT_EQ(std::string(ffpa_last_error()).find("engine \"cuda\" does not take this problem"), 0u) << ffpa_last_error();
  EXPECT_EQ(explained(f->p).find("error: engine \"cuda\" does not take this problem"), 0u);
}

TEST(Plan, ForcedByTheEnvironment) {
  const auto f = dense();
  const auto b = backward();
  ffpa_plan plan;
  {
    const Environment env("FFPA_KERNEL", "ref_bwd_loops,ref_fwd_loops");
    ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
    EXPECT_EQ(kernel_name(plan), "ref_fwd_loops");
    ASSERT_EQ(ffpa_backward_plan(&b->p, &plan), FFPA_OK) << ffpa_last_error();
    EXPECT_EQ(kernel_name(plan), "ref_bwd_loops");
  }
  {
    const Environment env("FFPA_KERNEL", "no_such_kernel");
    EXPECT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_INVALID_ARGUMENT);
    EXPECT_STREQ(
        ffpa_last_error(),
        "FFPA_KERNEL: must name a kernel of this build (ffpa_kernel_at lists them), but is \"no_such_kernel\"");
    f->p.engine = FFPA_ENGINE_REF;  // the problem's own wish comes first
    EXPECT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  }
}

TEST(Plan, AForwardKernelForcesTheBackwardBesideIt) {
  const auto b = backward();
  for (const Kernel& k : kernel_table()) {
    if (k.pass != Pass::kForward || k.engine == FFPA_ENGINE_CUDA) continue;
    b->p.forward.kernel = k.name;
    const std::string name = k.name, arch = name.substr(0, name.find('_') + 1);
    ffpa_plan plan;
    const ffpa_status status = ffpa_backward_plan(&b->p, &plan);
    if (status == FFPA_OK) {
      EXPECT_EQ(kernel_name(plan).find(arch + "bwd_"), 0u) << kernel_name(plan);
    } else {
      EXPECT_EQ(status, FFPA_NOT_SUPPORTED);
      EXPECT_EQ(std::string(ffpa_last_error())
                    .find("no backward kernel beside kernel \"" + name + "\" takes this problem: " + arch + "bwd_"),
                0u)
          << ffpa_last_error();
    }
  }
}

TEST(Explain, AnInvalidProblemByItsError) {
  const auto f = dense();
  f->p.k.extent[3] = 2;
  EXPECT_EQ(explained(f->p), "error: k: extent 3 (D_qk) must equal q's, 8, but is 2\n");
  char little[8];
  std::memset(little, 'x', sizeof little);
  EXPECT_GT(ffpa_forward_explain(&f->p, little, 6), sizeof little);
  EXPECT_STREQ(little, "error");
  EXPECT_EQ(little[6], 'x');
  const auto b = backward();
  b->p.dout = {};
  char text[256];
  ffpa_backward_explain(&b->p, text, sizeof text);
  EXPECT_STREQ(text, "error: dout: must be given, but is absent\n");
}

// ------------------------------------------------------------------------------------------------------------ run

struct Block {
  explicit Block(size_t bytes) : at(std::aligned_alloc(256, (bytes + 511) / 256 * 256)) {}
  ~Block() { std::free(at); }
  void* at;
};

ffpa_status run(const ffpa_forward_problem& p, const ffpa_plan& plan) {
  const Block workspace(plan.workspace_bytes);
  return ffpa_forward_run(&p, &plan, workspace.at, plan.workspace_bytes, nullptr);
}

TEST(Run, ComputesWhatWasPlanned) {
  const auto f = dense({.b = 1, .h_q = 1, .h_kv = 1, .n_q = 1, .n_kv = 2, .d_qk = 1, .d_v = 1});
  static_cast<float*>(f->p.v.data)[0] = 1;
  static_cast<float*>(f->p.v.data)[1] = 4;
  ffpa_plan plan;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  ASSERT_EQ(run(f->p, plan), FFPA_OK) << ffpa_last_error();
  EXPECT_FLOAT_EQ(*static_cast<float*>(f->p.o.data), 2.5f);  // all scores 0: the mean
  EXPECT_FLOAT_EQ(*static_cast<float*>(f->p.lse.data), std::log(2.f));
}

TEST(Run, NothingToWriteTakesNoTime) {
  const auto f = dense();
  for (ffpa_tensor* t : {&f->p.q, &f->p.k, &f->p.v, &f->p.o, &f->p.lse}) {
    t->extent[0] = int64_t{1} << 30;
    t->extent[1] = int64_t{1} << 20;
    t->stride[0] = t->stride[1] = 0;
  }
  f->p.q.extent[2] = f->p.o.extent[2] = f->p.lse.extent[2] = 0;
  ffpa_plan plan;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  EXPECT_EQ(run(f->p, plan), FFPA_OK) << ffpa_last_error();
}

TEST(Run, RefusesAnotherProblem) {
  const auto f = dense(), other = dense({.n_q = 2});
  const auto b = backward();
  ffpa_plan plan, plan_back;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK);
  ASSERT_EQ(ffpa_backward_plan(&b->p, &plan_back), FFPA_OK) << ffpa_last_error();
  EXPECT_EQ(run(other->p, plan), FFPA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(ffpa_last_error()),
            "plan: must have been made for this problem's extents, strides, dtypes, options and alignment, but its "
            "fingerprint "
            "differs (forward fp32 B 2, H_q 4, H_kv 2, N_q 2, N_kv 5, D_qk 8, D_v 6)");
  EXPECT_EQ(run(f->p, plan_back), FFPA_INVALID_ARGUMENT) << "a backward plan";
  EXPECT_EQ(run(f->p, ffpa_plan{}), FFPA_INVALID_ARGUMENT) << "no plan";
  EXPECT_EQ(ffpa_forward_run(&f->p, nullptr, nullptr, 0, nullptr), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "plan: must not be null");
}

TEST(Run, ChecksLengthsAgain) {
  const auto f = paged();
  ffpa_plan plan;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK) << ffpa_last_error();
  ints(f->p.seqlens_kv)[0] = 4;
  EXPECT_EQ(run(f->p, plan), FFPA_OK) << "lengths may change: " << ffpa_last_error();
  ints(f->p.seqlens_kv)[0] = 8;
  EXPECT_EQ(run(f->p, plan), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "block_table: entry [0, 2] must be a page, from 0 to 3, but is 99");
}

TEST(Run, WantsItsWorkspace) {
  const auto f = dense();
  ffpa_plan plan;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK);
  plan.workspace_bytes += 4096;  // so that every kernel needs some here
  const std::string bytes = std::to_string(plan.workspace_bytes);
  const Block workspace(plan.workspace_bytes);
  EXPECT_EQ(ffpa_forward_run(&f->p, &plan, workspace.at, plan.workspace_bytes - 1, nullptr), FFPA_WORKSPACE);
  EXPECT_EQ(ffpa_last_error(), "workspace_bytes: must be at least the plan's, " + bytes + ", but is " +
                                   std::to_string(plan.workspace_bytes - 1));
  EXPECT_EQ(ffpa_forward_run(&f->p, &plan, nullptr, plan.workspace_bytes, nullptr), FFPA_WORKSPACE);
  EXPECT_EQ(ffpa_last_error(), "workspace: must not be null, since the plan needs " + bytes + " bytes");
  EXPECT_EQ(ffpa_forward_run(&f->p, &plan, static_cast<char*>(workspace.at) + 16, plan.workspace_bytes, nullptr),
            FFPA_WORKSPACE);
  EXPECT_STREQ(ffpa_last_error(), "workspace: must be aligned to 256 bytes, but is off by 16");
  EXPECT_EQ(ffpa_forward_run(&f->p, &plan, workspace.at, plan.workspace_bytes, nullptr), FFPA_OK) << ffpa_last_error();
}

// ---------------------------------------------------------------------------------------------------- fingerprint

uint64_t fingerprint_of(const ffpa_forward_problem& p) {
  ffpa_plan plan;
  EXPECT_EQ(ffpa_forward_plan(&p, &plan), FFPA_OK) << ffpa_last_error();
  return plan.fingerprint;
}

TEST(Fingerprint, SeesWhatAPlanDependsOn) {
  const std::function<void(Forward&)> changes[] = {
      [](Forward&) {},
      [](Forward& f) { f.p = dense({.n_kv = 6})->p; },
      [](Forward& f) { f.p.q.stride[0] += 8; },
      [](Forward& f) { f.p.q.data = static_cast<char*>(f.p.q.data) + 4; },
      [](Forward& f) { f.p.lse = {}; },
      [](Forward& f) { f.p.causal = 1; },
      [](Forward& f) { f.p.anchor = 1; },
      [](Forward& f) { f.p.window_left = 2; },
      [](Forward& f) { f.p.window_right = 2; },
      [](Forward& f) { f.p.has_scale = 1, f.p.scale = 0; },
      [](Forward& f) { f.p.softcap = 5; },
      [](Forward& f) { f.p.dropout_p = 0.5; },
      [](Forward& f) { f.p.deterministic = 1; },
      [](Forward& f) { f.p.batch_invariant = 1; },
      [](Forward& f) { f.p.num_splits = 2; },
      [](Forward& f) { f.p.num_threads = 2; },
      [](Forward& f) { f.p.max_seqlen_q = 64; },
      [](Forward& f) { f.p.max_seqlen_kv = 64; },
      [](Forward& f) { f.p.engine = FFPA_ENGINE_REF; },
      [](Forward& f) { f.p.kernel = "ref_fwd_loops"; },
      [](Forward& f) { f.p.mask = f.memory.tensor(FFPA_BOOL, {1, 1, 3, 5}); },
      [](Forward& f) { f.p.bias = f.memory.tensor(FFPA_FP32, {1, 1, 3, 5}); },
      [](Forward& f) { f.p.sinks = f.memory.tensor(FFPA_FP32, {4}); },
      [](Forward& f) { f.p.alibi_slopes = f.memory.tensor(FFPA_FP32, {4}); },
      [](Forward& f) { f.p.seqlens_kv = f.memory.int32s({1, 1}); },
      [](Forward& f) { f.p.kv_batch_idx = f.memory.int32s({1, 1}); },
  };
  std::set<uint64_t> seen;
  int number = 0;
  for (const auto& change : changes) {
    const auto f = dense();
    change(*f);
    Problem problem;  // by hand, so that no kernel needs to take it
    const Status status = validate(&f->p, &problem);
    ASSERT_EQ(status.code, FFPA_OK) << status.text;
    EXPECT_TRUE(seen.insert(fingerprint(problem)).second) << "change " << number << " is not seen";
    ++number;
  }
}

TEST(Fingerprint, DoesNotSeeAddressesLengthsOrSeeds) {
  const auto a = paged(), b = paged();
  b->p.dropout_seed = 7;
  b->p.dropout_offset = 9;
  b->p.scale = 3;  // not read without has_scale
  ints(b->p.seqlens_kv)[1] = 1;
  EXPECT_EQ(fingerprint_of(a->p), fingerprint_of(b->p));
}

// ------------------------------------------------------------------------------------------------------------ log,
// threads

TEST(Log, PrintsEachPlanOnce) {
  const auto f = dense({.n_q = 17, .n_kv = 19});
  ffpa_plan plan;
  testing::internal::CaptureStderr();
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "silent unless asked";
  const Environment env("FFPA_LOG", "1");
  testing::internal::CaptureStderr();
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK);
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_OK);
  ASSERT_EQ(run(f->p, plan), FFPA_OK);
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string head = "ffpa: forward fp32 B 2, H_q 4, H_kv 2, N_q 17, N_kv 19, D_qk 8, D_v 6\nffpa:   kernel: ";
  EXPECT_EQ(log.find(head), 0u) << log;
  EXPECT_EQ(log.find(head, 1), std::string::npos) << "once per shape: " << log;
}

TEST(LastError, IsEachThreadsOwn) {
  const auto f = dense();
  f->p.k.extent[3] = 2;
  ffpa_plan plan;
  ASSERT_EQ(ffpa_forward_plan(&f->p, &plan), FFPA_INVALID_ARGUMENT);
  const std::string mine = ffpa_last_error();
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int id = 0; id < 8; ++id)
    threads.emplace_back([id, &wrong] {
      if (*ffpa_last_error()) ++wrong;  // a new thread has none
      const auto g = dense({.d_qk = 100 + id});
      g->p.k.extent[3] = id;
      for (int i = 0; i < 200; ++i) {
        ffpa_plan p;
        if (ffpa_forward_plan(&g->p, &p) != FFPA_INVALID_ARGUMENT) ++wrong;
        const std::string wanted =
            "k: extent 3 (D_qk) must equal q's, " + std::to_string(100 + id) + ", but is " + std::to_string(id);
        if (ffpa_last_error() != wanted) ++wrong;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(ffpa_last_error(), mine);
  const auto good = dense();
  EXPECT_EQ(ffpa_forward_plan(&good->p, &plan), FFPA_OK);
  EXPECT_EQ(ffpa_last_error(), mine) << "success leaves the text alone";
}

}  // namespace
}  // namespace ffpa::test

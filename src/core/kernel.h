// What a kernel is to the dispatcher. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/problem.h"

namespace ffpa {

// How a kernel will run a problem: decided by its `plan`, kept in ffpa_plan.
struct Choice {
  uint64_t workspace_bytes = 0;
  int32_t num_splits = 1;
  int32_t num_threads = 1;
};

struct Status {
  ffpa_status code = FFPA_OK;
  std::string text;  // empty when FFPA_OK
};

// A row of kernels.def. Kernels stand there best first; the dispatcher takes the first whose `plan` returns an empty reason.
struct Kernel {
  const char* name;  // <arch>_<pass>_<idea>
  const char* summary;
  Pass pass;
  ffpa_engine engine;
  uint32_t dtypes;       // bit (1 << ffpa_dtype)
  int64_t min_d, max_d;  // max_d 0 = no limit
  // nullptr if this machine can run it, else the reason (static text), e.g. "needs AVX-512".
  const char* (*machine_lacks)();
  // Fill *choice, or return one sentence naming argument, rule and value. Dtypes, head dims and device were checked from the row.
  std::string (*plan)(const Problem&, Choice* choice);
  // workspace holds choice.workspace_bytes bytes, 256-byte aligned. stream: a cudaStream_t, unused on the CPU.
  Status (*run)(const Problem&, const Choice&, void* workspace, void* stream);
};

}  // namespace ffpa

// From a validated problem to a plan: candidates best first, each refusal in one sentence.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "core/problem.h"

namespace ffpa {

// All rows of kernels.def, in its order. The index into it is ffpa_plan.kernel.
std::span<const Kernel> kernel_table();

struct PassedOver {
  const Kernel* kernel;
  std::string reason;
};

// The outcome of planning, chosen or not; `better` lists, in table order, the kernels of the pass that were passed
// over.
struct Decision {
  Status status;  // FFPA_NOT_SUPPORTED when no kernel takes the problem, FFPA_INVALID_ARGUMENT for a kernel name that
                  // does not exist
  const Kernel* kernel = nullptr;
  Choice choice;
  std::vector<PassedOver> better;
};

// Forcing, strongest first: the problem's `kernel`, its `engine`, then the environment variable FFPA_KERNEL (names
// separated by commas; a name binds its own pass and leaves the other alone).
Decision decide(const Problem& problem);

// The lines that ffpa_*_explain promises.
std::string explain(const Decision& decision);

// Of everything that a plan depends on: extents, strides, dtypes, options and alignment to 16 bytes; not of addresses,
// lengths or the dropout seed. Never 0.
uint64_t fingerprint(const Problem& problem);

// With FFPA_LOG=1 in the environment: the plan to stderr, once per fingerprint.
void log_plan(const Problem& problem, uint64_t fingerprint, const Decision& decision);

// "forward fp32 B 1, H_q 8, H_kv 8, N_q 128, N_kv 128, D_qk 64, D_v 64, causal"
std::string describe(const Problem& problem);

}  // namespace ffpa

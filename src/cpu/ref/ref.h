// The reference engine: plain loops in double, every option of the contract. SPDX-License-Identifier: Apache-2.0
//
// It is the oracle of all tests: one row of scores at a time, nothing shared, nothing tiled, nothing approximated. CPU
// tensors of any dtype; results are rounded once, on the store. Slow on purpose; memory: one row of N_kv doubles, and
// in the backward double copies of dk, dv, dbias and dsinks.
#pragma once

#include <string>

#include "core/kernel.h"

namespace ffpa::ref {

const char* machine_lacks();
std::string plan_forward(const Problem& problem, Choice* choice);
std::string plan_backward(const Problem& problem, Choice* choice);
Status run_forward(const Problem& problem, const Choice& choice, void* workspace, void* stream);
Status run_backward(const Problem& problem, const Choice& choice, void* workspace, void* stream);

}  // namespace ffpa::ref

// From the caller's structs to checked ones: every rule of the contract, before any engine.
// SPDX-License-Identifier: Apache-2.0
//
// Lengths and tables are read, and held against the extents, when they lie in host memory; in device memory they are
// the caller's promise. No other tensor data is read.
#pragma once

#include "core/kernel.h"
#include "core/problem.h"
#include "cpu/append.h"

namespace ffpa {

Status validate(const ffpa_forward_problem* caller, Problem* problem);
Status validate(const ffpa_backward_problem* caller, Problem* problem);
Status validate(const ffpa_append_problem* caller, Append* append);

}  // namespace ffpa

// Compiles if the binding's declarations of torch's C shims are those of the torch that is installed.
// SPDX-License-Identifier: Apache-2.0
#include "torch_shim.h"
// Above: ours; below: torch's own. A difference is a conflicting declaration.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

static_assert(AOTI_TORCH_SUCCESS == 0);
int main() { return 0; }

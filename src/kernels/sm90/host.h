// Host side that the Hopper kernels of both passes share: the machine, what they are told of a problem. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "attn/fwd_params.cuh"
#include "core/kernel.h"
#include "core/problem.h"

namespace ffpa::sm90 {

bool is_hopper(int device);

// nullptr if a Hopper GPU is there.
const char* machine_lacks_hopper();

int processors(int device);

// Raise a kernel's shared-memory limit once for each device; `done` is the kernel's own.
Status allow_shared_memory(const void* kernel, uint32_t bytes, int device, uint64_t* done);

Status launch_status(const char* kernel);

// The least that an instance must carry to run the problem.
attn::Features features_needed(const Problem& p);

// Everything but the tensor maps and the order of tiles (n_tiles, section).
void fill_attention_params(const Problem& p, attn::AttentionParams* f);

// A tensor that kernels write. Absent: data null.
attn::RowsOut rows_out(const ffpa_tensor& t);

}  // namespace ffpa::sm90

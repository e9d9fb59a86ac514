// Host side that the Hopper forward kernels share: what they refuse, tensor maps, parameters. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "attn/fwd_params.cuh"
#include "core/kernel.h"
#include "core/problem.h"

namespace ffpa::sm90 {

// nullptr if a Hopper GPU is there.
const char* machine_lacks_hopper();

// Empty, or the sentence that says why no kernel built on tensor maps takes the problem.
std::string tensor_maps_refuse(const Problem& p);

// The least that an instance must carry to run the problem.
attn::Features features_needed(const Problem& p);

// No element of o exists.
bool nothing_to_write(const Problem& p);

struct Boxes {
  int q_rows, k_rows, v_rows;  // rows of one copy
  int tile_q;
};
Status fill_forward_params(const Problem& p, const Boxes& boxes, attn::ForwardParams* f);

int processors(int device);

// CTAs or clusters to launch, where `resident` fit the GPU at a time. Even work: persistent workers. Uneven work (causal): one a tile,
// so that the hardware hands out the next tile, heaviest first, to whoever is free.
int workers(const attn::ForwardParams& f, int resident);

// Raise a kernel's shared-memory limit once for each device; `done` is the kernel's own.
Status allow_shared_memory(const void* kernel, uint32_t bytes, int device, uint64_t* done);

Status launch_status(const char* kernel);

}  // namespace ffpa::sm90

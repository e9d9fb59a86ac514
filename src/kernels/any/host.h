// Host side that CUDA kernels of every arch share: the device, what kernels are told of a problem. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/fwd_params.cuh"
#include "core/kernel.h"
#include "core/problem.h"

namespace ffpa::any {

inline constexpr int kMaxDevices = 64;

int processors(int device);

// Raise a kernel's shared-memory limit once for each device; `done` is the kernel's own.
Status allow_shared_memory(const void* kernel, uint32_t bytes, int device, uint64_t* done);

Status launch_status(const char* kernel);

// The least that an instance must carry to run the problem.
attn::Features features_needed(const Problem& p);

// Everything but the order of tiles (n_tiles, section).
void fill_attention_params(const Problem& p, attn::AttentionParams* f);

// The order of tiles of `tile_q` query rows: n_tiles and section, once the rest of *f is filled.
Status order_tiles(const Problem& p, int tile_q, attn::AttentionParams* f);

// CTAs or clusters to launch, where `resident` fit the GPU at a time. Even work: persistent workers. Uneven work (causal): one a tile,
// so that the hardware hands out the next tile, heaviest first, to whoever is free.
int workers(const attn::AttentionParams& f, int resident);

// No element of o exists.
bool nothing_to_write(const Problem& p);

// Tensors that kernels write. Absent: data null.
attn::RowsOut rows_out(const ffpa_tensor& t);
attn::RowValues row_values(const ffpa_tensor& t);

}  // namespace ffpa::any

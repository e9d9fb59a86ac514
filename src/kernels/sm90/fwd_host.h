// Host side that the Hopper forward kernels share. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/sm90/host.h"
#include "kernels/sm90/tensor_maps.h"

namespace ffpa::sm90 {

// Empty, or the sentence that says why no forward kernel of Hopper takes the problem.
std::string forward_refuses(const Problem& p);

// No element of o exists.
bool nothing_to_write(const Problem& p);

struct Boxes {
  int q_rows, k_rows, v_rows;  // rows of one copy
  int tile_q;
};
Status fill_forward_params(const Problem& p, const Boxes& boxes, attn::ForwardParams* f);

// CTAs or clusters to launch, where `resident` fit the GPU at a time. Even work: persistent workers. Uneven work (causal): one a tile,
// so that the hardware hands out the next tile, heaviest first, to whoever is free.
int workers(const attn::ForwardParams& f, int resident);

}  // namespace ffpa::sm90

// Host side that the Hopper forward kernels share. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/sm90/host.h"
#include "kernels/sm90/tensor_maps.h"

namespace ffpa::sm90 {

// Empty, or the sentence that says why no forward kernel of Hopper takes the problem.
std::string forward_refuses(const Problem& p);

struct Boxes {
  int q_rows, k_rows, v_rows;  // rows of one copy
  int tile_q;
};
Status fill_forward_params(const Problem& p, const Boxes& boxes, attn::ForwardParams* f);

}  // namespace ffpa::sm90

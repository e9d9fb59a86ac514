// Host side that the Hopper backward kernels share. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attn/bwd_params.cuh"
#include "kernels/sm90/host.h"

namespace ffpa::sm90 {

// Empty, or the sentence that says why no backward kernel of Hopper takes the problem.
std::string backward_refuses(const Problem& p);

// Where the parts of the workspace begin, in bytes.
struct BackwardWorkspace {
  uint64_t lse_log2 = 0, delta = 0;  // see BackwardParams
  uint64_t dout = 0;                 // a copy, where copies_dout
  bool copies_dout = false;          // the copy engine cannot read the caller's dout (broadcast, transposed, unaligned)
  uint64_t bytes = 0;
};
BackwardWorkspace backward_workspace(const Problem& p);

// The problem with dout where the kernels read it: the caller's, or the copy in the workspace.
Problem with_readable_dout(const Problem& p, void* workspace);

// Everything but the tensor maps and the order of tiles (n_tiles, section). `p` and the functions below: with_readable_dout.
void fill_backward_params(const Problem& p, void* workspace, attn::BackwardParams* b);

struct BackwardBoxes {
  int q_rows, k_rows, v_rows, dout_rows;  // rows of one copy
};
// Maps of tensors without elements stay as they are: nothing may be copied then.
Status fill_backward_maps(const Problem& p, const BackwardBoxes& boxes, attn::BackwardParams* b);

}  // namespace ffpa::sm90

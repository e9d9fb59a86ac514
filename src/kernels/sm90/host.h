// Host side that the Hopper kernels of both passes share. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "kernels/any/host.h"

namespace ffpa::sm90 {

using any::allow_shared_memory;
using any::features_needed;
using any::launch_status;
using any::nothing_to_write;
using any::order_tiles;
using any::processors;
using any::rows_out;
using any::workers;

bool is_hopper(int device);

// nullptr if a Hopper GPU is there.
const char* machine_lacks_hopper();

// Everything but the tensor maps and the order of tiles (n_tiles, section).
void fill_tma_params(const Problem& p, attn::TmaParams* f);

}  // namespace ffpa::sm90

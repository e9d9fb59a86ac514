// Host side of sm90_fwd_quad_dv; its instances are spread over files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attn/fwd_params.cuh"
#include "core/kernel.h"

namespace ffpa::sm90::fwd_quad_dv {

// One per Config, in the instance files.
template <class Element, int kDvSlice, attn::Features kFeatures>
Status launch(const Problem& p, cudaStream_t stream);

}  // namespace ffpa::sm90::fwd_quad_dv

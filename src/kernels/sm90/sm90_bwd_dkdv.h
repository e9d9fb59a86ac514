// Host side of sm90_bwd_dkdv; its instances are spread over files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "attn/bwd_params.cuh"
#include "core/kernel.h"

namespace ffpa::sm90::bwd_dkdv {

// Empty, or the sentence that says why it does not take the problem; beside sm90::backward_refuses.
std::string refuses(const Problem& p);

// dk and dv, whichever is wanted. `filled`: by fill_backward_params.
Status run(const Problem& p, const attn::BackwardParams& filled, cudaStream_t stream);

// One per Config, in the instance files.
template <class Element, int kColumns, int kSlices, attn::Features kFeatures>
Status launch(const Problem& p, const attn::BackwardParams& filled, cudaStream_t stream);

}  // namespace ffpa::sm90::bwd_dkdv

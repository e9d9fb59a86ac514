// Host side of sm90_bwd_dq; its instances are spread over files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "attn/bwd_params.cuh"
#include "core/kernel.h"

namespace ffpa::sm90::bwd_dq {

// `p`: with_readable_dout; `filled`: by fill_backward_params. Writes all of dq, which must be wanted.
Status run(const Problem& p, const attn::BackwardParams& filled, cudaStream_t stream);

// One per Config, in the instance files.
template <class Element, int kCluster, int kSlice, attn::Features kFeatures>
Status launch(const Problem& p, const attn::BackwardParams& filled, cudaStream_t stream);

}  // namespace ffpa::sm90::bwd_dq

// What the backward needs of each query row before its products: lse in base 2 and delta; the gradient of sinks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace ffpa::bwd_delta {

// Rows of q: B * H_q * N_q, packed H_q * T_q.
int64_t rows(const Problem& p);

// For each row: lse_log2 = lse * log2(e), +inf where lse = -inf; delta = rowsum(dout * o) - dlse, 0 where lse = -inf. Both fp32
// [B | 1, H_q, N_q | T_q], contiguous. If dout_copy is not null, dout is copied to it: [B | 1, H_q, N_q | T_q, D_v], contiguous but for
// D_v, which is rounded up to a multiple of 8.
void launch(const Problem& p, float* lse_log2, float* delta, void* dout_copy, cudaStream_t stream);

// dsinks[h] = -sum over rows of exp(sink - lse) * delta, in one fixed order. Afterwards, on the same stream.
void launch_dsinks(const Problem& p, const float* lse_log2, const float* delta, cudaStream_t stream);

}  // namespace ffpa::bwd_delta

// Instances of sm90_bwd_dq: fp16, clusters of 1. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/sm90_bwd_dq_launch.cuh"

namespace ffpa::sm90::bwd_dq {
template Status launch<__half, 1, 64, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                              cudaStream_t);
template Status launch<__half, 1, 64, attn::Features::kAll>(const Problem&, const attn::BackwardParams&, cudaStream_t);
template Status launch<__half, 1, 128, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                               cudaStream_t);
template Status launch<__half, 1, 128, attn::Features::kAll>(const Problem&, const attn::BackwardParams&, cudaStream_t);
template Status launch<__half, 1, 192, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                               cudaStream_t);
template Status launch<__half, 1, 192, attn::Features::kAll>(const Problem&, const attn::BackwardParams&, cudaStream_t);
template Status launch<__half, 1, 256, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                               cudaStream_t);
template Status launch<__half, 1, 256, attn::Features::kAll>(const Problem&, const attn::BackwardParams&, cudaStream_t);
}  // namespace ffpa::sm90::bwd_dq

// Instances of sm90_bwd_dq: bf16, clusters of 2. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/sm90_bwd_dq_launch.cuh"

namespace ffpa::sm90::bwd_dq {
template Status launch<__nv_bfloat16, 2, 160, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                                      cudaStream_t);
template Status launch<__nv_bfloat16, 2, 160, attn::Features::kAll>(const Problem&, const attn::BackwardParams&,
                                                                    cudaStream_t);
template Status launch<__nv_bfloat16, 2, 192, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                                      cudaStream_t);
template Status launch<__nv_bfloat16, 2, 192, attn::Features::kAll>(const Problem&, const attn::BackwardParams&,
                                                                    cudaStream_t);
template Status launch<__nv_bfloat16, 2, 256, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                                      cudaStream_t);
template Status launch<__nv_bfloat16, 2, 256, attn::Features::kAll>(const Problem&, const attn::BackwardParams&,
                                                                    cudaStream_t);
}  // namespace ffpa::sm90::bwd_dq

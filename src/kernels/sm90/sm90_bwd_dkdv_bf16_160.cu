// Instances of sm90_bwd_dkdv: bf16, 160 columns a summer. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/sm90_bwd_dkdv_launch.cuh"

namespace ffpa::sm90::bwd_dkdv {
template Status launch<__nv_bfloat16, 160, 1, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                                      cudaStream_t);
template Status launch<__nv_bfloat16, 160, 1, attn::Features::kAll>(const Problem&, const attn::BackwardParams&,
                                                                    cudaStream_t);
template Status launch<__nv_bfloat16, 160, 2, attn::Features::kDense>(const Problem&, const attn::BackwardParams&,
                                                                      cudaStream_t);
template Status launch<__nv_bfloat16, 160, 2, attn::Features::kAll>(const Problem&, const attn::BackwardParams&,
                                                                    cudaStream_t);
}  // namespace ffpa::sm90::bwd_dkdv

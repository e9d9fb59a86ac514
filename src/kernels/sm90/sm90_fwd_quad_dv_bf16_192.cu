// Instances of sm90_fwd_quad_dv: bf16, 192 columns of O a warpgroup. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/sm90_fwd_quad_dv_launch.cuh"

namespace ffpa::sm90::fwd_quad_dv {
template Status launch<__nv_bfloat16, 192, attn::Features::kDense>(const Problem&, cudaStream_t);
template Status launch<__nv_bfloat16, 192, attn::Features::kPacked>(const Problem&, cudaStream_t);
template Status launch<__nv_bfloat16, 192, attn::Features::kOptions>(const Problem&, cudaStream_t);
template Status launch<__nv_bfloat16, 192, attn::Features::kAll>(const Problem&, cudaStream_t);
}  // namespace ffpa::sm90::fwd_quad_dv

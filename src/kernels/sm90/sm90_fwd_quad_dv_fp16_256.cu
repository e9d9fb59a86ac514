// Instances of sm90_fwd_quad_dv: fp16, 256 columns of O a warpgroup. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/sm90_fwd_quad_dv_launch.cuh"

namespace ffpa::sm90::fwd_quad_dv {
template Status launch<__half, 256, attn::Features::kDense>(const Problem&, cudaStream_t);
template Status launch<__half, 256, attn::Features::kPacked>(const Problem&, cudaStream_t);
template Status launch<__half, 256, attn::Features::kOptions>(const Problem&, cudaStream_t);
template Status launch<__half, 256, attn::Features::kAll>(const Problem&, cudaStream_t);
}  // namespace ffpa::sm90::fwd_quad_dv

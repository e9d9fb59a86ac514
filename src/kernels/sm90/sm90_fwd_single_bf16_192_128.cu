// Instances of sm90_fwd_single: bf16, D_qk 192, D_v 128. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/sm90_fwd_single_launch.cuh"

namespace ffpa::sm90::fwd_single {
template Status launch<__nv_bfloat16, 192, 128, attn::Features::kDense>(const Problem&, cudaStream_t);
template Status launch<__nv_bfloat16, 192, 128, attn::Features::kPacked>(const Problem&, cudaStream_t);
template Status launch<__nv_bfloat16, 192, 128, attn::Features::kOptions>(const Problem&, cudaStream_t);
template Status launch<__nv_bfloat16, 192, 128, attn::Features::kAll>(const Problem&, cudaStream_t);
}  // namespace ffpa::sm90::fwd_single

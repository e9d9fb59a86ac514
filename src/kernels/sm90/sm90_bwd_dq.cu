// Choice of instance of sm90_bwd_dq. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/sm90/host.h"
#include "kernels/sm90/sm90_bwd_dq.h"

namespace ffpa::sm90::bwd_dq {

Status run(const Problem& p, const attn::BackwardParams& filled, cudaStream_t stream) {
  if (!has_elements(p.args.dq)) return {};
  const auto run = [&]<class Element, int kCluster, int kSlice>() {
    if (features_needed(p) == attn::Features::kDense)
      return launch<Element, kCluster, kSlice, attn::Features::kDense>(p, filled, stream);
    return launch<Element, kCluster, kSlice, attn::Features::kAll>(p, filled, stream);
  };
  const auto choose = [&]<class Element>() {
    const int64_t widest = std::max(p.d_qk, p.d_v);
    if (widest <= 256) {
      if (p.d_qk <= 64) return run.template operator()<Element, 1, 64>();
      if (p.d_qk <= 128) return run.template operator()<Element, 1, 128>();
      if (p.d_qk <= 192) return run.template operator()<Element, 1, 192>();
      return run.template operator()<Element, 1, 256>();
    }
    if (widest <= 512) {
      if (p.d_qk <= 320) return run.template operator()<Element, 2, 160>();
      if (p.d_qk <= 384) return run.template operator()<Element, 2, 192>();
      return run.template operator()<Element, 2, 256>();
    }
    if (p.d_qk <= 640) return run.template operator()<Element, 4, 160>();
    if (p.d_qk <= 768) return run.template operator()<Element, 4, 192>();
    return run.template operator()<Element, 4, 256>();
  };
  return p.fwd().q.dtype == FFPA_BF16 ? choose.template operator()<__nv_bfloat16>()
                                      : choose.template operator()<__half>();
}

}  // namespace ffpa::sm90::bwd_dq

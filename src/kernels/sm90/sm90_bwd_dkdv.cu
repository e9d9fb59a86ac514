// Choice of instance of sm90_bwd_dkdv. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/words.h"
#include "kernels/sm90/host.h"
#include "kernels/sm90/sm90_bwd_dkdv.h"

namespace ffpa::sm90::bwd_dkdv {

std::string refuses(const Problem& p) {
  if (p.d_qk > 1024) return words("D_qk: must be at most 1024, but is ", p.d_qk);
  if (p.d_v > 1024) return words("D_v: must be at most 1024, but is ", p.d_v);
  return {};
}

Status run(const Problem& p, const attn::BackwardParams& filled, cudaStream_t stream) {
  const ffpa_tensor& k = p.fwd().k;
  if (k.extent[0] * k.extent[1] * k.extent[2] == 0) return {};
  const bool plain = features_needed(p) == attn::Features::kDense && !present(p.fwd().kv_batch_idx);
  const auto run = [&]<class Element, int kColumns, int kSlices>() {
    return plain ? launch<Element, kColumns, kSlices, attn::Features::kDense>(p, filled, stream)
                 : launch<Element, kColumns, kSlices, attn::Features::kAll>(p, filled, stream);
  };
  const auto choose = [&]<class Element>() {
    const int64_t d = std::max(p.d_qk, p.d_v);
    if (d <= 128) return run.template operator()<Element, 64, 1>();
    if (d <= 256) return run.template operator()<Element, 128, 1>();
    if (d <= 320) return run.template operator()<Element, 160, 1>();
    if (d <= 384) return run.template operator()<Element, 192, 1>();
    if (d <= 512) return run.template operator()<Element, 256, 1>();
    if (d <= 640) return run.template operator()<Element, 160, 2>();
    if (d <= 768) return run.template operator()<Element, 192, 2>();
    return run.template operator()<Element, 256, 2>();
  };
  return p.fwd().q.dtype == FFPA_BF16 ? choose.template operator()<__nv_bfloat16>()
                                      : choose.template operator()<__half>();
}

}  // namespace ffpa::sm90::bwd_dkdv

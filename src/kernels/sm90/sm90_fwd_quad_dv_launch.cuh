// Launch of one instance of sm90_fwd_quad_dv; included by the instance files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "kernels/sm90/fwd_host.h"
#include "kernels/sm90/sm90_fwd_quad_dv.cuh"
#include "kernels/sm90/sm90_fwd_quad_dv.h"

namespace ffpa::sm90::fwd_quad_dv {

template <class Element, int kDvSlice, attn::Features kFeatures>
Status launch(const Problem& problem, cudaStream_t stream) {
  using C = Config<Element, kDvSlice, kFeatures>;
  static uint64_t allowed = 0;
  Params p;
  p.n_d_boxes = std::max(2, static_cast<int>((problem.d_qk + 63) / 64));
  const uint32_t q_bytes = C::kQBoxBytes * static_cast<uint32_t>(p.n_d_boxes);
  p.n_stages = std::min(C::kMaxStages, static_cast<int>((C::kSharedLimit - kFixedBytes<C> - q_bytes) / C::kStageBytes));
  if (Status s = fill_forward_params(problem, {C::kTileQ, C::kKRows, C::kChunkKeys, C::kTileQ}, &p.f);
      s.code != FFPA_OK)
    return s;
  const int device = problem.fwd().q.device_index;
  const auto kernel = sm90_fwd_quad_dv<C>;
  if (Status s = allow_shared_memory(reinterpret_cast<const void*>(kernel), C::kSharedLimit, device, &allowed);
      s.code != FFPA_OK)
    return s;
  const int clusters = workers(p.f, processors(device) / C::kCluster);
  const uint32_t bytes = kFixedBytes<C> + static_cast<uint32_t>(p.n_stages) * C::kStageBytes + q_bytes;
  kernel<<<clusters * C::kCluster, C::kThreads, bytes, stream>>>(p);
  return launch_status("sm90_fwd_quad_dv");
}

}  // namespace ffpa::sm90::fwd_quad_dv

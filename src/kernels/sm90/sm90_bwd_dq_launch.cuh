// Launch of one instance of sm90_bwd_dq; included by the instance files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/sm90/bwd_host.h"
#include "kernels/sm90/sm90_bwd_dq.cuh"
#include "kernels/sm90/sm90_bwd_dq.h"

namespace ffpa::sm90::bwd_dq {

template <class Element, int kCluster, int kSlice, attn::Features kFeatures>
Status launch(const Problem& problem, const attn::BackwardParams& filled, cudaStream_t stream) {
  using C = Config<Element, kCluster, kSlice, kFeatures>;
  static uint64_t allowed = 0;
  Params p{filled, static_cast<int>((problem.d_qk + 63) / 64), static_cast<int>((problem.d_v + 63) / 64)};
  if (Status s = fill_backward_maps(problem, {64, C::kTileKv, C::kTileKv, 64}, &p.b); s.code != FFPA_OK) return s;
  if (Status s = order_tiles(problem, C::kTileQ, &p.b); s.code != FFPA_OK) return s;
  const int device = problem.fwd().q.device_index;
  const auto kernel = sm90_bwd_dq<C>;
  if (Status s = allow_shared_memory(reinterpret_cast<const void*>(kernel), C::kSharedLimit, device, &allowed);
      s.code != FFPA_OK)
    return s;
  // How many clusters of 4 fit depends on the chip's floor plan: more workers with less to do each.
  const int resident = kCluster == 4 ? processors(device) : processors(device) / kCluster;
  const int clusters = workers(p.b, resident);
  kernel<<<clusters * kCluster, C::kThreads, C::kSharedLimit, stream>>>(p);
  return launch_status("sm90_bwd_dq");
}

}  // namespace ffpa::sm90::bwd_dq

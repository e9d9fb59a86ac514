// Launch of one instance of sm90_fwd_cluster_dv; included by the instance files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/sm90/fwd_cluster_dv.cuh"
#include "kernels/sm90/fwd_cluster_dv.h"
#include "kernels/sm90/fwd_host.h"

namespace ffpa::sm90::fwd_cluster_dv {

// Stages that fit beside Q; below Config::kMinStages the problem is refused (see plan_forward).
template <class C>
int stages_beside(int n_d_chunks) {
  const uint32_t left = C::kSharedLimit - kFixedBytes<C> - 4 * C::kQBoxBytes * static_cast<uint32_t>(n_d_chunks);
  const int n = static_cast<int>(left / C::kStageBytes);
  return n < C::kMaxStages ? n : C::kMaxStages;
}

template <class Element, int kDvSlice, attn::Features kFeatures>
Status launch(const Problem& problem, cudaStream_t stream) {
  using C = Config<Element, kDvSlice, kFeatures>;
  static uint64_t allowed = 0;
  Params p;
  p.n_d_chunks = static_cast<int>((problem.d_qk + C::kChunkD - 1) / C::kChunkD);
  p.n_stages = stages_beside<C>(p.n_d_chunks);
  if (Status s = fill_forward_params(problem, {64, C::kOwnKeys, C::kChunkKeys, C::kTileQ}, &p.f); s.code != FFPA_OK) return s;
  const int device = problem.fwd().q.device_index;
  const auto kernel = sm90_fwd_cluster_dv<C>;
  if (Status s = allow_shared_memory(reinterpret_cast<const void*>(kernel), C::kSharedLimit, device, &allowed); s.code != FFPA_OK)
    return s;
  int clusters = processors(device) / C::kCluster;
  if (!p.f.cu_seqlens_q && p.f.n_tiles < clusters) clusters = p.f.n_tiles;
  const uint32_t bytes = kFixedBytes<C> + static_cast<uint32_t>(p.n_stages) * C::kStageBytes +
                         4 * C::kQBoxBytes * static_cast<uint32_t>(p.n_d_chunks);
  kernel<<<clusters * C::kCluster, C::kThreads, bytes, stream>>>(p);
  return launch_status("sm90_fwd_cluster_dv");
}

}  // namespace ffpa::sm90::fwd_cluster_dv

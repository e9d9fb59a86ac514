// Launch of one instance of sm90_fwd_single; included by the instance files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/sm90/fwd_host.h"
#include "kernels/sm90/sm90_fwd_single.cuh"
#include "kernels/sm90/sm90_fwd_single.h"

namespace ffpa::sm90::fwd_single {

// Keys of a block: the table at the top of sm90_fwd_single.cuh; fewer where the options need registers.
template <int kDqk, int kDv, attn::Features kFeatures>
inline constexpr int kTileKv = attn::has_options(kFeatures) ? (kDqk == 128 ? 80 : 64)
                               : kDqk == 64                 ? 128
                               : kDqk == 128                ? 176
                               : kDqk == 192                ? (kDv == 128 ? 128 : 112)
                                                            : 80;
template <int kDqk>
inline constexpr int kWarpgroups = kDqk == 64 ? 3 : 2;

template <class Element, int kDqk, int kDv, attn::Features kFeatures>
Status launch(const Problem& problem, cudaStream_t stream) {
  using C = Config<Element, kDqk, kDv, kTileKv<kDqk, kDv, kFeatures>, kWarpgroups<kDqk>, kFeatures>;
  static uint64_t allowed = 0;
  Params p;
  if (Status s = fill_forward_params(problem, {64, C::kTileKv, C::kTileKv, C::kTileQ}, &p.f); s.code != FFPA_OK)
    return s;
  const int device = problem.fwd().q.device_index;
  const auto kernel = sm90_fwd_single<C>;
  constexpr uint32_t kBytes = sizeof(SharedStorage<C>);
  if (Status s = allow_shared_memory(reinterpret_cast<const void*>(kernel), kBytes, device, &allowed);
      s.code != FFPA_OK)
    return s;
  const int ctas = workers(p.f, processors(device));
  kernel<<<ctas, C::kThreads, kBytes, stream>>>(p);
  return launch_status("sm90_fwd_single");
}

}  // namespace ffpa::sm90::fwd_single

// Launch of one instance of sm90_bwd_dkdv; included by the instance files. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "core/words.h"
#include "kernels/sm90/bwd_host.h"
#include "kernels/sm90/sm90_bwd_dkdv.cuh"
#include "kernels/sm90/sm90_bwd_dkdv.h"

namespace ffpa::sm90::bwd_dkdv {

template <class Element, int kColumns, int kSlices, attn::Features kFeatures>
Status launch(const Problem& problem, const attn::BackwardParams& filled, cudaStream_t stream) {
  using C = Config<Element, kColumns, kSlices, kFeatures>;
  static uint64_t allowed = 0;
  const ffpa_tensor &q = problem.fwd().q, &k = problem.fwd().k;
  const int64_t rows = k.extent[2], batches = problem.packed_kv() ? problem.n_seqs : k.extent[0];
  const int64_t tiles = (problem.packed_kv() ? rows / C::kTileKv + batches + 1  // at most
                                             : (rows + C::kTileKv - 1) / C::kTileKv * batches) *
                        problem.h_kv;
  if (tiles >= int64_t{1} << 29)
    return {FFPA_NOT_SUPPORTED, words("k: B * H_kv * N_kv / ", C::kTileKv, " must be below 2^29, but is ", tiles)};
  Params p{.f = filled, .tiles = {}, .no_queries = !has_elements(q)};
  if (Status s = fill_backward_maps(problem, {C::kTileQ, C::kTileKv, C::kTileKv, C::kTileQ}, &p.f); s.code != FFPA_OK)
    return s;
  p.tiles.n_tiles = static_cast<int>(tiles);
  p.tiles.n_q = static_cast<int>(rows);
  p.tiles.n_seqs = static_cast<int>(batches);
  p.tiles.h_q = static_cast<int>(problem.h_kv);
  p.tiles.cu_seqlens_q = p.f.cu_seqlens_kv;
  // Under causality the first keys have the most queries: they are taken first, over as many heads as keep q and dout in a good half of
  // L2 (60 MB).
  const int64_t head_bytes = std::max<int64_t>(q.extent[2] * (problem.d_qk + problem.d_v) * 2 * problem.group, 1);
  if (p.f.heavy_last)
    p.tiles.section = static_cast<int>(std::clamp<int64_t>((int64_t{40} << 20) / head_bytes, 1, 1 << 20));
  const auto kernel = sm90_bwd_dkdv<C>;
  if (Status s =
          allow_shared_memory(reinterpret_cast<const void*>(kernel), Layout<C>::kBytes, q.device_index, &allowed);
      s.code != FFPA_OK)
    return s;
  kernel<<<static_cast<unsigned>(tiles * C::kCluster), C::kThreads, Layout<C>::kBytes, stream>>>(p);
  return launch_status("sm90_bwd_dkdv");
}

}  // namespace ffpa::sm90::bwd_dkdv

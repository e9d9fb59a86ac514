// Choice of instance of sm90_fwd_cluster_dv. SPDX-License-Identifier: Apache-2.0
#include "kernels/sm90/fwd_cluster_dv.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/words.h"
#include "kernels/sm90/fwd_host.h"

namespace ffpa::sm90::fwd_cluster_dv {

const char* machine_lacks() { return machine_lacks_hopper(); }

std::string plan_forward(const Problem& p, Choice*) {
  if (p.d_v > 512) return words("D_v: must be at most 512, but is ", p.d_v);
  if (p.d_qk > 576) return words("D_qk: must be at most 576, but is ", p.d_qk);
  return tensor_maps_refuse(p);
}

Status run_forward(const Problem& p, const Choice&, void*, void* stream) {
  const ffpa_forward_problem& f = p.fwd();
  if (p.n_seqs * p.h_q * f.q.extent[2] * p.d_v == 0 && !(p.packed_q() && f.q.extent[2] && p.h_q)) return {};
  const bool bf16 = f.q.dtype == FFPA_BF16, wide = p.d_v > 384, options = needs_options(p);
  const auto choose = [&]<class Element>(Element) {
    if (wide) return options ? launch<Element, 256, true> : launch<Element, 256, false>;
    return options ? launch<Element, 192, true> : launch<Element, 192, false>;
  };
  return (bf16 ? choose(__nv_bfloat16{}) : choose(__half{}))(p, static_cast<cudaStream_t>(stream));
}

}  // namespace ffpa::sm90::fwd_cluster_dv

// Choice of instance of sm90_fwd_quad_dv. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/words.h"
#include "kernels/sm90/fwd_host.h"
#include "kernels/sm90/sm90_fwd_quad_dv.h"

namespace ffpa::sm90::fwd_quad_dv {

const char* machine_lacks() { return machine_lacks_hopper(); }

std::string plan_forward(const Problem& p, Choice*) {
  if (p.d_v > 1024) return words("D_v: must be at most 1024, but is ", p.d_v);
  if (p.d_qk > 1024) return words("D_qk: must be at most 1024, but is ", p.d_qk);
  return forward_refuses(p);
}

Status run_forward(const Problem& p, const Choice&, void*, void* stream) {
  const ffpa_forward_problem& f = p.fwd();
  if (nothing_to_write(p)) return {};
  const auto run = [&]<class Element, int kDvSlice>() {
    switch (features_needed(p)) {
      case attn::Features::kDense:
        return launch<Element, kDvSlice, attn::Features::kDense>(p, static_cast<cudaStream_t>(stream));
      case attn::Features::kPacked:
        return launch<Element, kDvSlice, attn::Features::kPacked>(p, static_cast<cudaStream_t>(stream));
      case attn::Features::kOptions:
        return launch<Element, kDvSlice, attn::Features::kOptions>(p, static_cast<cudaStream_t>(stream));
      default: return launch<Element, kDvSlice, attn::Features::kAll>(p, static_cast<cudaStream_t>(stream));
    }
  };
  const auto choose = [&]<class Element>() {
    if (p.d_v <= 640) return run.template operator()<Element, 160>();
    if (p.d_v <= 768) return run.template operator()<Element, 192>();
    return run.template operator()<Element, 256>();
  };
  return f.q.dtype == FFPA_BF16 ? choose.template operator()<__nv_bfloat16>() : choose.template operator()<__half>();
}

}  // namespace ffpa::sm90::fwd_quad_dv

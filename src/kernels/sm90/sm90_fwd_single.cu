// Choice of instance of sm90_fwd_single. SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/words.h"
#include "kernels/sm90/fwd_host.h"
#include "kernels/sm90/sm90_fwd_single.h"

namespace ffpa::sm90::fwd_single {

const char* machine_lacks() { return machine_lacks_hopper(); }

std::string plan_forward(const Problem& p, Choice*) {
  if (p.d_qk > 256) return words("D_qk: must be at most 256, but is ", p.d_qk);
  if (p.d_v > 256) return words("D_v: must be at most 256, but is ", p.d_v);
  return forward_refuses(p);
}

Status run_forward(const Problem& p, const Choice&, void*, void* stream) {
  if (nothing_to_write(p)) return {};
  const auto run = [&]<class Element, int kDqk, int kDv>() {
    const auto to = static_cast<cudaStream_t>(stream);
    switch (features_needed(p)) {
      case attn::Features::kDense: return launch<Element, kDqk, kDv, attn::Features::kDense>(p, to);
      case attn::Features::kPacked: return launch<Element, kDqk, kDv, attn::Features::kPacked>(p, to);
      case attn::Features::kOptions: return launch<Element, kDqk, kDv, attn::Features::kOptions>(p, to);
      default: return launch<Element, kDqk, kDv, attn::Features::kAll>(p, to);
    }
  };
  const auto choose = [&]<class Element>() {
    if (p.d_qk <= 64 && p.d_v <= 64) return run.template operator()<Element, 64, 64>();
    if (p.d_qk <= 128 && p.d_v <= 128) return run.template operator()<Element, 128, 128>();
    if (p.d_qk <= 192 && p.d_v <= 128) return run.template operator()<Element, 192, 128>();
    if (p.d_qk <= 192 && p.d_v <= 192) return run.template operator()<Element, 192, 192>();
    return run.template operator()<Element, 256, 256>();
  };
  return p.fwd().q.dtype == FFPA_BF16 ? choose.template operator()<__nv_bfloat16>()
                                      : choose.template operator()<__half>();
}

}  // namespace ffpa::sm90::fwd_single

// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <atomic>

#include "kernels/sm90/host.h"
#include "kernels/sm90/tensor_maps.h"

namespace ffpa::sm90 {

bool is_hopper(int device) {
  static std::atomic<int8_t> known[any::kMaxDevices];  // 0 = not asked, 1 = yes, -1 = no
  if (device < 0 || device >= any::kMaxDevices) return false;
  int8_t k = known[device].load(std::memory_order_relaxed);
  if (k == 0) {
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess)
      cudaGetLastError();  // no such device: not an error of a later launch
    k = major == 9 && minor == 0 ? 1 : -1;
    known[device].store(k, std::memory_order_relaxed);
  }
  return k > 0;
}

const char* machine_lacks_hopper() {
  static const bool found = [] {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
      cudaGetLastError();  // no driver: not an error of a later call
      return false;
    }
    for (int i = 0; i < n; ++i)
      if (is_hopper(i)) return tensor_maps_here();
    return false;
  }();
  return found ? nullptr : "needs a GPU of compute capability 9.0 (Hopper)";
}

void fill_tma_params(const Problem& p, attn::TmaParams* f) {
  const ffpa_forward_problem& a = p.fwd();
  any::fill_attention_params(p, f);
  f->ragged = ragged_kv(p);
  f->k_batch_rows = map_batch_rows(a.k);
  f->v_batch_rows = map_batch_rows(a.v);
  f->q_head_step = map_step(a.q, 1);
  f->k_head_step = map_step(a.k, 1);
  f->v_head_step = map_step(a.v, 1);
  f->q_batch_step = map_step(a.q, 0);
  f->k_batch_step = map_step(a.k, 0);
  f->v_batch_step = map_step(a.v, 0);
}

}  // namespace ffpa::sm90

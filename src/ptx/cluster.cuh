// Thread block clusters and copies between their CTAs. PTX ISA 9.7.13.4, 9.7.9.25. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

namespace ffpa::ptx {

__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// barrier.cluster: all threads of all CTAs, release and acquire
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// mapa: the address of the same place in CTA `rank`
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ __forceinline__ RemoteMbarrier mapa(Mbarrier b, uint32_t rank) { return {mapa(b.address, rank)}; }

// cp.async.bulk, shared memory of this CTA to that of another; the bytes count towards `arrive` over there. 16-byte pieces.
__device__ __forceinline__ void bulk_copy(uint32_t to_remote, uint32_t from, uint32_t bytes, RemoteMbarrier arrive) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to_remote),
      "r"(from), "r"(bytes), "r"(arrive.address)
      : "memory");
}
// st.async: 16 bytes of registers to another CTA's shared memory (or to the own, by its mapped address); they count towards `arrive` there.
__device__ __forceinline__ void store_async4(uint32_t to_remote, const uint32_t* r, RemoteMbarrier arrive) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to_remote),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(arrive.address)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the sources of this thread's committed copies may be overwritten.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace ffpa::ptx

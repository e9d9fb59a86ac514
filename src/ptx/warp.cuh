// Warp-wide and per-thread instructions: elect, register hand-over, stmatrix, fences, ex2, packing. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ffpa::ptx {

// elect.sync: true in one lane of the warp
__device__ __forceinline__ bool elect_one() {
  uint32_t chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen != 0;
}
// A value that is the same in all lanes, in a form the compiler knows to be so: branches and addresses become uniform.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// setmaxnreg. Takes effect only under __launch_bounds__(threads, 1) with one branch a role.
template <int kRegisters>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// fence.proxy.async: ordinary writes to shared memory before the copy engine or the tensor cores read them
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// bar.sync / bar.arrive on one of the 16 named barriers
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// stmatrix.x4: four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
// ex2.approx. Volatile: the compiler would else move it below the next wgmma wait, out of the tensor cores' shadow.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// mov. Volatile: a copy into a register that a later wgmma reads must not sink below the first wgmma of its stage (C7513).
__device__ __forceinline__ uint32_t copy_here(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// min.NaN: a NaN stays one, unlike in fminf
__device__ __forceinline__ float min_nan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// cvt.rn.*x2: two floats to a word, the first in the low half
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>)
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  else
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

}  // namespace ffpa::ptx

// SPDX-License-Identifier: Apache-2.0
#include "cpu/features.h"

#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

namespace ffpa {
namespace {

int processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

#if defined(__x86_64__)
// CPUID.7.0:EDX: AMX-BF16 is bit 22, AMX-TILE bit 24; XCR0 bits 17 and 18 are the tile state. The kernel hands it out on request
// (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18), once per process.
bool amx_bf16() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

Features look() {
  Features f;
  f.processors = processors();
#if defined(__x86_64__)
  __builtin_cpu_init();  // its answers include the operating system's saving of the registers
  f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  if (unsigned a, b, c, d; f.avx2) f.avx2 = __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);  // F16C
  f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  f.avx512_bf16 = f.avx512 && __builtin_cpu_supports("avx512bf16");
  f.amx_bf16 = f.avx512_bf16 && amx_bf16();
#endif
  return f;
}

}  // namespace

const char* Features::lacks_for(Target target) const {
  switch (target) {
    case Target::portable: return nullptr;
    case Target::avx2: return avx2 ? nullptr : "needs AVX2, FMA and F16C";
    case Target::avx512: return avx512 ? nullptr : "needs AVX-512 F, BW, DQ and VL";
    case Target::avx512bf16: return avx512_bf16 ? nullptr : "needs AVX-512 BF16";
    case Target::amx: return amx_bf16 ? nullptr : "needs AMX BF16";
  }
  return "unknown target";
}

const Features& features() {
  static const Features found = look();
  return found;
}

}  // namespace ffpa

// What this CPU and operating system offer. SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ffpa {

// The instruction sets that the SIMD kernels are compiled for (src/cpu/CMakeLists.txt), and the namespaces of their copies.
enum class Target { portable, avx2, avx512, avx512bf16, amx };

struct Features {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  // with the kernel's leave to use tiles
  int processors = 1;     // threads that the affinity mask leaves to this process

  // nullptr if a kernel of this target runs here, else what is missing.
  const char* lacks_for(Target target) const;
};

// Looked up once.
const Features& features();

}  // namespace ffpa

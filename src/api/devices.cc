// SPDX-License-Identifier: Apache-2.0
#include "api/devices.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

namespace ffpa {
namespace {

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.starts_with("model name"))
      if (const size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return "CPU";
}

std::string cpu_features() {
  std::string text;
#if defined(__x86_64__)
  const auto add = [&](bool has, const char* name) {
    if (!has) return;
    if (!text.empty()) text += ' ';
    text += name;
  };
  __builtin_cpu_init();
  add(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "avx2");
  add(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"),
      "avx512");
  add(__builtin_cpu_supports("avx512bf16"), "avx512_bf16");
#endif
  return text;
}

// Threads that the affinity mask leaves to this process.
int cpu_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

void copy_text(const std::string& text, char (&to)[128]) {
  const size_t bytes = std::min(text.size(), sizeof(to) - 1);
  text.copy(to, bytes);
  to[bytes] = 0;
}

}  // namespace

int device_count(int type) { return type == FFPA_CPU ? 1 : 0; }

Status device_at(int, int, ffpa_device_info* info) {
  copy_text(cpu_model(), info->name);
  copy_text(cpu_features(), info->features);
  info->processors = cpu_threads();
  info->shared_memory_bytes = 0;
  info->memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return {};
}

}  // namespace ffpa

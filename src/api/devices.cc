// SPDX-License-Identifier: Apache-2.0
#include "api/devices.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "cpu/features.h"

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
  const Features& f = features();
  std::string text;
  for (const auto& [has, name] :
       {std::pair{f.avx2, "avx2 "}, {f.avx512, "avx512 "}, {f.avx512_bf16, "avx512_bf16 "}, {f.amx_bf16, "amx_bf16 "}})
    if (has) text += name;
  if (!text.empty()) text.pop_back();
  return text;
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
  info->processors = features().processors;
  info->shared_memory_bytes = 0;
  info->memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return {};
}

}  // namespace ffpa

// SPDX-License-Identifier: Apache-2.0
#include "api/devices.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#if defined(FFPA_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

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

#if defined(FFPA_WITH_CUDA)
int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();  // no driver or no GPU: not an error of a later call
  return 0;
}

Status cuda_status(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return {};
  cudaGetLastError();  // worded here: not an error of a later call
  return {FFPA_DEVICE_ERROR, std::string(call) + ": " + cudaGetErrorString(error)};
}

Status cuda_device_at(int index, ffpa_device_info* info) {
  cudaDeviceProp device;
  if (Status s = cuda_status("cudaGetDeviceProperties", cudaGetDeviceProperties(&device, index)); s.code != FFPA_OK)
    return s;
  copy_text(device.name, info->name);
  copy_text("sm_" + std::to_string(device.major) + std::to_string(device.minor), info->features);
  info->processors = device.multiProcessorCount;
  info->shared_memory_bytes = static_cast<int32_t>(device.sharedMemPerBlockOptin);
  info->memory_bytes = static_cast<int64_t>(device.totalGlobalMem);
  return {};
}
// Leaves the device that was current before in *previous, if it was another.
Status make_current(int device, int* previous) {
  int current = 0;
  if (Status s = cuda_status("cudaGetDevice", cudaGetDevice(&current)); s.code != FFPA_OK || current == device)
    return s;
  Status s = cuda_status("cudaSetDevice", cudaSetDevice(device));
  if (s.code == FFPA_OK) *previous = current;
  return s;
}
void restore(int previous) { cudaSetDevice(previous); }
#else
int cuda_device_count() { return 0; }
Status cuda_device_at(int, ffpa_device_info*) { return {FFPA_INTERNAL, "device_at: this build has no CUDA"}; }
Status make_current(int, int*) { return {FFPA_INTERNAL, "make_current: this build has no CUDA"}; }
void restore(int) {}
#endif

}  // namespace

int device_count(int type) { return type == FFPA_CPU ? 1 : type == FFPA_CUDA ? cuda_device_count() : 0; }

Status device_at(int type, int index, ffpa_device_info* info) {
  if (type == FFPA_CUDA) return cuda_device_at(index, info);
  copy_text(cpu_model(), info->name);
  copy_text(cpu_features(), info->features);
  info->processors = features().processors;
  info->shared_memory_bytes = 0;
  info->memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  return {};
}

CurrentDevice::CurrentDevice(const ffpa_tensor& on) {
  if (on.device_type == FFPA_CUDA) status_ = make_current(on.device_index, &previous_);
}

CurrentDevice::~CurrentDevice() {
  if (previous_ >= 0) restore(previous_);
}

}  // namespace ffpa

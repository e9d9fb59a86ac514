// Words for messages: every refusal and plan is put together here, in the symbols of the contract.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <sstream>
#include <string>

#include "ffpa/ffpa.h"

namespace ffpa {

// words("k: rank must be ", 4, ", but is ", 3)
template <class... Pieces>
std::string words(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  return text.str();
}

constexpr const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case FFPA_FP64: return "fp64";
    case FFPA_FP32: return "fp32";
    case FFPA_FP16: return "fp16";
    case FFPA_BF16: return "bf16";
    case FFPA_BOOL: return "bool";
    case FFPA_INT32: return "int32";
    case FFPA_INT64: return "int64";
    case FFPA_FP8_E4M3: return "fp8_e4m3";
    case FFPA_FP4_E2M1: return "fp4_e2m1";
    case FFPA_INT8: return "int8";
    default: return "unknown";
  }
}

constexpr const char* engine_name(int32_t engine) {
  switch (engine) {
    case FFPA_ENGINE_AUTO: return "auto";
    case FFPA_ENGINE_REF: return "ref";
    case FFPA_ENGINE_CPU: return "cpu";
    case FFPA_ENGINE_CUDA: return "cuda";
    default: return "unknown";
  }
}

constexpr const char* device_name(int32_t device_type) { return device_type == FFPA_CUDA ? "cuda" : "cpu"; }

}  // namespace ffpa

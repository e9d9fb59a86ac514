// One element of a floating-point tensor, as a double. SPDX-License-Identifier: Apache-2.0
//
// `offset` counts elements from t.data. Not for inner loops.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "ffpa/ffpa.h"

namespace ffpa {

inline double load_element(const ffpa_tensor& t, int64_t offset) {
  switch (t.dtype) {
    case FFPA_FP64: return static_cast<const double*>(t.data)[offset];
    case FFPA_FP32: return static_cast<const float*>(t.data)[offset];
    case FFPA_FP16: return float_from_fp16(static_cast<const uint16_t*>(t.data)[offset]);
    default: return float_from_bf16(static_cast<const uint16_t*>(t.data)[offset]);
  }
}

inline void store_element(const ffpa_tensor& t, int64_t offset, double value) {
  switch (t.dtype) {
    case FFPA_FP64: static_cast<double*>(t.data)[offset] = value; break;
    case FFPA_FP32: static_cast<float*>(t.data)[offset] = static_cast<float>(value); break;
    case FFPA_FP16: static_cast<uint16_t*>(t.data)[offset] = fp16_from_float(static_cast<float>(value)); break;
    default: static_cast<uint16_t*>(t.data)[offset] = bf16_from_float(static_cast<float>(value)); break;
  }
}

}  // namespace ffpa

// ffpa_append on the CPU: rows into a dense or paged K/V cache, keys (and queries) rotated on the way.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace ffpa {

// A checked ffpa_append_problem; made by src/api/validate_append.cc.
struct Append {
  ffpa_append_problem args{};
  int64_t n_seqs = 0, h_kv = 0, n_new = 0;  // B, H_kv, N_new
  int64_t d_qk = 0, d_v = 0;
  int64_t page_rows = 0;       // 0 = dense cache
  int64_t rotary_columns = 0;  // R, even; 0 = no rotation
};

void append_cpu(const Append& append);

}  // namespace ffpa

// Fuzzes ffpa_append: refused in words, or done within the caches' memory and nowhere else.
// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "ffpa/ffpa.h"
#include "input.h"

namespace ffpa::fuzz {
namespace {

std::vector<int32_t> distinct(Input& in, int64_t count, int64_t of) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  const int64_t start = in.upto(std::max<int64_t>(of - 1, 0));
  for (int64_t i = 0; i < count; ++i)
    values[static_cast<size_t>(i)] = static_cast<int32_t>((start + i) % std::max<int64_t>(of, 1));
  if (count && in.rarely())
    values[static_cast<size_t>(in.upto(count - 1))] = static_cast<int32_t>(in.coin() ? of : odd_number(in));
  return values;
}

void one_input(Input in) {
  Tensors m(in);
  m.wild = in.coin();
  constexpr int32_t kTypes[] = {FFPA_FP32, FFPA_BF16, FFPA_FP16, FFPA_FP64};
  const int32_t dtype = kTypes[in.byte() % 4];
  const int64_t b = in.upto(3), h = in.upto(3), n_new = in.upto(5), d_qk = in.upto(20), d_v = in.upto(20),
                length = in.upto(9);
  ffpa_append_problem p;
  ffpa_append_problem_init(&p);
  p.k_new = m.make(dtype, {b, h, n_new, d_qk});
  const int64_t mode = in.upto(2);
  int64_t caches = b + in.upto(2), rows = length + n_new + in.upto(3);
  if (mode == 1) p.kv_batch_idx = m.int32s(distinct(in, b, caches));
  if (mode == 2) {
    const int64_t page_rows = 1 + in.upto(4), per_sequence = (rows + page_rows - 1) / page_rows;
    rows = page_rows;
    caches = b * per_sequence + in.upto(2);
    if (per_sequence) p.block_table = m.int32s(distinct(in, b * per_sequence, caches), per_sequence);
  }
  p.k_cache = m.make(dtype, {caches, h, rows, d_qk}, true);
  if (in.byte() % 8)
    p.v_new = m.make(dtype, {b, h, n_new, d_v}), p.v_cache = m.make(dtype, {caches, h, rows, d_v}, true);
  if (in.byte() % 8) p.seqlens_kv = m.int32s(numbers(in, b, length));
  if (in.coin()) {
    const int32_t table = in.coin() ? FFPA_FP32 : dtype;
    const int64_t positions = length + n_new + in.upto(6), half = in.upto(d_qk / 2);
    p.rotary_cos = m.make(table, {positions, half});
    p.rotary_sin = m.make(table, {positions, half});
    if (in.coin()) {
      const int64_t h_q = in.upto(4), n_q = in.upto(4);
      p.q = m.make(dtype, {b, h_q, n_q, d_qk});
      p.q_rotated = in.byte() % 4 ? m.make(dtype, {b, h_q, n_q, d_qk}, true) : p.q;
    }
  }
  p.rotary_interleaved = in.rarely() ? static_cast<int32_t>(odd_number(in)) : in.coin();
  p.rotary_q_fixed = in.rarely() ? static_cast<int32_t>(odd_number(in)) : in.coin();
  p.num_threads = in.rarely() ? static_cast<int32_t>(odd_number(in)) : 1;
  const ffpa_status status = ffpa_append(&p, nullptr);
  if (status == FFPA_INTERNAL || (status != FFPA_OK && !*ffpa_last_error())) {
    std::fprintf(stderr, "fuzz: status %d, \"%s\"\n", status, ffpa_last_error());
    std::abort();
  }
}

}  // namespace
}  // namespace ffpa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ffpa::fuzz::one_input(ffpa::fuzz::Input(data, size));
  return 0;
}

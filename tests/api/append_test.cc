// ffpa_append against plain loops: dense, paged, by batch index, every dtype, both rotations; and its refusals.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <tuple>

#include "api/problems.h"
#include "core/element.h"

namespace ffpa::test {
namespace {

int64_t count(const ffpa_tensor& t) {
  int64_t n = 1;
  for (int axis = 0; axis < t.rank; ++axis) n *= t.extent[axis];
  return n;
}

void randomise(const ffpa_tensor& t, std::mt19937& rng) {
  std::uniform_real_distribution<double> uniform(-2, 2);
  for (int64_t i = 0; i < count(t); ++i) store_element(t, i, uniform(rng));
}

int64_t at(const ffpa_tensor& t, int64_t a, int64_t b, int64_t c, int64_t d) {
  return a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
}

enum class Cache { kDense, kIndexed, kPaged };
constexpr double kUntouched = 1.5;  // exact in every dtype

// 3 sequences, 2 heads, 4 new rows, D_qk 10, D_v 5; caches of 12 keys (paged: 3 rows a page).
struct Appending {
  Memory m;
  ffpa_append_problem p;
  Appending(Cache cache, int32_t dtype, int64_t rotary, int32_t table_dtype) {
    ffpa_append_problem_init(&p);
    p.k_new = m.tensor(dtype, {3, 2, 4, 10});
    p.v_new = m.tensor(dtype, {3, 2, 4, 5});
    const bool paged = cache == Cache::kPaged;
    p.k_cache = m.tensor(dtype, {paged ? 11 : 5, 2, paged ? 3 : 12, 10});
    p.v_cache = m.tensor(dtype, {paged ? 11 : 5, 2, paged ? 3 : 12, 5});
    p.seqlens_kv = m.int32s({0, 7, 2});
    if (cache == Cache::kIndexed) p.kv_batch_idx = m.int32s({4, 0, 2});
    if (paged) p.block_table = m.int32s(3, 4, {5, 9, -1, -1, -1, -1, 3, 0, 10, 2, -1, -1});
    if (rotary) {
      p.rotary_cos = m.tensor(table_dtype, {16, rotary / 2});
      p.rotary_sin = m.tensor(table_dtype, {16, rotary / 2});
      p.q = m.tensor(dtype, {3, 6, 2, 10});
      p.q_rotated = m.tensor(dtype, {3, 6, 2, 10});
    }
    std::mt19937 rng(7);
    for (ffpa_tensor* t : {&p.k_new, &p.v_new, &p.q})
      if (t->rank) randomise(*t, rng);
    for (ffpa_tensor* t : {&p.k_cache, &p.v_cache})
      for (int64_t i = 0; i < count(*t); ++i) store_element(*t, i, kUntouched);
    for (int64_t i = 0; i < 16 * rotary / 2; ++i) {
      const double angle = static_cast<double>(i / (rotary / 2)) *
                           std::pow(100.0, -2.0 * static_cast<double>(i % (rotary / 2)) / static_cast<double>(rotary));
      store_element(p.rotary_cos, i, std::cos(angle));
      store_element(p.rotary_sin, i, std::sin(angle));
    }
  }

  // Column d of a row turned to `position`, in double from the stored inputs.
  double rotated(const ffpa_tensor& t, int64_t row, int64_t d, int64_t position) const {
    const int64_t columns = p.rotary_cos.rank ? 2 * p.rotary_cos.extent[1] : 0;
    const double x = load_element(t, row + d);
    if (d >= columns) return x;
    const int64_t half = columns / 2;
    const int64_t pair = p.rotary_interleaved ? d / 2 : d % half;
    const bool first = p.rotary_interleaved ? d % 2 == 0 : d < half;
    const int64_t other = p.rotary_interleaved ? (first ? d + 1 : d - 1) : (first ? d + half : d - half);
    const double c = load_element(p.rotary_cos, position * half + pair),
                 s = load_element(p.rotary_sin, position * half + pair);
    return first ? x * c - load_element(t, row + other) * s : x * c + load_element(t, row + other) * s;
  }
};

class AppendTest : public testing::TestWithParam<std::tuple<Cache, int32_t, int64_t, int32_t, int32_t>> {};

TEST_P(AppendTest, FollowsPlainLoops) {
  const auto [cache, dtype, rotary, interleaved, fixed] = GetParam();
  for (const int32_t table_dtype : {dtype, static_cast<int32_t>(FFPA_FP32)}) {
    Appending a(cache, dtype, rotary, table_dtype);
    a.p.rotary_interleaved = interleaved;
    a.p.rotary_q_fixed = fixed;
    ASSERT_EQ(ffpa_append(&a.p, nullptr), FFPA_OK) << ffpa_last_error();
    const double tolerance = dtype == FFPA_FP64   ? 1e-14
                             : dtype == FFPA_FP32 ? 1e-6
                             : dtype == FFPA_FP16 ? 2e-3
                                                  : 1.6e-2;

    std::map<int64_t, double> k_wanted, v_wanted;  // by element of the cache
    for (int64_t b = 0; b < 3; ++b)
      for (int64_t h = 0; h < 2; ++h)
        for (int64_t j = 0; j < 4; ++j) {
          const int64_t position = ints(a.p.seqlens_kv)[b] + j;
          int64_t batch = b, row = position;
          if (cache == Cache::kIndexed) batch = ints(a.p.kv_batch_idx)[b];
          if (cache == Cache::kPaged) batch = ints(a.p.block_table)[b * 4 + position / 3], row = position % 3;
          for (int64_t d = 0; d < 10; ++d)
            k_wanted[at(a.p.k_cache, batch, h, row, d)] = a.rotated(a.p.k_new, at(a.p.k_new, b, h, j, 0), d, position);
          for (int64_t d = 0; d < 5; ++d)
            v_wanted[at(a.p.v_cache, batch, h, row, d)] = load_element(a.p.v_new, at(a.p.v_new, b, h, j, d));
        }
    ASSERT_EQ(k_wanted.size(), 3u * 2 * 4 * 10);
    for (int64_t i = 0; i < count(a.p.k_cache); ++i)
      if (const auto w = k_wanted.find(i); w != k_wanted.end())
        ASSERT_NEAR(load_element(a.p.k_cache, i), w->second, tolerance) << "k element " << i;
      else
        ASSERT_EQ(load_element(a.p.k_cache, i), kUntouched) << "k element " << i << " was not to be written";
    for (int64_t i = 0; i < count(a.p.v_cache); ++i)
      ASSERT_EQ(load_element(a.p.v_cache, i), v_wanted.contains(i) ? v_wanted[i] : kUntouched) << "v element " << i;
    if (rotary)
      for (int64_t b = 0; b < 3; ++b)
        for (int64_t h = 0; h < 6; ++h)
          for (int64_t i = 0; i < 2; ++i)
            for (int64_t d = 0; d < 10; ++d) {
              const int64_t row = at(a.p.q, b, h, i, 0), position = ints(a.p.seqlens_kv)[b] + (fixed ? 0 : i);
              ASSERT_NEAR(load_element(a.p.q_rotated, row + d), a.rotated(a.p.q, row, d, position), tolerance)
                  << "q " << b << h << i << d;
            }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AppendTest,
                         testing::Combine(testing::Values(Cache::kDense, Cache::kIndexed, Cache::kPaged),
                                          testing::Values(FFPA_FP64, FFPA_FP32, FFPA_FP16, FFPA_BF16),
                                          testing::Values(0, 8, 10), testing::Values(0, 1), testing::Values(0, 1)));

TEST(Append, RotatesQueriesInPlaceAndAnyStrides) {
  Appending a(Cache::kDense, FFPA_FP32, 8, FFPA_FP32), b(Cache::kDense, FFPA_FP32, 8, FFPA_FP32);
  b.p.q_rotated = b.p.q;
  b.p.k_cache = b.m.tensor(FFPA_FP32, {5, 12, 10, 2});  // [B, capacity, D_qk, H]
  b.p.k_cache.extent[1] = 2, b.p.k_cache.extent[2] = 12, b.p.k_cache.extent[3] = 10;
  b.p.k_cache.stride[0] = 240, b.p.k_cache.stride[1] = 1, b.p.k_cache.stride[2] = 20, b.p.k_cache.stride[3] = 2;
  ASSERT_EQ(ffpa_append(&a.p, nullptr), FFPA_OK) << ffpa_last_error();
  ASSERT_EQ(ffpa_append(&b.p, nullptr), FFPA_OK) << ffpa_last_error();
  for (int64_t i = 0; i < count(a.p.q); ++i) ASSERT_EQ(load_element(a.p.q_rotated, i), load_element(b.p.q, i));
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t d = 0; d < 10; ++d)
      ASSERT_EQ(load_element(a.p.k_cache, at(a.p.k_cache, 1, h, 8, d)),
                load_element(b.p.k_cache, at(b.p.k_cache, 1, h, 8, d)));
}

TEST(Append, ThreadsChangeNothing) {
  std::vector<float> results[2];
  for (const int32_t threads : {1, 3}) {
    Memory m;
    ffpa_append_problem p;
    ffpa_append_problem_init(&p);
    std::mt19937 rng(3);
    p.k_new = m.tensor(FFPA_FP32, {2, 3, 64, 128});  // large enough to be shared out
    p.v_new = m.tensor(FFPA_FP32, {2, 3, 64, 128});
    p.q = m.tensor(FFPA_FP32, {2, 6, 64, 128});
    p.rotary_cos = m.tensor(FFPA_FP32, {64, 32});
    p.rotary_sin = m.tensor(FFPA_FP32, {64, 32});
    for (const ffpa_tensor* t : {&p.k_new, &p.v_new, &p.q, &p.rotary_cos, &p.rotary_sin}) randomise(*t, rng);
    p.k_cache = m.tensor(FFPA_FP32, {2, 3, 70, 128});
    p.v_cache = m.tensor(FFPA_FP32, {2, 3, 70, 128});
    p.q_rotated = m.tensor(FFPA_FP32, {2, 6, 64, 128});
    p.num_threads = threads;
    ASSERT_EQ(ffpa_append(&p, nullptr), FFPA_OK) << ffpa_last_error();
    for (const ffpa_tensor* t : {&p.k_cache, &p.v_cache, &p.q_rotated})
      for (int64_t i = 0; i < count(*t); ++i) results[threads == 3].push_back(static_cast<float>(load_element(*t, i)));
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(Append, NothingToAppend) {
  Appending a(Cache::kDense, FFPA_FP32, 0, FFPA_FP32);
  a.p.k_new.extent[2] = a.p.v_new.extent[2] = 0;
  EXPECT_EQ(ffpa_append(&a.p, nullptr), FFPA_OK) << ffpa_last_error();
  for (int64_t i = 0; i < count(a.p.k_cache); ++i) ASSERT_EQ(load_element(a.p.k_cache, i), kUntouched);
}

TEST(Append, Refusals) {
  struct Case {
    Cache cache;
    int64_t rotary;
    std::function<void(Appending&)> bend;
    std::string text;
  };
  const Case cases[] = {
      {Cache::kDense, 0, [](Appending& a) { a.p.struct_size = 1; },
       "struct_size: must be " + std::to_string(sizeof(ffpa_append_problem)) +
           " (set by ffpa_append_problem_init), but is 1"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_new = {}; }, "k_new: must be given, but is absent"},
      {Cache::kDense, 0, [](Appending& a) { a.p.v_new = {}; }, "v_cache: must be absent when v_new is"},
      {Cache::kDense, 0, [](Appending& a) { a.p.v_new = a.p.v_cache = {}; }, ""},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_new.dtype = FFPA_INT32; },
       "k_new: dtype must be fp64, fp32, fp16 or bf16, but is int32"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_cache.dtype = FFPA_FP16; },
       "k_cache: dtype must be k_new's, fp32, but is fp16"},
      {Cache::kDense, 0, [](Appending& a) { a.p.v_new.extent[2] = 3; },
       "v_new: extent 2 (N_new) must equal k_new's, 4, but is 3"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_cache.extent[1] = 1; },
       "k_cache: extent 1 (H_kv) must equal k_new's, 2, but is 1"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_cache.extent[3] = 9; },
       "k_cache: extent 3 (D_qk) must equal k_new's, 10, but is 9"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_cache.extent[0] = a.p.v_cache.extent[0] = 2; },
       "k_cache: extent 0 (B_cache) must be at least k_new's B, 3, but is 2"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_cache.stride[2] = 0; },
       "k_cache: is written, so its strides must place elements without overlap, but extents are [5, 2, 12, 10] and "
       "strides "
       "[240, 120, 0, 1]"},
      {Cache::kDense, 0, [](Appending& a) { ints(a.p.seqlens_kv)[1] = 9; },
       "seqlens_kv: entry 1 plus N_new, 4, must be from 4 to the cache's capacity, 12, but the entry is 9"},
      {Cache::kDense, 0, [](Appending& a) { ints(a.p.seqlens_kv)[2] = -1; },
       "seqlens_kv: entry 2 plus N_new, 4, must be from 4 to the cache's capacity, 12, but the entry is -1"},
      {Cache::kIndexed, 0, [](Appending& a) { ints(a.p.kv_batch_idx)[1] = 5; },
       "kv_batch_idx: entry 1 must be from 0 to k_cache's last batch row, 4, but is 5"},
      {Cache::kIndexed, 0, [](Appending& a) { ints(a.p.kv_batch_idx)[1] = 4; },
       "kv_batch_idx: a batch row must be appended to once only, but two places name 4"},
      {Cache::kPaged, 0, [](Appending& a) { ints(a.p.block_table)[1] = 11; },
       "block_table: entry [0, 1] must be a page, from 0 to 10, but is 11"},
      {Cache::kPaged, 0, [](Appending& a) { ints(a.p.block_table)[1] = 2; },
       "block_table: a page must be appended to once only, but two places name 2"},
      {Cache::kPaged, 0, [](Appending& a) { a.p.kv_batch_idx = a.m.int32s({0, 1, 2}); },
       "kv_batch_idx: must be absent with block_table, which already says where each sequence lies"},
      {Cache::kDense, 0, [](Appending& a) { a.p.q = a.m.tensor(FFPA_FP32, {3, 2, 2, 10}); },
       "q: must be absent when rotary_cos is: there is nothing to do to it"},
      {Cache::kDense, 8, [](Appending& a) { a.p.rotary_interleaved = 3; },
       "rotary_interleaved: must be 0 or 1, but is 3"},
      {Cache::kDense, 8, [](Appending& a) { a.p.rotary_sin = {}; }, "rotary_sin: must be given, but is absent"},
      {Cache::kDense, 8, [](Appending& a) { a.p.rotary_sin.extent[1] = 3; },
       "rotary_sin: extent 1 (R/2) must equal rotary_cos's, 4, but is 3"},
      {Cache::kDense, 8, [](Appending& a) { a.p.rotary_cos.extent[1] = a.p.rotary_sin.extent[1] = 6; },
       "rotary_cos: extent 1 (R/2) must be at most half of D_qk, 5, but is 6"},
      {Cache::kDense, 8, [](Appending& a) { a.p.rotary_cos.extent[0] = a.p.rotary_sin.extent[0] = 10; },
       "rotary_cos: extent 0 (positions) must be at least 11 for sequence 1, but is 10"},
      {Cache::kDense, 8, [](Appending& a) { a.p.rotary_cos.dtype = FFPA_BF16; },
       "rotary_cos: dtype must be fp32 or k_new's, fp32, but is bf16"},
      {Cache::kDense, 8, [](Appending& a) { a.p.q_rotated = {}; }, "q_rotated: must be given, but is absent"},
      {Cache::kDense, 8, [](Appending& a) { a.p.q.extent[3] = 9; },
       "q: extent 3 (D_qk) must equal k_new's, 10, but is 9"},
      {Cache::kDense, 8, [](Appending& a) { a.p.q_rotated.extent[2] = 1; },
       "q_rotated: extent 2 (N_q) must equal q's, 2, but is 1"},
      {Cache::kDense, 0, [](Appending& a) { a.p.k_cache.data = a.p.k_new.data; },
       "k_cache: is written, so it must not share memory with k_new, but both start at the same address"},
      {Cache::kDense, 8, [](Appending& a) { a.p.q_rotated.data = static_cast<float*>(a.p.q.data) + 10; },
       "q_rotated: is written, so it must not share memory with q, but starts 40 bytes behind its start and meets it"},
      {Cache::kDense, 0, [](Appending& a) { a.p.num_threads = -2; }, "num_threads: must be from 0 to 4096, but is -2"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    Appending a(c.cache, FFPA_FP32, c.rotary, FFPA_FP32);
    c.bend(a);
    const ffpa_tensor cache = a.p.k_cache;
    const ffpa_status status = ffpa_append(&a.p, nullptr);
    if (c.text.empty()) {
      EXPECT_EQ(status, FFPA_OK) << ffpa_last_error();
      continue;
    }
    EXPECT_EQ(status, FFPA_INVALID_ARGUMENT);
    EXPECT_EQ(ffpa_last_error(), c.text);
    if (cache.dtype != FFPA_FP32 || cache.data == a.p.k_new.data) continue;
    EXPECT_EQ(load_element(cache, 0), kUntouched) << "nothing is written";
  }
  EXPECT_EQ(ffpa_append(nullptr, nullptr), FFPA_INVALID_ARGUMENT);
  EXPECT_STREQ(ffpa_last_error(), "problem: must not be null");
}

// Conversions: every 16-bit value survives the way through fp32, and rounding is to nearest even.
TEST(Half, RoundTripsAndRounds) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto h = static_cast<uint16_t>(bits);
    const float fp16 = float_from_fp16(h), bf16 = float_from_bf16(h);
    ASSERT_TRUE(std::isnan(fp16) ? (fp16_from_float(fp16) & 0x7FFF) > 0x7C00 : fp16_from_float(fp16) == h) << h;
    ASSERT_TRUE(std::isnan(bf16) ? (bf16_from_float(bf16) & 0x7FFF) > 0x7F80 : bf16_from_float(bf16) == h) << h;
  }
  EXPECT_EQ(fp16_from_float(65504.f), 0x7BFF);
  EXPECT_EQ(fp16_from_float(65519.f), 0x7BFF);
  EXPECT_EQ(fp16_from_float(65520.f), 0x7C00);
  EXPECT_EQ(fp16_from_float(0x1p-25f), 0x0000) << "halfway to even";
  EXPECT_EQ(fp16_from_float(0x1.8p-25f), 0x0001);
  EXPECT_EQ(fp16_from_float(1.f + 0x1p-11f), 0x3C00) << "halfway to even";
  EXPECT_EQ(fp16_from_float(1.f + 0x1.8p-10f), 0x3C02) << "halfway to even";
  EXPECT_EQ(bf16_from_float(1.f + 0x1p-8f), 0x3F80) << "halfway to even";
  EXPECT_EQ(bf16_from_float(1.f + 0x1.8p-7f), 0x3F82) << "halfway to even";
}

}  // namespace
}  // namespace ffpa::test

// Which written tensors are refused for sharing memory with another: random pairs against a count of their bytes, and the layouts
// that users have. SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "api/checks.h"
#include "api/problems.h"
#include "random_problem.h"

namespace ffpa::test {
namespace {

bool refused(const ffpa_tensor& written, const ffpa_tensor& other) {
  const Status status = worded([&] { check_apart({"o", written}, {"q", other}); });
  EXPECT_EQ(status.text.empty(), status.code == FFPA_OK);
  return status.code != FFPA_OK;
}

// The bytes of a tensor's elements, counted from `base`, in order.
std::vector<int64_t> bytes_of(const ffpa_tensor& t, const char* base) {
  std::vector<int64_t> all;
  const int64_t start = static_cast<const char*>(t.data) - base, element = dtype_bytes(t.dtype);
  for_each_offset(t, [&](int64_t at) {
    for (int64_t byte = 0; byte < element; ++byte) all.push_back(start + at * element + byte);
  });
  std::sort(all.begin(), all.end());
  return all;
}

bool meet(const ffpa_tensor& a, const ffpa_tensor& b, const char* base) {
  const std::vector<int64_t> x = bytes_of(a, base), y = bytes_of(b, base);
  std::vector<int64_t> both;
  std::set_intersection(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(both));
  return !both.empty();
}

// Strides that nest, in random order, with room between them; `like`: the strides of another tensor instead.
ffpa_tensor view(Rng& rng, char* base, const ffpa_tensor* like) {
  constexpr int32_t kTypes[] = {FFPA_BOOL, FFPA_BF16, FFPA_FP32, FFPA_FP64};
  ffpa_tensor t{};
  t.rank = like ? like->rank : static_cast<int32_t>(rng.between(1, 4));
  t.dtype = like && rng.chance(0.7) ? like->dtype : kTypes[rng.between(0, 3)];
  int64_t step = rng.between(1, 3);
  for (int axis = t.rank - 1; axis >= 0; --axis) {
    t.extent[axis] = rng.between(1, 4);
    t.stride[axis] = like ? like->stride[axis] : rng.chance(0.1) ? 0 : step;
    step = std::max<int64_t>(step * t.extent[axis] + rng.between(-1, 6), 1);  // now and then rows that overlap
  }
  if (!like && t.rank > 1 && rng.chance(0.3)) std::swap(t.stride[0], t.stride[t.rank - 1]);
  t.data = base + rng.between(0, 60) * dtype_bytes(t.dtype);
  return t;
}

TEST(Overlap, RandomPairsAreToldExactly) {
  std::vector<char> memory(1 << 14);
  Rng rng(1);
  int found = 0, interleaved = 0;
  for (int pair = 0; pair < 20000; ++pair) {
    const ffpa_tensor a = view(rng, memory.data(), nullptr);
    const ffpa_tensor b = view(rng, memory.data(), pair % 2 ? &a : nullptr);
    const bool truth = meet(a, b, memory.data());
    ASSERT_EQ(refused(a, b), truth) << "pair " << pair;
    ASSERT_EQ(refused(b, a), truth) << "pair " << pair;
    const auto x = bytes_of(a, memory.data()), y = bytes_of(b, memory.data());
    found += truth;
    interleaved += !truth && x.front() < y.back() && y.front() < x.back();
  }
  EXPECT_GT(found, 2000);
  EXPECT_GT(interleaved, 2000);
}

// An address that nothing reads.
void* nowhere(int64_t offset) { return reinterpret_cast<void*>((uintptr_t{1} << 40) + static_cast<uintptr_t>(offset)); }

// q, k, v and o as slices of one [N, 4, H, D] buffer, of the size that a model has.
TEST(Overlap, SlicesOfOneBufferPass) {
  constexpr int64_t kRows = 100000, kHeads = 32, kWidth = 512, kRow = 4 * kHeads * kWidth;
  const auto slice = [&](int64_t at) {
    return ffpa_tensor{
        nowhere(at * 2), FFPA_BF16, FFPA_CPU, 0, 4, {1, kHeads, kRows, kWidth}, {kRows * kRow, kWidth, kRow, 1}};
  };
  const ffpa_tensor q = slice(0), o = slice(3 * kHeads * kWidth);
  EXPECT_FALSE(refused(o, q));
  EXPECT_FALSE(refused(o, slice(2 * kHeads * kWidth)));
  EXPECT_TRUE(refused(o, slice(3 * kHeads * kWidth - 1)));       // a head's last column is another's first
  EXPECT_TRUE(refused(o, slice(2 * kHeads * kWidth + kWidth)));  // shifted by a head
  EXPECT_TRUE(refused(o, slice(3 * kHeads * kWidth + kRow)));    // shifted by a row
  EXPECT_TRUE(refused(slice(kRow - 1), q));

  ffpa_tensor even = q, odd = q;  // columns that alternate
  even.stride[3] = odd.stride[3] = 2;
  even.extent[3] = odd.extent[3] = kWidth / 2;
  odd.data = nowhere(2);
  EXPECT_FALSE(refused(odd, even));
  odd.data = nowhere(4);
  EXPECT_TRUE(refused(odd, even));
}

// What takes too many choices counts as apart, in bounded time.
TEST(Overlap, UndecidedIsAccepted) {
  const ffpa_tensor a{
      nowhere(0), FFPA_BOOL, FFPA_CPU, 0, 4, {4000, 4000, 4000, 4000}, {100003, 100019, 100043, 100049}};
  ffpa_tensor b = a;
  b.data = nowhere(7);
  for (int axis = 0; axis < 4; ++axis) b.stride[axis] = 2 * a.stride[axis] + 1;
  EXPECT_FALSE(refused(a, b));
}

}  // namespace
}  // namespace ffpa::test

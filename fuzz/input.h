// From a fuzzer's bytes to tensors in heap blocks of exactly their size, so that AddressSanitizer sees every overrun.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "core/element.h"
#include "core/problem.h"

namespace ffpa::fuzz {

// Bytes from the front; zeros when they run out.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  uint8_t byte() { return at_ < end_ ? *at_++ : 0; }
  int64_t upto(int64_t most) { return byte() % (most + 1); }
  bool coin() { return byte() & 1; }
  bool rarely() { return byte() > 247; }
  uint64_t word() {
    uint64_t w = 0;
    for (int i = 0; i < 8; ++i) w = w << 8 | byte();
    return w;
  }
  bool empty() const { return at_ == end_; }

 private:
  const uint8_t *at_, *end_;
};

// Something no caller should pass: small negatives, limits of the type, large powers of two.
inline int64_t odd_number(Input& in) {
  constexpr int64_t kOdd[] = {-1,
                              -2,
                              0,
                              1,
                              2,
                              3,
                              7,
                              65535,
                              INT32_MAX,
                              INT32_MIN,
                              INT64_MAX,
                              INT64_MIN,
                              int64_t{1} << 31,
                              int64_t{1} << 40,
                              int64_t{1} << 61,
                              int64_t{1} << 62};
  const uint8_t pick = in.byte();
  return pick < 16 ? kOdd[pick] : static_cast<int64_t>(in.word());
}

// `count` numbers from 0 to `most`; now and then one beyond, just or far.
inline std::vector<int32_t> numbers(Input& in, int64_t count, int64_t most) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (int32_t& v : values) v = static_cast<int32_t>(in.upto(std::max<int64_t>(most, 0)));
  if (count && in.rarely())
    values[static_cast<size_t>(in.upto(count - 1))] = static_cast<int32_t>(in.coin() ? most + 1 : odd_number(in));
  return values;
}

class Tensors {
 public:
  explicit Tensors(Input& in) : in_(in), noise_(in.word() | 1) {}

  // Random order and gaps of strides, contiguous most often; now and then a field that breaks a rule. Floats get values
  // in
  // [-2, 2), now and then NaN or infinity where `wild` allows; other dtypes zeros.
  ffpa_tensor make(int32_t dtype, std::initializer_list<int64_t> extents, bool written = false) {
    ffpa_tensor t{};
    t.dtype = dtype;
    for (int64_t e : extents) t.extent[t.rank++] = e;
    int order[FFPA_MAX_RANK] = {0, 1, 2, 3};
    if (in_.byte() % 4 == 3)
      for (int i = t.rank - 1; i > 0; --i) std::swap(order[i], order[in_.upto(i)]);
    const bool gaps = in_.byte() % 4 == 3, broadcast = !written && in_.byte() % 8 == 7;
    int64_t step = gaps ? 1 + in_.upto(2) : 1;
    for (int i = t.rank - 1; i >= 0; --i) {
      t.stride[order[i]] = broadcast && in_.coin() ? 0 : step;
      const auto extent =
          static_cast<uint64_t>(std::max<int64_t>(t.extent[order[i]], 1));  // may be absurd: let it wrap
      step = static_cast<int64_t>(static_cast<uint64_t>(step) * extent + static_cast<uint64_t>(gaps ? in_.upto(3) : 0));
    }
    if (in_.rarely()) breaks(t);
    allocate(t);
    return t;
  }

  ffpa_tensor int32s(const std::vector<int32_t>& values, int64_t columns = 0) {
    const auto count = static_cast<int64_t>(values.size());
    ffpa_tensor t = columns ? make(FFPA_INT32, {columns ? count / columns : 0, columns}) : make(FFPA_INT32, {count});
    if (!t.data || t.dtype != FFPA_INT32) return t;
    const auto [start, bytes] = block_of(t);  // its extents may have been broken: write what fits
    const auto room = static_cast<int64_t>(start + bytes - static_cast<uint8_t*>(t.data)) / 4;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at =
          columns && t.rank == 2 ? i / columns * t.stride[0] + i % columns * t.stride[1] : i * t.stride[0];
      if (at >= 0 && at < room) static_cast<int32_t*>(t.data)[at] = values[static_cast<size_t>(i)];
    }
    return t;
  }

  void* raw(size_t bytes, size_t alignment) {
    void* p = nullptr;
    if (posix_memalign(&p, std::max<size_t>(alignment, 8), bytes)) std::abort();
    blocks_.push_back({std::unique_ptr<void, void (*)(void*)>(p, &std::free), bytes});
    return p;
  }

  // Everything of one block, for poisoning and comparing; the block of t.data.
  std::pair<uint8_t*, size_t> block_of(const ffpa_tensor& t) {
    for (const Block& b : blocks_) {
      auto* start = static_cast<uint8_t*>(b.memory.get());
      if (t.data >= start && t.data <= start + b.size) return {start, b.size};
    }
    return {nullptr, 0};
  }

  bool wild = false;

 private:
  struct Block {
    std::unique_ptr<void, void (*)(void*)> memory;
    size_t size;
  };

  void breaks(ffpa_tensor& t) {
    const int axis = static_cast<int>(in_.upto(3));
    switch (in_.upto(6)) {
      case 0: t.extent[axis] = odd_number(in_); break;
      case 1: t.stride[axis] = odd_number(in_); break;
      case 2: t.dtype = static_cast<int32_t>(in_.coin() ? in_.upto(11) : odd_number(in_)); break;
      case 3: t.rank = static_cast<int32_t>(in_.coin() ? in_.upto(5) : odd_number(in_)); break;
      case 4: t.device_type = static_cast<int32_t>(odd_number(in_)); break;
      case 5: t.device_index = static_cast<int32_t>(odd_number(in_)); break;
      default: t.extent[axis] += in_.upto(2) - 1; break;
    }
  }

  // Exactly the bytes that the extents and strides reach. What is absurd, or too much work for one input, gets no
  // memory, so that validation refuses it.
  void allocate(ffpa_tensor& t) {
    int64_t reach = 1, work = 1;
    for (int axis = 0; axis < std::clamp<int32_t>(t.rank, 0, FFPA_MAX_RANK); ++axis) {
      if (t.extent[axis] < 0 || t.extent[axis] > 4096 || t.stride[axis] < 0 || t.stride[axis] > 65536) return;
      if (t.extent[axis] == 0) reach = 0;
      if (reach) reach += (t.extent[axis] - 1) * t.stride[axis];
      work *= std::max<int64_t>(t.extent[axis], 1);
      if (work > 1 << 14) return;
    }
    const int64_t bytes = std::max<int64_t>(dtype_bytes(t.dtype), 1);
    const bool shifted = in_.byte() % 4 == 3;  // aligned to the element alone
    auto* p = static_cast<uint8_t*>(raw(static_cast<size_t>((reach + shifted) * bytes), 16));
    std::memset(p, 0, static_cast<size_t>((reach + shifted) * bytes));
    t.data = p + (shifted ? bytes : 0);
    for (int64_t i = 0; i < reach; ++i) store(t, i);
  }

  void store(const ffpa_tensor& t, int64_t i) {
    noise_ ^= noise_ << 13, noise_ ^= noise_ >> 7, noise_ ^= noise_ << 17;
    float x = static_cast<float>(static_cast<int64_t>(noise_ % 4096) - 2048) / 1024.f;
    if (wild && noise_ >> 58 == 0) x = noise_ >> 57 & 1 ? NAN : noise_ >> 56 & 1 ? INFINITY : -INFINITY;
    switch (t.dtype) {
      case FFPA_FP64:
      case FFPA_FP32:
      case FFPA_FP16:
      case FFPA_BF16: store_element(t, i, x); break;
      case FFPA_BOOL: static_cast<uint8_t*>(t.data)[i] = static_cast<uint8_t>(noise_ >> 40 & 3); break;
      default: break;
    }
  }

  Input& in_;
  uint64_t noise_;
  std::vector<Block> blocks_;
};

}  // namespace ffpa::fuzz

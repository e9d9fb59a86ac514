// Small valid problems with memory of their own, for tests to bend. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "core/problem.h"
#include "ffpa/ffpa.h"

namespace ffpa::test {

// Tensors in zeroed, 64-byte aligned blocks, contiguous, that live as long as this.
class Memory {
 public:
  ffpa_tensor tensor(int32_t dtype, std::initializer_list<int64_t> extents) {
    ffpa_tensor t{};
    t.dtype = dtype;
    for (int64_t e : extents) t.extent[t.rank++] = e;
    int64_t count = 1;
    for (int axis = t.rank - 1; axis >= 0; --axis) t.stride[axis] = count, count *= t.extent[axis];
    t.data = block(static_cast<size_t>(count * dtype_bytes(dtype)));
    return t;
  }
  ffpa_tensor int32s(std::initializer_list<int32_t> values) {
    ffpa_tensor t = tensor(FFPA_INT32, {static_cast<int64_t>(values.size())});
    if (values.size()) std::memcpy(t.data, std::data(values), values.size() * sizeof(int32_t));
    return t;
  }
  ffpa_tensor int32s(int64_t rows, int64_t columns, std::initializer_list<int32_t> values) {
    ffpa_tensor t = tensor(FFPA_INT32, {rows, columns});
    std::memcpy(t.data, std::data(values), values.size() * sizeof(int32_t));
    return t;
  }

 private:
  void* block(size_t bytes) {
    void* p = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::memset(p, 0, (bytes + 64) / 64 * 64);
    blocks_.emplace_back(p, &std::free);
    return p;
  }
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

struct Forward {
  Memory memory;
  ffpa_forward_problem p;
  Forward() { ffpa_forward_problem_init(&p); }
};

struct Backward {
  Memory memory;
  ffpa_backward_problem p;
  Backward() { ffpa_backward_problem_init(&p); }
};

struct Sizes {
  int64_t b = 2, h_q = 4, h_kv = 2, n_q = 3, n_kv = 5, d_qk = 8, d_v = 6;
  int32_t dtype = FFPA_FP32;
};

inline void fill_dense(Memory& m, ffpa_forward_problem& p, const Sizes& s) {
  p.q = m.tensor(s.dtype, {s.b, s.h_q, s.n_q, s.d_qk});
  p.k = m.tensor(s.dtype, {s.b, s.h_kv, s.n_kv, s.d_qk});
  p.v = m.tensor(s.dtype, {s.b, s.h_kv, s.n_kv, s.d_v});
  p.o = m.tensor(s.dtype, {s.b, s.h_q, s.n_q, s.d_v});
  p.lse = m.tensor(s.dtype == FFPA_FP64 ? FFPA_FP64 : FFPA_FP32, {s.b, s.h_q, s.n_q});
}

inline std::unique_ptr<Forward> dense(const Sizes& s = {}) {
  auto f = std::make_unique<Forward>();
  fill_dense(f->memory, f->p, s);
  return f;
}

// Two sequences: 3 and 2 rows of q, 4 and 5 keys; T_q 6 and T_kv 10 leave a row each that belongs to nobody.
inline std::unique_ptr<Forward> packed() {
  auto f = dense({.b = 1, .n_q = 6, .n_kv = 10});
  f->p.cu_seqlens_q = f->memory.int32s({0, 3, 5});
  f->p.cu_seqlens_kv = f->memory.int32s({0, 4, 9});
  return f;
}

// Two sequences of 5 and 2 keys on 4 pages of 3 rows; the entries that no key needs are out of range on purpose.
inline std::unique_ptr<Forward> paged() {
  auto f = dense();
  f->p.k = f->memory.tensor(FFPA_FP32, {4, 2, 3, 8});
  f->p.v = f->memory.tensor(FFPA_FP32, {4, 2, 3, 6});
  f->p.block_table = f->memory.int32s(2, 3, {3, 1, 99, 0, -7, 99});
  f->p.seqlens_kv = f->memory.int32s({5, 2});
  return f;
}

inline std::unique_ptr<Backward> backward(const Sizes& s = {}) {
  auto b = std::make_unique<Backward>();
  fill_dense(b->memory, b->p.forward, s);
  b->p.dout = b->memory.tensor(s.dtype, {s.b, s.h_q, s.n_q, s.d_v});
  b->p.dq = b->memory.tensor(s.dtype, {s.b, s.h_q, s.n_q, s.d_qk});
  b->p.dk = b->memory.tensor(s.dtype, {s.b, s.h_kv, s.n_kv, s.d_qk});
  b->p.dv = b->memory.tensor(s.dtype, {s.b, s.h_kv, s.n_kv, s.d_v});
  return b;
}

inline int32_t* ints(const ffpa_tensor& t) { return static_cast<int32_t*>(t.data); }

}  // namespace ffpa::test

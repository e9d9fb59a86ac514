// SPDX-License-Identifier: Apache-2.0
#include "cpu/append.h"

#include <cstring>

#include "core/half.h"
#include "cpu/features.h"
#include "cpu/parallel.h"

namespace ffpa {
namespace {

// One element type: how it is read into and written from the type the rotation computes in.
struct Fp64 {
  using Stored = double;
  using Real = double;
  static double load(double x) { return x; }
  static double store(double x) { return x; }
};
struct Fp32 {
  using Stored = float;
  using Real = float;
  static float load(float x) { return x; }
  static float store(float x) { return x; }
};
struct Fp16 {
  using Stored = uint16_t;
  using Real = float;
  static float load(uint16_t x) { return float_from_fp16(x); }
  static uint16_t store(float x) { return fp16_from_float(x); }
};
struct Bf16 {
  using Stored = uint16_t;
  using Real = float;
  static float load(uint16_t x) { return float_from_bf16(x); }
  static uint16_t store(float x) { return bf16_from_float(x); }
};

template <class Body>
void with_dtype(int32_t dtype, Body&& body) {
  switch (dtype) {
    case FFPA_FP64: return body(Fp64{});
    case FFPA_FP32: return body(Fp32{});
    case FFPA_FP16: return body(Fp16{});
    default: return body(Bf16{});
  }
}

// One row of a tensor: a pointer to its column 0 and the step between columns.
template <class Stored>
struct Row {
  Stored* at;
  int64_t step;
  Stored& operator[](int64_t column) const { return at[column * step]; }
};

template <class Stored>
Row<Stored> row_of(const ffpa_tensor& t, int64_t batch, int64_t head, int64_t row) {
  return {static_cast<Stored*>(t.data) + batch * t.stride[0] + head * t.stride[1] + row * t.stride[2], t.stride[3]};
}

template <class Stored>
void copy(const Row<Stored>& from, const Row<Stored>& to, int64_t begin, int64_t end) {
  if (begin >= end) return;
  if (from.step == 1 && to.step == 1) {
    std::memmove(&to[begin], &from[begin], static_cast<size_t>(end - begin) * sizeof(Stored));
    return;
  }
  for (int64_t c = begin; c < end; ++c) to[c] = from[c];
}

// Copies `columns` values and turns the first R of them by the angles of `position`. `from` may be `to`.
//   interleaved: pairs (2i, 2i+1);  else pairs (i, i + R/2);  (x, y) -> (x cos - y sin, x sin + y cos)
template <class Type, class Table>
void rotate(const Append& a, Row<typename Type::Stored> from, Row<typename Type::Stored> to, int64_t columns,
            int64_t position) {
  using Real = typename Type::Real;
  const ffpa_tensor &cos = a.args.rotary_cos, &sin = a.args.rotary_sin;
  const int64_t half = a.rotary_columns / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t first = a.args.rotary_interleaved ? 2 * i : i;
    const int64_t second = a.args.rotary_interleaved ? 2 * i + 1 : i + half;
    const Real c =
        Table::load(static_cast<const typename Table::Stored*>(cos.data)[position * cos.stride[0] + i * cos.stride[1]]);
    const Real s =
        Table::load(static_cast<const typename Table::Stored*>(sin.data)[position * sin.stride[0] + i * sin.stride[1]]);
    const Real x = Type::load(from[first]), y = Type::load(from[second]);
    to[first] = Type::store(x * c - y * s);
    to[second] = Type::store(x * s + y * c);
  }
  copy(from, to, a.rotary_columns, columns);
}

// One call: rows (b, j) of k and v, and rows (b, i) of q.
template <class Type, class Table>
struct Rows {
  using Stored = typename Type::Stored;
  const Append& a;
  const ffpa_append_problem& p = a.args;

  int64_t length(int64_t b) const { return present(p.seqlens_kv) ? int32_at(p.seqlens_kv, b) : 0; }

  void key_and_value(int64_t b, int64_t j) const {
    const int64_t position = length(b) + j;
    int64_t batch = present(p.kv_batch_idx) ? int32_at(p.kv_batch_idx, b) : b, row = position;
    if (a.page_rows) {
      const ffpa_tensor& table = p.block_table;
      batch = static_cast<const int32_t*>(table.data)[b * table.stride[0] + row / a.page_rows * table.stride[1]];
      row %= a.page_rows;
    }
    for (int64_t h = 0; h < a.h_kv; ++h) {
      rotate<Type, Table>(a, row_of<Stored>(p.k_new, b, h, j), row_of<Stored>(p.k_cache, batch, h, row), a.d_qk,
                          position);
      if (present(p.v_new)) copy(row_of<Stored>(p.v_new, b, h, j), row_of<Stored>(p.v_cache, batch, h, row), 0, a.d_v);
    }
  }

  void query(int64_t b, int64_t i) const {
    const int64_t position = length(b) + (p.rotary_q_fixed ? 0 : i);
    for (int64_t h = 0; h < p.q.extent[1]; ++h)
      rotate<Type, Table>(a, row_of<Stored>(p.q, b, h, i), row_of<Stored>(p.q_rotated, b, h, i), a.d_qk, position);
  }

  void all() const {
    const int64_t n_q = has_elements(p.q) ? p.q.extent[2] : 0, each = a.n_new + n_q;
    const int64_t columns = a.h_kv * (a.d_qk + a.d_v) * a.n_new + (n_q ? p.q.extent[1] * a.d_qk * n_q : 0);
    constexpr int64_t kWorthThreads = 1 << 16;  // elements; below, waking a thread costs more than the work
    const int threads = p.num_threads ? p.num_threads : features().processors;
    parallel_for(columns * a.n_seqs < kWorthThreads ? 1 : threads, a.n_seqs * each, [&](int64_t item, int) {
      const int64_t b = item / each, row = item % each;
      row < a.n_new ? key_and_value(b, row) : query(b, row - a.n_new);
    });
  }
};

}  // namespace

void append_cpu(const Append& a) {
  with_dtype(a.args.k_new.dtype, [&](auto type) {
    const int32_t table = a.rotary_columns ? a.args.rotary_cos.dtype : FFPA_FP32;
    if (table == FFPA_FP32) return Rows<decltype(type), Fp32>{a}.all();
    Rows<decltype(type), decltype(type)>{a}.all();
  });
}

}  // namespace ffpa

// The query rows and scores of one tile: what forward and backward share of the contract. SPDX-License-Identifier: Apache-2.0
//
// A tile holds rows of all G query heads of one KV head, so K and V are read once for the group: row r of the tile is packed row
// R = first + r, query row i = R / G of head h = kv_head * G + R % G. Scores stand transposed, S[key][row], so that everything
// along the keys (maximum, sum, product with V) goes lane by lane and no lane ever looks at its neighbour.
#pragma once

#include "core/philox.h"
#include "cpu/features.h"
#include "cpu/simd/tile.h"

namespace ffpa::simd::FFPA_SIMD_TARGET {

// Hands out pieces of a workspace, 64-byte aligned; with a null base it only counts.
struct Arena {
  char* base = nullptr;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    char* at = base ? base + used : nullptr;
    used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(at);
  }
};

struct TileShape {
  int64_t rows = 0, keys = 0;  // of a tile; rows a multiple of kPanel, keys even
};

constexpr int64_t kMostRows = 256;  // of a tile

// Rows of a tile: as many as pays, since K and V are read and packed once for all of them; fewer, down to `fewest`, where processors
// would be left without work. Neither num_threads nor, if batch_invariant, other sequences have a say: where a tile begins can
// change bits.
inline int64_t tile_rows(const Problem& p, int64_t fewest) {
  const int64_t packed_rows = most(p.n_q * p.group, 1);
  const auto items = [&](int64_t rows) { return p.n_seqs * p.h_kv * ((packed_rows + rows - 1) / rows); };
  int64_t rows = kMostRows;
  while (rows > fewest && !p.fwd().batch_invariant && items(rows) < 2 * features().processors) rows /= 2;
  return least(rows, round_up(packed_rows, kPanel));
}

// Which parts of the contract a problem uses, and the work they share per tile.
struct Options {
  const Problem& p;
  const ffpa_forward_problem& f;
  bool softcap, alibi, extra, ranges;  // extra: mask or bias; ranges: causal or window
  Dropout dropout;
  float scale;

  FFPA_INLINE explicit Options(const Problem& problem) : p(problem), f(problem.fwd()) {
    softcap = f.softcap > 0;
    alibi = present(f.alibi_slopes);
    extra = present(f.mask) || present(f.bias);
    ranges = f.causal || p.has_window();
    scale = static_cast<float>(p.scale);
    dropout.seed = f.dropout_seed;
    dropout.offset = f.dropout_offset;
    if (present(f.dropout_state)) {
      const auto* state = static_cast<const int64_t*>(f.dropout_state.data);
      dropout.seed = static_cast<uint64_t>(state[0]);
      dropout.offset = static_cast<uint64_t>(state[f.dropout_state.stride[0]]);
    }
    dropout.threshold = static_cast<uint32_t>(f.dropout_p * 65536.0 + 0.5);
    dropout.keep_scale = f.dropout_p < 1 ? static_cast<float>(1.0 / (1.0 - f.dropout_p)) : 0.f;
  }
  FFPA_INLINE bool plain() const { return !softcap && !alibi && !extra; }
};

// One value of a bias or sinks tensor.
FFPA_INLINE float value_at(const ffpa_tensor& t, int64_t offset) {
  if (t.dtype == FFPA_FP32) return static_cast<const float*>(t.data)[offset];
  const uint16_t x = static_cast<const uint16_t*>(t.data)[offset];
  return t.dtype == FFPA_BF16 ? float_from_bf16(x) : float_from_fp16(x);
}

// The rows of the tile at hand. Lanes past `count` see no key.
struct QueryRows {
  Sequence seq;
  int64_t kv_head = 0, first = 0, count = 0;
  int32_t *begin, *end;  // visible keys of each row, by causality, window and length
  int32_t* index;        // i
  int32_t* head;         // h
  float* slope;          // of ALiBi
  float* any;            // 1 once a row has seen a visible key
  int64_t* offset;       // scratch for the element offsets of rows

  FFPA_INLINE void take(Arena& arena, const TileShape& shape) {
    begin = arena.take<int32_t>(shape.rows);
    end = arena.take<int32_t>(shape.rows);
    index = arena.take<int32_t>(shape.rows);
    head = arena.take<int32_t>(shape.rows);
    slope = arena.take<float>(shape.rows);
    any = arena.take<float>(shape.rows);
    offset = arena.take<int64_t>(shape.rows);
  }

  void set(const Options& o, const Sequence& s, int64_t kv_head_, int64_t first_, int64_t count_, int64_t lanes) {
    seq = s;
    kv_head = kv_head_;
    first = first_;
    count = count_;
    for (int64_t r = 0; r < lanes; ++r) {
      const int64_t packed = first + least(r, count - 1), i = packed / o.p.group,
                    h = kv_head * o.p.group + packed % o.p.group;
      const KeyRange keys = visible_keys(o.p, s, i);
      const bool real = r < count;
      begin[r] = real ? static_cast<int32_t>(least(keys.begin, s.n_kv)) : 0;
      end[r] = real ? static_cast<int32_t>(keys.end) : 0;
      index[r] = static_cast<int32_t>(i);
      head[r] = static_cast<int32_t>(h);
      any[r] = real && !o.extra && keys.begin < keys.end ? 1.f : 0.f;
      if (o.alibi) {
        const ffpa_tensor& a = o.f.alibi_slopes;
        slope[r] = value_at(a, a.rank == 2 ? s.b * a.stride[0] + h * a.stride[1] : h * a.stride[0]);
      }
    }
  }

  // Keys that some row sees: both ends never fall with the row.
  FFPA_INLINE KeyRange keys() const {
    KeyRange all{seq.n_kv, 0};
    for (int64_t r = 0; r < count; ++r)
      if (begin[r] < end[r]) all = {least(all.begin, begin[r]), most(all.end, end[r])};
    return all;
  }

  // Element offsets of the tile's rows in q, o, dout or dq.
  FFPA_INLINE Rows rows_of(const ffpa_tensor& t) const {
    for (int64_t r = 0; r < count; ++r) offset[r] = q_row_offset(seq, t, head[r], index[r]);
    return {t.data, t.dtype, t.stride[3], t.extent[3], offset};
  }
};

// Element offsets of `count` key rows from j in k or v.
FFPA_INLINE Rows key_rows(const Problem& p, const Sequence& s, const ffpa_tensor& t, int64_t head, int64_t j,
                          int64_t count, int64_t* offset) {
  for (int64_t r = 0; r < count; ++r) offset[r] = kv_row_offset(p, s, t, head, j + r);
  return {t.data, t.dtype, t.stride[3], t.extent[3], offset};
}

// The tile of mask and bias, E[key][row]: what is added to a score, -inf where they hide it. False if everything is hidden.
inline bool gather_extra(const Options& o, const QueryRows& q, int64_t j, int64_t keys, int64_t lanes, float* extra,
                         int64_t ld) {
  bool visible = false;
  const ffpa_tensor &mask = o.f.mask, &bias = o.f.bias;
  const bool has_mask = present(mask), has_bias = present(bias);
  const int64_t mask_step = has_mask ? broadcast_stride(mask, 3) : 0,
                bias_step = has_bias ? broadcast_stride(bias, 3) : 0;
  int64_t mask_before = -1, bias_before = -1;
  for (int64_t r = 0; r < lanes; ++r) {
    if (r >= q.count) {
      for (int64_t n = 0; n < keys; ++n) extra[n * ld + r] = -kInf;
      continue;
    }
    const int64_t mask_at = has_mask ? broadcast_row_offset(mask, q.seq.b, q.head[r], q.index[r]) + j * mask_step : 0;
    const int64_t bias_at = has_bias ? broadcast_row_offset(bias, q.seq.b, q.head[r], q.index[r]) + j * bias_step : 0;
    const bool same = r > 0 && mask_at == mask_before && bias_at == bias_before;  // broadcast over heads or rows
    mask_before = mask_at;
    bias_before = bias_at;
    bool seen = false;
    for (int64_t n = 0; n < keys; ++n) {
      float x = same ? extra[n * ld + r - 1] : has_bias ? value_at(bias, bias_at + n * bias_step) : 0.f;
      if (!same && has_mask && !static_cast<const uint8_t*>(mask.data)[mask_at + n * mask_step]) x = -kInf;
      extra[n * ld + r] = x;
      seen |= x != -kInf && j + n >= q.begin[r] && j + n < q.end[r];
    }
    if (seen) q.any[r] = 1.f;
    visible |= seen;
  }
  return visible;
}

// Scores of a tile from scale * q.k, in place, for columns [c0, c1): softcap, bias, visibility; hidden ones become -inf. `derivative`,
// if given, gets d score / d (scale * q.k).
inline void finish_scores(const Options& o, const QueryRows& q, int64_t j, int64_t keys, int64_t c0, int64_t c1,
                          float* s, int64_t ld, const float* extra, float* derivative) {
  const float cap = static_cast<float>(o.f.softcap), inverse = o.softcap ? static_cast<float>(1.0 / o.f.softcap) : 0.f;
  const int64_t shift = q.seq.n_kv - q.seq.n_q;
  for (int64_t c = c0; c < c1; c += kLanes) {
    const vi begin = load(q.begin + c), end = load(q.end + c);
    const vf slope = o.alibi ? load(q.slope + c) : vf{};
    const vi position = load(q.index + c) + static_cast<int32_t>(shift);
    for (int64_t n = 0; n < keys; ++n) {
      float* at = s + n * ld + c;
      vf x = load(at) * o.scale;
      if (o.softcap) {
        const vf t = tanh(x * inverse);
        x = t * cap;
        if (derivative) store(derivative + n * ld + c, 1.0f - t * t);
      }
      const vi key = splat(static_cast<int32_t>(j + n));
      if (o.alibi) {
        const vf distance = __builtin_convertvector(position - key, vf);
        x -= slope * from_bits(bits(distance) & 0x7FFFFFFF);
      }
      vi hidden = (key < begin) | (key >= end);
      if (o.extra) {
        const vf e = load(extra + n * ld + c);
        hidden |= e == splat(-kInf);
        x += e;
      }
      store(at, select(hidden, splat(-kInf), x));
    }
  }
}

// keep(n, r) of a tile's probabilities as 0 or keep_scale, K[key][row].
inline void gather_dropout(const Options& o, const QueryRows& q, int64_t j, int64_t keys, int64_t c0, int64_t c1,
                           float* keep, int64_t ld) {
  for (int64_t r = c0; r < c1; ++r) {
    const auto batch_head = static_cast<uint32_t>(q.seq.b * o.p.h_q + q.head[r]);
    for (int64_t n = 0; n < keys;) {
      const Philox4 drawn =
          o.dropout.bits(batch_head, static_cast<uint32_t>(q.index[r]), static_cast<uint32_t>((j + n) / 8));
      for (int64_t piece = (j + n) % 8; piece < 8 && n < keys; ++piece, ++n)
        keep[n * ld + r] = o.dropout.keep(drawn, static_cast<int>(piece)) ? o.dropout.keep_scale : 0.f;
    }
  }
}

// Columns of a tile that see any of the keys [j, j + keys), widened to whole panels.
FFPA_INLINE void visible_columns(const QueryRows& q, int64_t j, int64_t keys, int64_t* c0, int64_t* c1) {
  int64_t low = 0, high = q.count;
  while (low < high && (q.end[low] <= j || q.begin[low] >= q.end[low])) ++low;
  while (high > low && (q.begin[high - 1] >= j + keys || q.begin[high - 1] >= q.end[high - 1])) --high;
  *c0 = low / kPanel * kPanel;
  *c1 = low < high ? round_up(high, kPanel) : *c0;
}

// Whether every row of columns [c0, c1) sees all of [j, j + keys), as far as ranges go.
FFPA_INLINE bool all_visible(const QueryRows& q, int64_t j, int64_t keys, int64_t c0, int64_t c1) {
  const int64_t last = least(c1, q.count) - 1;
  return c1 <= q.count && q.begin[last] <= j && q.end[c0] >= j + keys;
}

// Threads worth waking for `products` multiplications with D: below some 10 us of work each, waking costs more than it gains.
FFPA_INLINE int64_t useful_threads(const Problem& p, int64_t products) {
  const double work = 2.0 * static_cast<double>(p.n_seqs * p.h_q) * static_cast<double>(p.n_q) *
                      static_cast<double>(p.n_kv) * static_cast<double>(most(p.d_qk, p.d_v) * products);
  return work >= 4e6 * 1024 ? 1024 : 1 + static_cast<int64_t>(work / 4e6);
}

// visit<Kind>() for the units that the problem's dtype is computed in.
template <class Visit>
auto with_kind(const Problem& p, Visit visit) {
#if defined(FFPA_SIMD_BF16_DOT)
  // Few keys: rounding P and dS to bf16 would be most of the error, and fp32 products cost next to nothing.
  constexpr int64_t kFewKeys = 64;
  const bool few = p.n_kv <= kFewKeys && !p.fwd().batch_invariant;
  if (p.fwd().q.dtype == FFPA_BF16 && !few) return visit.template operator()<Bf16>();
#endif
  (void)p;
  return visit.template operator()<Fp32>();
}

}  // namespace ffpa::simd::FFPA_SIMD_TARGET

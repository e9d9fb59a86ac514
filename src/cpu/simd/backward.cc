// Backward on the CPU: tiles of query rows over tiles of keys, no atomics. SPDX-License-Identifier: Apache-2.0
//
// With P = exp(S - lse), inner = dlse - rowsum(P * dP), and dropout's factors D (1 without):
//   dP = dout V' * D      dS = P * (dP + inner)      dR = dS * scale * (1 - tanh^2)      (the last factor under a softcap)
//   dQ = dR K             dK = dR' Q                 dV = (P * D)' dout                  dbias = dS      dsink = p_sink * inner
//
// One item of work is a KV head of one batch row of k, or one part of its query tiles:
//   once per tile of rows      Q' and dout' packed (for S and dP), Q and dout packed (for dK and dV)
//   per tile of keys, first    S[key][row] = K Q', dP[key][row] = V dout', exp(S - lse); rowsums of P and P * dP
//   per tile of keys, again    P and dR in place
//                              dV += P dout,  dK += dR Q    into the item's fp32 rows, which all heads of a group share
//                              dQ += dR' K                  into the tile's fp32 rows, stored at the end of the walk
// So neither the rounding of lse nor that of o reaches a gradient. The first tiles of keys stay in memory between the two, up to
// kKeptBytes; the rest is made again.
// The order of every sum is fixed by the problem and the number of threads, so bits repeat. Where dbias is broadcast over items, the
// items go to fixed lanes with a copy of dbias each. Memory: a thread's tiles, fp32 rows of dk and dv of the items at work.
#include <algorithm>
#include <cmath>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "cpu/simd/rows.h"
#include "cpu/simd/simd.h"

namespace ffpa::simd::FFPA_SIMD_TARGET {
namespace {

TileShape tile_shape(const Problem& p) { return {tile_rows(p, 64), least(64, round_up(most(p.n_kv, 1), 32))}; }

struct Wanted {
  bool dq, dk, dv, dbias, dsinks, ds;  // ds: any that needs it
  FFPA_INLINE explicit Wanted(const Problem& p)
      : dq(present(p.args.dq)),
        dk(present(p.args.dk)),
        dv(present(p.args.dv)),
        dbias(present(p.args.dbias)),
        dsinks(present(p.args.dsinks)),
        ds(dq || dk || dbias || dsinks) {}
};

// How the work is cut: items (batch row of k, KV head), parts of an item's query tiles, lanes of items in a fixed order.
struct Cut {
  int64_t batches, items, parts, lanes, tiles;
  bool shared_dbias;  // one copy of dbias serves all lanes

  Cut(const Problem& p, const TileShape& tile, int64_t threads) {
    batches = p.packed_kv() ? p.n_seqs : p.fwd().k.extent[0];
    items = batches * p.h_kv;
    tiles = most((p.n_q * p.group + tile.rows - 1) / tile.rows, 1);
    parts = items > 0 && !p.fwd().batch_invariant ? most(1, least(tiles, threads / items)) : 1;
    lanes = items * parts;
    shared_dbias = true;
    const ffpa_tensor& d = p.args.dbias;
    if (!present(d)) return;
    shared_dbias =
        (d.extent[0] > 1 || p.n_seqs == 1) && (d.extent[1] > 1 || p.h_q == 1) && (d.extent[2] > 1 || parts == 1);
    constexpr int64_t kMostBytes = int64_t{256} << 20;  // of all copies of dbias
    const int64_t bytes = most(4 * d.extent[0] * d.extent[1] * d.extent[2] * d.extent[3], 1);
    if (!shared_dbias) lanes = most(1, least(least(lanes, threads), kMostBytes / bytes));
  }
};

// S and dP of some keys, [key][row], columns [c0, c1).
struct KeyTile {
  int64_t j = -1, count = 0, c0 = 0, c1 = 0;
  float *s, *dp, *keep, *derivative;
};

constexpr int64_t kKeptBytes = int64_t{4} << 20;  // of key tiles that a thread keeps

template <class Kind>
struct Scratch {
  QueryRows q;
  int64_t* key_offset;
  uint32_t *q_panels, *dout_panels, *q_rows, *dout_rows, *k_rows, *v_rows, *k_panels, *row;
  uint32_t *p_by_row, *dr_by_row, *dr_by_key;  // 16 bits: units along the rows, and along the keys
  float *extra, *dq, *lse, *inner, *norm;
  KeyTile* tiles;
  int64_t ld_k, ld_v, ld_dq, n_tiles;

  Scratch(Arena& arena, const Problem& p, const Options& options, const TileShape& t) {
    const int64_t u_qk = units_of<Kind>(p.d_qk), u_v = units_of<Kind>(p.d_v), tile = t.rows * t.keys;
    const int64_t columns_qk = round_up(p.d_qk, kPanel), columns_v = round_up(p.d_v, kPanel);
    ld_k = u_qk + 16;  // not a power of two: rows must not share cache sets
    ld_v = u_v + 16;
    ld_dq = columns_qk;
    q.take(arena, t);
    key_offset = arena.take<int64_t>(t.keys);
    q_panels = arena.take<uint32_t>(t.rows * u_qk);
    dout_panels = arena.take<uint32_t>(t.rows * u_v);
    q_rows = arena.take<uint32_t>(units_of<Kind>(t.rows) * columns_qk);
    dout_rows = arena.take<uint32_t>(units_of<Kind>(t.rows) * columns_v);
    k_rows = arena.take<uint32_t>(t.keys * ld_k);
    v_rows = arena.take<uint32_t>(t.keys * ld_v);
    k_panels = arena.take<uint32_t>(units_of<Kind>(t.keys) * columns_qk);
    row = arena.take<uint32_t>(2 * round_up(most(p.d_qk, p.d_v) + 1, kPanel));
    if constexpr (Kind::kPerUnit > 1) {
      p_by_row = arena.take<uint32_t>(tile / 2);
      dr_by_row = arena.take<uint32_t>(tile / 2);
      dr_by_key = arena.take<uint32_t>(units_of<Kind>(t.keys) * t.rows);
    }
    extra = options.extra ? arena.take<float>(tile) : nullptr;
    const bool dropout = options.f.dropout_p > 0;
    const int64_t bytes = tile * 4 * (2 + dropout + options.softcap);
    n_tiles = most(1, least((p.n_kv + t.keys - 1) / t.keys, kKeptBytes / bytes));
    tiles = arena.take<KeyTile>(n_tiles);
    for (int64_t x = 0; x < n_tiles; ++x) {
      const KeyTile kept{.s = arena.take<float>(tile),
                         .dp = arena.take<float>(tile),
                         .keep = dropout ? arena.take<float>(tile) : nullptr,
                         .derivative = options.softcap ? arena.take<float>(tile) : nullptr};
      if (arena.base) tiles[x] = kept;
    }
    dq = arena.take<float>(t.rows * ld_dq);
    lse = arena.take<float>(t.rows);
    inner = arena.take<float>(t.rows);
    norm = arena.take<float>(t.rows);
  }
};

// What all threads share.
struct Shared {
  float* dsinks;   // p_sink * inner, [row of q][head]
  float *dk, *dv;  // fp32 rows of the items at work: by thread, or by item and part where parts meet in the end
  float* dbias;    // fp32 copies, one a lane or one for all
  int64_t ld_dk, ld_dv, rows, each_dbias, copies;

  Shared(Arena& arena, const Problem& p, const Wanted& wanted, const Cut& cut, int64_t threads) {
    const ffpa_backward_problem& g = p.args;
    dsinks = arena.take<float>(wanted.dsinks ? p.fwd().q.extent[0] * p.h_q * p.fwd().q.extent[2] : 0);
    rows = p.n_kv;
    ld_dk = round_up(p.d_qk, kPanel);
    ld_dv = round_up(p.d_v, kPanel);
    const int64_t holders = cut.parts > 1 ? cut.items * cut.parts : threads;
    dk = arena.take<float>(wanted.dk ? holders * rows * ld_dk : 0);
    dv = arena.take<float>(wanted.dv ? holders * rows * ld_dv : 0);
    each_dbias = wanted.dbias ? g.dbias.extent[0] * g.dbias.extent[1] * g.dbias.extent[2] * g.dbias.extent[3] : 0;
    copies = cut.shared_dbias ? 1 : cut.lanes;
    dbias = arena.take<float>(copies * each_dbias);
  }
};

template <class Kind>
struct Backward {
  const Problem& p;
  const ffpa_backward_problem& g;
  const Options options;
  const Wanted wanted;
  const TileShape tile;
  const Cut cut;
  const int64_t threads;

  Backward(const Problem& problem, int64_t num_threads)
      : p(problem),
        g(problem.args),
        options(problem),
        wanted(problem),
        tile(tile_shape(problem)),
        cut(problem, tile, num_threads),
        threads(num_threads) {}

  int64_t row_at(const Sequence& s, int64_t h, int64_t i) const {
    return (s.q_batch * p.h_q + h) * p.fwd().q.extent[2] + s.q_row + i;
  }

  // dout . o of row r of the tile.
  double dout_dot_o(const QueryRows& q, int64_t r) const {
    const ffpa_tensor &o = options.f.o, &dout = g.dout;
    const int64_t at_o = q_row_offset(q.seq, o, q.head[r], q.index[r]),
                  at_dout = q_row_offset(q.seq, dout, q.head[r], q.index[r]);
    double sum = 0.0;
    for (int64_t d = 0; d < p.d_v; ++d)
      sum += double{value_at(o, at_o + d * o.stride[3])} * value_at(dout, at_dout + d * dout.stride[3]);
    return sum;
  }

  void sink_gradient(const Shared& all, int64_t h) const {
    double sum = 0.0;
    for (int64_t b = 0; b < p.n_seqs; ++b) {
      const Sequence s = sequence_at(p, b);
      for (int64_t i = 0; i < s.n_q; ++i) sum += double{all.dsinks[row_at(s, h, i)]};
    }
    ffpa_tensor t = g.dsinks;
    t.stride[3] = 0;
    const float value = static_cast<float>(sum);
    store_row(t, h * t.stride[0], &value, 1, 1.f);
  }

  // Makes the tile of `count` keys from j: exp(S - lse) in s, dP in dp. Nothing visible: c0 = c1.
  void score(Scratch<Kind>& w, KeyTile& t, int64_t j, int64_t count, int64_t lanes) const {
    const ffpa_forward_problem& f = options.f;
    const Sequence& seq = w.q.seq;
    const int64_t ld = tile.rows, u_qk = units_of<Kind>(p.d_qk), u_v = units_of<Kind>(p.d_v);
    t.j = j;
    t.count = count;
    visible_columns(w.q, j, count, &t.c0, &t.c1);
    if (t.c0 < t.c1 && options.extra && !gather_extra(options, w.q, j, count, lanes, w.extra, ld)) t.c1 = t.c0;
    if (t.c0 == t.c1) return;
    copy_rows<Kind>(key_rows(p, seq, f.k, w.q.kv_head, j, count, w.key_offset), count, w.k_rows, w.ld_k);
    multiply<Kind>(count, t.c1 - t.c0, u_qk, w.k_rows, w.ld_k, 1, w.q_panels + t.c0 * u_qk, u_qk, t.s + t.c0, ld,
                   Into::kOverwrite);
    if (wanted.ds) {
      copy_rows<Kind>(key_rows(p, seq, f.v, w.q.kv_head, j, count, w.key_offset), count, w.v_rows, w.ld_v);
      multiply<Kind>(count, t.c1 - t.c0, u_v, w.v_rows, w.ld_v, 1, w.dout_panels + t.c0 * u_v, u_v, t.dp + t.c0, ld,
                     Into::kOverwrite);
    }
    const bool finish = !options.plain() || !all_visible(w.q, j, count, t.c0, t.c1);
    if (finish) finish_scores(options, w.q, j, count, t.c0, t.c1, t.s, ld, w.extra, t.derivative);
    if (t.keep) gather_dropout(options, w.q, j, count, t.c0, t.c1, t.keep, ld);
    const float scale = finish ? 1.f : options.scale;
    for (int64_t c = t.c0; c < t.c1; c += kLanes) {
      const vf lse = load(w.lse + c);
      for (int64_t at = c; at < count * ld + c; at += ld) {
        store(t.s + at, exp(load(t.s + at) * scale - lse));
        if (!t.keep || !wanted.ds) continue;
        const vf factor = load(t.keep + at);
        store(t.dp + at, select(factor == vf{}, vf{}, load(t.dp + at) * factor));
      }
    }
  }

  // Adds the tile's part to the rowsums of P (in norm) and P * dP (in inner).
  void add_rowsums(Scratch<Kind>& w, const KeyTile& t) const {
    const int64_t ld = tile.rows;
    for (int64_t c = t.c0; c < t.c1; c += kLanes) {
      vf total{}, inner{};
      for (int64_t at = c; at < t.count * ld + c; at += ld) {
        const vf x = load(t.s + at);
        total += x;
        if (wanted.ds) inner += select(x == vf{}, vf{}, x * load(t.dp + at));
      }
      store(w.norm + c, load(w.norm + c) + total);
      store(w.inner + c, load(w.inner + c) + inner);
    }
  }

  // From the rowsums: what brings a row's P to sum to 1, and inner. Where P does not sum to 1 by far, lse and o belong to more keys
  // than these (a part of them is differentiated), so P is left alone and inner is made from o.
  void finish_rowsums(Scratch<Kind>& w, const Shared& all) const {
    const ffpa_tensor& sinks = options.f.sinks;
    const float rounding = options.f.o.dtype == FFPA_FP32 ? 4e-6f : 2.5e-4f;
    for (int64_t r = 0; r < w.q.count; ++r) {
      const int64_t h = w.q.head[r], i = w.q.index[r];
      const float lse = w.lse[r], sink = present(sinks) ? std::exp(value_at(sinks, h * sinks.stride[0]) - lse) : 0.f;
      const float total = w.norm[r] + sink;
      const bool whole = std::abs(total - 1.f) <= rounding * std::max(1.f, std::abs(lse)) && std::isfinite(lse);
      w.norm[r] = whole ? 1.f / total : 1.f;
      if (!wanted.ds) continue;
      w.inner[r] = whole ? -w.inner[r] * w.norm[r] : static_cast<float>(-dout_dot_o(w.q, r));
      if (present(g.dlse)) w.inner[r] += static_cast<const float*>(g.dlse.data)[q_row_offset(w.q.seq, g.dlse, h, i)];
      if (wanted.dsinks) all.dsinks[row_at(w.q.seq, h, i)] = sink == 0.f ? 0.f : sink * w.norm[r] * w.inner[r];
    }
  }

  // exp(S - lse) and dP of the tile to P and dR: in place, or as 16-bit units.
  void differentiate(Scratch<Kind>& w, const KeyTile& t) const {
    const int64_t ld = tile.rows, keys = t.count;
    for (int64_t c = t.c0; c < t.c1; c += kLanes) {
      const vf inner = load(w.inner + c), norm = load(w.norm + c);
      for (int64_t n = 0; n < keys; n += Kind::kPerUnit) {
        vf probability[Kind::kPerUnit], gradient[Kind::kPerUnit];
        for (int e = 0; e < Kind::kPerUnit; ++e) {
          probability[e] = gradient[e] = vf{};
          if (e > 0 && n + e >= keys) break;
          const int64_t at = (n + e) * ld + c;
          const vf x = load(t.s + at) * norm;
          probability[e] = x;
          if (t.keep) {
            const vf factor = load(t.keep + at);
            probability[e] = select(factor == vf{}, vf{}, x * factor);
          }
          if (!wanted.ds) continue;
          const vf ds = select(x == vf{}, vf{}, x * (load(t.dp + at) + inner));
          if (wanted.dbias) store(t.dp + at, ds);
          gradient[e] = ds * options.scale;
          if (t.derivative) gradient[e] *= load(t.derivative + at);
        }
        if constexpr (Kind::kPerUnit == 1) {
          store(t.s + n * ld + c, probability[0]);
          if (wanted.ds && !wanted.dbias) store(t.dp + n * ld + c, gradient[0]);
        } else {
          for (int e = 0; e < Kind::kPerUnit && n + e < keys; ++e) {
            const int64_t at = (n + e) * ld + c;
            store(reinterpret_cast<uint16_t*>(w.p_by_row) + at, __builtin_convertvector(to_bf16(probability[e]), vh));
            store(reinterpret_cast<uint16_t*>(w.dr_by_row) + at, __builtin_convertvector(to_bf16(gradient[e]), vh));
          }
          store(w.dr_by_key + n / 2 * ld + c, to_bf16(gradient[0]) | to_bf16(gradient[Kind::kPerUnit - 1]) << 16);
        }
      }
      if constexpr (Kind::kStep > 1)
        for (int64_t u = (keys + 1) / 2; u < units_of<Kind>(keys); ++u) store(w.dr_by_key + u * ld + c, vu{});
    }
  }

  // Adds dS of the tile to dbias; in fp32 kernels dS then becomes dR.
  void add_to_dbias(Scratch<Kind>& w, const KeyTile& t, float* dbias) const {
    const int64_t ld = tile.rows;
    int64_t step[4], dense = 1;
    for (int axis = 3; axis >= 0; --axis) {
      step[axis] = g.dbias.extent[axis] == 1 ? 0 : dense;
      dense *= g.dbias.extent[axis];
    }
    for (int64_t r = t.c0; r < least(t.c1, w.q.count); ++r) {
      float* to = dbias + w.q.seq.b * step[0] + w.q.head[r] * step[1] + w.q.index[r] * step[2] + t.j * step[3];
      if (step[3] == 0) {
        float sum = 0.f;
        for (int64_t n = 0; n < t.count; ++n) sum += t.dp[n * ld + r];
        *to += sum;
      } else {
        for (int64_t n = 0; n < t.count; ++n) to[n] += t.dp[n * ld + r];
      }
    }
    if constexpr (Kind::kPerUnit == 1)
      for (int64_t n = 0; n < t.count; ++n)
        for (int64_t c = t.c0; c < t.c1; c += kLanes) {
          vf x = load(t.dp + n * ld + c) * options.scale;
          if (t.derivative) x *= load(t.derivative + n * ld + c);
          store(t.dp + n * ld + c, x);
        }
  }

  void walk(Scratch<Kind>& w, float* dk, float* dv, float* dbias, const Shared& all) const {
    const ffpa_forward_problem& f = options.f;
    const Sequence& s = w.q.seq;
    const int64_t lanes = round_up(w.q.count, kPanel), u_rows = units_of<Kind>(w.q.count);
    for (int64_t r = 0; r < lanes; ++r) {
      const float lse = r < w.q.count
                            ? static_cast<const float*>(f.lse.data)[q_row_offset(s, f.lse, w.q.head[r], w.q.index[r])]
                            : -kInf;
      w.lse[r] = lse == -kInf ? kInf : lse;  // a row without keys: P = 0
      w.norm[r] = w.inner[r] = 0.f;
    }
    const Rows q = w.q.rows_of(f.q);
    pack_transposed<Kind>(q, w.q.count, w.q_panels, w.row);
    if (wanted.dk) pack_rows<Kind>(q, w.q.count, w.q_rows, w.row);
    const Rows dout = w.q.rows_of(g.dout);
    if (wanted.ds) pack_transposed<Kind>(dout, w.q.count, w.dout_panels, w.row);
    if (wanted.dv) pack_rows<Kind>(dout, w.q.count, w.dout_rows, w.row);
    if (wanted.dq) std::memset(w.dq, 0, static_cast<size_t>(lanes * w.ld_dq) * sizeof(float));

    const KeyRange keys = w.q.keys();
    for (int64_t x = 0; x < w.n_tiles; ++x) w.tiles[x].j = -1;
    const auto scored = [&](int64_t j) -> KeyTile& {
      KeyTile& t = w.tiles[least((j - keys.begin) / tile.keys, w.n_tiles - 1)];
      if (t.j != j) score(w, t, j, least(tile.keys, keys.end - j), lanes);
      return t;
    };
    for (int64_t j = keys.begin; j < keys.end; j += tile.keys) add_rowsums(w, scored(j));
    finish_rowsums(w, all);
    for (int64_t j = keys.begin; j < keys.end; j += tile.keys) {
      const KeyTile& t = scored(j);
      if (t.c0 == t.c1) continue;
      differentiate(w, t);
      if (wanted.dbias) add_to_dbias(w, t, dbias);

      const uint32_t *p_by_row = w.p_by_row, *dr_by_row = w.dr_by_row, *dr_by_key = w.dr_by_key;
      if constexpr (Kind::kPerUnit == 1) {
        p_by_row = reinterpret_cast<const uint32_t*>(t.s);
        dr_by_row = dr_by_key = reinterpret_cast<const uint32_t*>(t.dp);
      }
      const int64_t row_step = tile.rows / Kind::kPerUnit, end = least(t.c1, w.q.count);
      const int64_t u0 = t.c0 / Kind::kPerUnit, units = units_of<Kind>(end) - u0;
      if (wanted.dv)
        multiply<Kind>(t.count, all.ld_dv, units, p_by_row + u0, row_step, 1, w.dout_rows + u0 * kPanel, u_rows,
                       dv + j * all.ld_dv, all.ld_dv, Into::kAdd);
      if (wanted.dk)
        multiply<Kind>(t.count, all.ld_dk, units, dr_by_row + u0, row_step, 1, w.q_rows + u0 * kPanel, u_rows,
                       dk + j * all.ld_dk, all.ld_dk, Into::kAdd);
      if (!wanted.dq) continue;
      pack_rows<Kind>(key_rows(p, s, f.k, w.q.kv_head, j, t.count, w.key_offset), t.count, w.k_panels, w.row);
      multiply<Kind>(end - t.c0, w.ld_dq, units_of<Kind>(t.count), dr_by_key + t.c0, 1, tile.rows, w.k_panels,
                     units_of<Kind>(t.count), w.dq + t.c0 * w.ld_dq, w.ld_dq, Into::kAdd);
    }
    if (wanted.dq)
      for (int64_t r = 0; r < w.q.count; ++r)
        store_row(g.dq, q_row_offset(s, g.dq, w.q.head[r], w.q.index[r]), w.dq + r * w.ld_dq, p.d_qk, 1.f);
  }

  // Keys that batch row `batch` of k holds, and where it starts.
  Sequence holder(int64_t batch) const {
    Sequence s;
    s.kv_batch = batch;
    s.n_kv = p.n_kv;
    if (p.packed_kv()) {
      s.kv_batch = 0;
      s.kv_row = int32_at(options.f.cu_seqlens_kv, batch);
      s.n_kv = int32_at(options.f.cu_seqlens_kv, batch + 1) - s.kv_row;
    }
    return s;
  }

  // Rows of an item's fp32 sums: no more than p.n_kv, for which the workspace was made.
  int64_t held_rows(int64_t item) const { return least(holder(item / p.h_kv).n_kv, p.n_kv); }

  // Rows past those that any sequence may use (max_seqlen_kv) get zeros.
  void store_keys(const Shared& all, int64_t item, const float* dk, const float* dv) const {
    const Sequence s = holder(item / p.h_kv);
    const auto store = [&](const ffpa_tensor& t, const float* rows, int64_t ld, int64_t width) {
      if (!present(t)) return;
      for (int64_t j = 0; j < s.n_kv; ++j) {
        const int64_t at = s.kv_batch * t.stride[0] + item % p.h_kv * t.stride[1] + (s.kv_row + j) * t.stride[2];
        if (j < p.n_kv)
          store_row(t, at, rows + j * ld, width, 1.f);
        else
          zero_row(t, at, width);
      }
    };
    store(g.dk, dk, all.ld_dk, p.d_qk);
    store(g.dv, dv, all.ld_dv, p.d_v);
  }

  void run_item(Scratch<Kind>& w, const Shared& all, int64_t item, int64_t part, int64_t held, float* dbias) const {
    float *dk = all.dk + held * all.rows * all.ld_dk, *dv = all.dv + held * all.rows * all.ld_dv;
    const int64_t n_kv = held_rows(item);
    if (wanted.dk) std::memset(dk, 0, static_cast<size_t>(n_kv * all.ld_dk) * sizeof(float));
    if (wanted.dv) std::memset(dv, 0, static_cast<size_t>(n_kv * all.ld_dv) * sizeof(float));
    const int64_t batch = item / p.h_kv;
    const bool chosen = present(options.f.kv_batch_idx);  // then any number of sequences reads these keys
    for (int64_t b = chosen ? 0 : batch; b < (chosen ? p.n_seqs : batch + 1); ++b) {
      const Sequence s = sequence_at(p, b);
      if (chosen && s.kv_batch != batch) continue;
      for (int64_t t = part; t < cut.tiles; t += cut.parts) {
        const int64_t first = t * tile.rows, count = least(tile.rows, s.n_q * p.group - first);
        if (count <= 0) break;
        w.q.set(options, s, item % p.h_kv, first, count, round_up(count, kPanel));
        walk(w, dk, dv, dbias, all);
      }
    }
    if (cut.parts == 1) store_keys(all, item, dk, dv);
  }

  // The parts of one item, added up in order.
  void join(const Shared& all, int64_t item) const {
    float *dk = all.dk + item * cut.parts * all.rows * all.ld_dk,
          *dv = all.dv + item * cut.parts * all.rows * all.ld_dv;
    for (int64_t part = 1; part < cut.parts; ++part) {
      const float *more_dk = dk + part * all.rows * all.ld_dk, *more_dv = dv + part * all.rows * all.ld_dv;
      const int64_t n_kv = held_rows(item);
      for (int64_t x = 0; wanted.dk && x < n_kv * all.ld_dk; ++x) dk[x] += more_dk[x];
      for (int64_t x = 0; wanted.dv && x < n_kv * all.ld_dv; ++x) dv[x] += more_dv[x];
    }
    store_keys(all, item, dk, dv);
  }

  void store_dbias(const Shared& all) const {
    ffpa_tensor t = g.dbias;
    for (int64_t x = 0; x < all.each_dbias; ++x) {
      double sum = 0.0;
      for (int64_t copy = 0; copy < all.copies; ++copy) sum += all.dbias[copy * all.each_dbias + x];
      int64_t rest = x, offset = 0;
      for (int axis = 3; axis >= 0; --axis) {
        offset += rest % t.extent[axis] * t.stride[axis];
        rest /= t.extent[axis];
      }
      const float value = static_cast<float>(sum);
      store_row(t, offset, &value, 1, 1.f);
    }
  }

  // Rows of packed tensors that belong to no sequence get zeros.
  void clear_unowned(const ffpa_tensor& t, const ffpa_tensor& cu) const {
    if (!present(t) || !present(cu)) return;
    for (int64_t h = 0; h < t.extent[1]; ++h)
      for (int64_t i = int32_at(cu, p.n_seqs); i < t.extent[2]; ++i)
        zero_row(t, h * t.stride[1] + i * t.stride[2], t.extent[3]);
  }

  void run(Arena arena) const {
    clear_unowned(g.dq, options.f.cu_seqlens_q);
    clear_unowned(g.dk, options.f.cu_seqlens_kv);
    clear_unowned(g.dv, options.f.cu_seqlens_kv);
    const Shared all(arena, p, wanted, cut, threads);
    std::memset(all.dbias, 0, static_cast<size_t>(all.copies * all.each_dbias) * sizeof(float));
    const int workers = static_cast<int>(threads);
    if (!wanted.ds && !wanted.dv) return;
    char* scratch = arena.base + arena.used;
    const int64_t each = scratch_bytes(), work = cut.items * cut.parts;
    parallel_for(workers, cut.lanes, [&](int64_t lane, int thread) {
      Arena own{scratch + thread * each, 0};
      Scratch<Kind> w(own, p, options, tile);
      float* dbias = all.dbias + (cut.shared_dbias ? 0 : lane * all.each_dbias);
      for (int64_t x = lane; x < work; x += cut.lanes)
        run_item(w, all, x / cut.parts, x % cut.parts, cut.parts > 1 ? x : thread, dbias);
    });
    if (cut.parts > 1) parallel_for(workers, cut.items, [&](int64_t item, int) { join(all, item); });
    if (wanted.dbias) store_dbias(all);
    if (wanted.dsinks) parallel_for(workers, p.h_q, [&](int64_t h, int) { sink_gradient(all, h); });
  }

  int64_t scratch_bytes() const {
    Arena arena;
    Scratch<Kind>(arena, p, options, tile);
    return round_up(arena.used, 4096);
  }
  int64_t workspace_bytes() const {
    Arena arena;
    Shared(arena, p, wanted, cut, threads);
    return arena.used + threads * scratch_bytes();
  }
};

}  // namespace

std::string plan_backward(const Problem& p, Choice* choice) {
  const int64_t asked = p.fwd().num_threads > 0 ? p.fwd().num_threads : features().processors;
  const int64_t wanted_threads = least(asked, useful_threads(p, 5));
  const Cut cut(p, tile_shape(p), wanted_threads);
  choice->num_splits = 1;
  choice->num_threads = static_cast<int32_t>(most(1, least(wanted_threads, cut.items * cut.parts)));
  choice->workspace_bytes = static_cast<uint64_t>(
      with_kind(p, [&]<class Kind>() { return Backward<Kind>(p, choice->num_threads).workspace_bytes(); }));
  return {};
}

Status run_backward(const Problem& p, const Choice& choice, void* workspace, void*) {
  with_kind(p,
            [&]<class Kind>() { Backward<Kind>(p, choice.num_threads).run(Arena{static_cast<char*>(workspace), 0}); });
  return {};
}

}  // namespace ffpa::simd::FFPA_SIMD_TARGET

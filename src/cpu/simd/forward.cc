// Forward on the CPU: tiles of query rows over tiles of keys. SPDX-License-Identifier: Apache-2.0
//
// One item of work: a tile of query rows (all heads of a group) of one sequence and KV head, over one split of the keys.
//   once       Q' = packed transpose of the tile's rows                                  in cache for the whole walk
//   per tile   K  = rows of keys, V = packed rows of values                              each read once for the group
//   of keys    S[key][row] = K Q'; scale, softcap, bias, visibility
//              m = max(m, S), P = exp(S - m), l = l * alpha + sum P, alpha = exp(m_before - m)
//              O[row][column] = alpha * O + P' V
//   once       the sink joins, o = O / l, lse = m + log(l); or, with splits, (O, m, l) to the workspace and a second pass merges them
// The running maximum starts at -inf and no finite stand-in exists, so scores of any size are right. Sums of P V may be N_kv times as
// large as v: where O of a tile overflows, the walk is done again with P smaller by a power of two, which changes no other bit. Tiles that causality, window,
// length, mask or bias hide are skipped; columns of a tile that see nothing of it are not computed. Bits do not depend on the number
// of threads, only on num_splits.
#include <bit>
#include <cmath>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "cpu/simd/rows.h"
#include "cpu/simd/simd.h"

namespace ffpa::simd::FFPA_SIMD_TARGET {
namespace {

constexpr int64_t kKeysOfSplit = 1024;  // at least

TileShape tile_shape(const Problem& p) {
#if defined(FFPA_SIMD_AMX)
  constexpr int64_t kKeys = kMostKeys;  // what a product adds to O goes through memory: few, long ones
#else
  constexpr int64_t kKeys = 128;  // +4 % over 256 on AVX-512, most of it under causality
#endif
  const bool splits = p.n_q * p.group <= kMostRows && p.n_kv >= 2 * kKeysOfSplit;  // give processors work instead
  return {tile_rows(p, splits ? kMostRows : 64), least(kKeys, round_up(most(p.n_kv, 1), 32))};
}

// What one thread works on.
template <class Kind>
struct Scratch {
  QueryRows q;
  int64_t* key_offset;
  uint32_t *q_panels, *k_rows, *v_panels, *p_units, *row;
  float *s, *extra, *keep, *o, *m, *l, *alpha;
  int64_t ld_k, ld_o;
  float shrink;  // P, l and O stand multiplied by it

  Scratch(Arena& arena, const Problem& p, const Options& options, const TileShape& t) {
    ld_k = units_of<Kind>(p.d_qk) + 16;  // not a power of two: rows of K must not share cache sets
    ld_o = round_up(p.d_v, kPanel);
    q.take(arena, t);
    key_offset = arena.take<int64_t>(t.keys);
    q_panels = arena.take<uint32_t>(t.rows * units_of<Kind>(p.d_qk));
    k_rows = arena.take<uint32_t>(t.keys * ld_k);
    v_panels = arena.take<uint32_t>(units_of<Kind>(t.keys) * ld_o);
    row = arena.take<uint32_t>(2 * round_up(most(p.d_qk, p.d_v) + 1, kPanel));
    s = arena.take<float>(t.keys * t.rows);
    p_units =
        Kind::kPerUnit == 1 ? reinterpret_cast<uint32_t*>(s) : arena.take<uint32_t>(units_of<Kind>(t.keys) * t.rows);
    extra = options.extra ? arena.take<float>(t.keys * t.rows) : nullptr;
    keep = options.f.dropout_p > 0 ? arena.take<float>(t.keys * t.rows) : nullptr;
    o = arena.take<float>(t.rows * ld_o);
    m = arena.take<float>(t.rows);
    l = arena.take<float>(t.rows);
    alpha = arena.take<float>(t.rows);
  }
};

// Where the parts of a split row meet: [row of all sequences and heads][split].
struct Partials {
  float *o, *unit, *m, *l, *any;
  int64_t ld;

  Partials(Arena& arena, const Problem& p, int64_t splits) {
    const int64_t rows = splits > 1 ? p.n_seqs * p.h_q * p.n_q * splits : 0;
    ld = round_up(p.d_v, kPanel);
    o = arena.take<float>(rows * ld);
    unit = arena.take<float>(rows);
    m = arena.take<float>(rows);
    l = arena.take<float>(rows);
    any = arena.take<float>(rows);
  }
};

template <class Kind>
struct Forward {
  const Problem& p;
  const Options options;
  const TileShape tile;
  const int64_t splits, tiles;  // tiles of rows per sequence and KV head

  Forward(const Problem& problem, const Choice& choice)
      : p(problem),
        options(problem),
        tile(tile_shape(problem)),
        splits(choice.num_splits),
        tiles((problem.n_q * problem.group + tile.rows - 1) / tile.rows) {}

  // One pass of softmax over the tile: S to P, maximum and sum carried on. Columns [c0, c1).
  void softmax(Scratch<Kind>& w, int64_t j, int64_t keys, int64_t c0, int64_t c1, bool finished) const {
    const int64_t ld = tile.rows;
    const float scale = finished ? 1.f : options.scale;
    if (w.keep) gather_dropout(options, w.q, j, keys, c0, c1, w.keep, ld);
    for (int64_t c = c0; c < c1; c += kLanes) {
      const vf before = load(w.m + c);
      vf top = before;
      for (int64_t n = 0; n < keys; ++n) top = max(load(w.s + n * ld + c) * scale, top);
      const vf safe = select(top == splat(-kInf), vf{}, top);
      const vf alpha = select(before == splat(-kInf), vf{}, exp(before - safe));
      vf sum = load(w.l + c) * alpha;
      for (int64_t n = 0; n < keys; n += Kind::kPerUnit) {
        vf x[Kind::kPerUnit];
        for (int e = 0; e < Kind::kPerUnit; ++e) {
          x[e] = vf{};
          if (e > 0 && n + e >= keys) break;
          x[e] = exp(load(w.s + (n + e) * ld + c) * scale - safe) * w.shrink;
          sum += x[e];
          if (w.keep) {  // a dropped NaN is dropped, too
            const vf factor = load(w.keep + (n + e) * ld + c);
            x[e] = select(factor == vf{}, vf{}, x[e]);
          }
        }
        if constexpr (Kind::kPerUnit == 1)
          store(w.s + n * ld + c, x[0]);
        else
          store(w.p_units + n / 2 * ld + c, to_bf16(x[0]) | to_bf16(x[1]) << 16);
      }
      if constexpr (Kind::kStep > 1)
        for (int64_t u = (keys + 1) / 2; u < units_of<Kind>(keys); ++u) store(w.p_units + u * ld + c, vu{});
      store(w.m + c, top);
      store(w.l + c, sum);
      store(w.alpha + c, alpha);
    }
  }

  // Whether a sum of P V of the tile is not finite: overflow, or v or the scores are not finite themselves.
  bool overflows(const Scratch<Kind>& w) const {
    constexpr uint32_t kExponent = 0x7F800000u;
    vi found{};
    for (int64_t x = 0; x < w.q.count * w.ld_o; x += kLanes)
      found |= (bits(load(w.o + x)) & static_cast<int32_t>(kExponent)) == splat(static_cast<int32_t>(kExponent));
    for (int lane = 0; lane < kLanes; ++lane)
      if (found[lane]) return true;
    return false;
  }

  // O, m and l of the keys, with w.shrink such that O is finite if v and the scores are; l stands without it.
  void walk(Scratch<Kind>& w, KeyRange keys) const {
    w.shrink = 1.f;
    walk_once(w, keys);
    if (!overflows(w)) return;
    w.shrink =
        std::ldexp(1.f, -static_cast<int>(std::bit_width(static_cast<uint64_t>(most(keys.end - keys.begin, 1)))));
    walk_once(w, keys);
    for (int64_t r = 0; r < w.q.count; ++r) w.l[r] /= w.shrink;
  }

  void walk_once(Scratch<Kind>& w, KeyRange keys) const {
    const int64_t ld = tile.rows, lanes = round_up(w.q.count, kPanel), units = units_of<Kind>(p.d_qk);
    for (int64_t r = 0; r < lanes; ++r) {
      w.m[r] = -kInf;
      w.l[r] = 0.f;
    }
    std::memset(w.o, 0, static_cast<size_t>(lanes * w.ld_o) * sizeof(float));
    pack_transposed<Kind>(w.q.rows_of(options.f.q), w.q.count, w.q_panels, w.row);
    for (int64_t j = keys.begin; j < keys.end; j += tile.keys) {
      const int64_t count = least(tile.keys, keys.end - j);
      int64_t c0, c1;
      visible_columns(w.q, j, count, &c0, &c1);
      if (c0 == c1) continue;
      if (options.extra && !gather_extra(options, w.q, j, count, lanes, w.extra, ld)) continue;
      copy_rows<Kind>(key_rows(p, w.q.seq, options.f.k, w.q.kv_head, j, count, w.key_offset), count, w.k_rows, w.ld_k);
      multiply<Kind>(count, c1 - c0, units, w.k_rows, w.ld_k, 1, w.q_panels + c0 * units, units, w.s + c0, ld,
                     Into::kOverwrite);
      const bool finish = !options.plain() || !all_visible(w.q, j, count, c0, c1);
      if (finish) finish_scores(options, w.q, j, count, c0, c1, w.s, ld, w.extra, nullptr);
      softmax(w, j, count, c0, c1, finish);
      pack_rows<Kind>(key_rows(p, w.q.seq, options.f.v, w.q.kv_head, j, count, w.key_offset), count, w.v_panels, w.row);
      multiply<Kind>(least(c1, w.q.count) - c0, w.ld_o, units_of<Kind>(count), w.p_units + c0, 1, ld, w.v_panels,
                     units_of<Kind>(count), w.o + c0 * w.ld_o, w.ld_o, Into::kScaleAndAdd, w.alpha + c0);
    }
  }

  // From (O, m, l) to o and lse of one row; sums of P V are O * unit.
  void finish_row(const Sequence& s, int64_t h, int64_t i, const float* o, float unit, float m, float l,
                  bool any) const {
    const ffpa_forward_problem& f = options.f;
    const float sink = present(f.sinks) ? value_at(f.sinks, h * f.sinks.stride[0]) : -kInf;
    float factor = options.dropout.keep_scale, lse = -kInf;
    if (any && l == 0.f) {
      l = __builtin_nanf("");  // visible, but every score is -inf: softmax has no answer, SDPA's is NaN
    }
    if (any || sink != -kInf || l != l) {
      const float top = sink > m ? sink : m;
      const float from_rows = m == -kInf && l == 0.f ? 0.f : expf(m - top);
      const float total = l * from_rows + expf(sink - top);
      factor *= unit * (from_rows / total);
      lse = top + logf(total);
      if (m != m || l != l) lse = l + m;  // NaN
    } else {
      factor = 0.f;
    }
    if (f.dropout_p == 1.0 || !any) {
      zero_row(f.o, q_row_offset(s, f.o, h, i), p.d_v);
    } else {
      store_row(f.o, q_row_offset(s, f.o, h, i), o, p.d_v, factor);
    }
    if (present(f.lse)) static_cast<float*>(f.lse.data)[q_row_offset(s, f.lse, h, i)] = lse;
  }

  int64_t partial_row(const Sequence& s, int64_t h, int64_t i) const {
    return ((s.b * p.h_q + h) * p.n_q + i) * splits;
  }

  void run_item(Scratch<Kind>& w, const Partials& parts, int64_t item) const {
    const int64_t split = item % splits, at = item / splits;
    const int64_t t = tiles - 1 - at % tiles, kv_head = at / tiles % p.h_kv,
                  b = at / tiles / p.h_kv;  // causal: heaviest first
    const Sequence s = sequence_at(p, b);
    const int64_t first = t * tile.rows, count = least(tile.rows, s.n_q * p.group - first);
    if (count <= 0) return;
    w.q.set(options, s, kv_head, first, count, round_up(count, kPanel));
    KeyRange keys = w.q.keys();
    if (splits > 1) {
      const int64_t each = round_up((most(keys.end - keys.begin, 0) + splits - 1) / splits, 16);
      const int64_t begin = keys.begin + split * each;
      keys = {begin, least(keys.end, begin + each)};
      for (int64_t r = 0; r < count && !options.extra; ++r)
        w.q.any[r] = most(w.q.begin[r], keys.begin) < least(w.q.end[r], keys.end) ? 1.f : 0.f;
    }
    walk(w, keys);
    for (int64_t r = 0; r < count; ++r) {
      const float* o = w.o + r * w.ld_o;
      if (splits == 1) {
        finish_row(s, w.q.head[r], w.q.index[r], o, 1.f / w.shrink, w.m[r], w.l[r], w.q.any[r] != 0.f);
        continue;
      }
      const int64_t row = partial_row(s, w.q.head[r], w.q.index[r]) + split;
      std::memcpy(parts.o + row * parts.ld, o, static_cast<size_t>(p.d_v) * sizeof(float));
      parts.unit[row] = 1.f / w.shrink;
      parts.m[row] = w.m[r];
      parts.l[row] = w.l[r];
      parts.any[row] = w.q.any[r];
    }
  }

  // The splits of one row, merged into its first.
  void merge(const Partials& parts, int64_t item) const {
    const int64_t i = item % p.n_q, h = item / p.n_q % p.h_q, b = item / p.n_q / p.h_q;
    const Sequence s = sequence_at(p, b);
    if (i >= s.n_q) return;
    const int64_t row = partial_row(s, h, i);
    float m = -kInf, l = 0.f;
    bool any = false;
    for (int64_t x = row; x < row + splits; ++x) {
      if (parts.m[x] > m) m = parts.m[x];
      any |= parts.any[x] != 0.f;
    }
    const auto weight = [&](int64_t x) { return parts.m[x] == -kInf ? 0.f : expf(parts.m[x] - m); };
    for (int64_t x = row; x < row + splits; ++x) l += weight(x) * parts.l[x];
    // A mean of the parts, each with its share of l: unlike their sum it cannot overflow.
    const float inverse = l == 0.f ? 0.f : 1.f / l;
    float* o = parts.o + row * parts.ld;
    for (int64_t x = row; x < row + splits; ++x) {
      const float share = weight(x) * inverse * parts.unit[x];
      const float* from = parts.o + x * parts.ld;
      for (int64_t d = 0; d < p.d_v; ++d) o[d] = x == row ? share * from[d] : o[d] + share * from[d];
    }
    finish_row(s, h, i, o, l, m, l, any);
  }

  void run(Arena arena, int num_threads) const {
    const Partials parts(arena, p, splits);
    const char* scratch = arena.base + arena.used;
    const int64_t each = scratch_bytes();
    parallel_for(num_threads, p.n_seqs * p.h_kv * tiles * splits, [&](int64_t item, int thread) {
      Arena own{const_cast<char*>(scratch) + thread * each, 0};
      Scratch<Kind> w(own, p, options, tile);
      run_item(w, parts, item);
    });
    if (splits > 1) parallel_for(num_threads, p.n_seqs * p.h_q * p.n_q, [&](int64_t item, int) { merge(parts, item); });
  }

  int64_t scratch_bytes() const {
    Arena arena;
    Scratch<Kind>(arena, p, options, tile);
    return round_up(arena.used, 4096);
  }
  int64_t workspace_bytes(int num_threads) const {
    Arena arena;
    Partials(arena, p, splits);
    return arena.used + num_threads * scratch_bytes();
  }
};

// Rows of packed tensors that belong to no sequence: o 0, lse -inf.
void clear_unowned(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (!p.packed_q()) return;
  const Sequence none;
  for (int64_t i = int32_at(f.cu_seqlens_q, p.n_seqs); i < f.q.extent[2]; ++i)
    for (int64_t h = 0; h < p.h_q; ++h) {
      zero_row(f.o, q_row_offset(none, f.o, h, i), p.d_v);
      if (present(f.lse)) static_cast<float*>(f.lse.data)[q_row_offset(none, f.lse, h, i)] = -kInf;
    }
}

}  // namespace

const char* machine_lacks() { return features().lacks_for(Target::FFPA_SIMD_TARGET); }

std::string plan_forward(const Problem& p, Choice* choice) {
  const ffpa_forward_problem& f = p.fwd();
  const TileShape tile = tile_shape(p);
  const int64_t items = p.n_seqs * p.h_kv * ((p.n_q * p.group + tile.rows - 1) / tile.rows);
  const int64_t threads = least(f.num_threads > 0 ? f.num_threads : features().processors, useful_threads(p, 2));
  int64_t splits = f.num_splits;
  if (splits ==
      0) {  // enough to give every thread work; batch-invariant: by the cache's size alone, not by the other sequences
    const int64_t useful = most(p.n_kv / kKeysOfSplit, 1);
    const bool alone = p.packed_q() || p.packed_kv() || p.paged();  // then n_q and n_kv are other sequences', too
    if (p.n_q * p.group > tile.rows)
      splits = 1;
    else if (f.batch_invariant)
      splits = alone ? 1 : least(useful, 16);
    else
      splits = items > 0 ? least(useful, (threads + items - 1) / items) : 1;
  }
  choice->num_splits = static_cast<int32_t>(least(most(splits, 1), 1024));
  choice->num_threads = static_cast<int32_t>(most(1, least(threads, items * choice->num_splits)));
  choice->workspace_bytes = static_cast<uint64_t>(
      with_kind(p, [&]<class Kind>() { return Forward<Kind>(p, *choice).workspace_bytes(choice->num_threads); }));
  return {};
}

Status run_forward(const Problem& p, const Choice& choice, void* workspace, void*) {
  clear_unowned(p);
  with_kind(p, [&]<class Kind>() {
    Forward<Kind>(p, choice).run(Arena{static_cast<char*>(workspace), 0}, choice.num_threads);
  });
  return {};
}

}  // namespace ffpa::simd::FFPA_SIMD_TARGET

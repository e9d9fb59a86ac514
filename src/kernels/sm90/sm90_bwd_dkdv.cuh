// sm90_bwd_dkdv: gradients of k and v for head dims up to 1024, on clusters of two or four Hopper SMs. SPDX-License-Identifier: Apache-2.0
//
//   S' = K Q'     P' = min(exp2(scale_log2 S' - lse_log2), 1)     dV = P' dout          rows of S', P', dP', dS' are keys
//   dP' = V dout'          dS' = P' (dP' - delta)                 dK = scale dS' Q
//
// A cluster owns 64 keys of a KV head and walks over the blocks of 64 queries that see them, in all heads of the group: sums stay in
// registers, in fp32, in one order. Its CTAs stand on two sides, each with X in place and Y streaming by once for two products:
//   side 0: X = K, Y = Q:     S' = X Y', dK += dS' Y            side 1: X = V, Y = dout:  dP' = X Y', dV += P' Y
// P' goes from side 0 to side 1, dS' back, 16 bits an element in the order of A fragments: 8 KB a block each. Beyond 512 columns a side
// is two CTAs with half the columns each; they trade their parts of S' or dP' (16 KB of fp32) and then do the same.
//
//  role      waits on                    does                                                     signals
//  TMA       empty                       X, then Y block by block                                 x_full, full
//  scorer,   x_full, full                S' or dP' of a block                                     empty
//  or two    part_full, part_free        beyond 512 columns: adds the other half                  part_full, part_free of the other half
//            side 1: in_full             P' of S', or dS' of P' and dP'; sends it                 in_full of the other side, its out_free
//            out_free
//  summer    in_full, full               A = P' or dS' into registers, half of the CTA's columns  out_free of the other side, empty
//  0, 1                                  of dV or dK += A Y; at the end stores them
//
//  barrier    count       arrives                            protects
//  full       1 + tx      TMA                                stage
//  empty      1 or 2      scorer, the stage's summer         stage
//  x_full     1 + tx      TMA                                x
//  in_full    1 + tx      a reader arms; sender's stores     in[buffer]
//  out_free   4 a role    reading warps, remote              the other side's in[buffer]
//  part_full  1 + tx      scorer arms; other half's stores   part
//  part_free  4           the other half's scorer, remote    its part
//
// Where only dk is wanted, side 1 sums nothing; where only dv is, side 0 sums and side 1 scores nothing.
//
//  columns of   CTAs of  D up to     threads, registers of         stages        buffers  shared memory
//  a summer     a side               TMA, scorers, summers
//   64          1         128        640: 40, 2 x 136, 2 x  96       16 x  8 KB   4        X 16 KB
//  128          1         256        640: 40, 2 x 120, 2 x 112       10 x 16 KB   4        X 32 KB
//  160, 192     1, 2      320, 384   512: 40, 168, 2 x 152            6 x 24 KB   2        X 48 KB
//  256          1, 2      512        512: 24, 136, 2 x 176            9 x 16 KB   2        X 64 KB
// (two CTAs a side: twice the D, 16 KB for the parts; with options: buffers twice as large, for P' times the softcap's derivative)
//
// Bound: at 512 columns shared memory and the tensor cores alike: a block costs a CTA 2048 cycles of products and 280 KB through
// shared memory; and 64 KB of loads for 8.4 MFLOP.
//
// Checked without a GPU: cubins inspected; cases of bwd_check with every option and instance on an emulation of the instructions in
// src/ptx, against plain loops in double. Never run on a GPU yet: its speed is not known.
#pragma once

#include "attn/bwd_params.cuh"
#include "attn/key_rows.cuh"
#include "attn/store.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_scheduler.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzled.cuh"

namespace ffpa::sm90::bwd_dkdv {

template <class Element_, int kColumns_, int kSlices_, attn::Features kFeatures>
struct Config {
  using Element = Element_;
  static constexpr int kColumns = kColumns_;  // of dK or dV of one summer
  static constexpr int kSlices = kSlices_;    // CTAs of a side
  static constexpr bool kOptions = attn::has_options(kFeatures);
  static constexpr bool kPacked = attn::has_packed(kFeatures);
  static constexpr int kCluster = 2 * kSlices;
  static constexpr int kTileKv = 64, kTileQ = 64;
  static constexpr int kSummers = 2, kScorers = kColumns <= 128 ? 2 : 1;
  static constexpr int kStageColumns = kColumns == 256 ? 128 : kColumns;
  static constexpr int kSummerStages = kColumns / kStageColumns;  // of a block, for each summer
  static constexpr int kBlockStages = kSummers * kSummerStages;
  static constexpr int kBuffers = kColumns <= 128 ? 4 : 2;
  static constexpr int kThreads = 128 * (1 + kScorers + kSummers);
  static constexpr int kProducerRegisters = kColumns == 256 ? 24 : 40;
  static constexpr int kScorerRegisters = kColumns == 64 ? 136 : kColumns == 128 ? 120 : kColumns == 256 ? 136 : 168;
  static constexpr int kSummerRegisters = kColumns == 64 ? 96 : kColumns == 128 ? 112 : kColumns == 256 ? 176 : 152;
  static constexpr uint32_t kBoxBytes = 64 * 128;
  static constexpr int kStageBoxes = (kStageColumns + 63) / 64;
  static constexpr uint32_t kStageBytes = kStageBoxes * kBoxBytes, kXBytes = kBlockStages * kStageBytes;
  static constexpr uint32_t kTileBytes = kTileKv * kTileQ * 2;           // P' or dS'
  static constexpr uint32_t kInBytes = (kOptions ? 2 : 1) * kTileBytes;  // of a buffer
  static constexpr uint32_t kPartBytes = kSlices == 2 ? kTileKv * kTileQ * 4 : 0;
  static constexpr uint32_t kSharedLimit = 232448, kMaxStages = 16;
  static_assert(kColumns % 32 == 0 && kColumns % kStageColumns == 0, "stored 32 columns at a time, in whole stages");
  static_assert(kStageColumns % 16 == 0, "whole k16 steps of X Y'");
  static_assert(kSlices == 1 || (kSlices == 2 && kScorers == 1), "two CTAs trade parts of a sum, one block at a time");
  static_assert(kBuffers % kScorers == 0, "a buffer belongs to one scorer");
  static_assert((kProducerRegisters + kScorers * kScorerRegisters + kSummers * kSummerRegisters) * 128 <= 65536,
                "registers of an SM");
};

struct Barriers {
  uint32_t keys[8];
  uint64_t full[16], empty[16], x_full, in_full[4], out_free[4], part_full, part_free;
};
// Shared memory: barriers, then in[buffer], part, X, the stages, each at multiples of 1024 bytes.
template <class C>
struct Layout {
  static constexpr uint32_t kIn = 1024, kPart = kIn + C::kBuffers * C::kInBytes, kX = kPart + C::kPartBytes,
                            kStages = kX + C::kXBytes;
  static constexpr int kStageCount = static_cast<int>((C::kSharedLimit - kStages) / C::kStageBytes) < C::kMaxStages
                                         ? static_cast<int>((C::kSharedLimit - kStages) / C::kStageBytes)
                                         : C::kMaxStages;
  static constexpr uint32_t kBytes = kStages + kStageCount * C::kStageBytes;
  static_assert(sizeof(Barriers) <= kIn, "barriers lie before the buffers");
  static_assert(C::kOptions || C::kSlices == 2 ||
                    kStageCount == (C::kColumns == 256   ? 9
                                    : C::kColumns == 128 ? 10
                                    : C::kColumns == 64  ? 16
                                                         : 6),
                "stages as the table above says");
  static_assert(kStageCount >= C::kBlockStages,
                "a block at a time: with less, scorers and summers would wait for each other");
};

// The tiles of keys as pipeline::TileScheduler lists tiles of query rows: keys take the part of queries, and nothing is the other side.
struct KeyTiles {
  int n_tiles = 0, n_q = 0, section = 1;  // n_q: rows of k and v in memory
  int n_seqs = 0, h_q = 0;                // batches of k, or packed sequences; KV heads
  const int* cu_seqlens_q = nullptr;      // cu_seqlens_kv
  static constexpr bool heavy_last = false;
  static constexpr int n_kv = 0, kv_rows = 0;
  static constexpr const int *cu_seqlens_kv = nullptr, *seqlens_kv = nullptr, *kv_batch_idx = nullptr;
};

struct Params {
  attn::BackwardParams f;
  KeyTiles tiles;
  bool no_queries;  // q has no elements
};

// A cluster's tile of keys, found once and kept in shared memory: over their loops summers have no register for it.
struct Keys {
  int batch = 0, seq = 0, head = 0;  // of k; of the first sequence that reads it; KV head
  int first_row = 0, row = 0,
      n = 0;       // where the rows of the sequence (or batch) begin, the tile's first in them, how many they are
  int n_kv = 0;    // keys that some sequence has
  int blocks = 0;  // of queries that see the tile, over all heads and sequences
};

template <class C>
struct Shared {
  uint32_t base;
  pipeline::Ring ring;
  ptx::Mbarrier x_full, in_full, out_free, part_full, part_free;
  __device__ __forceinline__ explicit Shared(uint8_t* memory) : base(ptx::shared_address(memory)) {
    const auto barrier = [&](size_t offset) { return ptx::Mbarrier{base + static_cast<uint32_t>(offset)}; };
    ring = {barrier(offsetof(Barriers, full)), barrier(offsetof(Barriers, empty)), Layout<C>::kStageCount};
    x_full = barrier(offsetof(Barriers, x_full));
    in_full = barrier(offsetof(Barriers, in_full));
    out_free = barrier(offsetof(Barriers, out_free));
    part_full = barrier(offsetof(Barriers, part_full));
    part_free = barrier(offsetof(Barriers, part_free));
  }
  __device__ __forceinline__ void keep(const Keys& k) const {
    const auto u = [](int x) { return static_cast<uint32_t>(x); };
    ptx::store_shared4(base, make_uint4(u(k.batch), u(k.seq), u(k.head), u(k.first_row)));
    ptx::store_shared4(base + 16, make_uint4(u(k.row), u(k.n), u(k.n_kv), u(k.blocks)));
  }
  __device__ __forceinline__ Keys keys() const {
    const uint4 a = ptx::load_shared4(base), b = ptx::load_shared4(base + 16);
    const auto i = [](uint32_t x) { return ptx::uniform(static_cast<int>(x)); };
    return {i(a.x), i(a.y), i(a.z), i(a.w), i(b.x), i(b.y), i(b.z), i(b.w)};
  }
  __device__ __forceinline__ uint32_t in(int buffer) const { return base + Layout<C>::kIn + buffer * C::kInBytes; }
  __device__ __forceinline__ uint32_t part() const { return base + Layout<C>::kPart; }
  __device__ __forceinline__ uint32_t x() const { return base + Layout<C>::kX; }
  __device__ __forceinline__ uint32_t stage(int i) const { return base + Layout<C>::kStages + i * C::kStageBytes; }
};

// What a CTA is and does.
struct Part {
  int side, slice;
  bool scores, sums;
  __device__ __forceinline__ Part(const attn::BackwardParams& f, int rank)
      : side(rank & 1),
        slice(rank >> 1),
        scores(side == 0 || f.dk.data),
        sums(side == 0 ? f.dk.data != nullptr : f.dv.data != nullptr) {}
};

// The blocks of queries that see a tile of keys, in the one order in which all roles take them.
template <class C>
struct Queries {
  const Params& p;
  const Keys& keys;
  int seq = -1, head = 0, row = 0;  // of the block; row within the sequence
  int n_q = 0, n_kv = 0, q_row = 0, q_batch = 0;
  int first = 0, blocks = 0, block = 0, member = 0;

  __device__ __forceinline__ Queries(const Params& params, const Keys& tile) : p(params), keys(tile) {
    member = p.f.group - 1;
  }
  __device__ __forceinline__ bool next_sequence() {
    const attn::BackwardParams& f = p.f;
    if (p.no_queries || keys.seq >= f.n_seqs) return false;
    if (C::kPacked && f.kv_batch_idx) {
      do ++seq;
      while (seq < f.n_seqs && f.kv_batch_idx[seq] != keys.batch);
      if (seq >= f.n_seqs) return false;
    } else {
      if (seq >= 0) return false;
      seq = keys.seq;
    }
    q_batch = seq;
    n_q = f.n_q;
    n_kv = f.kv_rows;
    if constexpr (C::kPacked) {
      if (f.cu_seqlens_q) {
        q_batch = 0;
        q_row = f.cu_seqlens_q[seq];
        n_q = f.cu_seqlens_q[seq + 1] - q_row;
      }
      if (f.cu_seqlens_kv) n_kv = keys.n;
    }
    if (f.seqlens_kv) n_kv = min(f.seqlens_kv[seq], n_kv);
    const int last = min(keys.row + C::kTileKv, n_kv) - 1;
    const int begin = attn::visible_queries(f, n_q, n_kv, keys.row).begin;
    const int end = last < keys.row ? 0 : attn::visible_queries(f, n_q, n_kv, last).end;
    first = begin / C::kTileQ;
    blocks = max((end + C::kTileQ - 1) / C::kTileQ - first, 0);
    return true;
  }
  __device__ __forceinline__ bool next() {
    if (++block >= blocks) {
      block = 0;
      if (++member == p.f.group) {
        member = 0;
        do {
          if (!next_sequence()) return false;
        } while (!blocks);
      }
      head = keys.head * p.f.group + member;
    }
    row = (first + block) * C::kTileQ;
    return true;
  }
  // All keys of the tile are seen by all queries of the block.
  __device__ __forceinline__ bool all_see() const {
    const int last = keys.row + C::kTileKv - 1;
    return last < n_kv && row >= attn::visible_queries(p.f, n_q, n_kv, last).begin &&
           row + C::kTileQ <= attn::visible_queries(p.f, n_q, n_kv, keys.row).end;
  }
};

// By a whole warp; of a CTA past the last tile, nothing.
template <class C>
__device__ __forceinline__ Keys find_keys(const Params& p) {
  pipeline::TileScheduler<C::kTileKv, C::kPacked, KeyTiles> scheduler(blockIdx.x / C::kCluster,
                                                                      gridDim.x / C::kCluster);
  pipeline::Tile t;
  Keys keys;
  if (!scheduler.next(p.tiles, t)) return keys;
  keys = {.batch = t.q_batch, .seq = t.seq, .head = t.head, .first_row = t.q_row, .row = t.row, .n = t.n_q};
  Queries<C> q(p, keys);
  while (q.next_sequence()) {
    keys.blocks += q.blocks * p.f.group;
    keys.n_kv = max(keys.n_kv, q.n_kv);
  }
  return keys;
}

template <class C>
__device__ __forceinline__ void produce(const Params& p, const Shared<C>& shared, const Part& part, const Keys& keys) {
  if (!ptx::elect_one() || !keys.blocks || !(part.scores || part.sums)) return;
  const attn::BackwardParams& f = p.f;
  const int column = part.slice * C::kSummers * C::kColumns;
  if (part.scores) {
    const bool v = part.side;
    const CUtensorMap* map = v ? &f.v : &f.k;
    const attn::RowCoordinates x =
        attn::kv_coordinates(f, keys.batch, keys.first_row, keys.n_kv, keys.head, v ? f.v_batch_rows : f.k_batch_rows,
                             v ? f.v_batch_step : f.k_batch_step, v ? f.v_head_step : f.k_head_step);
    ptx::mbarrier_arrive_expect(shared.x_full, C::kXBytes);
    for (int s = 0; s < C::kBlockStages; ++s)
      for (int box = 0; box < C::kStageBoxes; ++box)
        ptx::tma_load(shared.x() + s * C::kStageBytes + box * C::kBoxBytes, map,
                      column + s * C::kStageColumns + box * 64, x.row + keys.row, x.third, x.fourth, x.head,
                      shared.x_full);
  }
  const bool dout = part.side;
  const CUtensorMap* map = dout ? &f.dout : &f.q;
  const int batch_rows = dout ? f.dout_batch_rows : f.q_batch_rows,
            batch_step = dout ? f.dout_batch_step : f.q_batch_step, head_step = dout ? f.dout_head_step : f.q_head_step;
  pipeline::RingPlace place;
  Queries<C> q(p, keys);
  while (q.next()) {
    const attn::RowCoordinates y =
        attn::row_coordinates(f.q_ragged, q.q_batch, q.q_row, q.n_q, q.head, batch_rows, batch_step, head_step);
    for (int s = 0; s < C::kBlockStages; ++s) {
      const int stage = shared.ring.fill(place, C::kStageBytes);
      for (int box = 0; box < C::kStageBoxes; ++box)
        ptx::tma_load(shared.stage(stage) + box * C::kBoxBytes, map, column + s * C::kStageColumns + box * 64,
                      y.row + q.row, y.third, y.fourth, y.head, shared.ring.full[stage]);
    }
  }
}

// Bytes that come in with a block.
template <class C>
__device__ __forceinline__ uint32_t in_bytes(const attn::BackwardParams& f, int side) {
  return C::kOptions && side == 1 && f.softcap_log2 > 0.f ? 2 * C::kTileBytes : C::kTileBytes;
}

// Reads a tile that the other side has sent, in the order of A fragments; the buffer may then be overwritten.
template <class C>
__device__ __forceinline__ void read_tile(uint32_t from, uint32_t (&words)[16]) {
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const uint4 w = ptx::load_shared4(from + x * (C::kTileBytes / 4) + threadIdx.x % 128 * 16);
    words[4 * x] = w.x, words[4 * x + 1] = w.y, words[4 * x + 2] = w.z, words[4 * x + 3] = w.w;
  }
}

template <class C, int kSide>
struct Scorer {
  using Element = typename C::Element;
  static constexpr int kScores = C::kTileQ / 2;

  const Params& p;
  const attn::BackwardParams& f;
  const Shared<C>& shared;
  const Keys& keys;
  const int rank, warp, lane, thread;
  pipeline::RingPlace place;
  uint32_t part_phase = 0;
  float s[kScores];
  float row_values[C::kTileQ / 4];  // of the thread's queries: lse_log2 or delta
  uint32_t words[kScores / 2], sloped[kScores / 2];

  __device__ __forceinline__ Scorer(const Params& params, const Shared<C>& sh, const Keys& tile, int cta_rank)
      : p(params),
        f(params.f),
        shared(sh),
        keys(tile),
        rank(cta_rank),
        warp(ptx::uniform(threadIdx.x % 128 / 32)),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128) {}

  __device__ __forceinline__ int key() const {
    return keys.row + warp * 16 + lane / 4;
  }  // the first of the thread's two; the other is +8
  __device__ __forceinline__ int query(const Queries<C>& q) const { return q.row + 2 * (lane % 4); }  // its first

  __device__ __forceinline__ void load_row_values(const Queries<C>& q) {
    const float* from = (kSide ? f.delta : f.lse_log2).at(q.q_batch, q.head, q.q_row);
#pragma unroll
    for (int i = 0; i < C::kTileQ / 4; ++i) {
      const int at = query(q) + i / 2 * 8 + i % 2;
      row_values[i] = at < q.n_q ? from[at] : kSide ? 0.f : INFINITY;
    }
  }

  // s = X Y'
  __device__ __forceinline__ void product() {
    const uint32_t x = tile::k_major(shared.x()), y = tile::k_major(shared.stage(0));
    const int first = place.stage;
#pragma unroll
    for (int c = 0; c < C::kBlockStages; ++c) {
      const uint32_t stage = shared.ring.acquire(place);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < C::kStageColumns / 16; ++k) {
        const uint32_t at = k / 4 * (C::kBoxBytes / 16) + k % 4 * tile::kKMajorStep;
        ptx::Wgmma<C::kTileQ>::template ss<Element, 0>(s, tile::descriptor(x + c * (C::kStageBytes / 16) + at),
                                                       tile::descriptor(y + stage * (C::kStageBytes / 16) + at),
                                                       c || k);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    if (thread == 0) {
      int stage = first;
#pragma unroll
      for (int c = 0; c < C::kBlockStages; ++c) {
        ptx::mbarrier_arrive(shared.ring.empty[stage]);
        if (++stage == Layout<C>::kStageCount) stage = 0;
      }
    }
  }

  // Adds the part of the products that the other half of the columns makes. The two halves get the same bits: a + b = b + a.
  __device__ __forceinline__ void add_part() {
    const int other = rank ^ 2;
    ptx::mbarrier_wait(shared.part_free, part_phase ^ 1);
    const uint32_t to = ptx::mapa(shared.part() + thread * 16, other);
    const ptx::RemoteMbarrier full = ptx::mapa(shared.part_full, other);
#pragma unroll
    for (int x = 0; x < kScores / 4; ++x) {
      const uint32_t w[4] = {__float_as_uint(s[4 * x]), __float_as_uint(s[4 * x + 1]), __float_as_uint(s[4 * x + 2]),
                             __float_as_uint(s[4 * x + 3])};
      ptx::store_async4(to + x * 2048, w, full);
    }
    ptx::mbarrier_wait(shared.part_full, part_phase);
    part_phase ^= 1;
#pragma unroll
    for (int x = 0; x < kScores / 4; ++x) {
      const uint4 w = ptx::load_shared4(shared.part() + thread * 16 + x * 2048);
      s[4 * x] += __uint_as_float(w.x), s[4 * x + 1] += __uint_as_float(w.y);
      s[4 * x + 2] += __uint_as_float(w.z), s[4 * x + 3] += __uint_as_float(w.w);
    }
    if (thread == 0) ptx::mbarrier_arrive_expect(shared.part_full, C::kPartBytes);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.part_free, other));
  }

  // ---- side 0: P' of S'
  __device__ __forceinline__ void probabilities(const Queries<C>& q) {
    const bool all_see = q.all_see();
    if (!all_see) {
      const attn::QueryRange range[2] = {attn::visible_queries(f, q.n_q, q.n_kv, key()),
                                         attn::visible_queries(f, q.n_q, q.n_kv, key() + 8)};
      attn::hide<C::kTileQ>(s, query(q), range);
    }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float* rows = row_values + i / 2 * 2;
      float e[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) e[x] = ptx::min_nan(ptx::exp2_fast(fmaf(s[2 * i + x], f.scale_log2, -rows[x])), 1.f);
      words[i] = ptx::pack<Element>(e[0], e[1]);
    }
  }
  // With options; a dropped element carries a minus sign. `sloped`: times the softcap's derivative.
  __device__ __forceinline__ void probabilities_with_options(const Queries<C>& q) {
    const attn::KeyRows x{q.seq, q.head, q.n_q, q.n_kv, key()};
    const bool all_see = q.all_see();
    const attn::QueryRange range[2] = {attn::visible_queries(f, q.n_q, q.n_kv, key()),
                                       attn::visible_queries(f, q.n_q, q.n_kv, key() + 8)};
    const uint32_t drawn = f.dropout.threshold ? attn::draw_keys(f, x, q.row) : ~0u;
#pragma unroll
    for (int group = 0; group < C::kTileQ / 8; ++group) {
      const uint32_t word = f.dropout.threshold ? __shfl_sync(~0u, drawn, 4 * group + lane % 4) : ~0u;
      const int first = query(q) + 8 * group;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 2 * group + r;
        float e[2] = {s[2 * i], s[2 * i + 1]}, slope[2] = {1.f, 1.f};
        attn::key_logits<Element>(f, x, r, first, e, slope);
#pragma unroll
        for (int y = 0; y < 2; ++y) {
          if (!all_see && (first + y < range[r].begin || first + y >= range[r].end)) e[y] = -INFINITY;
          e[y] = ptx::min_nan(ptx::exp2_fast(e[y] - row_values[2 * group + y]), 1.f);
          slope[y] *= e[y];
          e[y] = attn::keeps(word, r, y) ? e[y] : -e[y];
        }
        words[i] = ptx::pack<Element>(e[0], e[1]);
        sloped[i] = ptx::pack<Element>(slope[0], slope[1]);
      }
    }
  }

  // ---- side 1: dS' of P' and dP'. An element without probability has no gradient, whatever dP' is there.
  template <bool kAllSee>
  __device__ __forceinline__ void differences() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float* rows = row_values + i / 2 * 2;
      const float2 e = ptx::unpack<Element>(words[i]);
      float low = e.x * (s[2 * i] - rows[0]), high = e.y * (s[2 * i + 1] - rows[1]);
      if constexpr (!kAllSee) {
        low = e.x == 0.f ? 0.f : low;
        high = e.y == 0.f ? 0.f : high;
      }
      words[i] = ptx::pack<Element>(low, high);
    }
  }
  __device__ __forceinline__ void differences_with_options() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) {
      const float* rows = row_values + i / 2 * 2;
      const float2 two = ptx::unpack<Element>(f.softcap_log2 > 0.f ? sloped[i] : words[i] & 0x7FFF7FFFu);
      const float e[2] = {two.x, two.y};
      float d[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const bool dropped = words[i] >> (16 * x + 15) & 1u;
        d[x] = e[x] * ((dropped ? 0.f : s[2 * i + x] * f.keep_scale) - rows[x]);
        d[x] = e[x] == 0.f ? 0.f : d[x];
      }
      words[i] = ptx::pack<Element>(d[0], d[1]);
    }
  }
  __device__ __forceinline__ void receive(int n) {
    const int buffer = n % C::kBuffers;
    ptx::mbarrier_wait(shared.in_full[buffer], n / C::kBuffers & 1);
    read_tile<C>(shared.in(buffer), words);
    if constexpr (C::kOptions)
      if (f.softcap_log2 > 0.f) read_tile<C>(shared.in(buffer) + C::kTileBytes, sloped);
    if (thread == 0 && !f.dv.data) ptx::mbarrier_arrive_expect(shared.in_full[buffer], in_bytes<C>(f, kSide));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.out_free[buffer], rank ^ 1));
  }

  __device__ __forceinline__ void send(int n) {
    const int buffer = n % C::kBuffers, other = rank ^ 1;
    ptx::mbarrier_wait(shared.out_free[buffer], (n / C::kBuffers & 1) ^ 1);
    const uint32_t to = ptx::mapa(shared.in(buffer) + thread * 16, other);
    const ptx::RemoteMbarrier full = ptx::mapa(shared.in_full[buffer], other);
#pragma unroll
    for (int x = 0; x < 4; ++x) ptx::store_async4(to + x * (C::kTileBytes / 4), words + 4 * x, full);
    if constexpr (C::kOptions && kSide == 0)
      if (f.softcap_log2 > 0.f)
#pragma unroll
        for (int x = 0; x < 4; ++x)
          ptx::store_async4(to + C::kTileBytes + x * (C::kTileBytes / 4), sloped + 4 * x, full);
  }

  __device__ __forceinline__ void run(int scorer) {
    if (keys.blocks) ptx::mbarrier_wait(shared.x_full, 0);
    Queries<C> q(p, keys);
#pragma unroll 1
    for (int n = 0; n < keys.blocks; ++n) {
      q.next();
      if (C::kScorers > 1 && n % C::kScorers != scorer) {
        for (int c = 0; c < C::kBlockStages; ++c) place.advance(Layout<C>::kStageCount);
        continue;
      }
      load_row_values(q);
      product();
      if constexpr (C::kSlices == 2) add_part();
      if constexpr (kSide == 0) {
        if constexpr (C::kOptions)
          probabilities_with_options(q);
        else
          probabilities(q);
      } else {
        receive(n);
        if constexpr (C::kOptions)
          differences_with_options();
        else if (q.all_see())
          differences<true>();
        else
          differences<false>();
      }
      send(n);
    }
  }
};

template <class C>
__device__ __forceinline__ void sum(const Params& p, const Shared<C>& shared, const Part& part, int rank, int summer) {
  using Element = typename C::Element;
  const attn::BackwardParams& f = p.f;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = ptx::uniform(thread / 32);
  float sums[C::kColumns / 2];
#pragma unroll
  for (int i = 0; i < C::kColumns / 2; ++i) sums[i] = 0.f;
  const uint32_t y = tile::mn_major(shared.stage(0), C::kBoxBytes);
  pipeline::RingPlace place;
  const auto skip = [&] {
#pragma unroll
    for (int c = 0; c < C::kSummerStages; ++c) place.advance(Layout<C>::kStageCount);
  };
  if (summer == 1) skip();
  const int blocks = shared.keys().blocks;
#pragma unroll 1
  for (int n = 0; n < blocks; ++n) {
    const int buffer = n % C::kBuffers;
    uint32_t a[16];
    ptx::mbarrier_wait(shared.in_full[buffer], n / C::kBuffers & 1);
    read_tile<C>(shared.in(buffer), a);
    if (thread == 0 && summer == 0) ptx::mbarrier_arrive_expect(shared.in_full[buffer], in_bytes<C>(f, part.side));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.out_free[buffer], rank ^ 1));
    if constexpr (C::kOptions)
      if (f.dropout.threshold && part.side == 1) {  // what carries a sign was dropped
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i] &= ~((a[i] >> 15 & 0x10001u) * 0xFFFFu);
      }
    int stages[C::kSummerStages];
#pragma unroll
    for (int c = 0; c < C::kSummerStages; ++c) {
      stages[c] = shared.ring.acquire(place);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < C::kTileQ / 16; ++k)
        ptx::Wgmma<C::kStageColumns>::template rs<Element, 1>(
            sums + c * (C::kStageColumns / 2), a + 4 * k,
            tile::descriptor(y + stages[c] * (C::kStageBytes / 16) + k * tile::kMnMajorStep), 1);
      ptx::wgmma_commit();
    }
    if constexpr (C::kSummerStages == 2) {
      ptx::wgmma_wait<1>();
      if (thread == 0) ptx::mbarrier_arrive(shared.ring.empty[stages[0]]);
    }
    ptx::wgmma_wait<0>();
    if (thread == 0) ptx::mbarrier_arrive(shared.ring.empty[stages[C::kSummerStages - 1]]);
    skip();
  }

  const Keys keys = shared.keys();
  const attn::RowsOut& out = part.side ? f.dv : f.dk;
  const float factor = part.side == 0 ? f.scale : C::kOptions ? f.keep_scale : 1.f;
  const int column = (part.slice * C::kSummers + summer) * C::kColumns, first = keys.row + warp * 16 + lane / 4;
  const auto store = [&]<int r>() {
    const int j = first + 8 * r;
    if (j >= keys.n_kv) {  // keys that no sequence has: what stands in memory there may be anything
#pragma unroll
      for (int i = 0; i < C::kColumns / 4; ++i) sums[i / 2 * 4 + 2 * r + i % 2] = 0.f;
    }
    attn::store_row<Element, C::kColumns, r>(
        out, sums, factor, j < keys.n ? out.at<Element>(keys.batch, keys.head, keys.first_row + j) : nullptr, column);
  };
  store.template operator()<0>();
  store.template operator()<1>();
}

template <class C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    sm90_bwd_dkdv(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> shared(memory);
  const int rank = static_cast<int>(ptx::cluster_cta_rank());
  const int wg = ptx::uniform(threadIdx.x / 128);
  const Part part(p.f, rank);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Layout<C>::kStageCount; ++i) {
      ptx::mbarrier_init(shared.ring.full[i], 1);
      ptx::mbarrier_init(shared.ring.empty[i], max(part.scores + part.sums, 1));
    }
    ptx::mbarrier_init(shared.x_full, 1);
    const int readers = part.side == 0 ? 4 * (p.f.dk.data != nullptr) + 8 * (p.f.dv.data != nullptr) : 8;
    for (int i = 0; i < C::kBuffers; ++i) {
      ptx::mbarrier_init(shared.in_full[i], 1);
      ptx::mbarrier_init(shared.out_free[i], readers);
    }
    ptx::mbarrier_init(shared.part_full, 1);
    ptx::mbarrier_init(shared.part_free, 4);
    ptx::fence_mbarrier_init();
    for (int i = 0; i < C::kBuffers; ++i) ptx::mbarrier_arrive_expect(shared.in_full[i], in_bytes<C>(p.f, part.side));
    if (C::kSlices == 2) ptx::mbarrier_arrive_expect(shared.part_full, C::kPartBytes);
  }
  if (ptx::uniform(threadIdx.x / 32) == 0) {
    const Keys keys = find_keys<C>(p);
    if (threadIdx.x == 0) shared.keep(keys);
  }
  __syncthreads();
  ptx::cluster_sync();
  if (wg == 0) {
    ptx::registers_down<C::kProducerRegisters>();
    if (ptx::uniform(threadIdx.x / 32) == 0) produce<C>(p, shared, part, shared.keys());
  } else if (wg <= C::kSummers) {
    ptx::registers_up<C::kSummerRegisters>();
    if (part.sums) sum<C>(p, shared, part, rank, wg - 1);
  } else {
    ptx::registers_up<C::kScorerRegisters>();
    const int scorer = wg - 1 - C::kSummers;
    const Keys keys = shared.keys();
    if (part.side == 0) Scorer<C, 0>(p, shared, keys, rank).run(scorer);
    if (part.side == 1 && part.scores) Scorer<C, 1>(p, shared, keys, rank).run(scorer);
  }
  ptx::cluster_sync();  // no CTA leaves while another may still write to its shared memory
}

}  // namespace ffpa::sm90::bwd_dkdv

// sm90_bwd_dq: the gradient of Q, head dims to 1024, on one Hopper SM or a cluster of 2 or 4. SPDX-License-Identifier: Apache-2.0
//
// A cluster owns 128 query rows and walks the keys in blocks of 64. Both consumer warpgroups of a CTA do the same for 64 rows each:
//   S = Q K', dP = dO V'    [64, 64], both by one CTA, or S by one half of a cluster and dP by the other
//   P = exp(S - lse), dS = P (dP - delta)
//   dQ[64, slice] += dS K   each CTA its own slice of the columns: D_qk over the size of the cluster
// A CTA keeps its X (Q or dO, of a cluster of 4 half of their columns) and streams the same columns of Y (K or V), then its slice of
// K's columns again. P, dS and partial sums travel in the order of fragments, by st.async: neither swizzle nor proxy fence.
//
//  cluster 1  kAlone            S, dP, dS                                                                    D_qk, D_v to 256
//  cluster 2  kScores, kGrads   P goes over, dS comes back                                                   to 512
//  cluster 4  + two kHelpers    each sends its half of the sum over D of S or of dP first; dS goes to all    to 1024
//
//  role       regs  waits on                does                                                 signals
//  TMA          32  empty, x_empty          X of a tile; Y of block j, then K's slice of j-1     full, x_full
//  consumers   240  full, x_full            X Y' of block j
//                   in_full (dS of j-1)     dQ += dS(j-1) K(j-1), in flight under what follows   empty, out_free(sender)
//    kScores        part_full, out_free     P(j)                                                 in_full(kGrads), part_free(helper)
//    kGrads         part_full, in_full (P)  dS(j)                                                in_full(all others), ...
//    kHelper        part_free               nothing                                              part_full(its leader)
//
//  barrier     count          arrives                      protects
//  full        1 + tx         TMA                          stage
//  empty       2              one thread of WG0, of WG1    stage
//  x_full      1 + tx         TMA                          X
//  x_empty     2              one thread of WG0, of WG1    X
//  in_full     1 + tx         own WG arms; st.async        inbox[wg]: P in kGrads, dS in the others
//  out_free    4 x receivers  the receivers' warps         the receivers' inbox[wg]
//  part_full   1 + tx         own WG arms; st.async        partial[wg] of a leader
//  part_free   4              the leader's warps           the same, in the helper
//
// Stages hold 64 keys x 128 columns, 16 KB; X 16 KB for 64 columns: 5 stages at D 512 (cluster 2), 6 at 256 (1), 4 at 1024 (4).
//
// No wait is circular: P(j) needs S(j) alone; dS(j) needs P(j) and dP(j); dS(j) is waited for in trip j + 1, when every role has sent
// what trip j had to send. Inboxes are freed before the wait for the next message.
//
// Not in kernels.def yet: only tools/bwd_check calls it, and it has not run anywhere so far, neither on a GPU nor emulated.
//
// Bound: the tensor cores (3 products, 12.6 MFLOP a block and CTA at D 512, 96 KB loaded).
#pragma once

#include "attn/bwd_scores.cuh"
#include "attn/store.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_scheduler.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzled.cuh"

namespace ffpa::sm90::bwd_dq {

enum class Role { kAlone, kScores, kGrads, kHelper };

template <class Element_, int kCluster_, int kSlice_, attn::Features kFeatures>
struct Config {
  using Element = Element_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kScoresRank = 0, kGradsRank = kCluster / 2;  // [kScores, helper,] [kGrads, helper]
  static constexpr int kSlice = kSlice_;                            // columns of dQ of one CTA
  static constexpr bool kOptions = attn::has_options(kFeatures);
  static constexpr bool kPacked = attn::has_packed(kFeatures);
  static constexpr int kTileQ = 128, kTileKv = 64;
  static constexpr int kThreads = 384, kProducerRegisters = 32, kConsumerRegisters = 240;
  static constexpr int kMaxStages = 12, kMinStages = 3;
  static constexpr uint32_t kBoxBytes = 64 * 128;  // 64 rows or keys of 64 columns
  static constexpr uint32_t kStageBytes = 2 * kBoxBytes;
  static constexpr int kSliceBoxes = (kSlice + 63) / 64, kSliceChunks = (kSliceBoxes + 1) / 2;
  static constexpr uint32_t kWordsBytes = 64 * kTileKv * 2,  // P or dS of a warpgroup
      kPartialBytes = 64 * kTileKv * 4;
  static constexpr uint32_t kSharedLimit = 232448;
  static_assert(kCluster == 1 || kCluster == 2 || kCluster == 4, "roles are known for these");
  static_assert(kSlice % 32 == 0 && kSlice <= 256,
                "a slice is accumulated by one warpgroup and stored 32 columns at a time");
  static_assert(kMinStages > kSliceChunks, "a consumer may hold this many stages while it waits for the next");
  static_assert((2 * kConsumerRegisters + kProducerRegisters) * 128 <= 65536, "registers of an SM");
};

template <class C>
struct SharedStorage {  // followed by partial[2] in the leaders of a cluster of 4, stages, X: [Q, dO][warpgroup][box]
  uint8_t inbox[2][C::kCluster > 1 ? C::kWordsBytes : 16];
  uint64_t full[C::kMaxStages], empty[C::kMaxStages], x_full, x_empty, in_full[2], out_free[2], part_full[2],
      part_free[2];
};
template <class C>
inline constexpr uint32_t kFixedBytes = (sizeof(SharedStorage<C>) + 1023) / 1024 * 1024;

struct Params {
  attn::BackwardParams b;
  int q_boxes, v_boxes;  // 64 columns each: D_qk, D_v rounded up
};

// A CTA's part of the products over D: boxes [first, first + count) of Q and K or of dO and V.
struct Part {
  int first, count;
};
inline constexpr int kMostLeaderBoxes = 7;  // of 16: a leader has partial sums to store too
__host__ __device__ constexpr Part part_of(int boxes, int cluster, bool leader) {
  if (cluster < 4) return {0, boxes};
  const int half = (boxes + 1) / 2, first = half < kMostLeaderBoxes ? half : kMostLeaderBoxes;
  if (leader) return {0, first};
  return {first, boxes > first ? boxes - first : 1};  // a box past D: zeros
}

template <class C>
__host__ __device__ constexpr int stages_of(int x_boxes, bool has_partial) {
  const int n = static_cast<int>((C::kSharedLimit - kFixedBytes<C> - (has_partial ? 2 * C::kPartialBytes : 0) -
                                  2 * C::kBoxBytes * static_cast<uint32_t>(x_boxes)) /
                                 C::kStageBytes);
  return n < C::kMaxStages ? n : C::kMaxStages;
}

// What a CTA does and where things lie in its shared memory.
template <class C>
struct Shared {
  int rank;
  bool of_grads, leader;  // alone: both S and dP
  Part part;              // alone: of Q and K
  int n_stages;
  uint32_t base, partial, stages, x;
  pipeline::Ring ring;
  ptx::Mbarrier x_full, x_empty, in_full, out_free, part_full, part_free;
  __device__ __forceinline__ Shared(uint8_t* memory, const Params& p, int cta_rank)
      : rank(cta_rank), base(ptx::shared_address(memory)) {
    using S = SharedStorage<C>;
    of_grads = C::kCluster > 1 && rank >= C::kCluster / 2;
    leader = C::kCluster < 4 || rank % 2 == 0;
    part = part_of(of_grads ? p.v_boxes : p.q_boxes, C::kCluster, leader);
    const bool has_partial = C::kCluster == 4 && leader;
    n_stages = stages_of<C>(part.count + (C::kCluster == 1 ? p.v_boxes : 0), has_partial);
    partial = base + kFixedBytes<C>;
    stages = partial + (has_partial ? 2 * C::kPartialBytes : 0);
    x = stages + n_stages * C::kStageBytes;
    const auto barrier = [&](size_t offset) { return ptx::Mbarrier{base + static_cast<uint32_t>(offset)}; };
    ring = {barrier(offsetof(S, full)), barrier(offsetof(S, empty)), n_stages};
    x_full = barrier(offsetof(S, x_full));
    x_empty = barrier(offsetof(S, x_empty));
    in_full = barrier(offsetof(S, in_full));
    out_free = barrier(offsetof(S, out_free));
    part_full = barrier(offsetof(S, part_full));
    part_free = barrier(offsetof(S, part_free));
  }
  __device__ __forceinline__ int slice_column() const { return rank * C::kSlice; }
};

// Blocks of keys that a tile visits.
struct Blocks {
  int first, count;
};
template <class C>
__device__ __forceinline__ Blocks blocks_of(const attn::BackwardParams& b, const pipeline::Tile& t) {
  const int last_row = min(t.row + C::kTileQ, t.n_q) - 1;
  const int begin = attn::visible_keys(b, t.n_q, t.n_kv, t.row).begin / C::kTileKv;
  const int end = (attn::visible_keys(b, t.n_q, t.n_kv, last_row).end + C::kTileKv - 1) / C::kTileKv;
  return {begin, max(end - begin, 0)};
}
template <class C>
using Scheduler = pipeline::TileScheduler<C::kTileQ, C::kPacked, attn::BackwardParams>;

template <class C>
__device__ __forceinline__ void produce(const Params& p, const Shared<C>& shared) {
  const attn::BackwardParams& b = p.b;
  const bool thread = ptx::elect_one();
  Scheduler<C> scheduler(blockIdx.x / C::kCluster, gridDim.x / C::kCluster);
  pipeline::Tile t;
  pipeline::RingPlace place;
  uint32_t x_phase = 0;
  while (scheduler.next(b, t)) {
    const Blocks blocks = blocks_of<C>(b, t);
    if (!blocks.count) continue;
    if (thread) {
      const auto rows_of_q = [&](int batch_rows, int batch_step, int head_step) {
        return attn::row_coordinates(b.q_ragged, t.q_batch, t.q_row, t.n_q, t.head, batch_rows, batch_step, head_step);
      };
      const attn::RowCoordinates q = rows_of_q(b.q_batch_rows, b.q_batch_step, b.q_head_step),
                                 dout = rows_of_q(b.dout_batch_rows, b.dout_batch_step, b.dout_head_step);
      const int head = t.head / b.group;
      const attn::KvCoordinates k =
          attn::kv_coordinates(b, t.kv_batch, t.kv_row, t.n_kv, head, b.k_batch_rows, b.k_batch_step, b.k_head_step);
      const attn::KvCoordinates v =
          attn::kv_coordinates(b, t.kv_batch, t.kv_row, t.n_kv, head, b.v_batch_rows, b.v_batch_step, b.v_head_step);
      const auto load_x = [&](uint32_t to, const CUtensorMap* map, const attn::RowCoordinates& at, const Part& part) {
        for (int wg = 0; wg < 2; ++wg)
          for (int box = 0; box < part.count; ++box)
            ptx::tma_load(to + (wg * part.count + box) * C::kBoxBytes, map, (part.first + box) * 64,
                          at.row + t.row + wg * 64, at.third, at.fourth, at.head, shared.x_full);
      };
      const auto load_y = [&](const CUtensorMap* map, const attn::KvCoordinates& at, int block, int column, int boxes) {
        for (int box = 0; box < boxes; box += 2) {
          const int n = min(boxes - box, 2);
          const int stage = shared.ring.fill(place, n * C::kBoxBytes);
          for (int i = 0; i < n; ++i)
            ptx::tma_load(shared.stages + stage * C::kStageBytes + i * C::kBoxBytes, map, column + (box + i) * 64,
                          at.row + (blocks.first + block) * C::kTileKv, at.third, at.fourth, at.head,
                          shared.ring.full[stage]);
        }
      };
      ptx::mbarrier_wait(shared.x_empty, x_phase ^ 1);
      const Part of_v = {0, p.v_boxes};
      const int x_boxes = shared.part.count + (C::kCluster == 1 ? p.v_boxes : 0);
      ptx::mbarrier_arrive_expect(shared.x_full, 2 * x_boxes * C::kBoxBytes);
      if (shared.of_grads)
        load_x(shared.x, &b.dout, dout, shared.part);
      else
        load_x(shared.x, &b.q, q, shared.part);
      if (C::kCluster == 1) load_x(shared.x + 2 * p.q_boxes * C::kBoxBytes, &b.dout, dout, of_v);
      for (int j = 0; j <= blocks.count; ++j) {
        if (j < blocks.count) {
          if (C::kCluster == 1) load_y(&b.v, v, j, 0, p.v_boxes);
          if (shared.of_grads)
            load_y(&b.v, v, j, shared.part.first * 64, shared.part.count);
          else
            load_y(&b.k, k, j, shared.part.first * 64, shared.part.count);
        }
        if (j > 0) load_y(&b.k, k, j - 1, shared.slice_column(), C::kSliceBoxes);
      }
    }
    x_phase ^= 1;
    __syncwarp();
  }
}

template <class C, Role kRole>
struct Consumer {
  using Element = typename C::Element;
  static constexpr int kScores = C::kTileKv / 2, kWords = kScores / 2;
  // What follows from scores runs under dQ += dS K where registers allow for both.
  static constexpr bool kUnderProducts =
      kRole == Role::kGrads || kRole == Role::kHelper || !C::kOptions || C::kSlice <= 192;
  static constexpr bool kLeads = kRole == Role::kScores || kRole == Role::kGrads;

  const Params& p;
  const attn::BackwardParams& b;
  const Shared<C>& shared;
  const int wg, warp, lane, thread;
  pipeline::RingPlace place;
  int oldest = 0;  // stage to be released next
  uint32_t x_phase = 0, in_phase = 0, part_in_phase = 0;
  uint32_t out_phase = 1, part_out_phase = 1;  // the first wait passes
  uint32_t x_low, y_low, slice_low;
  float sums[C::kSlice / 2], s[kScores];
  float dp[kRole == Role::kAlone ? kScores : 1];
  uint32_t ds[kWords];                               // dS as A fragments
  uint32_t out[kRole == Role::kAlone ? 1 : kWords];  // what the role sends of the next block
  uint32_t keep[1];                                  // dropout
  attn::FetchedWords<C::kTileKv> fetched;
  attn::BackwardRows rows;
  pipeline::Tile t;
  Blocks blocks;
  int all_see_from, all_see_to;  // keys that all 64 rows see

  __device__ __forceinline__ Consumer(const Params& params, const Shared<C>& sh, int wg_idx)
      : p(params),
        b(params.b),
        shared(sh),
        wg(wg_idx),
        warp(ptx::uniform(threadIdx.x % 128 / 32)),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128) {
    x_low = tile::k_major(shared.x + wg * shared.part.count * C::kBoxBytes);
    y_low = tile::k_major(shared.stages);
    slice_low = tile::mn_major(shared.stages, C::kBoxBytes);
  }
  __device__ __forceinline__ int row() const {
    return warp * 16 + lane / 4;
  }  // the first of the thread's two; the other is +8

  // ---- products. Each call of multiply and accumulate adds one committed group of wgmma.
  __device__ __forceinline__ void release() {
    if (thread == 0) ptx::mbarrier_arrive(shared.ring.empty[oldest]);
    if (++oldest == shared.n_stages) oldest = 0;
  }
  template <int kPending>
  __device__ __forceinline__ void finish() {  // the oldest group, which has kPending after it
    ptx::wgmma_wait<kPending>();
    release();
  }
  template <int kBoxes, bool kFirst>
  __device__ __forceinline__ void multiply(float* to, uint32_t x, int box) {
    const uint32_t y = y_low + shared.ring.acquire(place) * (C::kStageBytes / 16);
    x += box * (C::kBoxBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4 * kBoxes; ++i) {
      const uint32_t step = i / 4 * (C::kBoxBytes / 16) + i % 4 * tile::kKMajorStep;
      ptx::Wgmma<C::kTileKv>::template ss<Element, 0>(to, tile::descriptor(x + step), tile::descriptor(y + step),
                                                      !kFirst || i);
    }
    ptx::wgmma_commit();
  }
  // to = X Y'. The last group stays in flight, its stage held; kHeld: so did one before.
  template <bool kHeld>
  __device__ __forceinline__ void product(float* to, uint32_t x, int boxes) {
    if (boxes == 1)
      multiply<1, true>(to, x, 0);
    else
      multiply<2, true>(to, x, 0);
    if constexpr (kHeld) finish<1>();
    for (int box = 2; box + 1 < boxes; box += 2) {
      multiply<2, false>(to, x, box);
      finish<1>();
    }
    if (boxes > 2 && boxes % 2) {
      multiply<1, false>(to, x, boxes - 1);
      finish<1>();
    }
  }
  template <int kChunk>
  __device__ __forceinline__ void accumulate() {
    constexpr int kWidth = C::kSlice - 128 * kChunk < 128 ? C::kSlice - 128 * kChunk : 128;
    const uint32_t k = slice_low + shared.ring.acquire(place) * (C::kStageBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kTileKv / 16; ++i)
      ptx::Wgmma<kWidth>::template rs<Element, 1>(sums + 64 * kChunk, ds + 4 * i,
                                                  tile::descriptor(k + i * tile::kMnMajorStep), 1);
    ptx::wgmma_commit();
  }

  // ---- messages: 4 * kWords words a thread in pieces of 16 bytes, piece x of thread t at x * 2048 + t * 16
  using Storage = SharedStorage<C>;
  __device__ __forceinline__ uint32_t inbox() const {
    return shared.base + offsetof(Storage, inbox) + wg * C::kWordsBytes + thread * 16;
  }
  __device__ __forceinline__ uint32_t partial() const {
    return shared.base + kFixedBytes<C> + wg * C::kPartialBytes + thread * 16;
  }
  __device__ __forceinline__ void arm() {
    if (thread == 0) ptx::mbarrier_arrive_expect(shared.in_full[wg], C::kWordsBytes);
  }
  __device__ __forceinline__ void arm_partial() {
    if (thread == 0) ptx::mbarrier_arrive_expect(shared.part_full[wg], C::kPartialBytes);
  }
  __device__ __forceinline__ void send(const uint32_t (&words)[kWords], int rank) {
    const uint32_t to = ptx::mapa(inbox(), rank);
    const ptx::RemoteMbarrier full = ptx::mapa(shared.in_full[wg], rank);
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) ptx::store_async4(to + i * 2048, words + 4 * i, full);
  }
  __device__ __forceinline__ void await_free_inboxes() {
    ptx::mbarrier_wait(shared.out_free[wg], out_phase);
    out_phase ^= 1;
  }
  __device__ __forceinline__ void receive(uint32_t (&words)[kWords]) {
    ptx::mbarrier_wait(shared.in_full[wg], in_phase);
    in_phase ^= 1;
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 w = ptx::load_shared4(inbox() + i * 2048);
      words[4 * i] = w.x, words[4 * i + 1] = w.y, words[4 * i + 2] = w.z, words[4 * i + 3] = w.w;
    }
    arm();
    __syncwarp();
    constexpr int kSender = kRole == Role::kGrads ? C::kScoresRank : C::kGradsRank;
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.out_free[wg], kSender));
  }
  __device__ __forceinline__ void send_partial() {
    ptx::mbarrier_wait(shared.part_free[wg], part_out_phase);
    part_out_phase ^= 1;
    const uint32_t to = ptx::mapa(partial(), shared.rank - 1);
    const ptx::RemoteMbarrier full = ptx::mapa(shared.part_full[wg], shared.rank - 1);
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const uint32_t words[4] = {__float_as_uint(s[4 * i]), __float_as_uint(s[4 * i + 1]),
                                 __float_as_uint(s[4 * i + 2]), __float_as_uint(s[4 * i + 3])};
      ptx::store_async4(to + i * 2048, words, full);
    }
  }
  __device__ __forceinline__ void add_partial() {
    ptx::mbarrier_wait(shared.part_full[wg], part_in_phase);
    part_in_phase ^= 1;
#pragma unroll
    for (int i = 0; i < kScores / 4; ++i) {
      const uint4 w = ptx::load_shared4(partial() + i * 2048);
      s[4 * i] += __uint_as_float(w.x), s[4 * i + 1] += __uint_as_float(w.y);
      s[4 * i + 2] += __uint_as_float(w.z), s[4 * i + 3] += __uint_as_float(w.w);
    }
    arm_partial();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.part_free[wg], shared.rank + 1));
  }

  // ---- between the products
  __device__ __forceinline__ attn::OptionRows options() const {
    return {t.seq, t.head, t.n_q, t.n_kv, t.row + wg * 64 + row()};
  }
  __device__ __forceinline__ int key(int j) const { return (blocks.first + j) * C::kTileKv; }
  __device__ __forceinline__ void fetch(int j) { attn::fetch<C::kTileKv>(b, options(), key(j), fetched); }
  // What comes of memory and of Philox, under the products.
  __device__ __forceinline__ void prepare(int j) {
    if constexpr (C::kOptions) {
      if constexpr (kUnderProducts && (kRole == Role::kAlone || kRole == Role::kScores)) fetch(j);
      if constexpr (kRole == Role::kAlone || kRole == Role::kGrads)
        if (b.dropout.threshold) attn::dropout_bits<C::kTileKv>(b, options(), key(j) + lane % 4 * 2, keep);
    }
  }
  __device__ __forceinline__ void make_p(int j) {
    if constexpr (C::kOptions && !kUnderProducts) fetch(j);
    const bool partial = key(j) < all_see_from || key(j) + C::kTileKv > all_see_to;
    const int first = t.row + wg * 64 + row();
    attn::KeyRange range[2] = {};
    if (partial) {
      range[0] = attn::visible_keys(b, t.n_q, t.n_kv, first);
      range[1] = attn::visible_keys(b, t.n_q, t.n_kv, first + 8);
    }
    attn::probabilities<Element, C::kTileKv, C::kOptions>(b, options(), s, key(j), partial, range, rows.lse_log2,
                                                          fetched);
  }
  // What follows from the scores of block j. kAlone: dS in s. Else it is sent, and stays in `out`.
  __device__ __forceinline__ void elementwise(int j) {
    if constexpr (kRole == Role::kHelper) {
      send_partial();
    } else if constexpr (kRole == Role::kScores) {
      if constexpr (C::kCluster == 4) add_partial();
      uint32_t slope[C::kOptions ? kWords : 1];  // fp16 pairs: 11 bits of values from 0 to 1
      const bool capped = C::kOptions && b.softcap_log2 > 0.f;
      if constexpr (C::kOptions) {
        if (capped) {
#pragma unroll
          for (int i = 0; i < kWords; ++i)
            slope[i] = ptx::pack<__half>(attn::softcap_slope(b, s[2 * i]), attn::softcap_slope(b, s[2 * i + 1]));
        }
      }
      make_p(j);
      if constexpr (C::kOptions) {
        if (capped) {
#pragma unroll
          for (int i = 0; i < kWords; ++i) {
            const float2 two = ptx::unpack<__half>(slope[i]);
            s[2 * i] *= two.x;
            s[2 * i + 1] *= two.y;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) out[i] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
      await_free_inboxes();
      send(out, C::kGradsRank);
    } else if constexpr (kRole == Role::kGrads) {
      if constexpr (C::kCluster == 4) add_partial();
      attn::subtract_delta<C::kTileKv, C::kOptions>(b, s, rows.delta, keep);
      receive(out);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const float2 two = ptx::unpack<Element>(out[i]);
        out[i] = ptx::pack<Element>(two.x * s[2 * i], two.y * s[2 * i + 1]);
      }
      await_free_inboxes();
#pragma unroll
      for (int rank = 0; rank < C::kCluster; ++rank)
        if (rank != C::kGradsRank) send(out, rank);
    } else {
      attn::subtract_delta<C::kTileKv, C::kOptions>(b, dp, rows.delta, keep);
      if constexpr (C::kOptions) {
        if (b.softcap_log2 > 0.f) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) dp[i] *= attn::softcap_slope(b, s[i]);
        }
      }
      make_p(j);
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] *= dp[i];
    }
  }
  // dS of a block whose dQ is next, from here, from `elementwise` or from kGrads.
  __device__ __forceinline__ void keep_ds() {
    if constexpr (kRole == Role::kAlone) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) ds[i] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
    } else if constexpr (kRole == Role::kGrads) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) ds[i] = ptx::copy_here(out[i]);
    }
  }
  __device__ __forceinline__ void receive_ds() {
    if constexpr (kRole == Role::kScores || kRole == Role::kHelper) receive(ds);
  }

  // Scores of block j, dQ of block j - 1, what follows from the scores.
  template <bool kFirst>
  __device__ __forceinline__ void block(int j) {
    if constexpr (kRole == Role::kAlone) {
      product<false>(dp,
                     x_low + 2 * p.q_boxes * (C::kBoxBytes / 16) + wg * (p.v_boxes - p.q_boxes) * (C::kBoxBytes / 16),
                     p.v_boxes);
      product<true>(s, x_low, p.q_boxes);
    } else {
      product<false>(s, x_low, shared.part.count);
    }
    prepare(j);
    if constexpr (kFirst) {
      finish<0>();
      elementwise(j);
    } else {
      receive_ds();
      accumulate<0>();
      finish<1>();
      if constexpr (C::kSliceChunks == 2) accumulate<1>();
      if constexpr (kUnderProducts) elementwise(j);
      if constexpr (C::kSliceChunks == 2) finish<1>();
      finish<0>();
      if constexpr (!kUnderProducts) elementwise(j);
    }
    keep_ds();
  }

  __device__ __forceinline__ void tile() {
    const int first_row = t.row + wg * 64, last_row = min(first_row + 63, t.n_q - 1);
    all_see_from = attn::visible_keys(b, t.n_q, t.n_kv, last_row).begin;
    all_see_to = attn::visible_keys(b, t.n_q, t.n_kv, first_row).end;
    rows.load(b, t.q_batch, t.head, t.q_row, first_row + row(), t.n_q);
    ptx::mbarrier_wait(shared.x_full, x_phase);
    x_phase ^= 1;
    block<true>(0);
#pragma unroll 1
    for (int j = 1; j < blocks.count; ++j) block<false>(j);
    if (thread == 0) ptx::mbarrier_arrive(shared.x_empty);
    receive_ds();
    accumulate<0>();
    if constexpr (C::kSliceChunks == 2) {
      accumulate<1>();
      finish<1>();
    }
    finish<0>();
  }

  template <int r>
  __device__ __forceinline__ void store_row() {
    const int i = t.row + wg * 64 + row() + 8 * r;
    Element* to = i < t.n_q ? b.dq.at<Element>(t.q_batch, t.head, t.q_row + i) : nullptr;
    attn::store_row<Element, C::kSlice, r>(b.dq, sums, b.scale, to, shared.slice_column());
  }

  __device__ __forceinline__ void run() {
    if constexpr (kRole != Role::kAlone) arm();
    if constexpr (C::kCluster == 4 && kLeads) arm_partial();
    Scheduler<C> scheduler(blockIdx.x / C::kCluster, gridDim.x / C::kCluster);
    while (scheduler.next(b, t)) {
      blocks = blocks_of<C>(b, t);
#pragma unroll
      for (int i = 0; i < C::kSlice / 2; ++i) sums[i] = 0.f;
      if (blocks.count) tile();
      store_row<0>();
      store_row<1>();
    }
  }
};

template <class C>
__device__ __forceinline__ void consume(const Params& p, const Shared<C>& shared, int wg) {
  if constexpr (C::kCluster == 1) {
    Consumer<C, Role::kAlone>(p, shared, wg).run();
  } else {
    if (C::kCluster == 4 && !shared.leader)
      Consumer<C, Role::kHelper>(p, shared, wg).run();
    else if (shared.of_grads)
      Consumer<C, Role::kGrads>(p, shared, wg).run();
    else
      Consumer<C, Role::kScores>(p, shared, wg).run();
  }
}

template <class C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    sm90_bwd_dq(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> shared(memory, p, C::kCluster == 1 ? 0 : static_cast<int>(ptx::cluster_cta_rank()));
  const int wg = ptx::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < shared.n_stages; ++i) {
      ptx::mbarrier_init(shared.ring.full[i], 1);
      ptx::mbarrier_init(shared.ring.empty[i], 2);
    }
    ptx::mbarrier_init(shared.x_full, 1);
    ptx::mbarrier_init(shared.x_empty, 2);
    const int receivers = shared.rank == C::kGradsRank ? C::kCluster - 1 : 1;
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.in_full[i], 1);
      ptx::mbarrier_init(shared.out_free[i], 4 * max(receivers, 1));
      ptx::mbarrier_init(shared.part_full[i], 1);
      ptx::mbarrier_init(shared.part_free[i], 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (C::kCluster > 1) ptx::cluster_sync();
  if (wg == 2) {
    ptx::registers_down<C::kProducerRegisters>();
    if (ptx::uniform(threadIdx.x % 128 / 32) == 0) produce<C>(p, shared);
  } else {
    ptx::registers_up<C::kConsumerRegisters>();
    consume<C>(p, shared, wg);
  }
  if constexpr (C::kCluster > 1)
    ptx::cluster_sync();  // no CTA leaves while another may still write to its shared memory
}

}  // namespace ffpa::sm90::bwd_dq

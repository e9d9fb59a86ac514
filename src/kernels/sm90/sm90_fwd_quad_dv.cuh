// sm90_fwd_quad_dv: forward for head dims from 513 to 1024, four warpgroups of two Hopper SMs. SPDX-License-Identifier: Apache-2.0
//
// A cluster of two CTAs owns 64 query rows: Q of 128 rows would leave no shared memory to load through. Its four consumer warpgroups
// are parties: party p = 2 * rank + warpgroup computes S of its own 32 keys of every block of 128 and its own quarter of O. All four
// quarters of P lie in the shared memory of both CTAs, two written there, two copied over.
//
//  role  regs  waits on         does                                                             signals
//  TMA     24  empty, q_empty   Q of a tile; K and V of a block in stages of 16 KB               full, q_full
//  WG0,1  240  p_full           agree on what P(j) is relative to                                p_free of both CTAs
//              full, q_full     O += P(j) V, under its first chunks softmax(j+1), P(j+1) leaves  empty, q_empty
//              p_free           S(j+2) = Q K'                                                    p_full of both CTAs
//
//  barrier    count      arrives                                         protects
//  full       1 + tx     TMA                                             stage
//  empty      2          one thread of WG0, of WG1                       stage
//  q_full     1 + tx     TMA                                             q
//  q_empty    2          one thread of WG0, of WG1                       q
//  p_full[2]  65 + tx    lanes of this CTA that wrote rows, one arms;    p[buffer], rows[buffer]
//                        peer's copies
//  p_free[2]  264        threads of this CTA, the peer's 8 warps         p[buffer], rows[buffer]
//
// Shared memory: 35 KB fixed, Q 128 bytes x D_qk (to 64), the rest a ring of 16 KB stages: 4 at D_qk 1024, 6 at 768, 7 at 640.
// A stage holds 64 keys x 128 columns of K (32 keys for each warpgroup), or 16 keys x both warpgroups' columns of V.
//
// References are lagged and exact as in sm90_fwd_cluster_dv.
//
// Bound: what an SM can take in: 256 KB a block and CTA at D 1024 for 16.8 MFLOP, 494 TFLOP/s at 7.8 TB/s over all.
#pragma once

#include "attn/fwd_params.cuh"
#include "attn/options.cuh"
#include "attn/softmax.cuh"
#include "attn/store.cuh"
#include "attn/visible.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_scheduler.cuh"
#include "ptx/cluster.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzled.cuh"

namespace ffpa::sm90::fwd_quad_dv {

template <class Element_, int kDvSlice_, attn::Features kFeatures>
struct Config {
  using Element = Element_;
  static constexpr int kDvSlice = kDvSlice_;  // columns of O and V of one party
  static constexpr bool kOptions = attn::has_options(kFeatures);
  static constexpr bool kPacked = attn::has_packed(kFeatures);
  static constexpr int kCluster = 2, kParties = 4;
  static constexpr int kTileQ = 64, kTileKv = 128, kOwnKeys = kTileKv / kParties;
  static constexpr int kChunkD = 128;    // columns of K in a stage
  static constexpr int kChunkKeys = 16;  // keys of V in a stage
  static constexpr int kVChunks = kTileKv / kChunkKeys;
  static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kMaxStages = 8, kMinStages = 3;
  static constexpr uint32_t kStageBytes = 16384, kSharedLimit = 232448;
  static constexpr int kKRows = 2 * kOwnKeys;  // keys of both warpgroups
  static constexpr uint32_t kKBoxBytes = kKRows * 128, kVBoxBytes = kChunkKeys * 128, kQBoxBytes = kTileQ * 128;
  static constexpr int kVBoxes = (kDvSlice + 63) / 64;                                // of one party
  static constexpr uint32_t kPBytes = kTileQ * kOwnKeys * 2, kRowBytes = kTileQ * 4;  // of one party
  static_assert(kDvSlice % 32 == 0 && kDvSlice <= 256, "a slice is one wgmma wide and stored 32 columns at a time");
  static_assert(kKBoxBytes * (kChunkD / 64) == kStageBytes, "a K chunk fills a stage");
  static_assert(2 * kVBoxes * kVBoxBytes <= kStageBytes, "a V chunk fits a stage");
  static_assert(kOwnKeys == 32, "a row of P of one party is 64 bytes: 64-byte swizzle");
};

template <class C>
struct SharedStorage {                    // followed by n_stages stages, then Q: D_qk/64 boxes of 64 rows
  uint8_t p[2][C::kParties][C::kPBytes];  // two exchanges in turn
  float rows[2][C::kParties][C::kTileQ];  // maxima; at the end of a tile sums
};
struct Barriers {  // in the last bytes, so that the fixed part stays 34 KB
  uint64_t full[8], empty[8], q_full, q_empty, p_full[2], p_free[2];
};
template <class C>
inline constexpr uint32_t kFixedBytes = (sizeof(SharedStorage<C>) + sizeof(Barriers) + 1023) / 1024 * 1024;

struct Params {
  attn::ForwardParams f;
  int n_d_boxes;  // D_qk / 64, rounded up, at least 2
  int n_stages;
};

template <class C>
struct Shared {
  uint32_t base, stages, q;
  pipeline::Ring ring;
  ptx::Mbarrier q_full, q_empty, p_full, p_free;
  __device__ __forceinline__ Shared(uint8_t* memory, const Params& p) : base(ptx::shared_address(memory)) {
    stages = base + kFixedBytes<C>;
    q = stages + p.n_stages * C::kStageBytes;
    const uint32_t barriers = base + sizeof(SharedStorage<C>);
    ring = {
        {barriers + uint32_t(offsetof(Barriers, full))}, {barriers + uint32_t(offsetof(Barriers, empty))}, p.n_stages};
    q_full = {barriers + uint32_t(offsetof(Barriers, q_full))};
    q_empty = {barriers + uint32_t(offsetof(Barriers, q_empty))};
    p_full = {barriers + uint32_t(offsetof(Barriers, p_full))};
    p_free = {barriers + uint32_t(offsetof(Barriers, p_free))};
  }
};

// Blocks of keys that a tile visits. At least two, so that the schedule has no shorter form; the second may be all hidden.
struct Blocks {
  int first, count;
};
template <class C>
__device__ __forceinline__ Blocks blocks_of(const attn::ForwardParams& f, const pipeline::Tile& t) {
  const int last_row = min(t.row + C::kTileQ, t.n_q) - 1;
  const int begin = attn::visible_keys(f, t.n_q, t.n_kv, t.row).begin / C::kTileKv;
  const int end = (attn::visible_keys(f, t.n_q, t.n_kv, last_row).end + C::kTileKv - 1) / C::kTileKv;
  return {begin, end > begin ? max(end - begin, 2) : 0};
}

template <class C>
__device__ __forceinline__ void produce(const Params& p, const Shared<C>& shared, int rank) {
  const attn::ForwardParams& f = p.f;
  const bool leader = ptx::elect_one();
  pipeline::TileScheduler<C::kTileQ, C::kPacked, attn::ForwardParams> scheduler(blockIdx.x / C::kCluster,
                                                                                gridDim.x / C::kCluster);
  pipeline::Tile t;
  pipeline::RingPlace place;
  uint32_t q_phase = 0;
  while (scheduler.next(f, t)) {
    const Blocks blocks = blocks_of<C>(f, t);
    if (!blocks.count) continue;
    if (leader) {
      ptx::mbarrier_wait(shared.q_empty, q_phase ^ 1);
      ptx::mbarrier_arrive_expect(shared.q_full, p.n_d_boxes * C::kQBoxBytes);
      for (int box = 0; box < p.n_d_boxes; ++box)
        ptx::tma_load(shared.q + box * C::kQBoxBytes, &f.q, box * 64, t.q_row + t.row, t.head * f.q_head_step,
                      t.q_batch * f.q_batch_step, shared.q_full);
      const int head = t.head / f.group;
      const attn::KvCoordinates k =
          attn::kv_coordinates(f, t.kv_batch, t.kv_row, t.n_kv, head, f.k_batch_rows, f.k_batch_step, f.k_head_step);
      const attn::KvCoordinates v =
          attn::kv_coordinates(f, t.kv_batch, t.kv_row, t.n_kv, head, f.v_batch_rows, f.v_batch_step, f.v_head_step);
      const auto load_k = [&](int block) {
        for (int c = 0; 2 * c < p.n_d_boxes; ++c) {
          const int boxes = min(p.n_d_boxes - 2 * c, 2);
          const int stage = shared.ring.fill(place, boxes * C::kKBoxBytes);
          for (int box = 0; box < boxes; ++box)
            ptx::tma_load(shared.stages + stage * C::kStageBytes + box * C::kKBoxBytes, &f.k, c * C::kChunkD + box * 64,
                          k.row + block * C::kTileKv + rank * C::kKRows, k.third, k.fourth, k.head,
                          shared.ring.full[stage]);
        }
      };
      const auto load_v = [&](int block) {
        for (int c = 0; c < C::kVChunks; ++c) {
          const int stage = shared.ring.fill(place, 2 * C::kVBoxes * C::kVBoxBytes);
          for (int box = 0; box < 2 * C::kVBoxes; ++box)
            ptx::tma_load(shared.stages + stage * C::kStageBytes + box * C::kVBoxBytes, &f.v,
                          (2 * rank + box / C::kVBoxes) * C::kDvSlice + box % C::kVBoxes * 64,
                          v.row + block * C::kTileKv + c * C::kChunkKeys, v.third, v.fourth, v.head,
                          shared.ring.full[stage]);
        }
      };
      load_k(blocks.first);
      load_k(blocks.first + 1);
      for (int j = 0; j < blocks.count; ++j) {
        load_v(blocks.first + j);
        if (j + 2 < blocks.count) load_k(blocks.first + j + 2);
      }
    }
    q_phase ^= 1;
    __syncwarp();
  }
}

template <class C>
struct Consumer {
  using Element = typename C::Element;
  using Storage = SharedStorage<C>;
  static constexpr float kBump = 14.f;  // P never exceeds 2^14: fp16 holds 2^15.99
  static constexpr int kScores = C::kOwnKeys / 2, kOutputs = C::kDvSlice / 2;

  const Params& p;
  const attn::ForwardParams& f;
  const Shared<C> shared;
  const int wg, rank, party, warp, lane, thread;
  pipeline::RingPlace place;
  int oldest = 0;  // stage to be released next
  uint32_t q_phase = 0;
  int sent = 0, seen = 0;  // exchanges so far: the buffer is the lowest bit, the phase the next
  uint32_t q_low, k_low, v_low, p_low;
  float o[kOutputs], s[kScores];
  uint32_t p_words[kScores / 2];
  uint32_t keep[1] = {0};  // dropout
  // Per row, base 2. ref: agreed by all parties before the block in work. used: what the own P and sum are relative to. base: O.
  float ref[2], used[2], base[2], top[2], sum[2];
  pipeline::Tile t;
  Blocks blocks;
  int all_see_from, all_see_to;  // keys that all 64 rows see

  __device__ __forceinline__ Consumer(const Params& params, const Shared<C>& sh, int wg_idx, int cta_rank)
      : p(params),
        f(params.f),
        shared(sh),
        wg(wg_idx),
        rank(cta_rank),
        party(2 * cta_rank + wg_idx),
        warp(ptx::uniform(threadIdx.x % 128 / 32)),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128) {
    q_low = tile::k_major(shared.q);
    k_low = tile::k_major(shared.stages + wg * C::kOwnKeys * 128);
    v_low = tile::mn_major(shared.stages + wg * C::kVBoxes * C::kVBoxBytes, C::kVBoxBytes);
    p_low = tile::k_major(shared.base);
  }
  __device__ __forceinline__ int row() const {
    return warp * 16 + lane / 4;
  }  // the first of the thread's two; the other is +8
  __device__ __forceinline__ uint32_t p_slot(int buffer, int of) const {
    return shared.base + offsetof(Storage, p) + (buffer * C::kParties + of) * C::kPBytes;
  }
  __device__ __forceinline__ uint32_t row_slot(int buffer, int of) const {
    return shared.base + offsetof(Storage, rows) + (buffer * C::kParties + of) * C::kRowBytes;
  }

  // ---- products. Each call adds one committed group of wgmma.
  __device__ __forceinline__ void release() {
    if (thread == 0) ptx::mbarrier_arrive(shared.ring.empty[oldest]);
    if (++oldest == p.n_stages) oldest = 0;
  }
  template <bool kFirst, int kSteps = C::kChunkD / 16>
  __device__ __forceinline__ void qk(int chunk) {
    const uint32_t stage = shared.ring.acquire(place);
    const uint32_t q = q_low + chunk * (2 * C::kQBoxBytes / 16), k = k_low + stage * (C::kStageBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < kSteps; ++x)
      ptx::Wgmma<C::kOwnKeys>::template ss<Element, 0>(
          s, tile::descriptor(q + x / 4 * (C::kQBoxBytes / 16) + x % 4 * tile::kKMajorStep),
          tile::descriptor(k + x / 4 * (C::kKBoxBytes / 16) + x % 4 * tile::kKMajorStep), !kFirst || x);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void qk_rest() {  // all chunks but the first; drained
    for (int c = 1; c < p.n_d_boxes / 2; ++c) {
      qk<false>(c);
      ptx::wgmma_wait<1>();
      release();
    }
    if (p.n_d_boxes & 1) {
      qk<false, 4>(p.n_d_boxes / 2);
      ptx::wgmma_wait<1>();
      release();
    }
    ptx::wgmma_wait<0>();
    release();
  }
  template <int kChunk>
  __device__ __forceinline__ void pv(int buffer) {
    const uint32_t stage = shared.ring.acquire(place);
    const uint32_t v = v_low + stage * (C::kStageBytes / 16);
    const uint32_t a = p_low + (buffer * C::kParties + kChunk / 2) * (C::kPBytes / 16) + kChunk % 2 * tile::kKMajorStep;
    ptx::wgmma_fence();
    ptx::Wgmma<C::kDvSlice>::template ss<Element, 1>(o, ptx::matrix_descriptor(a, tile::kDescriptorHigh64),
                                                     tile::descriptor(v), 1);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ attn::OptionRows options() const { return {t.seq, t.head, t.n_q, t.n_kv, t.row + row()}; }

  // ---- softmax of block j: S to P in the shared memory of both CTAs
  __device__ __forceinline__ void softmax(int j) {
    const int key = (blocks.first + j) * C::kTileKv + party * C::kOwnKeys, column = key + lane % 4 * 2;
    if constexpr (C::kOptions) {
      attn::FetchedWords<C::kOwnKeys> fetched;
      attn::fetch<C::kOwnKeys>(f, options(), key, fetched);
      attn::apply_options<Element, C::kOwnKeys>(f, options(), s, key, fetched);
      if (f.dropout.threshold) attn::dropout_bits<C::kOwnKeys>(f, options(), column, keep);
    }
    if (key < all_see_from || key + C::kOwnKeys > all_see_to) {
      const int first = t.row + row();
      const attn::KeyRange range[2] = {attn::visible_keys(f, t.n_q, t.n_kv, first),
                                       attn::visible_keys(f, t.n_q, t.n_kv, first + 8)};
      attn::hide<C::kOwnKeys>(s, column, range);
    }
    const float c = C::kOptions ? 1.f : f.scale_log2;
    float maximum[2], shift[2];
    attn::row_maxima<C::kOwnKeys>(s, maximum[0], maximum[1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], maximum[r] * c);
      const float next = attn::follow(ref[r], top[r], kBump);
      sum[r] *= attn::power(used[r], next);
      used[r] = next;
      shift[r] = attn::shift_of(next);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = ptx::exp2_fast(fmaf(s[i], c, -shift[i / 2 % 2]));
      sum[i / 2 % 2] += s[i];
    }
    if constexpr (C::kOptions)
      if (f.dropout.threshold) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = keep[0] >> i & 1u ? s[i] : 0.f;
      }
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) p_words[i] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
    const int buffer = begin_exchange();
    const int lane_row =
        warp * 16 + (lane / 8 & 1) * 8 + lane % 8;  // the row whose address this lane gives to stmatrix
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      ptx::stmatrix_x4(p_slot(buffer, party) + lane_row * 64 + (((i + (lane >> 4)) ^ (lane_row >> 1 & 3)) << 4),
                       p_words + 2 * i);
    end_exchange<true>(buffer, top);
  }

  // ---- exchange, a warp at a time: 16 rows
  __device__ __forceinline__ int begin_exchange() {
    const int buffer = sent & 1;
    ptx::mbarrier_wait(shared.p_free[buffer], (sent >> 1 & 1) ^ 1);
    if (lane == 0) ptx::bulk_wait_read();
    __syncwarp();
    ++sent;
    return buffer;
  }
  template <bool kWithP>
  __device__ __forceinline__ void end_exchange(int buffer, const float (&x)[2]) {
    if (lane % 4 == 0) {
      ptx::store_shared(row_slot(buffer, party) + row() * 4, x[0]);
      ptx::store_shared(row_slot(buffer, party) + (row() + 8) * 4, x[1]);
    }
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      const int peer = rank ^ 1;
      const ptx::RemoteMbarrier full = ptx::mapa(shared.p_full[buffer], peer);
      if constexpr (kWithP) {
        const uint32_t from = p_slot(buffer, party) + warp * (C::kPBytes / 4);
        ptx::bulk_copy(ptx::mapa(from, peer), from, C::kPBytes / 4, full);
      }
      const uint32_t from = row_slot(buffer, party) + warp * (C::kRowBytes / 4);
      ptx::bulk_copy(ptx::mapa(from, peer), from, C::kRowBytes / 4, full);
      ptx::bulk_commit();
      if (thread == 0 && wg == 0)
        ptx::mbarrier_arrive_expect(shared.p_full[buffer], 2 * C::kRowBytes + (kWithP ? 2 * C::kPBytes : 0));
    }
    if (lane % 4 == 0) ptx::mbarrier_arrive(shared.p_full[buffer]);
    __syncwarp();
  }
  __device__ __forceinline__ int await_exchange() {
    const int buffer = seen & 1;
    ptx::mbarrier_wait(shared.p_full[buffer], seen >> 1 & 1);
    ++seen;
    return buffer;
  }
  __device__ __forceinline__ void free_exchange(int buffer) {
    ptx::mbarrier_arrive(shared.p_free[buffer]);
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.p_free[buffer], rank ^ 1));
    __syncwarp();
  }
  // All quarters of P(j) have arrived, each relative to follow(ref, its party's maximum, kBump). Bring them, O and the sum to the largest
  // of the four, then let the reference follow the maximum of all. Both CTAs and both warpgroups come to the same values.
  __device__ __forceinline__ int agree() {
    const int buffer = await_exchange();
    float theirs[C::kParties][2], both[2] = {-INFINITY, -INFINITY}, maximum[2] = {-INFINITY, -INFINITY}, alpha[2];
#pragma unroll
    for (int q = 0; q < C::kParties; ++q)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float x = ptx::load_shared(row_slot(buffer, q) + (row() + 8 * r) * 4);
        theirs[q][r] = attn::follow(ref[r], x, kBump);
        both[r] = fmaxf(both[r], theirs[q][r]);
        maximum[r] = fmaxf(maximum[r], x);
      }
    bool differ = false;
#pragma unroll
    for (int q = 0; q < C::kParties; ++q) differ = differ || theirs[q][0] != both[0] || theirs[q][1] != both[1];
    if (__any_sync(~0u, differ)) {
      if (lane == 0) ptx::bulk_wait_read();  // the own P has left
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2;
           ++half) {  // this warpgroup's own party and the one opposite; the other's sees to the rest
        const int q = 2 * half + wg;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float x = attn::power(wg ? theirs[2 * half + 1][r] : theirs[2 * half][r], both[r]);
          const uint32_t at = p_slot(buffer, q) + warp * (C::kPBytes / 4) + r * 512 + lane * 16;
          uint4 w = ptx::load_shared4(at);
          scale_word(w.x, x);
          scale_word(w.y, x);
          scale_word(w.z, x);
          scale_word(w.w, x);
          ptx::store_shared4(at, w);
        }
      }
      ptx::fence_async_shared();
      ptx::named_sync(1 + warp, 64);  // the same rows' warp of the other warpgroup decides alike
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      alpha[r] = attn::power(base[r], both[r]);
      sum[r] *= attn::power(used[r], both[r]);
      base[r] = used[r] = both[r];
      ref[r] = attn::follow(both[r], maximum[r], attn::kLag);
    }
    if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= alpha[i / 2 % 2];
    }
    return buffer;
  }
  static __device__ __forceinline__ void scale_word(uint32_t& word, float x) {
    const float2 two = ptx::unpack<Element>(word);
    word = ptx::pack<Element>(two.x * x, two.y * x);
  }

  // ---- one block. On entry S(j+1) is ready and P(j) on its way; no product is in flight.
  template <bool kMore, bool kMore2>
  __device__ __forceinline__ void block(int j) {
    const int buffer = agree();
    pv<0>(buffer);
    pv<1>(buffer);
    if constexpr (kMore) softmax(j + 1);
    ptx::wgmma_wait<1>();
    release();
    pv_rest<2>(buffer);
    if constexpr (kMore2) {
      qk<true>(0);
      ptx::wgmma_wait<1>();
      release();
      free_exchange(buffer);
      qk_rest();
    } else {
      ptx::wgmma_wait<0>();
      release();
      free_exchange(buffer);
    }
  }
  template <int kChunk>
  __device__ __forceinline__ void pv_rest(int buffer) {
    if constexpr (kChunk < C::kVChunks) {
      pv<kChunk>(buffer);
      ptx::wgmma_wait<1>();
      release();
      pv_rest<kChunk + 1>(buffer);
    }
  }

  __device__ __forceinline__ void tile_begin() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ref[r] = used[r] = base[r] = top[r] = -INFINITY;
      sum[r] = 0.f;
    }
    const int last_row = min(t.row + 63, t.n_q - 1);
    all_see_from = attn::visible_keys(f, t.n_q, t.n_kv, last_row).begin;
    all_see_to = attn::visible_keys(f, t.n_q, t.n_kv, t.row).end;
    if (!blocks.count) return;
    ptx::mbarrier_wait(shared.q_full, q_phase);
    q_phase ^= 1;
    qk<true>(0);
    qk_rest();
    softmax(0);
    qk<true>(0);
    qk_rest();
  }

  // Sums of all parties' keys, as one more exchange.
  __device__ __forceinline__ void tile_end() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
    end_exchange<false>(begin_exchange(), sum);
    const int buffer = await_exchange();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = 0.f;
#pragma unroll
      for (int q = 0; q < C::kParties; ++q) sum[r] += ptx::load_shared(row_slot(buffer, q) + (row() + 8 * r) * 4);
    }
    free_exchange(buffer);
  }

  template <int r>
  __device__ __forceinline__ void store_row(float sink) {
    const int i = t.row + row() + 8 * r;
    const attn::RowEnd end = attn::end_row(base[r], sum[r], sink, C::kOptions ? f.keep_scale : 1.f);
    Element* to = nullptr;
    if (i < t.n_q) {
      to = f.o.at<Element>(t.q_batch, t.head, t.q_row + i);
      if (f.lse.data && party == 0 && lane % 4 == 0) *f.lse.at(t.q_batch, t.head, t.q_row + i) = end.lse;
    }
    attn::store_row<Element, C::kDvSlice, r>(f.o, o, end.factor, to, party * C::kDvSlice);
  }

  __device__ __forceinline__ void run() {
    pipeline::TileScheduler<C::kTileQ, C::kPacked, attn::ForwardParams> scheduler(blockIdx.x / C::kCluster,
                                                                                  gridDim.x / C::kCluster);
    while (scheduler.next(f, t)) {
      blocks = blocks_of<C>(f, t);
      tile_begin();
      if (blocks.count) {
#pragma unroll 1
        for (int j = 0; j < blocks.count - 2; ++j) block<true, true>(j);
        if (thread == 0) ptx::mbarrier_arrive(shared.q_empty);
        block<true, false>(blocks.count - 2);
        block<false, false>(blocks.count - 1);
        tile_end();
      }
      const float sink = attn::sink_log2<Element>(f, t.head, t.nobodys);
      store_row<0>(sink);
      store_row<1>(sink);
    }
  }
};

template <class C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    sm90_fwd_quad_dv(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> shared(memory, p);
  const int rank = static_cast<int>(ptx::cluster_cta_rank());
  const int wg = ptx::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.n_stages; ++i) {
      ptx::mbarrier_init(shared.ring.full[i], 1);
      ptx::mbarrier_init(shared.ring.empty[i], 2);
    }
    ptx::mbarrier_init(shared.q_full, 1);
    ptx::mbarrier_init(shared.q_empty, 2);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(shared.p_full[i], 65);
      ptx::mbarrier_init(shared.p_free[i], 264);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cluster_sync();
  if (wg == 2) {
    ptx::registers_down<C::kProducerRegisters>();
    if (ptx::uniform(threadIdx.x % 128 / 32) == 0) produce<C>(p, shared, rank);
  } else {
    ptx::registers_up<C::kConsumerRegisters>();
    Consumer<C>(p, shared, wg, rank).run();
  }
  ptx::cluster_sync();  // no CTA leaves while the other may still write to its shared memory
}

}  // namespace ffpa::sm90::fwd_quad_dv

// sm90_fwd_cluster_dv: forward for head dims from 257 to 512 (D_qk to 576) on pairs of Hopper SMs. SPDX-License-Identifier: Apache-2.0
//
// A cluster of two CTAs owns 128 query rows. Keys come in blocks of 128. CTA r computes S of its own 64 keys of every block
// (S[128, 64] = Q[128, D_qk] K[64, D_qk]') and its own slice of O (O[128, D_v/2] += P[128, 128] V[128, D_v/2]); the halves of P
// cross over. So no product is computed twice, and a block costs each SM 64 D_qk + 128 D_v/2 elements of loads for 128 rows.
//
//  role  regs  waits on            does                                                       signals
//  TMA     24  empty, q_empty      Q of a tile; K and V of a block in chunks of one stage     full, q_full
//  WG0,1  240  full, q_full        64 rows each. Entering block j, S(j+1) is in registers, P(j) in registers and on its way over:
//              p_full (P, max)       P(j) V: own half from registers, the peer's from p_in; softmax(j+1) between the chunks
//              p_free (peer's p_in)  S(j+2) = Q K'; after its first chunk P(j+1) leaves      empty, q_empty, p_free(peer)
//              l_full                at the end: sums of the other half of the keys          l_full(peer), p_full(peer), by bytes
//
//  barrier  count      arrives                      protects
//  full     1 + tx     TMA                          stage
//  empty    2          one thread of WG0, of WG1    stage
//  q_full   1 + tx     TMA                          q
//  q_empty  2          one thread of WG0, of WG1    q
//  p_full   1 + tx     own WG arms; peer's copies   p_in[wg], max_in[wg]
//  p_free   4          the peer's warps, remote     the peer's p_in[wg], max_in[wg]
//  l_full   1 + tx     own WG arms; peer's copies   sum_in[wg]
//
// Shared memory: 35 KB fixed, Q 256 bytes x D_qk (to 64), the rest a ring of 16 KB stages: 4 at D_qk 512, 6 at 384, 3 at 576.
// A stage holds 64 keys x 128 columns of K, or 32 keys x D_v/2 columns of V.
//
// The reference of a row (what its exponents are relative to, a whole power of two) is lagged: block j+1 is exponentiated against
// what both CTAs knew after block j, so no exchange stands between S and exp. Exact for any rise: where a half's maximum
// exceeds the reference by more than kBump powers, that half moves its own reference; the peer sees the same maximum with P, and
// `agree` brings the halves together (rare, except in a tile's first block). Powers of two scale without rounding.
//
// Bound: the tensor cores (16.8 MFLOP a block and CTA at D 512) against 128 KB of loads a block from L2.
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

namespace ffpa::sm90::fwd_cluster_dv {

template <class Element_, int kDvSlice_, attn::Features kFeatures>
struct Config {
  using Element = Element_;
  static constexpr int kDvSlice = kDvSlice_;  // columns of O and V of one CTA
  static constexpr bool kOptions = attn::has_options(kFeatures);
  static constexpr bool kPacked = attn::has_packed(kFeatures);
  static constexpr int kCluster = 2;
  static constexpr int kTileQ = 128, kTileKv = 128, kOwnKeys = kTileKv / kCluster;
  static constexpr int kChunkD = 128;    // columns of K in a stage
  static constexpr int kChunkKeys = 32;  // keys of V in a stage
  static constexpr int kVChunks = kTileKv / kChunkKeys;
  static constexpr int kThreads = 384, kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kMaxStages = 8, kMinStages = 3;
  static constexpr uint32_t kStageBytes = 16384;
  static constexpr uint32_t kKBoxBytes = kOwnKeys * 128, kVBoxBytes = kChunkKeys * 128, kQBoxBytes = 64 * 128;
  static constexpr int kVBoxes = (kDvSlice + 63) / 64;
  static constexpr uint32_t kVChunkBytes = kVBoxes * kVBoxBytes;
  static constexpr uint32_t kPBytes = 64 * kOwnKeys * 2,
                            kRowBytes = 64 * 4;  // of one warpgroup: P of its rows, a float a row
  static constexpr uint32_t kSharedLimit = 232448;
  static_assert(kDvSlice % 32 == 0 && kDvSlice <= 256, "a slice is one wgmma wide and stored 32 columns at a time");
  static_assert(kKBoxBytes * (kChunkD / 64) == kStageBytes, "a K chunk fills a stage");
  static_assert(kVChunkBytes <= kStageBytes, "a V chunk fits a stage");
  static_assert(kOwnKeys == 64, "P of a warpgroup is one box of 64 columns");
  static_assert((2 * kConsumerRegisters + kProducerRegisters) * 128 <= 65536, "registers of an SM");
};

template <class C>
struct SharedStorage {  // followed by n_stages stages, then Q: [warpgroup][D_qk/64] boxes of 64 rows
  uint8_t p_in[2][C::kPBytes], p_out[2][C::kPBytes];
  float max_in[2][64], max_out[2][64], sum_in[2][64];
  uint64_t full[C::kMaxStages], empty[C::kMaxStages], q_full, q_empty, p_full[2], p_free[2], l_full[2];
};
template <class C>
inline constexpr uint32_t kFixedBytes = (sizeof(SharedStorage<C>) + 1023) / 1024 * 1024;

struct Params {
  attn::ForwardParams f;
  int n_d_boxes;  // D_qk / 64, rounded up, at least 2
  int n_stages;
};

// Addresses of everything in shared memory.
template <class C>
struct Shared {
  uint32_t base, stages, q;
  pipeline::Ring ring;
  ptx::Mbarrier q_full, q_empty, p_full, p_free, l_full;
  __device__ __forceinline__ Shared(uint8_t* memory, const Params& p) : base(ptx::shared_address(memory)) {
    using S = SharedStorage<C>;
    stages = base + kFixedBytes<C>;
    q = stages + p.n_stages * C::kStageBytes;
    ring = {{base + uint32_t(offsetof(S, full))}, {base + uint32_t(offsetof(S, empty))}, p.n_stages};
    q_full = {base + uint32_t(offsetof(S, q_full))};
    q_empty = {base + uint32_t(offsetof(S, q_empty))};
    p_full = {base + uint32_t(offsetof(S, p_full))};
    p_free = {base + uint32_t(offsetof(S, p_free))};
    l_full = {base + uint32_t(offsetof(S, l_full))};
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
      ptx::mbarrier_arrive_expect(shared.q_full, 2 * p.n_d_boxes * C::kQBoxBytes);
      for (int wg = 0; wg < 2; ++wg)
        for (int box = 0; box < p.n_d_boxes; ++box)
          ptx::tma_load(shared.q + (wg * p.n_d_boxes + box) * C::kQBoxBytes, &f.q, box * 64, t.q_row + t.row + wg * 64,
                        t.head * f.q_head_step, t.q_batch * f.q_batch_step, shared.q_full);
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
                          k.row + block * C::kTileKv + rank * C::kOwnKeys, k.third, k.fourth, k.head,
                          shared.ring.full[stage]);
        }
      };
      const auto load_v = [&](int block) {  // the keys of the own half of P first
        for (int c = 0; c < C::kVChunks; ++c) {
          const int half = c < C::kVChunks / 2 ? rank : rank ^ 1;
          const int key = block * C::kTileKv + half * C::kOwnKeys + c % (C::kVChunks / 2) * C::kChunkKeys;
          const int stage = shared.ring.fill(place, C::kVChunkBytes);
          for (int box = 0; box < C::kVBoxes; ++box)
            ptx::tma_load(shared.stages + stage * C::kStageBytes + box * C::kVBoxBytes, &f.v,
                          rank * C::kDvSlice + box * 64, v.row + key, v.third, v.fourth, v.head,
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
  static constexpr float kBump = 14.f;  // P never exceeds 2^14: fp16 holds 2^15.99
  static constexpr int kScores = C::kOwnKeys / 2, kOutputs = C::kDvSlice / 2;

  const Params& p;
  const attn::ForwardParams& f;
  const Shared<C> shared;
  const int wg, rank, warp, lane, thread;
  pipeline::RingPlace place;
  int oldest = 0;  // stage to be released next
  uint32_t p_phase = 0, q_phase = 0, l_phase = 0;
  uint32_t free_phase = 1;  // of p_free: the first wait passes
  uint32_t q_low, k_low, v_low, p_in_low;
  float o[kOutputs], s[kScores];
  uint32_t p_words[kScores / 2];            // P of the own keys, as A fragments
  attn::FetchedWords<C::kOwnKeys> fetched;  // options of the next block
  uint32_t drawn = 0;                       // dropout: bit i, keep element i
  // Per row, base 2. ref: agreed by both CTAs before the block in work. used: what the own P and o are relative to.
  float ref[2], used[2], top[2], sum[2], alpha[2];
  pipeline::Tile t;
  Blocks blocks;
  int all_see_from, all_see_to;  // keys that all 64 rows see

  __device__ __forceinline__ Consumer(const Params& params, const Shared<C>& sh, int wg_idx, int cta_rank)
      : p(params),
        f(params.f),
        shared(sh),
        wg(wg_idx),
        rank(cta_rank),
        warp(ptx::uniform(threadIdx.x % 128 / 32)),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128) {
    q_low = tile::k_major(shared.q + wg * p.n_d_boxes * C::kQBoxBytes);
    k_low = tile::k_major(shared.stages);
    v_low = tile::mn_major(shared.stages, C::kVBoxBytes);
    p_in_low = tile::k_major(p_in());
  }

  using Storage = SharedStorage<C>;
  __device__ __forceinline__ uint32_t p_in() const { return shared.base + offsetof(Storage, p_in) + wg * C::kPBytes; }
  __device__ __forceinline__ uint32_t p_out() const { return shared.base + offsetof(Storage, p_out) + wg * C::kPBytes; }
  __device__ __forceinline__ uint32_t max_in() const {
    return shared.base + offsetof(Storage, max_in) + wg * C::kRowBytes;
  }
  __device__ __forceinline__ uint32_t max_out() const {
    return shared.base + offsetof(Storage, max_out) + wg * C::kRowBytes;
  }
  __device__ __forceinline__ uint32_t sum_in() const {
    return shared.base + offsetof(Storage, sum_in) + wg * C::kRowBytes;
  }
  __device__ __forceinline__ int row() const {
    return warp * 16 + lane / 4;
  }  // the first of the thread's two; the other is +8

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
  // Chunks from `begin` on, the last one narrower where D_qk has an odd number of boxes; each waits for the one before it.
  __device__ __forceinline__ void qk_from(int begin, int j) {
    for (int c = begin; c < p.n_d_boxes / 2; ++c) {
      qk<false>(c);
      draw(j, c);
      ptx::wgmma_wait<1>();
      release();
    }
    if (p.n_d_boxes & 1) {
      qk<false, 4>(p.n_d_boxes / 2);
      ptx::wgmma_wait<1>();
      release();
    }
  }
  // The dropout of block j, a quarter of it under each of the first four chunks of its Q K'; what is left under the last of fewer.
  __device__ __forceinline__ void draw(int j, int chunk) {
    if constexpr (C::kOptions)
      if (f.dropout.threshold && chunk < 4) {
        const int end = chunk + 1 == p.n_d_boxes / 2 ? 4 : chunk + 1;
        if (chunk == 0) drawn = 0;
        for (int quarter = chunk; quarter < end; ++quarter)
          drawn |= attn::dropout_quarter(f, options(), own_key(j), quarter & 1, quarter >> 1);
      }
  }
  template <int kChunk>
  __device__ __forceinline__ void pv() {  // chunks 0, 1: own keys; 2, 3: the peer's
    const uint32_t stage = shared.ring.acquire(place);
    const uint32_t v = v_low + stage * (C::kStageBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < C::kChunkKeys / 16; ++x) {
      constexpr int kHalf = C::kVChunks / 2;
      const int step = kChunk % kHalf * (C::kChunkKeys / 16) + x;
      if constexpr (kChunk < kHalf)
        ptx::Wgmma<C::kDvSlice>::template rs<Element, 1>(o, p_words + 4 * step,
                                                         tile::descriptor(v + x * tile::kMnMajorStep), 1);
      else
        ptx::Wgmma<C::kDvSlice>::template ss<Element, 1>(o, tile::descriptor(p_in_low + step * tile::kKMajorStep),
                                                         tile::descriptor(v + x * tile::kMnMajorStep), 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ attn::OptionRows options() const {
    return {t.seq, t.head, t.n_q, t.n_kv, t.row + wg * 64 + row()};
  }

  // ---- softmax
  // Logits (with options: in base 2), invisible ones -inf; then the running maximum of the own half, in base 2.
  __device__ __forceinline__ int own_key(int j) const { return (blocks.first + j) * C::kTileKv + rank * C::kOwnKeys; }
  __device__ __forceinline__ void fetch_options(int j) {
    if constexpr (C::kOptions) attn::fetch<C::kOwnKeys>(f, options(), own_key(j), fetched);
  }
  __device__ __forceinline__ void apply_options(int j) {
    if constexpr (C::kOptions) attn::apply_options<Element, C::kOwnKeys>(f, options(), s, own_key(j), fetched);
  }
  __device__ __forceinline__ void score(int j) {
    const int key = own_key(j), column = key + lane % 4 * 2;
    if (key < all_see_from || key + C::kOwnKeys > all_see_to) {
      const int first = t.row + wg * 64 + row();
      const attn::KeyRange range[2] = {attn::visible_keys(f, t.n_q, t.n_kv, first),
                                       attn::visible_keys(f, t.n_q, t.n_kv, first + 8)};
      attn::hide<C::kOwnKeys>(s, column, range);
    }
    float a, b;
    attn::row_maxima<C::kOwnKeys>(s, a, b);
    top[0] = fmaxf(top[0], a * exponent_scale());
    top[1] = fmaxf(top[1], b * exponent_scale());
  }
  __device__ __forceinline__ float exponent_scale() const { return C::kOptions ? 1.f : f.scale_log2; }
  // What a half's P is relative to, given its running maximum: both CTAs compute this for both halves.
  static __device__ __forceinline__ float bumped(float reference, float maximum) {
    return attn::follow(reference, maximum, kBump);
  }
  // Before exponentials: from the reference that o is relative to, `ref`, to the one that the next P will use.
  __device__ __forceinline__ void choose_reference() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float next = bumped(ref[r], top[r]);
      alpha[r] = attn::power(used[r], next);
      used[r] = next;
      sum[r] *= alpha[r];
    }
  }
  // Exponentials of 32 of the own 64 keys, packed for the own P V and staged for the peer's.
  template <int kHalf>
  __device__ __forceinline__ void exponentials() {
    const float c = exponent_scale(), a = attn::shift_of(used[0]), b = attn::shift_of(used[1]);
    const int lane_row =
        warp * 16 + (lane / 8 & 1) * 8 + lane % 8;  // the row whose address this lane gives to stmatrix
#pragma unroll
    for (int i = 4 * kHalf; i < 4 * kHalf + 4; ++i) {
      float e[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) e[x] = ptx::exp2_fast(fmaf(s[4 * i + x], c, x < 2 ? -a : -b));
      sum[0] += e[0] + e[1];
      sum[1] += e[2] + e[3];
      if constexpr (C::kOptions)
        if (f.dropout.threshold)
#pragma unroll
          for (int x = 0; x < 4; ++x) e[x] = drawn >> (4 * i + x) & 1u ? e[x] : 0.f;
      p_words[2 * i] = ptx::pack<Element>(e[0], e[1]);
      p_words[2 * i + 1] = ptx::pack<Element>(e[2], e[3]);
    }
#pragma unroll
    for (int i = 4 * kHalf; i < 4 * kHalf + 4; i += 2)
      ptx::stmatrix_x4(tile::box_piece(p_out(), lane_row, i + (lane >> 4)), p_words + 2 * i);
  }
  __device__ __forceinline__ void rescale() {
    if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= alpha[i / 2 % 2];
    }
  }

  // ---- exchange of P and maxima, a warp at a time: 16 rows
  __device__ __forceinline__ void reuse_out() {
    if (lane == 0) ptx::bulk_wait_read();
    __syncwarp();
  }
  __device__ __forceinline__ void stage_rows(const float (&x)[2]) {
    if (lane % 4 == 0) {
      ptx::store_shared(max_out() + row() * 4, x[0]);
      ptx::store_shared(max_out() + (row() + 8) * 4, x[1]);
    }
    ptx::fence_async_shared();
    __syncwarp();
  }
  __device__ __forceinline__ void ship() {
    if (lane == 0) {
      const int peer = rank ^ 1;
      ptx::mbarrier_wait(shared.p_free[wg], free_phase);
      const ptx::RemoteMbarrier full = ptx::mapa(shared.p_full[wg], peer);
      ptx::bulk_copy(ptx::mapa(p_in() + warp * 2048, peer), p_out() + warp * 2048, 2048, full);
      ptx::bulk_copy(ptx::mapa(max_in() + warp * 64, peer), max_out() + warp * 64, 64, full);
      ptx::bulk_commit();
    }
    free_phase ^= 1;
    __syncwarp();
  }
  __device__ __forceinline__ void arm_p() {
    if (thread == 0) ptx::mbarrier_arrive_expect(shared.p_full[wg], C::kPBytes + C::kRowBytes);
  }
  __device__ __forceinline__ void free_p() {
    if (lane == 0) ptx::mbarrier_arrive(ptx::mapa(shared.p_free[wg], rank ^ 1));
  }
  // P of the peer has arrived, relative to bumped(ref, its maximum). Bring o (which P of the own half is already in) and p_in to the
  // larger of the two references, then let the reference follow the maximum of both halves.
  __device__ __forceinline__ void agree() {
    ptx::mbarrier_wait(shared.p_full[wg], p_phase);
    p_phase ^= 1;
    float peer_used[2], maximum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float peer = ptx::load_shared(max_in() + (row() + 8 * r) * 4);
      peer_used[r] = bumped(ref[r], peer);
      maximum[r] = fmaxf(top[r], peer);
    }
    if (__any_sync(~0u, peer_used[0] != used[0] || peer_used[1] != used[1])) {
      float peer_factor[2], factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float both = fmaxf(used[r], peer_used[r]);
        factor[r] = attn::power(used[r], both);
        peer_factor[r] = attn::power(peer_used[r], both);
        sum[r] *= factor[r];
        used[r] = both;
      }
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 16 rows of 8 pieces, 4 rows a step
        const float x = __shfl_sync(~0u, peer_factor[i / 2], (i % 2 * 4 + lane / 8) * 4);
        const uint32_t at = p_in() + warp * 2048 + i * 512 + lane * 16;
        uint4 w = ptx::load_shared4(at);
        scale_word(w.x, x);
        scale_word(w.y, x);
        scale_word(w.z, x);
        scale_word(w.w, x);
        ptx::store_shared4(at, w);
      }
      ptx::fence_async_shared();
      __syncwarp();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) ref[r] = attn::follow(used[r], maximum[r], attn::kLag);
  }

  static __device__ __forceinline__ void scale_word(uint32_t& word, float x) {
    const float2 two = ptx::unpack<Element>(word);
    word = ptx::pack<Element>(two.x * x, two.y * x);
  }

  // ---- one block. On entry S(j+1) is ready, P(j) is in registers and on its way, chunk 0 of P(j) V is in flight.
  template <bool kMore, bool kMore2>
  __device__ __forceinline__ void block(int j) {
    if constexpr (kMore) fetch_options(j + 1);
    pv<1>();
    agree();
    if constexpr (kMore) {
      if constexpr (C::kOptions) {  // the longer softmax under two chunks of products
        ptx::wgmma_wait<1>();
        release();
        pv<2>();
        apply_options(j + 1);
        score(j + 1);
        choose_reference();
        ptx::wgmma_wait<1>();
        release();
        pv<3>();
        reuse_out();
        exponentials<0>();
        ptx::wgmma_wait<1>();
        release();
        exponentials<1>();
        stage_rows(top);
      } else {
        score(j + 1);
        choose_reference();
        ptx::wgmma_wait<1>();
        release();
        pv<2>();
        reuse_out();
        exponentials<0>();
        ptx::wgmma_wait<1>();
        release();
        pv<3>();
        exponentials<1>();
        stage_rows(top);
        ptx::wgmma_wait<1>();
        release();
      }
      if constexpr (kMore2) {
        qk<true>(0);
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      release();
      arm_p();
      free_p();
      rescale();
      if constexpr (kMore2) {
        draw(j + 2, 0);
        if (p.n_d_boxes >= 4) {
          qk<false>(1);
          draw(j + 2, 1);
          ptx::wgmma_wait<1>();
          release();
        }
        ship();
        qk_from(2, j + 2);
        pv<0>();
        ptx::wgmma_wait<1>();
        release();
      } else {
        ship();
        pv<0>();
      }
    } else {
      ptx::wgmma_wait<1>();
      release();
      pv<2>();
      ptx::wgmma_wait<1>();
      release();
      pv<3>();
      ptx::wgmma_wait<0>();
      release();
      release();
      arm_p();
      free_p();
    }
  }

  __device__ __forceinline__ void tile_begin() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      ref[r] = used[r] = top[r] = -INFINITY;
      sum[r] = 0.f;
    }
    const int first_row = t.row + wg * 64, last_row = min(first_row + 63, t.n_q - 1);
    all_see_from = attn::visible_keys(f, t.n_q, t.n_kv, last_row).begin;
    all_see_to = attn::visible_keys(f, t.n_q, t.n_kv, first_row).end;
    ptx::mbarrier_wait(shared.q_full, q_phase);
    q_phase ^= 1;
    qk<true>(0);
    draw(0, 0);
    qk_from(1, 0);
    ptx::wgmma_wait<0>();
    release();
    fetch_options(0);
    apply_options(0);
    score(0);
    choose_reference();
    reuse_out();
    exponentials<0>();
    exponentials<1>();
    stage_rows(top);
    ship();
    qk<true>(0);
    draw(1, 0);
    qk_from(1, 1);
    pv<0>();
    ptx::wgmma_wait<1>();
    release();
  }

  // Sums of the peer's half of the keys, then o and lse.
  __device__ __forceinline__ void tile_end() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
    reuse_out();
    stage_rows(sum);
    if (lane == 0) {
      const int peer = rank ^ 1;
      ptx::bulk_copy(ptx::mapa(sum_in() + warp * 64, peer), max_out() + warp * 64, 64,
                     ptx::mapa(shared.l_full[wg], peer));
      ptx::bulk_commit();
    }
    ptx::mbarrier_wait(shared.l_full[wg], l_phase);
    l_phase ^= 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += ptx::load_shared(sum_in() + (row() + 8 * r) * 4);
    if (thread == 0) ptx::mbarrier_arrive_expect(shared.l_full[wg], C::kRowBytes);
  }
  template <int r>
  __device__ __forceinline__ void store_row(float sink) {
    const int i = t.row + wg * 64 + row() + 8 * r;
    const attn::RowEnd end = attn::end_row(used[r], sum[r], sink, C::kOptions ? f.keep_scale : 1.f);
    Element* to = nullptr;
    if (i < t.n_q) {
      to = f.o.at<Element>(t.q_batch, t.head, t.q_row + i);
      if (f.lse.data && rank == 0 && lane % 4 == 0) *f.lse.at(t.q_batch, t.head, t.q_row + i) = end.lse;
    }
    attn::store_row<Element, C::kDvSlice, r>(f.o, o, end.factor, to, rank * C::kDvSlice);
  }

  __device__ __forceinline__ void run() {
    arm_p();
    if (thread == 0) ptx::mbarrier_arrive_expect(shared.l_full[wg], C::kRowBytes);
    pipeline::TileScheduler<C::kTileQ, C::kPacked, attn::ForwardParams> scheduler(blockIdx.x / C::kCluster,
                                                                                  gridDim.x / C::kCluster);
    while (scheduler.next(f, t)) {
      blocks = blocks_of<C>(f, t);
      if (blocks.count) {
        tile_begin();
#pragma unroll 1
        for (int j = 0; j < blocks.count - 2; ++j) block<true, true>(j);
        if (thread == 0) ptx::mbarrier_arrive(shared.q_empty);
        block<true, false>(blocks.count - 2);
        block<false, false>(blocks.count - 1);
        tile_end();
      } else {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] = 0.f;
        used[0] = used[1] = -INFINITY;
        sum[0] = sum[1] = 0.f;
      }
      const float sink = attn::sink_log2<Element>(f, t.head, t.nobodys);
      store_row<0>(sink);
      store_row<1>(sink);
    }
  }
};

template <class C>
__global__ void __cluster_dims__(C::kCluster, 1, 1) __launch_bounds__(C::kThreads, 1)
    sm90_fwd_cluster_dv(const __grid_constant__ Params p) {
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
      ptx::mbarrier_init(shared.p_full[i], 1);
      ptx::mbarrier_init(shared.p_free[i], 4);
      ptx::mbarrier_init(shared.l_full[i], 1);
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

}  // namespace ffpa::sm90::fwd_cluster_dv

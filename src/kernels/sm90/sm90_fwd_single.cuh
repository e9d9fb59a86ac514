// sm90_fwd_single: forward for head dims up to 256, one CTA a tile of query rows. SPDX-License-Identifier: Apache-2.0
//
// Every consumer warpgroup owns 64 query rows and all of O: S[64, tile_kv] = Q K', softmax, O[64, D_v] += P V with P from registers.
// The product S of the next block is issued before P V of this one, so that the softmax of the next runs under P V; warpgroups take
// turns at issuing, so that one's softmax also runs under the other's products.
//
//  role    regs    waits on               does                                                   signals
//  TMA     24, 32  empty_k/v, q_empty     Q of a tile, K and V block by block                     full_k, full_v, q_full
//  WG0..   240,    full_k, full_v, turn   issue S(j+1) = Q K', then O += P(j) V; softmax(j+1)     empty_k, empty_v, q_empty,
//          160                            in registers; when P(j) V is done, rescale O, pack P    turn of the next warpgroup
//
//  barrier     count        arrives                          protects
//  full_k/v    1 + tx       TMA                              k[stage], v[stage]
//  empty_k/v   warpgroups   one thread of each               k[stage], v[stage]
//  q_full      1 + tx       TMA                              q
//  q_empty     warpgroups   one thread of each               q
//  turn        256          named barriers 1.., a warpgroup  order of issue
//                           and the one before it
//
//  D_qk/D_v   tile_q  tile_kv  shared memory                   registers of a consumer
//  64/64        192      128   Q 24 KB, K and V 2 x 16 KB each  O 32, S 64, P 32
//  128/128      128      176   Q 32 KB, K and V 2 x 44 KB each  O 64, S 88, P 44
//  192/128      128      128   Q 48 KB, K 2 x 48, V 2 x 32 KB   O 64, S 64, P 32
//  192/192      128      112   Q 48 KB, K and V 2 x 42 KB each  O 96, S 56, P 28
//  256/256      128       80   Q 64 KB, K and V 2 x 40 KB each  O 128, S 40, P 20
// Other head dims run in the next larger instance; the copy engine fills with zeros.
//
// Bound: the tensor cores at D 128 and 256; at D 64 the exponentials take as long as the products.
#pragma once

#include "attn/fwd_params.cuh"
#include "attn/options.cuh"
#include "attn/softmax.cuh"
#include "attn/store.cuh"
#include "attn/visible.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/tile_scheduler.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "tile/swizzled.cuh"

namespace ffpa::sm90::fwd_single {

template <class Element_, int kDqk_, int kDv_, int kTileKv_, int kWarpgroups_, attn::Features kFeatures>
struct Config {
  using Element = Element_;
  static constexpr int kDqk = kDqk_, kDv = kDv_, kTileKv = kTileKv_;
  static constexpr int kWarpgroups = kWarpgroups_, kTileQ = 64 * kWarpgroups;
  static constexpr bool kOptions = attn::has_options(kFeatures);
  static constexpr bool kPacked = attn::has_packed(kFeatures);
  static constexpr int kStages = 2;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160,
                       kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr uint32_t kQBoxBytes = 64 * 128, kKvBoxBytes = kTileKv * 128;
  static constexpr uint32_t kQBytes = kWarpgroups * (kDqk / 64) * kQBoxBytes;
  static constexpr uint32_t kKBytes = kDqk / 64 * kKvBoxBytes, kVBytes = kDv / 64 * kKvBoxBytes;
  static_assert(kDqk % 64 == 0 && kDv % 64 == 0 && kDv <= 256, "whole boxes of 64 columns, one wgmma wide");
  static_assert(kTileKv % 16 == 0 && kTileKv <= 256, "whole k16 steps of P V, one wgmma wide");
  static_assert(kWarpgroups == 2 || kWarpgroups == 3, "register budgets are known for two and three");
  static_assert((kWarpgroups * kConsumerRegisters + kProducerRegisters) * 128 <= 65536, "registers of an SM");
};

template <class C>
struct SharedStorage {
  alignas(1024) uint8_t q[C::kQBytes], k[C::kStages][C::kKBytes], v[C::kStages][C::kVBytes];
  uint64_t full_k[C::kStages], empty_k[C::kStages], full_v[C::kStages], empty_v[C::kStages], q_full, q_empty;
};

struct Params {
  attn::ForwardParams f;
};

template <class C>
struct Shared {
  static_assert(sizeof(SharedStorage<C>) <= 232448, "shared memory of an SM");
  uint32_t q, k, v;
  pipeline::Ring ring_k, ring_v;
  ptx::Mbarrier q_full, q_empty;
  __device__ __forceinline__ explicit Shared(uint8_t* memory) {
    using S = SharedStorage<C>;
    const uint32_t base = ptx::shared_address(memory);
    const auto barrier = [&](size_t offset) { return ptx::Mbarrier{base + static_cast<uint32_t>(offset)}; };
    q = base + offsetof(S, q);
    k = base + offsetof(S, k);
    v = base + offsetof(S, v);
    ring_k = {barrier(offsetof(S, full_k)), barrier(offsetof(S, empty_k)), C::kStages};
    ring_v = {barrier(offsetof(S, full_v)), barrier(offsetof(S, empty_v)), C::kStages};
    q_full = barrier(offsetof(S, q_full));
    q_empty = barrier(offsetof(S, q_empty));
  }
};

// Blocks of keys that a tile visits.
struct Blocks {
  int first, count;
};
template <class C>
__device__ __forceinline__ Blocks blocks_of(const attn::ForwardParams& f, const pipeline::Tile& t) {
  const int last_row = min(t.row + C::kTileQ, t.n_q) - 1;
  const int begin = attn::visible_keys(f, t.n_q, t.n_kv, t.row).begin / C::kTileKv;
  const int end = (attn::visible_keys(f, t.n_q, t.n_kv, last_row).end + C::kTileKv - 1) / C::kTileKv;
  return {begin, max(end - begin, 0)};
}

template <class C>
__device__ __forceinline__ void produce(const Params& p, const Shared<C>& shared) {
  const attn::ForwardParams& f = p.f;
  const bool leader = ptx::elect_one();
  pipeline::TileScheduler<C::kTileQ, C::kPacked, attn::ForwardParams> scheduler(blockIdx.x, gridDim.x);
  pipeline::Tile t;
  pipeline::RingPlace place_k, place_v;
  uint32_t q_phase = 0;
  while (scheduler.next(f, t)) {
    const Blocks blocks = blocks_of<C>(f, t);
    if (!blocks.count) continue;
    if (leader) {
      ptx::mbarrier_wait(shared.q_empty, q_phase ^ 1);
      ptx::mbarrier_arrive_expect(shared.q_full, C::kQBytes);
      for (int wg = 0; wg < C::kWarpgroups; ++wg)
        for (int box = 0; box < C::kDqk / 64; ++box)
          ptx::tma_load(shared.q + (wg * (C::kDqk / 64) + box) * C::kQBoxBytes, &f.q, box * 64,
                        t.q_row + t.row + wg * 64, t.head * f.q_head_step, t.q_batch * f.q_batch_step, shared.q_full);
      const int head = t.head / f.group;
      const attn::KvCoordinates k =
          attn::kv_coordinates(f, t.kv_batch, t.kv_row, t.n_kv, head, f.k_batch_rows, f.k_batch_step, f.k_head_step);
      const attn::KvCoordinates v =
          attn::kv_coordinates(f, t.kv_batch, t.kv_row, t.n_kv, head, f.v_batch_rows, f.v_batch_step, f.v_head_step);
      for (int j = 0; j <= blocks.count; ++j) {
        if (j < blocks.count) {
          const int stage = shared.ring_k.fill(place_k, C::kKBytes);
          for (int box = 0; box < C::kDqk / 64; ++box)
            ptx::tma_load(shared.k + stage * C::kKBytes + box * C::kKvBoxBytes, &f.k, box * 64,
                          k.row + (blocks.first + j) * C::kTileKv, k.third, k.fourth, k.head,
                          shared.ring_k.full[stage]);
        }
        if (j > 0) {
          const int stage = shared.ring_v.fill(place_v, C::kVBytes);
          for (int box = 0; box < C::kDv / 64; ++box)
            ptx::tma_load(shared.v + stage * C::kVBytes + box * C::kKvBoxBytes, &f.v, box * 64,
                          v.row + (blocks.first + j - 1) * C::kTileKv, v.third, v.fourth, v.head,
                          shared.ring_v.full[stage]);
        }
      }
    }
    q_phase ^= 1;
    __syncwarp();
  }
}

template <class C>
struct Consumer {
  using Element = typename C::Element;
  static constexpr int kScores = C::kTileKv / 2, kOutputs = C::kDv / 2;

  const attn::ForwardParams& f;
  const Shared<C> shared;
  const int wg, warp, lane, thread;
  pipeline::RingPlace place_k, place_v;
  uint32_t q_phase = 0;
  uint32_t q_low, k_low, v_low;
  float o[kOutputs], s[kScores];
  uint32_t p_words[kScores / 2];           // P as A fragments
  uint32_t keep[(C::kTileKv + 63) / 64];   // dropout
  float ref[2], top[2], sum[2], alpha[2];  // a row: what o and P are relative to, maximum, sum of weights, step of ref
  pipeline::Tile t;
  Blocks blocks;
  int all_see_from, all_see_to;  // keys that all 64 rows see

  __device__ __forceinline__ Consumer(const Params& p, const Shared<C>& sh, int wg_idx)
      : f(p.f),
        shared(sh),
        wg(wg_idx),
        warp(ptx::uniform(threadIdx.x % 128 / 32)),
        lane(threadIdx.x % 32),
        thread(threadIdx.x % 128) {
    q_low = tile::k_major(shared.q + wg * (C::kDqk / 64) * C::kQBoxBytes);
    k_low = tile::k_major(shared.k);
    v_low = tile::mn_major(shared.v, C::kKvBoxBytes);
  }
  __device__ __forceinline__ int row() const {
    return warp * 16 + lane / 4;
  }  // the first of the thread's two; the other is +8
  __device__ __forceinline__ void release(ptx::Mbarrier b) {
    if (thread == 0) ptx::mbarrier_arrive(b);
  }

  // ---- turns: warpgroup w issues its products between await_turn and pass_turn
  static constexpr int kFirstTurn = 1;  // named barrier of warpgroup 0
  __device__ __forceinline__ void await_turn() { ptx::named_sync(kFirstTurn + wg, 256); }
  __device__ __forceinline__ void pass_turn() {
    ptx::named_arrive(kFirstTurn + (wg + 1 == C::kWarpgroups ? 0 : wg + 1), 256);
  }

  // ---- products, one committed group each
  __device__ __forceinline__ void qk(int stage) {
    const uint32_t k = k_low + stage * (C::kKBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < C::kDqk / 16; ++x)
      ptx::Wgmma<C::kTileKv>::template ss<Element, 0>(
          s, tile::descriptor(q_low + x / 4 * (C::kQBoxBytes / 16) + x % 4 * tile::kKMajorStep),
          tile::descriptor(k + x / 4 * (C::kKvBoxBytes / 16) + x % 4 * tile::kKMajorStep), x);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void pv(int stage) {
    const uint32_t v = v_low + stage * (C::kVBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int x = 0; x < C::kTileKv / 16; ++x)
      ptx::Wgmma<C::kDv>::template rs<Element, 1>(o, p_words + 4 * x, tile::descriptor(v + x * tile::kMnMajorStep), 1);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ attn::OptionRows options() const {
    return {t.seq, t.head, t.n_q, t.n_kv, t.row + wg * 64 + row()};
  }

  // ---- softmax of block j, all but what touches o and P
  __device__ __forceinline__ void softmax(int j) {
    const int key = (blocks.first + j) * C::kTileKv, column = key + lane % 4 * 2;
    if constexpr (C::kOptions) {
      attn::FetchedWords<C::kTileKv> fetched;
      attn::fetch<C::kTileKv>(f, options(), key, fetched);
      attn::apply_options<Element, C::kTileKv>(f, options(), s, key, fetched);
      if (f.dropout.threshold) attn::dropout_bits<C::kTileKv>(f, options(), column, keep);
    }
    if (key < all_see_from || key + C::kTileKv > all_see_to) {
      const int first = t.row + wg * 64 + row();
      const attn::KeyRange range[2] = {attn::visible_keys(f, t.n_q, t.n_kv, first),
                                       attn::visible_keys(f, t.n_q, t.n_kv, first + 8)};
      attn::hide<C::kTileKv>(s, column, range);
    }
    const float c = C::kOptions ? 1.f : f.scale_log2;
    float maximum[2], shift[2], part[2] = {0.f, 0.f};
    attn::row_maxima<C::kTileKv>(s, maximum[0], maximum[1]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], maximum[r] * c);
      const float next = attn::follow(ref[r], top[r], attn::kLag);
      alpha[r] = attn::power(ref[r], next);
      ref[r] = next;
      shift[r] = attn::shift_of(next);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = ptx::exp2_fast(fmaf(s[i], c, -shift[i / 2 % 2]));
      part[i / 2 % 2] += s[i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], alpha[r], part[r]);
    if constexpr (C::kOptions)
      if (f.dropout.threshold) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = keep[i / 32] >> (i % 32) & 1u ? s[i] : 0.f;
      }
  }
  __device__ __forceinline__ void pack_p() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) p_words[i] = ptx::pack<Element>(s[2 * i], s[2 * i + 1]);
  }
  __device__ __forceinline__ void rescale() {
    if (__any_sync(~0u, alpha[0] != 1.f || alpha[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= alpha[i / 2 % 2];
    }
  }

  __device__ __forceinline__ void tile_begin() {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.f;
    ref[0] = ref[1] = top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
    const int first_row = t.row + wg * 64, last_row = min(first_row + 63, t.n_q - 1);
    all_see_from = attn::visible_keys(f, t.n_q, t.n_kv, last_row).begin;
    all_see_to = attn::visible_keys(f, t.n_q, t.n_kv, first_row).end;
  }
  __device__ __forceinline__ void blocks_loop() {
    ptx::mbarrier_wait(shared.q_full, q_phase);
    q_phase ^= 1;
    int k_stage = shared.ring_k.acquire(place_k);
    await_turn();
    qk(k_stage);
    pass_turn();
    ptx::wgmma_wait<0>();
    release(shared.ring_k.empty[k_stage]);
    softmax(0);
    pack_p();
#pragma unroll 1
    for (int j = 1; j < blocks.count; ++j) {
      k_stage = shared.ring_k.acquire(place_k);
      await_turn();
      qk(k_stage);
      const int v_stage = shared.ring_v.acquire(place_v);
      pv(v_stage);
      pass_turn();
      ptx::wgmma_wait<1>();
      release(shared.ring_k.empty[k_stage]);
      softmax(j);
      ptx::wgmma_wait<0>();
      release(shared.ring_v.empty[v_stage]);
      rescale();
      pack_p();
    }
    release(shared.q_empty);
    const int v_stage = shared.ring_v.acquire(place_v);
    pv(v_stage);
    ptx::wgmma_wait<0>();
    release(shared.ring_v.empty[v_stage]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
  }

  template <int r>
  __device__ __forceinline__ void store_row(float sink) {
    const int i = t.row + wg * 64 + row() + 8 * r;
    const attn::RowEnd end = attn::end_row(ref[r], sum[r], sink, C::kOptions ? f.keep_scale : 1.f);
    Element* to = nullptr;
    if (i < t.n_q) {
      to = f.o.at<Element>(t.q_batch, t.head, t.q_row + i);
      if (f.lse.data && lane % 4 == 0) *f.lse.at(t.q_batch, t.head, t.q_row + i) = end.lse;
    }
    attn::store_row<Element, C::kDv, r>(f.o, o, end.factor, to, 0);
  }

  __device__ __forceinline__ void run() {
    if (wg == C::kWarpgroups - 1) pass_turn();  // the first turn is warpgroup 0's
    pipeline::TileScheduler<C::kTileQ, C::kPacked, attn::ForwardParams> scheduler(blockIdx.x, gridDim.x);
    while (scheduler.next(f, t)) {
      blocks = blocks_of<C>(f, t);
      tile_begin();
      if (blocks.count) blocks_loop();
      const float sink = attn::sink_log2<Element>(f, t.head, t.nobodys);
      store_row<0>(sink);
      store_row<1>(sink);
    }
    if (wg == 0) await_turn();  // takes the turn that is left over
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) sm90_fwd_single(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> shared(memory);
  const int wg = ptx::uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      for (const pipeline::Ring* ring : {&shared.ring_k, &shared.ring_v}) {
        ptx::mbarrier_init(ring->full[i], 1);
        ptx::mbarrier_init(ring->empty[i], C::kWarpgroups);
      }
    }
    ptx::mbarrier_init(shared.q_full, 1);
    ptx::mbarrier_init(shared.q_empty, C::kWarpgroups);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (wg == C::kWarpgroups) {
    ptx::registers_down<C::kProducerRegisters>();
    if (ptx::uniform(threadIdx.x % 128 / 32) == 0) produce<C>(p, shared);
  } else {
    ptx::registers_up<C::kConsumerRegisters>();
    Consumer<C>(p, shared, wg).run();
  }
}

}  // namespace ffpa::sm90::fwd_single

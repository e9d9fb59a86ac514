// Which tiles of query rows a persistent CTA or cluster works on, dense and packed. SPDX-License-Identifier: Apache-2.0
//
// Tiles of one head follow one another, so that its K and V stay in L2; heads that share them are neighbours. Where later rows see
// more keys, the tiles of a section of heads are listed together, heaviest first. Worker w takes w, 2W-1-w, 2W+w, ... of the list
// (there and back). Every role of the worker walks the list by itself.
#pragma once

#include "ptx/warp.cuh"

namespace ffpa::pipeline {

struct Tile {
  int seq = 0, head = 0;
  int row = 0;                 // first query row, within the sequence
  int n_q = 0, n_kv = 0;       // of the sequence
  int q_row = 0, q_batch = 0;  // where the sequence's rows of q, o and lse begin
  int kv_row = 0, kv_batch = 0;
  bool nobodys = false;  // rows past cu_seqlens_q[B]
};

// kPacked: cu_seqlens_q may be given. Apart, because it costs: the compiler cannot prove that what comes of the search is uniform, and
// every address that depends on it moves from uniform to vector registers (66 R2UR a block of sm90_fwd_cluster_dv).
// `Params` is attn::ForwardParams or has its fields of the same names.
template <int kTileQ, bool kPacked, class Params>
class TileScheduler {
 public:
  __device__ __forceinline__ TileScheduler(int worker, int n_workers) : worker_(worker), n_workers_(n_workers) {}

  // Called by whole warps.
  __device__ __forceinline__ bool next(const Params& p, Tile& t) {
    const int index = round_ * n_workers_ + (round_ & 1 ? n_workers_ - 1 - worker_ : worker_);
    ++round_;
    if constexpr (kPacked)
      if (p.cu_seqlens_q) return packed(p, index, t);
    return dense(p, index, t);
  }

 private:
  __device__ __forceinline__ bool dense(const Params& p, int index, Tile& t) {
    if (index >= p.n_tiles) return false;
    const int tiles = (p.n_q + kTileQ - 1) / kTileQ;
    const int section = index / (tiles * p.section), rest = index - section * (tiles * p.section);
    const int heads = min(p.section, p.n_seqs * p.h_q - section * p.section);
    const int tile = rest / heads, batch_head = section * p.section + rest - tile * heads;
    place(p, tile, tiles, t);
    t.seq = batch_head / p.h_q;
    t.head = batch_head - t.seq * p.h_q;
    t.n_q = p.n_q;
    t.q_batch = t.seq;
    keys(p, t);
    return true;
  }

  // 32 sequences a step; the rows past the last sequence are one more, without keys.
  __device__ __forceinline__ bool packed(const Params& p, int index, Tile& t) {
    const int lane = threadIdx.x % 32;
    while (seq_ <= p.n_seqs) {
      const int seq = min(seq_ + lane, p.n_seqs);
      const int begin = p.cu_seqlens_q[seq];
      const int next = p.cu_seqlens_q[min(seq + 1, p.n_seqs)];
      const int end = seq_ + lane < p.n_seqs ? next : seq_ + lane == p.n_seqs ? p.n_q : begin;
      const int tiles = (end - begin + kTileQ - 1) / kTileQ;
      int sum = tiles * p.h_q;
      for (int d = 1; d < 32; d *= 2) {
        const int lower = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? lower : 0;
      }
      const int beyond = ptx::uniform(static_cast<int>(__ballot_sync(~0u, first_ + sum > index)));
      if (beyond) {
        const int found = __ffs(beyond) - 1;
        first_ += __shfl_sync(~0u, sum - tiles * p.h_q, found);
        first_ = ptx::uniform(first_);
        seq_ += found;
        const int n_tiles = ptx::uniform(__shfl_sync(~0u, tiles, found));
        t.q_row = ptx::uniform(__shfl_sync(~0u, begin, found));
        t.n_q = ptx::uniform(__shfl_sync(~0u, end, found)) - t.q_row;
        t.seq = seq_;
        t.head = ptx::uniform((index - first_) / n_tiles);
        place(p, ptx::uniform(index - first_ - t.head * n_tiles), n_tiles, t);
        t.nobodys = t.seq == p.n_seqs;
        keys(p, t);
        return true;
      }
      first_ += ptx::uniform(__shfl_sync(~0u, sum, 31));
      seq_ += 32;
    }
    return false;
  }

  __device__ __forceinline__ static void place(const Params& p, int tile, int tiles, Tile& t) {
    t.row = (p.heavy_last ? tiles - 1 - tile : tile) * kTileQ;
  }

  __device__ __forceinline__ static void keys(const Params& p, Tile& t) {
    t.kv_batch = t.seq;
    t.n_kv = p.n_kv;
    if (t.nobodys) {
      t.n_kv = 0;
      return;
    }
    if (p.cu_seqlens_kv) {
      t.kv_row = ptx::uniform(p.cu_seqlens_kv[t.seq]);
      t.n_kv = ptx::uniform(p.cu_seqlens_kv[t.seq + 1]) - t.kv_row;
      t.kv_batch = 0;
    } else if (p.kv_batch_idx) {
      t.kv_batch = ptx::uniform(p.kv_batch_idx[t.seq]);
    }
    if (p.seqlens_kv) t.n_kv = min(ptx::uniform(p.seqlens_kv[t.seq]), p.kv_rows);
  }

  int worker_, n_workers_;
  int round_ = 0;
  int seq_ = 0, first_ = 0;  // packed: a sequence at or before the next tile, and the index of its first tile
};

}  // namespace ffpa::pipeline

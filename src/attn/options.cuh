// The options that act on single scores: softcap, bias, ALiBi, bool mask, dropout. SPDX-License-Identifier: Apache-2.0
//
// Kernels come twice: without these, where scores stay as the tensor cores left them and scale_log2 enters with the exponential,
// and with them, where `apply` turns a fragment into logits in base 2.
#pragma once

#include "attn/visible.cuh"
#include "ptx/warp.cuh"

namespace ffpa::attn {

inline constexpr float kLog2e = 1.4426950408889634f;

// Where a thread's two rows stand. Rows past N_q take the last row's mask and bias: they are never stored. Pointers are made where they
// are used: kept over the main loop they would spill.
struct OptionRows {
  int seq, head, n_q, n_kv;
  int row;  // the first; the other is +8
  __device__ __forceinline__ const char* at(const Broadcast& t, int bytes, int r) const {
    const int64_t i = min(row + 8 * r, n_q - 1);
    return static_cast<const char*>(t.data) + (seq * t.batch + head * t.head + i * t.row) * bytes;
  }
};

// One element of each of the thread's columns in four groups of eight, out of loads of whole groups: lane t of a quad holds in `mine` the
// 4 * kWords words of group t, of which kWords words from t * kWords on belong to lane t. Afterwards `mine` holds the thread's own
// words of the four groups.
template <int kWords>
__device__ __forceinline__ void trade_groups(uint32_t (&mine)[4 * kWords]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t &a = mine[i * kWords + w], &b = mine[(i + 1) * kWords + w];
      const uint32_t other = __shfl_xor_sync(~0u, odd ? a : b, 1);
      a = odd ? other : a;
      b = odd ? b : other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t &a = mine[i * kWords + w], &b = mine[(i + 2) * kWords + w];
      const uint32_t other = __shfl_xor_sync(~0u, upper ? a : b, 2);
      a = upper ? other : a;
      b = upper ? b : other;
    }
  }
}

// Words of mask or bias fetched ahead of their block: 16 bits an element, the bias's own or one mask bit a byte.
template <int kColumns>
struct FetchedWords {
  static constexpr int kFours = (kColumns + 31) / 32;
  uint32_t word[2][kFours][4];  // row, four groups of eight columns, group: the thread's two columns
};

// Whether `fetch` has what apply_options needs of a tensor: 16-bit bias, or else the mask.
template <int kColumns>
__device__ __forceinline__ bool fetches_bias(const AttentionParams& p, int n_kv, int key) {
  return kColumns % 32 == 0 && p.bias_eights && !p.bias_fp32 && key + kColumns <= n_kv;
}
template <int kColumns>
__device__ __forceinline__ bool fetches_mask(const AttentionParams& p, int n_kv, int key) {
  return kColumns % 32 == 0 && p.mask_eights && !(p.bias_eights && !p.bias_fp32) && key + kColumns <= n_kv;
}

template <int kColumns>
__device__ __forceinline__ void fetch(const AttentionParams& p, const OptionRows& x, int key,
                                      FetchedWords<kColumns>& to) {
  const int part = threadIdx.x % 4;
  if (fetches_bias<kColumns>(p, x.n_kv, key)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4* row = reinterpret_cast<const uint4*>(x.at(p.bias, 2, r) + 2 * key);
#pragma unroll
      for (int four = 0; four < kColumns / 32; ++four) {
        const uint4 w = row[4 * four + part];
        to.word[r][four][0] = w.x, to.word[r][four][1] = w.y, to.word[r][four][2] = w.z, to.word[r][four][3] = w.w;
      }
    }
  } else if (fetches_mask<kColumns>(p, x.n_kv, key)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2* row = reinterpret_cast<const uint2*>(x.at(p.mask, 1, r) + key);
#pragma unroll
      for (int four = 0; four < kColumns / 32; ++four) {
        const uint2 w = row[4 * four + part];
        to.word[r][four][0] = w.x, to.word[r][four][1] = w.y;
      }
    }
  }
}

// Calls use(i, low, high) for each pair of neighbouring elements s[i], s[i + 1] with the two elements of a row of a broadcast tensor
// that stand at their columns. Columns past N_kv stand at the last one: `hide` discards them.
template <int kColumns, class One, class Use>
__device__ __forceinline__ void for_pairs(const char* const (&rows)[2], int64_t column_stride, int column, int n_kv,
                                          Use use) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; i += 2) {
    const One* row = reinterpret_cast<const One*>(rows[i / 2 % 2]);
    const int j = column + i / 4 * 8;
    use(i, row[min(j, n_kv - 1) * column_stride], row[min(j + 1, n_kv - 1) * column_stride]);
  }
}

// q.k to logits in base 2. `key`: first of the block, `column`: the thread's first column; `fetched` by `fetch` for the same block.
template <class Element, int kColumns>
__device__ __forceinline__ void apply_options(const AttentionParams& p, const OptionRows& x, float* s, int key,
                                              FetchedWords<kColumns>& fetched) {
  const int column = key + threadIdx.x % 4 * 2;
  if (p.softcap_log2 > 0.f) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)  // cap tanh(y) = cap - 2 cap / (1 + e^2y): exact to fp32, unlike tanh.approx
      s[i] = fmaf(-2.f * p.softcap_log2, ptx::reciprocal_fast(1.f + ptx::exp2_fast(s[i] * p.softcap_inverse)),
                  p.softcap_log2);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) s[i] *= p.scale_log2;
  }
  if (fetches_bias<kColumns>(p, x.n_kv, key)) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int four = 0; four < kColumns / 32; ++four) {
        uint32_t (&w)[4] = fetched.word[r][four];
        trade_groups<1>(w);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const float2 two = ptx::unpack<Element>(w[g]);
          const int i = 4 * (4 * four + g) + 2 * r;
          s[i] = fmaf(two.x, kLog2e, s[i]);
          s[i + 1] = fmaf(two.y, kLog2e, s[i + 1]);
        }
      }
  } else if (p.bias.data && p.bias_fp32 && p.bias_eights && kColumns % 32 == 0 && key + kColumns <= x.n_kv) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4* row = reinterpret_cast<const uint4*>(x.at(p.bias, 4, r) + 4 * key);
#pragma unroll
      for (int four = 0; four < kColumns / 32; ++four) {
        const uint4 a = row[2 * (4 * four + threadIdx.x % 4)], b = row[2 * (4 * four + threadIdx.x % 4) + 1];
        uint32_t w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        trade_groups<2>(w);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int i = 4 * (4 * four + g) + 2 * r;
          s[i] = fmaf(__uint_as_float(w[2 * g]), kLog2e, s[i]);
          s[i + 1] = fmaf(__uint_as_float(w[2 * g + 1]), kLog2e, s[i + 1]);
        }
      }
    }
  } else if (p.bias.data) {
    const char* const rows[2] = {x.at(p.bias, p.bias_fp32 ? 4 : 2, 0), x.at(p.bias, p.bias_fp32 ? 4 : 2, 1)};
    if (p.bias_fp32)
      for_pairs<kColumns, float>(rows, p.bias.column, column, x.n_kv, [&](int i, float low, float high) {
        s[i] = fmaf(low, kLog2e, s[i]);
        s[i + 1] = fmaf(high, kLog2e, s[i + 1]);
      });
    else
      for_pairs<kColumns, uint16_t>(rows, p.bias.column, column, x.n_kv, [&](int i, uint16_t low, uint16_t high) {
        s[i] = fmaf(ptx::unpack<Element>(low).x, kLog2e, s[i]);
        s[i + 1] = fmaf(ptx::unpack<Element>(high).x, kLog2e, s[i + 1]);
      });
  }
  if (p.alibi_slopes) {
    const float slope_log2 = p.alibi_slopes[x.seq * p.alibi_batch + x.head * p.alibi_head] * kLog2e;
    const float distance = static_cast<float>(x.row + x.n_kv - x.n_q - column);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      s[i] = fmaf(-slope_log2, fabsf(distance + static_cast<float>(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), s[i]);
  }
  if (fetches_mask<kColumns>(p, x.n_kv, key)) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int four = 0; four < kColumns / 32; ++four) {
        // Lane t holds the eight bytes of group t and wants bytes 2t and 2t+1 of every group: halves of two words, traded as words.
        const uint32_t a = fetched.word[r][four][0], b = fetched.word[r][four][1];
        uint32_t w[4] = {a & 0xFFFFu, a >> 16, b & 0xFFFFu, b >> 16};
        trade_groups<1>(w);
#pragma unroll
        for (int g = 0; g < 4; ++g) {
          const int i = 4 * (4 * four + g) + 2 * r;
          s[i] = w[g] & 0xFFu ? s[i] : -INFINITY;
          s[i + 1] = w[g] & 0xFF00u ? s[i + 1] : -INFINITY;
        }
      }
  } else if (p.mask.data) {
    const char* const rows[2] = {x.at(p.mask, 1, 0), x.at(p.mask, 1, 1)};
    for_pairs<kColumns, uint8_t>(rows, p.mask.column, column, x.n_kv, [&](int i, uint8_t low, uint8_t high) {
      s[i] = low ? s[i] : -INFINITY;
      s[i + 1] = high ? s[i + 1] : -INFINITY;
    });
  }
}

// Dropout of one of the thread's rows (r) over 32 of its columns (from 8 * 4 * four): bits 4 * group + 2 * r and +1 of `keep` for the
// thread's two columns of group `group` (of eight columns), counted from `column`; 8 groups a word. The four lanes of a quad share the
// calls: each makes one for one of the four groups, and they trade words.
__device__ __forceinline__ uint32_t dropout_quarter(const AttentionParams& p, const OptionRows& x, int column, int r,
                                                    int four) {
  const int part = threadIdx.x % 4;
  Dropout dropout = p.dropout;
  if (p.dropout_state) {
    dropout.seed = static_cast<uint64_t>(p.dropout_state[0]);
    dropout.offset = static_cast<uint64_t>(p.dropout_state[1]);
  }
  const Philox4 mine = dropout.bits(static_cast<uint32_t>(x.seq * p.h_q + x.head), static_cast<uint32_t>(x.row + 8 * r),
                                    static_cast<uint32_t>(column / 8 + 4 * four + part));
  uint32_t keep = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {  // lane part wants word `part` of the call made by lane part ^ k
    const int peer = part ^ k;
    const uint32_t give =
        peer & 2 ? (peer & 1 ? mine.word[3] : mine.word[2]) : (peer & 1 ? mine.word[1] : mine.word[0]);
    const uint32_t word = __shfl_xor_sync(~0u, give, k);
    const uint32_t two =
        ((word & 0xFFFFu) >= dropout.threshold ? 1u : 0u) | ((word >> 16) >= dropout.threshold ? 2u : 0u);
    keep |= two << (4 * peer);
  }
  return keep << (2 * r + 16 * (four & 1));
}

// Bit i of word i/32: keep element i of the fragment.
template <int kColumns>
__device__ __forceinline__ void dropout_bits(const AttentionParams& p, const OptionRows& x, int column,
                                             uint32_t (&keep)[(kColumns + 63) / 64]) {
#pragma unroll
  for (int word = 0; word < (kColumns + 63) / 64; ++word) {
    keep[word] = 0;
#pragma unroll
    for (int four = 2 * word; four < 2 * word + 2; ++four)
      if (32 * four < kColumns)
#pragma unroll
        for (int r = 0; r < 2; ++r) keep[word] |= dropout_quarter(p, x, column, r, four);
  }
}

}  // namespace ffpa::attn

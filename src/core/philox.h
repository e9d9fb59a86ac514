// The dropout mask, the same on every engine. SPDX-License-Identifier: Apache-2.0
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call serves 8
// neighbouring keys of one row: 16 random bits for each. Key column j of row i of head h of sequence b is kept when its 16 bits
// are >= round(p * 65536). So the mask depends on (seed, offset, b, h, i, j) alone, not on tiles, engine or packing.
//
//   key     = { seed[31:0],  seed[63:32] ^ offset[63:32] }
//   counter = { j / 8,  i,  b * H_q + h,  offset[31:0] }
//   bits(j) = 16-bit piece j % 8 of the 128-bit result, lowest first
//
// In an m16n8 accumulator fragment, the four lanes of a quad hold the 8 columns of a row; word t of the result belongs to lane t,
// so a quad serves four column groups with one call a lane and a 4x4 transpose.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FFPA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FFPA_HOST_DEVICE [[gnu::always_inline]] inline  // compiled in many places with many flags
#endif

namespace ffpa {

struct Philox4 {
  uint32_t word[4];
};

FFPA_HOST_DEVICE Philox4 philox4x32_10(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

struct Dropout {
  uint64_t seed = 0, offset = 0;
  uint32_t threshold = 0;  // drop when the 16 bits are below it; 0 = keep all, 65536 = drop all
  float keep_scale = 1.f;  // 1 / (1 - p); 0 when p = 1

  // The 8 pieces of keys 8*column_group to 8*column_group+7.
  FFPA_HOST_DEVICE Philox4 bits(uint32_t batch_head, uint32_t row, uint32_t column_group) const {
    return philox4x32_10({{column_group, row, batch_head, static_cast<uint32_t>(offset)}}, static_cast<uint32_t>(seed),
                         static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32));
  }
  FFPA_HOST_DEVICE static uint32_t piece(const Philox4& bits, int j) {
    return (bits.word[(j >> 1) & 3] >> (16 * (j & 1))) & 0xFFFFu;
  }
  FFPA_HOST_DEVICE bool keep(const Philox4& bits, int j) const { return piece(bits, j) >= threshold; }
};

}  // namespace ffpa

// Shared-memory tiles of 16-bit elements as the copy engine writes them and wgmma reads them. SPDX-License-Identifier: Apache-2.0
//
// A box is some rows of 64 elements: 128 bytes a row, 16-byte pieces of row r permuted by XOR with r % 8 (128-byte swizzle), so
// that eight rows fill 1024 bytes. Wider tiles are boxes one after another. Boxes start at multiples of 1024 bytes.
#pragma once

#include <cstdint>

#include "ptx/wgmma.cuh"

namespace ffpa::tile {

inline constexpr int kBoxColumns = 64;
inline constexpr uint32_t kBoxRowBytes = 128;

// Upper descriptor word: 128-byte swizzle, 1024 bytes from one group of eight rows to the next.
inline constexpr uint32_t kDescriptorHigh = (1u << 30) | (1024u >> 4);

// The same for boxes of 32 columns: 64 bytes a row, 64-byte swizzle (piece of row r permuted by XOR with r / 2 % 4).
inline constexpr uint32_t kDescriptorHigh64 = (2u << 30) | (512u >> 4);

// Lower descriptor word of a K-major operand (rows are M or N, the 64 columns are k). A k16 step is +2; the next box is its bytes
// over 16. In a cluster the shared address carries the CTA rank from bit 24 up, which a descriptor must not.
__device__ __forceinline__ uint32_t k_major(uint32_t address) { return ((address & 0x3FFFFu) >> 4) | (1u << 16); }
inline constexpr uint32_t kKMajorStep = 2;

// Lower descriptor word of an MN-major operand (rows are k, columns are N), boxes of `box_bytes`. A k16 step is 16 rows.
__device__ __forceinline__ uint32_t mn_major(uint32_t address, uint32_t box_bytes) {
  return ((address & 0x3FFFFu) >> 4) | ((box_bytes >> 4) << 16);
}
inline constexpr uint32_t kMnMajorStep = 16 * kBoxRowBytes / 16;

__device__ __forceinline__ uint64_t descriptor(uint32_t low) { return ptx::matrix_descriptor(low, kDescriptorHigh); }

// Address of 16-byte piece `piece` of row `row` in a box.
__device__ __forceinline__ uint32_t box_piece(uint32_t box, int row, int piece) {
  return box + static_cast<uint32_t>(row) * kBoxRowBytes + static_cast<uint32_t>((piece ^ (row & 7)) << 4);
}

}  // namespace ffpa::tile

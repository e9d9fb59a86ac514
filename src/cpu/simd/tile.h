// Tiles of a problem in cache and the products on them. SPDX-License-Identifier: Apache-2.0
//
// The currency is the unit, 32 bits: one fp32 value, or two bf16 values that are neighbours along the summed axis (FFPA_SIMD_BF16_DOT
// with bf16 tensors). In units both look the same: C[m, n] (+)= sum_u A[m, u] * B[u, n], where * is an fma or a bf16 dot product.
//   A   units at a[m * step_m + u * step_u]: rows of a tile (step_u 1) or its columns (step_m 1)
//   B   panels of kPanel columns: b[(n / kPanel) * units * kPanel + u * kPanel + n % kPanel], padded with zeros
//   C   fp32, rows ldc apart, ldc a multiple of kPanel
#pragma once

#include "core/half.h"
#include "cpu/simd/vec.h"

namespace ffpa::simd::FFPA_SIMD_TARGET {

constexpr int kPanel = 2 * kLanes;
constexpr int64_t kMostKeys = 256;               // of a tile
constexpr int64_t kTurnedUnits = kMostKeys / 2;  // that a product over the keys sums
#if FFPA_SIMD_BYTES == 64
constexpr int kRowsMax = 12;  // 24 accumulators of 32 registers
#elif FFPA_SIMD_BYTES == 32
constexpr int kRowsMax = 6;  // 12 of 16
#else
constexpr int kRowsMax = 4;
#endif

FFPA_INLINE constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
FFPA_INLINE constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FFPA_INLINE constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// How tensor elements become units.
struct Fp32 {  // fp32, fp16 or bf16 tensors, fp32 products
  static constexpr int kPerUnit = 1, kStep = 1;
  FFPA_INLINE static vf product(vf c, uint32_t a, const uint32_t* b) {
    float x;
    std::memcpy(&x, &a, sizeof x);
    return c + x * load(reinterpret_cast<const float*>(b));
  }
};
#if defined(FFPA_SIMD_BF16_DOT)
struct Bf16 {  // bf16 tensors, bf16 products summed in fp32
#if defined(FFPA_SIMD_AMX)
  static constexpr int kPerUnit = 2,
                       kStep = 16;  // units of a tile register's row; sums go over whole ones, padded with zeros
#else
  static constexpr int kPerUnit = 2, kStep = 1;
#endif
  FFPA_INLINE static vf product(vf c, uint32_t a, const uint32_t* b) {
    const __m512i x = _mm512_set1_epi32(static_cast<int32_t>(a)), y = _mm512_loadu_si512(b);
    return reinterpret_cast<vf>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(c), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y)));
  }
};
#endif

// ------------------------------------------------------------------------------------------------------------- products

enum class Into { kOverwrite, kAdd, kScaleAndAdd };  // C = AB, C += AB, C = scale[m] * C + AB

template <class Kind, int kRows, Into kInto>
FFPA_INLINE void block(const uint32_t* a, int64_t step_m, int64_t step_u, const uint32_t* b, int64_t units, float* c,
                       int64_t ldc, const float* scale) {
  vf sum[kRows][2];  // starts at zero also where C is added to: small terms first meet small sums
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) sum[m][0] = sum[m][1] = vf{};
  for (int64_t u = 0; u < units; ++u, a += step_u, b += kPanel) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
      for (int n = 0; n < 2; ++n) sum[m][n] = Kind::product(sum[m][n], a[m * step_m], b + n * kLanes);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
    for (int n = 0; n < 2; ++n) {
      float* to = c + m * ldc + n * kLanes;
      if constexpr (kInto == Into::kOverwrite) store(to, sum[m][n]);
      if constexpr (kInto == Into::kAdd) store(to, load(to) + sum[m][n]);
      if constexpr (kInto == Into::kScaleAndAdd) store(to, load(to) * scale[m] + sum[m][n]);
    }
}

template <class Kind, Into kInto>
void panel_product(int64_t rows, const uint32_t* a, int64_t step_m, int64_t step_u, const uint32_t* b, int64_t units,
                   float* c, int64_t ldc, const float* scale) {
  int64_t m = 0;
  const auto run = [&]<int kRows>() __attribute__((always_inline)) {
    for (; rows - m >= kRows; m += kRows)
      block<Kind, kRows, kInto>(a + m * step_m, step_m, step_u, b, units, c + m * ldc, ldc,
                                kInto == Into::kScaleAndAdd ? scale + m : nullptr);
  };
  run.template operator()<kRowsMax>();
  if constexpr (kRowsMax > 8) run.template operator()<8>();
  if constexpr (kRowsMax > 4) run.template operator()<4>();
  run.template operator()<2>();
  run.template operator()<1>();
}

#if defined(FFPA_SIMD_AMX)
// The same by tile registers: 32 rows by one panel at a time, four accumulators of 16 x 16. Sources: Intel SDM, TDPBF16PS, TILELOADD.
// A's columns (step_m 1) are turned into rows first. Rows of A past the last are read, so tiles in memory hold multiples of 32.
inline void multiply_tiles(int64_t rows, int64_t columns, int64_t units, const uint32_t* a, int64_t step_m,
                           int64_t step_u, const uint32_t* b, int64_t panel_units, float* c, int64_t ldc, Into into,
                           const float* scale) {
  constexpr int kRows = 32;
  alignas(64) struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  static_assert(sizeof config == 64);
  _tile_loadconfig(&config);
  alignas(64) float sum[kRows][kPanel];
  alignas(64) uint32_t turned[kRows * kTurnedUnits];
  for (int64_t m = 0; m < rows; m += kRows) {
    const int64_t count = least(kRows, rows - m);
    const uint32_t* block = a + m * step_m;
    int64_t ld = step_m;
    if (step_u != 1) {
      ld = units;
      for (int64_t u = 0; u < units; ++u)
        for (int64_t r = 0; r < count; ++r) turned[r * ld + u] = block[u * step_u + r];
      for (int64_t x = count * ld; x < kRows * ld; ++x) turned[x] = 0;
      block = turned;
    }
    for (int64_t n = 0; n < columns; n += kPanel) {
      const uint32_t* panel = b + n * panel_units;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t u = 0; u < units; u += 16) {
        _tile_loadd(4, block + u, ld * 4);
        _tile_loadd(5, block + 16 * ld + u, ld * 4);
        _tile_loadd(6, panel + u * kPanel, kPanel * 4);
        _tile_loadd(7, panel + u * kPanel + 16, kPanel * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, &sum[0][0], kPanel * 4);
      _tile_stored(1, &sum[0][16], kPanel * 4);
      _tile_stored(2, &sum[16][0], kPanel * 4);
      _tile_stored(3, &sum[16][16], kPanel * 4);
      for (int64_t r = 0; r < count; ++r)
        for (int x = 0; x < kPanel; x += kLanes) {
          float* to = c + (m + r) * ldc + n + x;
          const vf found = load(&sum[r][x]);
          if (into == Into::kOverwrite) store(to, found);
          if (into == Into::kAdd) store(to, load(to) + found);
          if (into == Into::kScaleAndAdd) store(to, load(to) * scale[m + r] + found);
        }
    }
  }
  _tile_release();
}
#endif

// C[rows, columns] from A and packed B, whose panels are `panel_units` long; `units` of them are summed, in pieces that keep a panel of
// B in the first-level cache.
template <class Kind>
void multiply(int64_t rows, int64_t columns, int64_t units, const uint32_t* a, int64_t step_m, int64_t step_u,
              const uint32_t* b, int64_t panel_units, float* c, int64_t ldc, Into into, const float* scale = nullptr) {
#if defined(FFPA_SIMD_AMX)
  if constexpr (Kind::kStep == 16) {
    multiply_tiles(rows, columns, units, a, step_m, step_u, b, panel_units, c, ldc, into, scale);
    return;
  }
#endif
  constexpr int64_t kPiece = 128;
  for (int64_t n = 0; n < columns; n += kPanel) {
    const uint32_t* panel = b + n * panel_units;
    Into how = into;
    int64_t u = 0;
    do {  // once even with no units: C may have to be zeroed or scaled
      const int64_t piece = least(kPiece, units - u);
      const uint32_t *au = a + u * step_u, *bu = panel + u * kPanel;
      switch (how) {
        case Into::kOverwrite:
          panel_product<Kind, Into::kOverwrite>(rows, au, step_m, step_u, bu, piece, c + n, ldc, scale);
          break;
        case Into::kAdd: panel_product<Kind, Into::kAdd>(rows, au, step_m, step_u, bu, piece, c + n, ldc, scale); break;
        default: panel_product<Kind, Into::kScaleAndAdd>(rows, au, step_m, step_u, bu, piece, c + n, ldc, scale);
      }
      how = Into::kAdd;
      u += piece;
    } while (u < units);
  }
}

// --------------------------------------------------------------------------------------------------- tensors to tiles

// Rows of a tensor: where row r of the tile is, its element step and dtype.
struct Rows {
  const void* data;
  int32_t dtype;
  int64_t step;           // elements between neighbours of a row
  int64_t width;          // elements of a row
  const int64_t* offset;  // element offset of each row
};

// count values of one row as fp32.
FFPA_INLINE void widen(const Rows& rows, int64_t row, float* out) {
  const int64_t n = rows.width;
  int64_t i = 0;
  if (rows.dtype == FFPA_FP32) {
    const float* p = static_cast<const float*>(rows.data) + rows.offset[row];
    if (rows.step == 1)
      std::memcpy(out, p, static_cast<size_t>(n) * 4);
    else
      for (; i < n; ++i) out[i] = p[i * rows.step];
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(rows.data) + rows.offset[row];
  if (rows.dtype == FFPA_BF16) {
    if (rows.step == 1)
      for (; i + kLanes <= n; i += kLanes)
        store(reinterpret_cast<uint32_t*>(out + i), __builtin_convertvector(load(p + i), vu) << 16);
    for (; i < n; ++i) out[i] = float_from_bf16(p[i * rows.step]);
    return;
  }
  if (rows.step == 1) {
#if FFPA_SIMD_BYTES == 64
    for (; i + 16 <= n; i += 16)
      _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))));
#elif FFPA_SIMD_BYTES == 32
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i))));
#endif
  }
  for (; i < n; ++i) out[i] = float_from_fp16(p[i * rows.step]);
}

template <class Kind>
constexpr int64_t units_of(int64_t elems) {
  return round_up((elems + Kind::kPerUnit - 1) / Kind::kPerUnit, Kind::kStep);
}

// One row as units along its own axis; the tail of the last unit is zero.
template <class Kind>
FFPA_INLINE void row_units(const Rows& rows, int64_t row, uint32_t* out) {
  if constexpr (Kind::kPerUnit == 1) {
    widen(rows, row, reinterpret_cast<float*>(out));
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(rows.data) + rows.offset[row];
    auto* to = reinterpret_cast<uint16_t*>(out);
    if (rows.step == 1)
      std::memcpy(to, p, static_cast<size_t>(rows.width) * 2);
    else
      for (int64_t i = 0; i < rows.width; ++i) to[i] = p[i * rows.step];
    for (int64_t i = rows.width; i < 2 * units_of<Kind>(rows.width); ++i) to[i] = 0;
  }
}

// A side: rows one after the other, `ld` units apart.
template <class Kind>
void copy_rows(const Rows& rows, int64_t count, uint32_t* out, int64_t ld) {
  for (int64_t r = 0; r < count; ++r) row_units<Kind>(rows, r, out + r * ld);
}

// B side, summed along the rows' own axis: B[u, n] = unit u of row n. `scratch` holds the units of one row.
template <class Kind>
void pack_transposed(const Rows& rows, int64_t count, uint32_t* out, uint32_t* scratch) {
  const int64_t units = units_of<Kind>(rows.width);
  for (int64_t n = 0; n < round_up(count, kPanel); ++n) {
    uint32_t* to = out + n / kPanel * kPanel * units + n % kPanel;
    if (n < count) row_units<Kind>(rows, n, scratch);
    for (int64_t u = 0; u < units; ++u) to[u * kPanel] = n < count ? scratch[u] : 0;
  }
}

// B side, summed over the rows: B[u, n] = column n of row u (Fp32), of rows 2u and 2u + 1 (Bf16). Missing rows and columns are zero.
// `scratch` holds two rows of `width` floats, rounded up to a panel.
template <class Kind>
void pack_rows(const Rows& rows, int64_t count, uint32_t* out, uint32_t* scratch) {
  const int64_t units = units_of<Kind>(count), columns = round_up(rows.width, kPanel);
  for (int64_t i = rows.width; i < columns; ++i) scratch[i] = scratch[columns + i] = 0;
  for (int64_t u = 0; u < units; ++u) {
    if constexpr (Kind::kPerUnit == 1) {
      row_units<Kind>(rows, u, scratch);
      for (int64_t n = 0; n < columns; n += kLanes)
        store(out + n / kPanel * kPanel * units + u * kPanel + n % kPanel, load(scratch + n));
    } else {
      auto *low = reinterpret_cast<uint16_t*>(scratch), *high = reinterpret_cast<uint16_t*>(scratch + columns);
      const auto get = [&](int64_t row, uint16_t* to) __attribute__((always_inline)) {
        const uint16_t* p = static_cast<const uint16_t*>(rows.data) + rows.offset[row];
        if (rows.step == 1)
          std::memcpy(to, p, static_cast<size_t>(rows.width) * 2);
        else
          for (int64_t i = 0; i < rows.width; ++i) to[i] = p[i * rows.step];
        for (int64_t i = rows.width; i < columns; ++i) to[i] = 0;
      };
      for (int64_t row = 2 * u; row < 2 * u + 2; ++row) {
        uint16_t* to = row & 1 ? high : low;
        if (row < count)
          get(row, to);
        else
          std::memset(to, 0, static_cast<size_t>(columns) * 2);
      }
      for (int64_t n = 0; n < columns; n += kLanes) {
        const vu pair = __builtin_convertvector(load(low + n), vu) | __builtin_convertvector(load(high + n), vu) << 16;
        store(out + n / kPanel * kPanel * units + u * kPanel + n % kPanel, pair);
      }
    }
  }
}

// --------------------------------------------------------------------------------------------------- tiles to tensors

// fp32 to a row of fp32, fp16 or bf16 elements, `step` apart, times `factor`.
FFPA_INLINE void store_row(const ffpa_tensor& t, int64_t offset, const float* in, int64_t n, float factor) {
  const int64_t step = t.stride[3];
  if (t.dtype == FFPA_FP32) {
    float* p = static_cast<float*>(t.data) + offset;
    for (int64_t i = 0; i < n; ++i) p[i * step] = in[i] * factor;
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(t.data) + offset;
  if (t.dtype == FFPA_BF16) {
    for (int64_t i = 0; i < n; ++i) p[i * step] = bf16_from_float(in[i] * factor);
    return;
  }
  for (int64_t i = 0; i < n; ++i) p[i * step] = fp16_from_float(in[i] * factor);
}

FFPA_INLINE void zero_row(const ffpa_tensor& t, int64_t offset, int64_t n) {
  const float zero = 0.f;
  for (int64_t i = 0; i < n; ++i) store_row(t, offset + i * t.stride[3], &zero, 1, 1.f);
}

// Rounded to bf16, to nearest even, in the low 16 bits.
FFPA_INLINE vu to_bf16(vf x) {
  const vu b = reinterpret_cast<vu>(x);
  const vu rounded = (b + 0x7FFFu + (b >> 16 & 1u)) >> 16;
  return reinterpret_cast<vu>(select(x == x, from_bits(reinterpret_cast<vi>(rounded)), from_bits(splat(0x7FC0))));
}

}  // namespace ffpa::simd::FFPA_SIMD_TARGET

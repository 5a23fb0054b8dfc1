// The steps of a tile with AVX-512: a vector of tokens at a time, where rows have four or eight
// bytes of scales side by side, which most rows of 128 and 64 numbers have, or one F32 scale.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "format/scale.hpp"
#include "ops/attend/cpu/code_order.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Sixteen rows of RowBytes scales: where they lie if they do so in one run, else a copy.
template <int RowBytes>
KVX_INLINE const uint8_t* sixteen_rows(const uint8_t* const* rows, uint8_t* copy) {
  constexpr int kR = RowBytes;
  const __m512i first = _mm512_set1_epi64(reinterpret_cast<int64_t>(rows[0]));
  const __m512i places = _mm512_add_epi64(
      first, _mm512_setr_epi64(0, kR, 2 * kR, 3 * kR, 4 * kR, 5 * kR, 6 * kR, 7 * kR));
  const __m512i next_places = _mm512_add_epi64(places, _mm512_set1_epi64(8 * kR));
  const __mmask8 elsewhere =
      static_cast<__mmask8>(_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(rows), places) |
                            _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(rows + 8), next_places));
  if (elsewhere == 0) return rows[0];
  for (int t = 0; t < kTokenStep; ++t) memcpy(copy + t * kR, rows[t], kR);
  return copy;
}

// Where in a vector of rows group after group has its tokens' scales of Bytes bytes.
template <int Bytes, int RowBytes>
constexpr Table<uint8_t, 64> order_of_groups() {
  Table<uint8_t, 64> order = {};
  constexpr int kTokens = 64 / RowBytes;
  for (int at = 0; at < 64; ++at) {
    const int group = at / (kTokens * Bytes);
    const int token = at / Bytes % kTokens;
    order.at[at] = static_cast<uint8_t>(token * RowBytes + group * Bytes + at % Bytes);
  }
  return order;
}

// Whether widen_scales reads all of these scales of type T right.
template <format::ScaleType T>
KVX_INLINE bool are_common(__m512i scales) {
  // E4M3: not NaN and what has a sign. E8M0: not NaN.
  constexpr int kFirstUncommon = T == format::ScaleType::kE4M3 ? 0x7F : 0xFF;
  if constexpr (format::bytes_of(T) > 1) return true;
  return _mm512_cmpge_epu8_mask(scales, _mm512_set1_epi8(static_cast<char>(kFirstUncommon))) == 0;
}

// Sixteen rows to [groups][16]. False: a scale is uncommon.
template <format::ScaleType T, int RowBytes>
KVX_INLINE bool sort_by_group(const uint8_t* rows, uint8_t* sorted) {
  constexpr int kBytes = format::bytes_of(T);
  static constexpr Table<uint8_t, 64> kOrder = order_of_groups<kBytes, RowBytes>();
  const __m512i order = _mm512_load_si512(kOrder.at);
  const __m512i first = _mm512_loadu_si512(rows);
  const __m512i a = _mm512_permutexvar_epi8(order, first);
  if constexpr (RowBytes == 4) {
    _mm512_store_si512(sorted, a);
    return are_common<T>(first);
  } else {
    static_assert(RowBytes == 8 && kBytes <= 2);
    const __m512i second = _mm512_loadu_si512(rows + 64);
    const __m512i b = _mm512_permutexvar_epi8(order, second);
    // The halves of each group, eight tokens each, side by side.
    const __m512i low = kBytes == 1 ? _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11)
                                    : _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
    _mm512_store_si512(sorted, _mm512_permutex2var_epi64(a, low, b));
    _mm512_store_si512(sorted + 64, _mm512_permutex2var_epi64(a, high, b));
    return are_common<T>(_mm512_max_epu8(first, second));
  }
}

// Sixteen scales; E4M3: over 256.
template <format::ScaleType T>
KVX_INLINE __m512 widen_scales(const uint8_t* scales) {
  using format::ScaleType;
  if constexpr (format::bytes_of(T) == 2) {
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(scales));
    if constexpr (T == ScaleType::kF16) return _mm512_cvtph_ps(words);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
  }
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(scales));
  if constexpr (T == ScaleType::kE4M3) {  // an F16's exponent has a bias larger by 8
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
  }
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);  // E8M0's 0 means 2^-127
  return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x400000)));
}

template <format::ScaleType T, int RowBytes>
KVX_INLINE bool load_sorted_steps(const PackedTile& tile, float factor, float* steps) {
  constexpr float kLost = T == format::ScaleType::kE4M3 ? 256.0f : 1.0f;
  constexpr int kBytes = format::bytes_of(T);
  const __m512 factors = _mm512_set1_ps(factor * kLost);
  const int n = tile.padded_tokens();
  alignas(64) uint8_t copy[kTokenStep * RowBytes];
  alignas(64) uint8_t sorted[kMaxTileTokens / kTokenStep][kTokenStep * RowBytes];
  for (int t = 0; t < n; t += kTokenStep) {
    const uint8_t* rows = sixteen_rows<RowBytes>(tile.scales + t, copy);
    if (!sort_by_group<T, RowBytes>(rows, sorted[t / kTokenStep])) return false;
  }
  for (int t = 0; t < n; t += kTokenStep) {
    for (int g = 0; g < RowBytes / kBytes; ++g) {
      const __m512 widened = widen_scales<T>(sorted[t / kTokenStep] + kTokenStep * kBytes * g);
      _mm512_storeu_ps(steps + g * n + t, _mm512_mul_ps(widened, factors));
    }
  }
  return true;
}

template <format::ScaleType T>
KVX_INLINE bool load_sorted_steps(const PackedTile& tile, int row_bytes, float factor,
                                  float* steps) {
  if (row_bytes == 8) return load_sorted_steps<T, 8>(tile, factor, steps);
  return row_bytes == 4 && load_sorted_steps<T, 4>(tile, factor, steps);
}

// Rows of one F32 scale each.
KVX_INLINE void load_single_steps(const PackedTile& tile, float factor, float* steps) {
  alignas(64) uint8_t copy[kTokenStep * sizeof(float)];
  for (int t = 0; t < tile.padded_tokens(); t += kTokenStep) {
    const __m512 scales = _mm512_loadu_ps(sixteen_rows<sizeof(float)>(tile.scales + t, copy));
    _mm512_storeu_ps(steps + t, _mm512_mul_ps(scales, _mm512_set1_ps(factor)));
  }
}

// load_steps for such rows. False: the tile has other rows, or an uncommon scale.
KVX_INLINE bool load_sorted_steps(const PackedTile& tile, format::ScaleType type, int count,
                                  float factor, float* steps) {
  using format::ScaleType;
  if (type == ScaleType::kF32 && count == 1) {
    load_single_steps(tile, factor, steps);
    return true;
  }
  const int bytes = format::bytes_of(type);
  if (tile.scale_group_stride != bytes && !tile.spec->is_affine()) return false;
  switch (type) {
    case ScaleType::kE4M3:
      return load_sorted_steps<ScaleType::kE4M3>(tile, count * bytes, factor, steps);
    case ScaleType::kE8M0:
      return load_sorted_steps<ScaleType::kE8M0>(tile, count * bytes, factor, steps);
    case ScaleType::kF16:
      return load_sorted_steps<ScaleType::kF16>(tile, count * bytes, factor, steps);
    case ScaleType::kBF16:
      return load_sorted_steps<ScaleType::kBF16>(tile, count * bytes, factor, steps);
    case ScaleType::kNone:
    case ScaleType::kF32:
      return false;
  }
  return false;
}

KVX_INLINE void decode_f16_steps(const uint32_t* bits, int n, float factor, float* steps) {
  for (int i = 0; i < n; i += kTokenStep) {
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_loadu_si512(bits + i));
    _mm512_storeu_ps(steps + i, _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(factor)));
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

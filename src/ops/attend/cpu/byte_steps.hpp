// Steps of a tile whose rows have four or eight scales of one byte side by side (nvfp4, mxfp4), a
// vector of tokens at a time: AVX-512 with VBMI.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "format/scale.hpp"
#include "ops/attend/cpu/code_order.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The scales of sixteen tokens, [16][Count]: where they lie if they do so in one run, else a copy.
template <int Count>
KVX_INLINE const uint8_t* sixteen_rows(const uint8_t* const* rows, uint8_t* copy) {
  const __m512i first = _mm512_set1_epi64(reinterpret_cast<int64_t>(rows[0]));
  const __m512i places =
      _mm512_add_epi64(first, _mm512_setr_epi64(0, Count, 2 * Count, 3 * Count, 4 * Count,
                                                5 * Count, 6 * Count, 7 * Count));
  const __m512i next_places = _mm512_add_epi64(places, _mm512_set1_epi64(8 * Count));
  const __mmask8 elsewhere =
      static_cast<__mmask8>(_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(rows), places) |
                            _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(rows + 8), next_places));
  if (elsewhere == 0) return rows[0];
  for (int t = 0; t < kTokenStep; ++t) memcpy(copy + t * Count, rows[t], Count);
  return copy;
}

// Where in a vector of tokens' scales group after group has its tokens'.
template <int Count>
constexpr Table<uint8_t, 64> order_of_groups() {
  Table<uint8_t, 64> order = {};
  constexpr int kTokens = 64 / Count;
  for (int g = 0; g < Count; ++g) {
    for (int t = 0; t < kTokens; ++t) {
      order.at[g * kTokens + t] = static_cast<uint8_t>(t * Count + g);
    }
  }
  return order;
}

// [16][Count] to [Count][16]. Returns whether T says every one of them in the common way.
template <format::ScaleType T, int Count>
KVX_INLINE bool sort_by_group(const uint8_t* scales, uint8_t* sorted) {
  static constexpr Table<uint8_t, 64> kOrder = order_of_groups<Count>();
  // E4M3: NaN and what has a sign. E8M0: NaN.
  constexpr int kFirstUncommon = T == format::ScaleType::kE4M3 ? 0x7F : 0xFF;
  const __m512i uncommon = _mm512_set1_epi8(static_cast<char>(kFirstUncommon));
  const __m512i order = _mm512_load_si512(kOrder.at);
  const __m512i first = _mm512_loadu_si512(scales);
  const __m512i a = _mm512_permutexvar_epi8(order, first);
  if constexpr (Count == 4) {
    _mm512_store_si512(sorted, a);
    return _mm512_cmpge_epu8_mask(first, uncommon) == 0;
  } else {
    static_assert(Count == 8);
    const __m512i second = _mm512_loadu_si512(scales + 64);
    const __m512i b = _mm512_permutexvar_epi8(order, second);
    const __m512i even = _mm512_unpacklo_epi64(a, b);  // groups 0, 2, 4, 6
    const __m512i odd = _mm512_unpackhi_epi64(a, b);
    const auto store_group = [&](int g, __m128i bytes) {
      _mm_store_si128(reinterpret_cast<__m128i*>(sorted + 16 * g), bytes);
    };
    store_group(0, _mm512_castsi512_si128(even));
    store_group(1, _mm512_castsi512_si128(odd));
    store_group(2, _mm512_extracti32x4_epi32(even, 1));
    store_group(3, _mm512_extracti32x4_epi32(odd, 1));
    store_group(4, _mm512_extracti32x4_epi32(even, 2));
    store_group(5, _mm512_extracti32x4_epi32(odd, 2));
    store_group(6, _mm512_extracti32x4_epi32(even, 3));
    store_group(7, _mm512_extracti32x4_epi32(odd, 3));
    return _mm512_cmpge_epu8_mask(_mm512_max_epu8(first, second), uncommon) == 0;
  }
}

// Sixteen scales, times byte_scale_factor.
template <format::ScaleType T>
KVX_INLINE __m512 widen_scales(const uint8_t* scales) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(scales));
  if constexpr (T == format::ScaleType::kE4M3) {  // an F16's exponent has a bias larger by 8
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
  } else {  // 0 says 2^-127
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(0x400000)));
  }
}

template <format::ScaleType T, int Count>
KVX_INLINE bool load_byte_steps(const PackedTile& tile, float factor, float* steps) {
  constexpr float kLost = T == format::ScaleType::kE4M3 ? 256.0f : 1.0f;
  const __m512 factors = _mm512_set1_ps(factor * kLost);
  const int n = tile.padded_tokens();
  alignas(64) uint8_t copy[kTokenStep * Count];
  alignas(64) uint8_t sorted[kMaxTileTokens / kTokenStep][kTokenStep * Count];
  for (int t = 0; t < n; t += kTokenStep) {
    const uint8_t* scales = sixteen_rows<Count>(tile.scales + t, copy);
    if (!sort_by_group<T, Count>(scales, sorted[t / kTokenStep])) return false;
  }
  for (int t = 0; t < n; t += kTokenStep) {
    for (int g = 0; g < Count; ++g) {
      const __m512 wide = widen_scales<T>(sorted[t / kTokenStep] + 16 * g);
      _mm512_storeu_ps(steps + g * n + t, _mm512_mul_ps(wide, factors));
    }
  }
  return true;
}

// load_steps for such rows. False: they are none, or have an uncommon scale.
KVX_INLINE bool load_byte_steps(const PackedTile& tile, format::ScaleType type, int count,
                                float factor, float* steps) {
  using format::ScaleType;
  if (tile.scale_group_stride != 1) return false;
  if (type == ScaleType::kE4M3) {
    if (count == 8) return load_byte_steps<ScaleType::kE4M3, 8>(tile, factor, steps);
    if (count == 4) return load_byte_steps<ScaleType::kE4M3, 4>(tile, factor, steps);
  }
  if (type == ScaleType::kE8M0) {
    if (count == 8) return load_byte_steps<ScaleType::kE8M0, 8>(tile, factor, steps);
    if (count == 4) return load_byte_steps<ScaleType::kE8M0, 4>(tile, factor, steps);
  }
  return false;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

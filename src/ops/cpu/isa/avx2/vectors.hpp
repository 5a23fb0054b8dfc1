// The vectors of AVX2 with FMA and F16C: eight floats.
#pragma once

#include "ops/cpu/isa/avx2/part_bytes.hpp"
#include "ops/cpu/vector_types.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

using Widest = Lanes8;
using LaneBits = LanesOf<Widest>::Bits;
using LaneInts = decltype(Widest{} < Widest{});

// x * y + z. The product is exact, so fusing it changes nothing.
KVX_INLINE Widest add_exact_product(const Widest& x, const Widest& y, const Widest& z) {
  return static_cast<Widest>(
      _mm256_fmadd_ps(static_cast<__m256>(x), static_cast<__m256>(y), static_cast<__m256>(z)));
}

// One instruction, where the compilers make two of a comparison. With a NaN: the bound.
KVX_INLINE Widest at_least(const Widest& x, float bound) {
  return static_cast<Widest>(_mm256_max_ps(static_cast<__m256>(x), _mm256_set1_ps(bound)));
}
KVX_INLINE Widest at_most(const Widest& x, float bound) {
  return static_cast<Widest>(_mm256_min_ps(static_cast<__m256>(x), _mm256_set1_ps(bound)));
}

// x, its magnitude no larger than the bound, which is positive. Requires: x is no NaN.
KVX_INLINE Widest within(const Widest& x, float bound) {
  return at_most(at_least(x, -bound), bound);
}

// Rounds to integers, ties to even. Requires: a lane can hold them.
KVX_INLINE LaneBits integers_of(const Widest& x) {
  return __builtin_bit_cast(LaneBits, _mm256_cvtps_epi32(static_cast<__m256>(x)));
}

// ---- F16

KVX_INLINE Widest round_to_f16(const Widest& x) {
  const __m128i halves = _mm256_cvtps_ph(static_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<Widest>(_mm256_cvtph_ps(halves));
}

// The numbers' F16 bits, in the low half of each lane.
KVX_INLINE LaneBits f16_bits(const Widest& x) {
  const __m128i halves = _mm256_cvtps_ph(static_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
  return __builtin_bit_cast(LaneBits, _mm256_cvtepu16_epi32(halves));
}

// Stores the low half of each lane, whose high half is 0.
KVX_INLINE void store_low_halves(const LaneBits& bits, uint8_t* target) {
  const auto lanes = __builtin_bit_cast(__m256i, bits);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(target),
      _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
}

// Stores F16 numbers; every NaN as nan_bits.
KVX_INLINE void store_f16(const Widest& x, uint32_t nan_bits, uint8_t* target) {
  store_low_halves(x == x ? f16_bits(x) : LaneBits{} + nan_bits, target);
}

// ---- Codes as bytes

// The low bytes of sixteen lanes. part: [2].
KVX_INLINE PartBytes low_bytes(const LaneBits* part) {
  const __m256i low = __builtin_bit_cast(__m256i, part[0] & 0xFFu);
  const __m256i high = __builtin_bit_cast(__m256i, part[1] & 0xFFu);
  // [low 0-3][high 0-3][low 4-7][high 4-7], 16 bits each
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Codes of four vectors, one a byte.
using QuadBytes = __m256i;

// The lanes of four vectors as bytes, in order, each cut to what a byte can hold.
template <bool IsSigned>
KVX_INLINE QuadBytes bytes_of_lanes(const LaneBits* lanes) {
  const auto vector = [lanes](int i) { return __builtin_bit_cast(QuadBytes, lanes[i]); };
  const __m256i low = _mm256_packs_epi32(vector(0), vector(1));
  const __m256i high = _mm256_packs_epi32(vector(2), vector(3));
  const __m256i bytes = IsSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

KVX_INLINE QuadBytes bytes_within(const QuadBytes& bytes, int bound) {
  const auto most = static_cast<char>(bound);
  const auto least = static_cast<char>(-bound);
  return _mm256_max_epi8(_mm256_min_epi8(bytes, _mm256_set1_epi8(most)), _mm256_set1_epi8(least));
}

// As store_nibbles_of_part, for a quad; bits above the nibbles may be anything.
KVX_INLINE void store_nibbles_of_quad(QuadBytes codes, uint8_t* target) {
  const __m256i pairs = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  const __m256i nibbles = _mm256_maddubs_epi16(pairs, _mm256_set1_epi16(0x1001));
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(nibbles, nibbles), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(bytes));
}

// As store_codes, for a quad.
template <format::Packing P>
KVX_INLINE void store_quad(QuadBytes codes, int number, uint8_t* row) {
  using format::Packing;
  if constexpr (P == Packing::kBytes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + number), codes);
  } else if constexpr (P == Packing::kTurboMind) {
    const __m256i order = _mm256_broadcastsi128_si256(turbomind_order());
    store_nibbles_of_quad(_mm256_shuffle_epi8(codes, order), row + number / 2);
  } else if constexpr (P == Packing::kNibbles || P == Packing::kWords) {
    store_nibbles_of_quad(codes, row + number / 2);
  } else {
    static_assert(format::kHasNoBranch<P>, "store_quad has no branch for this packing");
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

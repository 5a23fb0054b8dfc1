// The vectors of AVX-512 F, BW, VL and DQ: sixteen floats.
#pragma once

#include "ops/cpu/isa/avx2/part_bytes.hpp"
#include "ops/cpu/vector_types.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

using Widest = Lanes16;
using LaneBits = LanesOf<Widest>::Bits;
using LaneInts = decltype(Widest{} < Widest{});

// x * y + z. The product is exact, so fusing it changes nothing.
KVX_INLINE Widest add_exact_product(const Widest& x, const Widest& y, const Widest& z) {
  return static_cast<Widest>(
      _mm512_fmadd_ps(static_cast<__m512>(x), static_cast<__m512>(y), static_cast<__m512>(z)));
}

// One instruction, where the compilers make two of a comparison. With a NaN: the bound.
KVX_INLINE Widest at_least(const Widest& x, float bound) {
  return static_cast<Widest>(_mm512_max_ps(static_cast<__m512>(x), _mm512_set1_ps(bound)));
}
KVX_INLINE Widest at_most(const Widest& x, float bound) {
  return static_cast<Widest>(_mm512_min_ps(static_cast<__m512>(x), _mm512_set1_ps(bound)));
}

// x, its magnitude no larger than the bound, which is positive. Requires: x is no NaN.
KVX_INLINE Widest within(const Widest& x, float bound) {
  constexpr int kSmallerMagnitudeSignOfFirst = 0x2;
  return static_cast<Widest>(
      _mm512_range_ps(static_cast<__m512>(x), _mm512_set1_ps(bound), kSmallerMagnitudeSignOfFirst));
}

// Rounds to integers, ties to even. Requires: a lane can hold them.
KVX_INLINE LaneBits integers_of(const Widest& x) {
  return __builtin_bit_cast(LaneBits, _mm512_cvtps_epi32(static_cast<__m512>(x)));
}

// ---- F16

KVX_INLINE Widest round_to_f16(const Widest& x) {
  const __m256i halves = _mm512_cvtps_ph(static_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<Widest>(_mm512_cvtph_ps(halves));
}

// The numbers' F16 bits, in the low half of each lane.
KVX_INLINE LaneBits f16_bits(const Widest& x) {
  const __m256i halves = _mm512_cvtps_ph(static_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
  return __builtin_bit_cast(LaneBits, _mm512_cvtepu16_epi32(halves));
}

// Stores the low half of each lane.
KVX_INLINE void store_low_halves(const LaneBits& bits, uint8_t* target) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                      _mm512_cvtepi32_epi16(__builtin_bit_cast(__m512i, bits)));
}

// Stores F16 numbers; every NaN as nan_bits. A mask selects among the narrow numbers.
KVX_INLINE void store_f16(const Widest& x, uint32_t nan_bits, uint8_t* target) {
  const auto numbers = static_cast<__m512>(x);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m256i halves = _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT);
  const __m256i nan = _mm256_set1_epi16(static_cast<short>(nan_bits));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                      _mm256_mask_mov_epi16(halves, is_nan, nan));
}

// ---- Codes as bytes

// The low bytes of sixteen lanes. part: [1].
KVX_INLINE PartBytes low_bytes(const LaneBits* part) {
  return _mm512_cvtepi32_epi8(__builtin_bit_cast(__m512i, part[0]));
}

// Codes of four vectors, one a byte.
using QuadBytes = __m512i;

// The lanes of four vectors as bytes, in order, each cut to what a byte can hold.
template <bool IsSigned>
KVX_INLINE QuadBytes bytes_of_lanes(const LaneBits* lanes) {
  const auto vector = [lanes](int i) { return __builtin_bit_cast(QuadBytes, lanes[i]); };
  const __m512i low = _mm512_packs_epi32(vector(0), vector(1));
  const __m512i high = _mm512_packs_epi32(vector(2), vector(3));
  const __m512i bytes = IsSigned ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

KVX_INLINE QuadBytes bytes_within(const QuadBytes& bytes, int bound) {
  const auto most = static_cast<char>(bound);
  const auto least = static_cast<char>(-bound);
  return _mm512_max_epi8(_mm512_min_epi8(bytes, _mm512_set1_epi8(most)), _mm512_set1_epi8(least));
}

// As store_nibbles_of_part, for a quad; bits above the nibbles may be anything.
KVX_INLINE void store_nibbles_of_quad(QuadBytes codes, uint8_t* target) {
  const __m512i pairs = _mm512_and_si512(codes, _mm512_set1_epi8(15));
  const __m512i nibbles = _mm512_maddubs_epi16(pairs, _mm512_set1_epi16(0x1001));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi16_epi8(nibbles));
}

// As store_codes, for a quad.
template <format::Packing P>
KVX_INLINE void store_quad(QuadBytes codes, int number, uint8_t* row) {
  using format::Packing;
  if constexpr (P == Packing::kBytes) {
    _mm512_storeu_si512(row + number, codes);
  } else if constexpr (P == Packing::kTurboMind) {
    const __m512i order = _mm512_broadcast_i32x4(turbomind_order());
    store_nibbles_of_quad(_mm512_shuffle_epi8(codes, order), row + number / 2);
  } else if constexpr (P == Packing::kNibbles || P == Packing::kWords) {
    store_nibbles_of_quad(codes, row + number / 2);
  } else {
    static_assert(format::kHasNoBranch<P>, "store_quad has no branch for this packing");
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

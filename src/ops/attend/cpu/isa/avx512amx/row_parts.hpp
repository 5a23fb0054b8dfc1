// Thirty-two numbers of a stored row as BF16 parts, for the packers. A loader's low parts are 0
// where kHasLow is false.
#pragma once

#include <bit>

#include "format/codec.hpp"
#include "ops/attend/cpu/code_bytes.hpp"
#include "ops/attend/cpu/isa/avx512amx/parts.hpp"
#include "ops/attend/cpu/matrix/kernels.hpp"
#include "ops/attend/cpu/packed_steps.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Rows of BF16 are their own high parts.
class Bf16Rows {
 public:
  static constexpr bool kHasLow = false;
  static constexpr bool kHasRowSteps = false;

  bool begin(const PackedTile& rows, MatrixTile&) {
    rows_ = &rows;
    return true;
  }
  KVX_INLINE Parts load(int token, int number) {
    const __m512i words = _mm512_loadu_si512(rows_->codes[token] + 2 * number);
    largest_ = _mm512_max_epu16(largest_, _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF)));
    return {words, _mm512_setzero_si512()};
  }
  bool all_have_parts() const {
    return _mm512_cmpgt_epu16_mask(largest_, _mm512_set1_epi16(0x7F00)) == 0;
  }

 private:
  const PackedTile* rows_ = nullptr;
  __m512i largest_ = _mm512_setzero_si512();
};

// Rows of fp8 under one step: BF16 holds every code, and the step is multiplied in behind the
// products. A code's exponent is its BF16's but for the bias, and a table has the subnormals.
template <class Codec>
class Fp8Rows {
 public:
  static constexpr bool kHasLow = false;
  static constexpr bool kHasRowSteps = true;

  bool begin(const PackedTile& rows, MatrixTile& tile) {
    rows_ = &rows;
    if (!rows.spec->has_scale()) return true;
    load_steps(rows, scale_row(*rows.spec, rows.head_dim), tensor_scale_of(rows), tile.scratch);
    tile.steps = tile.scratch;
    return are_within_reach(tile.steps);
  }
  KVX_INLINE Parts load(int token, int number) {
    static constexpr Table<uint16_t, 32> kSubnormal = subnormals();
    const auto* codes = reinterpret_cast<const __m256i*>(rows_->codes[token] + number);
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(codes));
    const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7F));
    largest_ = _mm512_max_epu16(largest_, magnitude);
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 7 - kMantissaBits),
                                            _mm512_set1_epi16(kBiasDifference << 7));
    const __mmask32 is_subnormal =
        _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(1 << kMantissaBits));
    const __m512i bits = _mm512_mask_permutexvar_epi16(normal, is_subnormal, magnitude,
                                                       _mm512_load_si512(kSubnormal.at));
    constexpr int kOrAnd = 0xF8;  // a | (b & c)
    const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000));
    return {_mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(words, 8), sign, kOrAnd),
            _mm512_setzero_si512()};
  }
  bool all_have_parts() const {
    return _mm512_cmpgt_epu16_mask(largest_, _mm512_set1_epi16(kLargestFinite)) == 0;
  }

 private:
  static constexpr bool kIsE4M3 = std::is_same_v<Codec, format::E4M3Codec>;
  static constexpr int kMantissaBits = kIsE4M3 ? 3 : 2;
  static constexpr int kBiasDifference = 127 - (kIsE4M3 ? 7 : 15);
  static constexpr short kLargestFinite = kIsE4M3 ? 0x7E : 0x7B;

  static constexpr Table<uint16_t, 32> subnormals() {
    Table<uint16_t, 32> table = {};
    for (int code = 0; code < 1 << kMantissaBits; ++code) {
      const uint32_t bits = std::bit_cast<uint32_t>(Codec::decode(static_cast<uint8_t>(code)));
      table.at[code] = static_cast<uint16_t>(bits >> 16);
    }
    return table;
  }

  // A weight is a probability times a step, and has two parts where the step is in this range or 0.
  static bool are_within_reach(const float* steps) {
    __mmask16 outside = 0;
    for (int t = 0; t < kMaxTileTokens; t += 16) {
      const __m512 step = _mm512_loadu_ps(steps + t);
      const __mmask16 not_zero = _mm512_cmp_ps_mask(step, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      outside |= _mm512_mask_cmp_ps_mask(not_zero, step, _mm512_set1_ps(0x1p-60f), _CMP_NGE_UQ);
      outside |= _mm512_mask_cmp_ps_mask(not_zero, step, _mm512_set1_ps(0x1p60f), _CMP_NLE_UQ);
    }
    return outside == 0;
  }

  const PackedTile* rows_ = nullptr;
  __m512i largest_ = _mm512_setzero_si512();
};

// What turns 32 numbers as binary32 into parts.
template <bool WantsLow>
class NumberParts {
 public:
  KVX_INLINE Parts make(__m512 first, __m512 second) {
    watch_.see(first, second);
    if constexpr (WantsLow) return parts_of(first, second);
    return {round_to_bf16(first, second), _mm512_setzero_si512()};
  }
  bool all_have_parts() const { return watch_.all_have_parts(); }

 private:
  PartsWatch watch_;
};

template <bool WantsLow>
class F16Rows {
 public:
  static constexpr bool kHasLow = WantsLow;
  static constexpr bool kHasRowSteps = false;

  bool begin(const PackedTile& rows, MatrixTile&) {
    rows_ = &rows;
    return true;
  }
  KVX_INLINE Parts load(int token, int number) {
    const auto* halves = reinterpret_cast<const __m256i*>(rows_->codes[token] + 2 * number);
    return numbers_.make(_mm512_cvtph_ps(_mm256_loadu_si256(halves)),
                         _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)));
  }
  bool all_have_parts() const { return numbers_.all_have_parts(); }

 private:
  const PackedTile* rows_ = nullptr;
  NumberParts<WantsLow> numbers_;
};

// Integer and E2M1 codes under steps of groups, or a row's step and zero.
template <class Codec, format::Packing P, bool WantsLow>
class CodeRows {
 public:
  static constexpr bool kHasLow = WantsLow;
  static constexpr bool kHasRowSteps = false;

  bool begin(const PackedTile& rows, MatrixTile& tile) {
    rows_ = &rows;
    const ScaleRow row = scale_row(*rows.spec, rows.head_dim);
    load_steps(rows, row, Unit::kUnit * tensor_scale_of(rows), tile.scratch);
    steps_ = tile.scratch;
    if (rows.spec->is_affine()) {
      zeros_ = tile.scratch + kMaxTileTokens;
    } else if (rows.spec->group_size != format::kWholeRow) {
      group_bits_ = std::countr_zero(static_cast<unsigned>(rows.spec->group_size));
    }
    return true;
  }
  KVX_INLINE Parts load(int token, int number) {
    const __m256i bytes = code_bytes(rows_->codes[token], number);
    const float* steps = steps_ + token;
    const __m512 step = _mm512_set1_ps(steps[(number >> group_bits_) * kMaxTileTokens]);
    const __m512 next = _mm512_set1_ps(steps[((number + 16) >> group_bits_) * kMaxTileTokens]);
    const __m512 first = _mm512_cvtepi32_ps(widen(_mm256_castsi256_si128(bytes)));
    const __m512 second = _mm512_cvtepi32_ps(widen(_mm256_extracti128_si256(bytes, 1)));
    if (zeros_ != nullptr) {
      const __m512 zero = _mm512_set1_ps(zeros_[token]);
      return numbers_.make(_mm512_fmadd_ps(first, step, zero), _mm512_fmadd_ps(second, step, zero));
    }
    return numbers_.make(_mm512_mul_ps(first, step), _mm512_mul_ps(second, next));
  }
  bool all_have_parts() const { return numbers_.all_have_parts(); }

 private:
  using Unit = CodeBytes<Codec>;
  static constexpr bool kIsUnsigned = is_unsigned_code<Codec>();

  KVX_INLINE static __m512i widen(__m128i bytes) {
    return kIsUnsigned ? _mm512_cvtepu8_epi32(bytes) : _mm512_cvtepi8_epi32(bytes);
  }
  // Of sixteen numbers: where one is among the nibbles, a byte's low one before its high one.
  static constexpr Table<int8_t, 16> order_of_numbers() {
    Table<int8_t, 16> order = {};
    for (int byte = 0; byte < 8; ++byte) {
      order.at[low_nibble_number<P>(byte)] = static_cast<int8_t>(2 * byte);
      order.at[high_nibble_number<P>(byte)] = static_cast<int8_t>(2 * byte + 1);
    }
    return order;
  }
  // Numbers over kUnit.
  KVX_INLINE static __m256i code_bytes(const uint8_t* row, int number) {
    if constexpr (!Unit::kIsNibble) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + number));
    } else {
      const auto* codes = reinterpret_cast<const __m128i*>(row + number / 2);
      const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes));
      const __m256i both = _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
      __m256i nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
      if constexpr (P == format::Packing::kTurboMind) {
        static constexpr Table<int8_t, 16> kOrder = order_of_numbers();
        const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.at));
        nibbles = _mm256_shuffle_epi8(nibbles, _mm256_broadcastsi128_si256(order));
      }
      if constexpr (kIsUnsigned) return nibbles;
      static constexpr Table<int8_t, 16> kNumbers = Unit::nibble_bytes(0);
      const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(kNumbers.at));
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
    }
  }

  const PackedTile* rows_ = nullptr;
  const float* steps_ = nullptr;  // [groups, kMaxTileTokens]
  const float* zeros_ = nullptr;  // [kMaxTileTokens]
  int group_bits_ = 30;           // of the numbers in a group, which are a power of two
  NumberParts<WantsLow> numbers_;
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

// Which formats have packed kernels at the level being compiled.
#pragma once

#include "format/list.hpp"
#include "format/traits.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/precision.hpp"
#if defined(__AVX2__)
#include "ops/attend/cpu/code_keys.hpp"
#include "ops/attend/cpu/code_values.hpp"
#include "ops/attend/cpu/packed_floats.hpp"
#endif

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

#if defined(__AVX2__)

// OfQuery, OfWeight: fixed-point numbers.
template <class Codec, format::Packing P, Fixed OfQuery, Fixed OfWeight>
inline constexpr PackedKernels kCodeKernels = {prepare_code_queries<Codec, P, OfQuery>,
                                               score_codes<Codec, P, OfQuery>,
                                               add_code_values<Codec, P, OfWeight>, kAnyRows};

// Words of eight are nibbles in the same order.
constexpr format::Packing order_of_codes(format::Packing packing) {
  return packing == format::Packing::kWords ? format::Packing::kNibbles : packing;
}

template <class Format, Precision Wanted>
constexpr const PackedKernels* packed_kernels_of() {
  using Codec = typename Format::Codec;
  constexpr format::FormatId kId = Format::kFacts.id;
  if constexpr (kId == format::FormatId::kF32) {
    return nullptr;  // decoding is a copy
  } else if constexpr (format::is_plain<Format>() || kId == format::FormatId::kFp8E4M3 ||
                       kId == format::FormatId::kFp8E5M2) {
    return &kFloatKernels<FloatPart<Codec>>;
  } else {
    constexpr Fixed kWeight = takes_words<Codec>() ? Fixed::kWord : Fixed::kTwoDigits;
    constexpr bool kIsOneDigit = Wanted == Precision::kFast && kWeight == Fixed::kTwoDigits;
    constexpr Fixed kQuery = kIsOneDigit ? Fixed::kHighDigit : kWeight;
    return &kCodeKernels<Codec, order_of_codes(Format::kFacts.packing), kQuery, kWeight>;
  }
}

static const PackedKernels* find_packed(const format::FormatSpec& spec, int head_dim,
                                        Precision precision) {
#define KVX_ACCURATE(Format) packed_kernels_of<format::Format, Precision::kAccurate>(),
#define KVX_FAST(Format) packed_kernels_of<format::Format, Precision::kFast>(),
  static constexpr const PackedKernels* kAccurate[] = {KVX_FOR_EACH_FORMAT(KVX_ACCURATE)};
  static constexpr const PackedKernels* kFast[] = {KVX_FOR_EACH_FORMAT(KVX_FAST)};
#undef KVX_ACCURATE
#undef KVX_FAST
#if defined(__AVX512VBMI__)
  if (head_dim % 32 == 0 && spec.facts->id == format::FormatId::kBF16) {
    static constexpr const PackedKernels* kBF16 = &kFloatKernels<Bf16Block>;
    return kBF16;
  }
  if (head_dim % 64 == 0) {  // whole blocks of sixty-four numbers
    static constexpr const PackedKernels* kE4M3 = &kFloatKernels<Fp8Block<format::E4M3Codec>>;
    static constexpr const PackedKernels* kE5M2 = &kFloatKernels<Fp8Block<format::E5M2Codec>>;
    if (spec.facts->id == format::FormatId::kFp8E4M3) return kE4M3;
    if (spec.facts->id == format::FormatId::kFp8E5M2) return kE5M2;
  }
#endif
  const int id = static_cast<int>(spec.facts->id);
  const int group = spec.group_size == format::kWholeRow ? head_dim : spec.group_size;
  // Kernels take numbers in parts of sixteen, each in one group.
  const bool fits = head_dim % 16 == 0 && (group % 16 == 0 || !spec.has_scale());
  if (id >= format::kNumFormats || !fits) return nullptr;
  return precision == Precision::kFast ? kFast[id] : kAccurate[id];
}

#else

static const PackedKernels* find_packed(const format::FormatSpec&, int, Precision) {
  return nullptr;
}

#endif

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

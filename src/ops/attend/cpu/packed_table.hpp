// Which formats have packed kernels at the level being compiled.
#pragma once

#include "format/list.hpp"
#include "format/traits.hpp"
#include "ops/attend/cpu/code_keys.hpp"
#include "ops/attend/cpu/code_values.hpp"
#include "ops/attend/cpu/dual_kernels.hpp"
#include "ops/attend/cpu/packed_floats.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/precision.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// OfQuery, OfWeight: fixed-point numbers.
template <class Codec, format::Packing P, Fixed OfQuery, Fixed OfWeight>
inline constexpr PackedKernels kCodeKernels = {prepare_code_queries<Codec, P, OfQuery>,
                                               score_codes<Codec, P, OfQuery>,
                                               add_code_values<Codec, P, OfWeight>, kAnyRows};

// Words of eight are nibbles in the same order.
template <format::Packing P>
constexpr format::Packing order_of_codes() {
  using format::Packing;
  if constexpr (P == Packing::kWords) {
    return Packing::kNibbles;
  } else {
    static_assert(P == Packing::kBytes || P == Packing::kNibbles || P == Packing::kTurboMind,
                  "integer products have no order for this packing");
    return P;
  }
}

template <class Format, Precision Wanted>
constexpr const PackedKernels* packed_kernels_of() {
  using Codec = typename Format::Codec;
  constexpr format::FormatId kId = Format::kFacts.id;
  if constexpr (format::is_dual<Format>()) {
    constexpr Fixed kQuery = Wanted == Precision::kFast ? Fixed::kHighDigit : Fixed::kTwoDigits;
    return &kDualKernels<Codec::kBits, kQuery>;
  } else if constexpr (!format::has_fast_kernels<Format>()) {
    return nullptr;
  } else if constexpr (kId == format::FormatId::kF32) {
    return nullptr;  // decoding is a copy
  } else if constexpr (format::is_plain<Format>() || kId == format::FormatId::kFp8E4M3 ||
                       kId == format::FormatId::kFp8E5M2) {
    return &kFloatKernels<FloatPart<Codec>>;
  } else {
    constexpr Fixed kWeight = takes_words<Codec>() ? Fixed::kWord : Fixed::kTwoDigits;
    constexpr bool kIsOneDigit = Wanted == Precision::kFast && kWeight == Fixed::kTwoDigits;
    constexpr Fixed kQuery = kIsOneDigit ? Fixed::kHighDigit : kWeight;
    return &kCodeKernels<Codec, order_of_codes<Format::kFacts.packing>(), kQuery, kWeight>;
  }
}

// Levels whose packed kernels take rows in parts alone.
struct NoBlockKernels {
  static const PackedKernels* find(const format::FormatSpec&, int) { return nullptr; }
};

// Blocks: kernels that a level has for rows of whole blocks.
template <class Blocks>
static const PackedKernels* find_packed(const format::FormatSpec& spec, int head_dim,
                                        Precision precision) {
#define KVX_ACCURATE(Format) packed_kernels_of<format::Format, Precision::kAccurate>(),
#define KVX_FAST(Format) packed_kernels_of<format::Format, Precision::kFast>(),
  static constexpr const PackedKernels* kAccurate[] = {KVX_FOR_EACH_FORMAT(KVX_ACCURATE)};
  static constexpr const PackedKernels* kFast[] = {KVX_FOR_EACH_FORMAT(KVX_FAST)};
#undef KVX_ACCURATE
#undef KVX_FAST
  if (const PackedKernels* block = Blocks::find(spec, head_dim)) return block;
  const int id = static_cast<int>(spec.facts->id);
  const int group = spec.group_size == format::kWholeRow ? head_dim : spec.group_size;
  // Kernels take numbers in parts of sixteen, each in one group.
  const bool fits = head_dim % 16 == 0 && (group % 16 == 0 || !spec.has_scale());
  if (id >= format::kNumFormats || !fits) return nullptr;
  if (spec.is_dual() && head_dim > kMostDualHeadDim) return nullptr;
  return precision == Precision::kFast ? kFast[id] : kAccurate[id];
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

// Which formats have packed kernels at the level being compiled.
#pragma once

#include "format/list.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/cpu/facts_in_kernels.hpp"
#if defined(__AVX512VNNI__)
#include "ops/attend/cpu/code_keys.hpp"
#include "ops/attend/cpu/code_values.hpp"
#endif
#if defined(__AVX2__)
#include "ops/attend/cpu/packed_floats.hpp"
#endif

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

#if defined(__AVX2__)

template <class Codec, format::Packing P>
inline constexpr PackedKernels kCodeKernels =
#if defined(__AVX512VNNI__)
    {prepare_code_queries<Codec, P>, score_codes<Codec>, add_code_values<Codec, P>, kAnyRows};
#else
    kFloatKernels<CodePart<Codec, P>>;
#endif

// Words of eight are nibbles in the same order.
constexpr format::Packing order_of_codes(format::Packing packing) {
  return packing == format::Packing::kWords ? format::Packing::kNibbles : packing;
}

template <class Format>
constexpr const PackedKernels* packed_kernels_of() {
  using Codec = typename Format::Codec;
  constexpr format::FormatId kId = Format::kFacts.id;
  if constexpr (kId == format::FormatId::kF32) {
    return nullptr;  // decoding is a copy
  } else if constexpr (is_plain<Format>() || kId == format::FormatId::kFp8E4M3 ||
                       kId == format::FormatId::kFp8E5M2) {
    return &kFloatKernels<FloatPart<Codec>>;
  } else {
    return &kCodeKernels<Codec, order_of_codes(Format::kFacts.packing)>;
  }
}

static const PackedKernels* find_packed(const format::FormatSpec& spec, int head_dim) {
#define KVX_PACKED(Format) packed_kernels_of<format::Format>(),
  static constexpr const PackedKernels* kKernels[] = {KVX_FOR_EACH_FORMAT(KVX_PACKED)};
#undef KVX_PACKED
#if defined(__AVX512VBMI__)
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
  return id < format::kNumFormats && fits ? kKernels[id] : nullptr;
}

#else

static const PackedKernels* find_packed(const format::FormatSpec&, int) {
  return nullptr;
}

#endif

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

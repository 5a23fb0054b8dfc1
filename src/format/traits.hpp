// A format's facts as kernels of every backend use them: a fact with one permitted value is a
// constant.
#pragma once

#include "format/format_spec.hpp"
#include "format/scale.hpp"

namespace kvx::format {

// gather and attention read affine rows differently (docs/numbers.md, section 4); all other formats
// alike.
enum class DecodeFor : uint8_t { kGather, kAttend };

// Whether the codes are the numbers.
template <class Format>
KVX_INLINE constexpr bool is_plain() {
  return Format::kFacts.scale_types.values[0] == ScaleType::kNone;
}

template <class Format>
KVX_INLINE constexpr bool is_affine() {
  return Format::kFacts.scale_rules.values[0] == ScaleRule::kAffine;
}

// Whether rows are quantised a whole block at once (format/dual_scale.hpp).
template <class Format>
KVX_INLINE constexpr bool is_dual() {
  return Format::kFacts.scale_rules.values[0] == ScaleRule::kDual;
}

// Whether kernels beside the reference ones take the format.
template <class Format>
KVX_INLINE constexpr bool has_fast_kernels() {
  switch (Format::kFacts.kernels) {
    case Kernels::kAll:
      return true;
    case Kernels::kReference:
      return false;
  }
  return false;
}

template <class Format>
KVX_INLINE ScaleMaker scale_maker(const FormatSpec& spec, float tensor_scale) {
  constexpr auto kTypes = Format::kFacts.scale_types;
  constexpr auto kRules = Format::kFacts.scale_rules;
  return {
      .type = kTypes.count == 1 ? kTypes.values[0] : spec.scale_type,
      .rule = kRules.count == 1 ? kRules.values[0] : spec.scale_rule,
      .tensor_scale = tensor_scale,
      .has_tensor_scale = Format::kFacts.has_tensor_scale,
  };
}

}  // namespace kvx::format

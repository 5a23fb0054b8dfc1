// A format's facts as kernels use them: what the facts leave no choice about is a constant.
#pragma once

#include "format/facts.hpp"
#include "format/scale.hpp"
#include "format/spec.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The codes are the numbers.
template <class Format>
constexpr bool is_plain() {
  return Format::kFacts.scale_types.values[0] == format::ScaleType::kNone;
}

template <class Format>
constexpr bool is_affine() {
  return Format::kFacts.scale_rules.values[0] == format::ScaleRule::kAffine;
}

template <class Format>
KVX_INLINE format::ScaleMaker scale_maker(const format::FormatSpec& spec, float tensor_scale) {
  constexpr auto kTypes = Format::kFacts.scale_types;
  constexpr auto kRules = Format::kFacts.scale_rules;
  return {
      .type = kTypes.count == 1 ? kTypes.values[0] : spec.scale_type,
      .rule = kRules.count == 1 ? kRules.values[0] : spec.scale_rule,
      .tensor_scale = tensor_scale,
      .has_tensor_scale = Format::kFacts.has_tensor_scale,
  };
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

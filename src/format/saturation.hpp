// Saturation: numbers that a format clips.
//
// A finite number is saturated when it lies further beyond the largest code than codes of that size
// are apart from a number between them: its error is larger than any other number's. Under a given
// scale that is a matter of the scale. A computed scale reaches every number, unless the scale's
// own type ends before (nvfp4's E4M3 scales under a tensor scale that is too small); what a search
// clips on purpose does not count.
#pragma once

#include "format/group.hpp"

namespace kvx::format {

// Half a spacing beyond the largest code, in units of the step.
template <class Codec>
constexpr float saturation_product() {
  constexpr auto kLargest = Codec::encode(Codec::kQmax);
  constexpr float kBefore = Codec::decode(static_cast<typename Codec::Code>(kLargest - 1));
  return Codec::kQmax + (Codec::kQmax - kBefore) / 2;
}
static_assert(saturation_product<Int8Codec>() == 127.5f);
static_assert(saturation_product<E2M1Codec>() == 7.0f);
static_assert(saturation_product<E4M3Codec>() == 464.0f);

// The largest number that a computed scale can reach; FLT_MAX where that is all of them.
template <class Codec>
KVX_INLINE float largest_storable(const ScaleMaker& maker) {
  if (maker.rule != ScaleRule::kAmax) return kFloatMax;  // 2^127 and more
  const float step = maker.step(round_scale(maker.type, kFloatMax));
  const float largest = saturation_product<Codec>() * step;
  return largest < kFloatMax ? largest : kFloatMax;
}

// When a number is saturated: its product under a given scale, or itself, is beyond a limit.
struct SaturationLimit {
  float most;
  bool is_of_product;

  // Whether no finite number is beyond it.
  KVX_INLINE bool is_none() const { return !is_of_product && most >= kFloatMax; }
  // inverse_step: reciprocal() of the step. A step of 0 stores nothing but zeros.
  KVX_INLINE bool is_exceeded_by(float x, float inverse_step) const {
    const float number = is_of_product ? x * inverse_step : x;
    return is_finite(x) && (number > most || number < -most);
  }
};

// Page-shared scales grow with the numbers.
template <class Codec>
KVX_INLINE SaturationLimit saturation_limit(ScaleSource source, const ScaleMaker& maker) {
  if (source == ScaleSource::kGiven) return {saturation_product<Codec>(), true};
  if (source == ScaleSource::kPageShared) return {kFloatMax, false};
  return {largest_storable<Codec>(maker), false};
}

}  // namespace kvx::format

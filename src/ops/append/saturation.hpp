// Saturation: numbers that a format clips, counted while rows are encoded.
//
// A finite number is saturated when it lies further beyond the largest code than codes of that size
// are apart from a number between them: its error is larger than any other number's. Under a given
// scale that is a matter of the scale. A computed scale reaches every number, unless the scale's
// own type ends before (nvfp4's E4M3 scales under a tensor scale that is too small); what a search
// clips on purpose does not count.
#pragma once

#include "format/scale.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Half a spacing beyond the largest code, in units of the step.
template <class Codec>
constexpr float saturation_product() {
  constexpr auto kLargest = Codec::encode(Codec::kQmax);
  constexpr float kBefore = Codec::decode(static_cast<typename Codec::Code>(kLargest - 1));
  return Codec::kQmax + (Codec::kQmax - kBefore) / 2;
}
static_assert(saturation_product<format::Int8Codec>() == 127.5f);
static_assert(saturation_product<format::E2M1Codec>() == 7.0f);
static_assert(saturation_product<format::E4M3Codec>() == 464.0f);

// Requires: x is finite. A step of 0 stores nothing but zeros.
template <class Codec>
KVX_INLINE bool is_saturated(float x, float step) {
  const float product = x * format::reciprocal(step);
  return product > saturation_product<Codec>() || product < -saturation_product<Codec>();
}

// How many of x, [n], are finite and saturated under this step.
template <class Codec>
int count_saturated(float step, const float* x, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) count += format::is_finite(x[i]) && is_saturated<Codec>(x[i], step);
  return count;
}

// The largest number that a computed scale can reach; FLT_MAX where that is all of them.
template <class Codec>
KVX_INLINE float largest_storable(const format::ScaleMaker& maker) {
  if (maker.rule != format::ScaleRule::kAmax) return format::kFloatMax;  // 2^127 and more
  const float step = maker.step(format::round_scale(maker.type, format::kFloatMax));
  const float largest = saturation_product<Codec>() * step;
  return largest < format::kFloatMax ? largest : format::kFloatMax;
}

// How many of x, [n], are finite and beyond +-limit.
inline int count_beyond(float limit, const float* x, int n) {
  int count = 0;
  for (int i = 0; i < n; ++i) {
    count += format::is_finite(x[i]) && (x[i] > limit || x[i] < -limit);
  }
  return count;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

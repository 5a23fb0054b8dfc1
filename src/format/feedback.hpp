// Error feedback: a row's numbers are rounded one after another, and each one's error moves the
// numbers after it, so that the errors cancel in the scores of likely queries (docs/numbers.md,
// section 8).
#pragma once

#include "format/affine.hpp"
#include "format/group.hpp"

namespace kvx::format {

// A row with a magnitude of this or more is coded without feedback, and no error is larger: with
// weights of kMaxFeedback at most no sum can overflow.
inline constexpr float kFeedbackLimit = 0x1p60f;
inline constexpr float kMaxFeedback = 0x1p20f;

// A code and the error that it leaves.
template <class Codec>
struct FedCode {
  typename Codec::Code code;
  float error;
};

template <class Codec>
KVX_INLINE FedCode<Codec> fed_code(typename Codec::Code code, float number, float value) {
  return {code, clamp(number - value, -kFeedbackLimit, kFeedbackLimit)};
}

// number: with the errors before it. is_zero: all of the group's own numbers are zeros.
template <class Codec>
KVX_INLINE FedCode<Codec> round_fed(float step, float inverse_step, bool is_zero, float number) {
  const typename Codec::Code code = is_zero ? 0 : Codec::encode(number * inverse_step);
  return fed_code<Codec>(code, number, is_zero ? 0.0f : Codec::decode(code) * step);
}

// What a row's parameters say, read back. Requires: they are not NaN.
template <ScaleType T>
KVX_INLINE AffineEncoder affine_encoder_of(AffineParams params) {
  using Param = ParamFloat<T>;
  return {params, Param::value(params.zero), Param::round(1.0f / Param::value(params.scale)),
          false};
}

template <class Codec, ScaleType T>
KVX_INLINE FedCode<Codec> round_fed_affine(const AffineEncoder& encoder, float number) {
  using Param = ParamFloat<T>;
  const auto code = encode_affine_number<Codec, T>(encoder, Param::round(number));
  const float value = Codec::decode(code) * Param::value(encoder.params.scale) + encoder.low;
  return fed_code<Codec>(code, number, value);
}

}  // namespace kvx::format

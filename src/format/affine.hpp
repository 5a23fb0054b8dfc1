// Affine rows: scale and zero per token and head, with arithmetic in the parameters' own type, byte
// for byte what LMDeploy's TurboMind stores (docs/numbers.md, section 4).
#pragma once

#include "format/group.hpp"

namespace kvx::format {

// The two parameters of a row, as bits of F16 or BF16. row parameters: [scale: 2 bytes][zero: 2
// bytes]
struct AffineParams {
  uint16_t scale;
  uint16_t zero;
};

// One binary32 operation rounded once to the parameter type. binary32 has more than twice its
// digits plus two, so rounding twice gives what rounding the exact result once gives (Figueroa
// 1995).
template <ScaleType T>
struct ParamFloat {
  static_assert(T == ScaleType::kF16 || T == ScaleType::kBF16);
  KVX_INLINE static uint16_t bits(float x) {
    return T == ScaleType::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
  KVX_INLINE static float value(uint16_t bits) {
    return T == ScaleType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }
  KVX_INLINE static float round(float x) { return value(bits(x)); }
};

// Orders floats as integers so that -0 comes before +0. Requires: x is not NaN.
KVX_INLINE int32_t ordered_bits(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// x: [n]; codes: [n], not yet packed.
template <class Codec, ScaleType T>
KVX_INLINE AffineParams quantize_affine(const float* x, int n, typename Codec::Code* codes) {
  using Param = ParamFloat<T>;
  float low = Param::round(x[0]);
  float high = low;
  bool has_nonfinite = false;
  for (int i = 0; i < n; ++i) {
    const float value = Param::round(x[i]);
    has_nonfinite |= !is_finite(value);
    low = ordered_bits(value) < ordered_bits(low) ? value : low;
    high = value > high ? value : high;
  }
  if (has_nonfinite) {
    for (int i = 0; i < n; ++i) codes[i] = 0;
    const uint16_t nan = static_cast<uint16_t>(nan_scale(T).bits);
    return {nan, nan};
  }
  const AffineParams params = {Param::bits((high - low) / Codec::kQmax), Param::bits(low)};
  const float inverse = Param::round(1.0f / Param::value(params.scale));
  for (int i = 0; i < n; ++i) {
    const float distance = Param::round(Param::round(x[i]) - low);
    codes[i] = Codec::encode(Param::round(distance * inverse));
  }
  return params;
}

// What gather returns: both operations rounded to the parameter type. codes: [n]; x: [n].
template <class Codec, ScaleType T>
KVX_INLINE void dequantize_affine(AffineParams params, const typename Codec::Code* codes, int n,
                                  float* x) {
  using Param = ParamFloat<T>;
  const float scale = Param::value(params.scale);
  const float zero = Param::value(params.zero);
  for (int i = 0; i < n; ++i) {
    x[i] = Param::round(Param::round(Codec::decode(codes[i]) * scale) + zero);
  }
}

// What attention computes with: the stored parameters' meaning in binary32, without the parameter
// type's rounding.
template <class Codec, ScaleType T>
KVX_INLINE void dequantize_affine_exact(AffineParams params, const typename Codec::Code* codes,
                                        int n, float* x) {
  using Param = ParamFloat<T>;
  const float scale = Param::value(params.scale);
  const float zero = Param::value(params.zero);
  for (int i = 0; i < n; ++i) x[i] = Codec::decode(codes[i]) * scale + zero;
}

}  // namespace kvx::format

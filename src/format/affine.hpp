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

// Orders floats as integers: -0 comes before +0, NaNs beyond the infinities of their sign.
KVX_INLINE int32_t ordered_bits(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
KVX_INLINE float float_of_ordered(int32_t bits) {
  return std::bit_cast<float>(bits ^ ((bits >> 31) & 0x7FFFFFFF));
}

// The smallest and largest of a row that is already in the parameters' type. As ordered integers
// they come out of one vector loop; infinities and NaNs lie outside the finite numbers.
struct AffineRange {
  float low;
  float high;
  bool has_nonfinite;
};

// low, high: the smallest and largest ordered bits of the row.
KVX_INLINE AffineRange affine_range(int32_t low, int32_t high) {
  constexpr int32_t kInfinity = 0x7F800000;
  const bool has_nonfinite = high >= kInfinity || low <= (kInfinity ^ -1);
  return {float_of_ordered(low), float_of_ordered(high), has_nonfinite};
}

KVX_INLINE AffineRange affine_range(const float* x, int n) {
  int32_t low = ordered_bits(x[0]);
  int32_t high = low;
  KVX_VECTOR_LOOP
  for (int i = 0; i < n; ++i) {
    const int32_t bits = ordered_bits(x[i]);
    low = bits < low ? bits : low;
    high = bits > high ? bits : high;
  }
  return affine_range(low, high);
}

// How a row's numbers become codes: all that its range decides.
struct AffineEncoder {
  AffineParams params;
  float low;
  float inverse;
  bool has_nonfinite;  // the parameters are NaN and every code is 0
};

template <class Codec, ScaleType T>
KVX_INLINE AffineEncoder affine_encoder(const AffineRange& range) {
  using Param = ParamFloat<T>;
  if (range.has_nonfinite) {
    const uint16_t nan = static_cast<uint16_t>(nan_scale(T).bits);
    return {{nan, nan}, 0.0f, 0.0f, true};
  }
  const AffineParams params = {Param::bits((range.high - range.low) / Codec::kQmax),
                               Param::bits(range.low)};
  return {params, range.low, Param::round(1.0f / Param::value(params.scale)), false};
}

// rounded: a number of the row in the parameters' type. Requires: !encoder.has_nonfinite.
template <class Codec, ScaleType T>
KVX_INLINE typename Codec::Code encode_affine_number(const AffineEncoder& encoder, float rounded) {
  using Param = ParamFloat<T>;
  return Codec::encode(Param::round(Param::round(rounded - encoder.low) * encoder.inverse));
}

// x: [n]; codes: [n], not yet packed; rounded: [n], scratch.
template <class Codec, ScaleType T>
KVX_INLINE AffineParams quantize_affine(const float* x, int n, typename Codec::Code* codes,
                                        float* rounded) {
  using Param = ParamFloat<T>;
  for (int i = 0; i < n; ++i) rounded[i] = Param::round(x[i]);
  const AffineEncoder encoder = affine_encoder<Codec, T>(affine_range(rounded, n));
  if (encoder.has_nonfinite) {
    for (int i = 0; i < n; ++i) codes[i] = 0;
    return encoder.params;
  }
  for (int i = 0; i < n; ++i) codes[i] = encode_affine_number<Codec, T>(encoder, rounded[i]);
  return encoder.params;
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

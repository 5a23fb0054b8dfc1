// Numbers that every float type of the ABI represents exactly, so that no encoder is needed: a
// conversion between types, or by a scale that is a power of two, has one exact result.
#pragma once

#include <kvx/kvx_abi.h>

#include <cstdint>

namespace kvx::conformance {

// (-1)^negative * (1 + quarters / 4) * 2^exponent
struct Number {
  bool negative = false;
  int exponent = 0;
  int quarters = 0;  // 0 to 3
};

// sign | exponent | mantissa, from the high bit down; exponents of the numbers here are normal.
struct FloatFields {
  int mantissa_bits;
  int bias;
  int sign_bit;
};

inline FloatFields fields_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F16:
      return {10, 15, 15};
    case KVX_DTYPE_BF16:
      return {7, 127, 15};
    case KVX_DTYPE_F8_E4M3:
      return {3, 7, 7};
    case KVX_DTYPE_F8_E5M2:
      return {2, 15, 7};
    default:
      return {23, 127, 31};
  }
}

inline int bytes_of(kvx_dtype_t dtype) {
  return (fields_of(dtype).sign_bit + 1) / 8;
}

inline uint32_t bits_of(kvx_dtype_t dtype, Number number) {
  const FloatFields f = fields_of(dtype);
  return static_cast<uint32_t>(number.negative) << f.sign_bit |
         static_cast<uint32_t>(number.exponent + f.bias) << f.mantissa_bits |
         static_cast<uint32_t>(number.quarters) << (f.mantissa_bits - 2);
}

// 64 pseudo-random bits, a function of the place.
inline uint64_t noise(uint64_t place) {
  place += 0x9E3779B97F4A7C15u;
  place = (place ^ (place >> 30)) * 0xBF58476D1CE4E5B9u;
  place = (place ^ (place >> 27)) * 0x94D049BB133111EBu;
  return place ^ (place >> 31);
}

// Exponents from -3 to 3: a scale of 1/8 to 8 beside it stays normal in every type.
inline Number some_number(uint64_t place) {
  const uint64_t bits = noise(place);
  return {(bits & 1) != 0, static_cast<int>((bits >> 1) % 7) - 3,
          static_cast<int>((bits >> 8) % 4)};
}

}  // namespace kvx::conformance

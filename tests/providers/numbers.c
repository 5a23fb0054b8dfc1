/* Numbers: every float type decoded to a double and encoded from one, bit by bit. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "slow.h"

struct float_type {
  int bytes;
  int mantissa_bits;
  int bias;
  uint32_t sign;
  uint32_t largest;  /* the code of the largest finite number */
  uint32_t infinity; /* 0: the type has none */
  uint32_t nan;
};

static struct float_type type_of(uint32_t dtype) {
  const struct float_type f16 = {2, 10, 15, 0x8000, 0x7BFF, 0x7C00, 0x7E00};
  const struct float_type bf16 = {2, 7, 127, 0x8000, 0x7F7F, 0x7F80, 0x7FC0};
  const struct float_type f32 = {4, 23, 127, 0x80000000u, 0x7F7FFFFF, 0x7F800000, 0x7FC00000};
  const struct float_type e4m3 = {1, 3, 7, 0x80, 0x7E, 0, 0x7F};
  const struct float_type e5m2 = {1, 2, 15, 0x80, 0x7B, 0x7C, 0x7F};
  const struct float_type none = {0, 0, 0, 0, 0, 0, 0};
  switch (dtype) {
    case KVX_DTYPE_F16:
      return f16;
    case KVX_DTYPE_BF16:
      return bf16;
    case KVX_DTYPE_F32:
      return f32;
    case KVX_DTYPE_F8_E4M3:
      return e4m3;
    case KVX_DTYPE_F8_E5M2:
      return e5m2;
    default:
      return none;
  }
}

int element_bytes(uint32_t dtype) {
  return type_of(dtype).bytes;
}

int is_float_type(uint32_t dtype) {
  return element_bytes(dtype) != 0;
}

int is_eight_bits(uint32_t dtype) {
  return element_bytes(dtype) == 1;
}

static double decode(uint32_t dtype, const void* data) {
  const struct float_type type = type_of(dtype);
  uint32_t code = 0;
  memcpy(&code, data, (size_t)type.bytes);
  const double sign = (code & type.sign) != 0 ? -1 : 1;
  code &= type.sign - 1;
  if (type.infinity != 0 && code == type.infinity) return sign * (double)INFINITY;
  if (code > type.largest) return (double)NAN;
  const uint32_t hidden = 1u << type.mantissa_bits;
  const int exponent = (int)(code / hidden);
  const uint32_t mantissa = code % hidden;
  const int unit = 1 - type.bias - type.mantissa_bits;
  if (exponent == 0) return sign * ldexp(mantissa, unit);
  return sign * ldexp(hidden + mantissa, exponent - 1 + unit);
}

/* To nearest, ties to the even code. Beyond the largest number: infinity, or the largest number
 * where `saturates`. */
static uint32_t encode(uint32_t dtype, double value, int saturates) {
  const struct float_type type = type_of(dtype);
  if (isnan(value)) return type.nan;
  const uint32_t sign = signbit(value) ? type.sign : 0;
  const uint32_t beyond = saturates ? type.largest : type.infinity;
  value = fabs(value);
  if (isinf(value)) return sign | beyond;
  if (value == 0) return sign;
  int exponent;
  frexp(value, &exponent);
  exponent -= 1; /* value is in [2^exponent, 2^(exponent + 1)) */
  if (exponent < 1 - type.bias) exponent = 1 - type.bias;
  if (exponent > type.bias + 1) return sign | beyond;
  const double steps = ldexp(value, type.mantissa_bits - exponent);
  const double whole = floor(steps);
  uint32_t code = (uint32_t)whole;
  if (FAULT != ROUNDS_TOWARDS_ZERO &&
      (steps - whole > 0.5 || (steps - whole == 0.5 && code % 2 == 1))) {
    code += 1;
  }
  code += (uint32_t)(exponent + type.bias - 1) << type.mantissa_bits;
  return sign | (code > type.largest ? beyond : code);
}

/* A number that is none, in a cache of 8-bit floats: E4M3 has no infinity. */
static uint32_t encode_special(uint32_t dtype, double value) {
  const struct float_type type = type_of(dtype);
  if (isnan(value) || type.infinity == 0) return type.nan;
  return type.infinity | (signbit(value) ? type.sign : 0);
}

void convert(uint32_t from_type, const void* from, uint32_t to_type, void* to, float scale) {
  const size_t bytes = (size_t)element_bytes(to_type);
  if (from_type == to_type) {
    memcpy(to, from, bytes);
    return;
  }
  const double value = decode(from_type, from);
  uint32_t code;
  if (!is_eight_bits(to_type)) {
    code = encode(to_type, value, 0);
  } else if (!isfinite(value)) {
    code = encode_special(to_type, value);
  } else {
    float inverse = FAULT == SCALE_INVERTED ? scale : 1.0f / scale;
    if (inverse > FLT_MAX) inverse = FLT_MAX;
    const float product = (float)value * inverse;
    code = encode(to_type, product, 1);
  }
  memcpy(to, &code, bytes);
}

float read_scale(uint32_t type, const void* data) {
  return (float)decode(type, data);
}

// The reference encoder and decoder. Arithmetic is float where docs/numbers.md requires it.
#include "tools/conformance/row_codec.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace kvx::conformance {

const SmallFloat kE2M1 = {2, 1, 1, 0x7, false, 0};
const SmallFloat kE4M3 = {4, 3, 7, 0x7E, false, 0x7F};
const SmallFloat kE5M2 = {5, 2, 15, 0x7B, true, 0x7D};
const SmallFloat kF16 = {5, 10, 15, 0x7BFF, true, 0x7E00};
const SmallFloat kBF16 = {8, 7, 127, 0x7F7F, true, 0x7FC0};

double decode_float(const SmallFloat& type, uint32_t code) {
  const uint32_t sign = code >> (type.exponent_bits + type.mantissa_bits);
  const uint32_t magnitude = code & ((1u << (type.exponent_bits + type.mantissa_bits)) - 1);
  if (magnitude > type.largest)
    return type.has_infinity && magnitude == type.largest + 1 ? (sign ? -HUGE_VAL : HUGE_VAL)
                                                              : std::nan("");
  const uint32_t exponent = magnitude >> type.mantissa_bits;
  const uint32_t mantissa = magnitude & ((1u << type.mantissa_bits) - 1);
  const uint32_t leading = exponent == 0 ? 0 : 1u << type.mantissa_bits;
  const double value =
      std::ldexp(static_cast<double>(leading + mantissa),
                 static_cast<int>(std::max(exponent, 1u)) - type.bias - type.mantissa_bits);
  return sign ? -value : value;
}

namespace {

uint32_t encode_magnitude(const SmallFloat& type, double magnitude, bool saturates) {
  uint32_t low = 0;  // the largest code whose number is not above
  uint32_t high = type.largest;
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (decode_float(type, middle) <= magnitude) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const double below = decode_float(type, low);
  // Rounds as if a next number followed the largest one at the same distance.
  const double above =
      low == type.largest ? 2 * below - decode_float(type, low - 1) : decode_float(type, low + 1);
  const double middle = (below + above) / 2;
  const bool rounds_up = magnitude > middle || (magnitude == middle && low % 2 == 1);
  if (!rounds_up) return low;
  return low == type.largest && saturates ? low : low + 1;
}

uint32_t encode(const SmallFloat& type, double x, bool saturates) {
  if (std::isnan(x)) return type.nan;
  const uint32_t sign = std::signbit(x) ? 1u << (type.exponent_bits + type.mantissa_bits) : 0;
  return sign | encode_magnitude(type, std::fabs(x), saturates);
}

// The nearest number of a 16-bit type, in float.
float round16(const SmallFloat& type, float x) {
  if (std::isnan(x)) return x;
  if (std::isinf(x)) return x;
  return static_cast<float>(decode_float(type, encode_float(type, x)));
}

constexpr int kRow = -1;
using P = Packing;

const std::vector<FormatFacts> kFacts = {
    {KVX_FORMAT_F32, "f32", nullptr, 0, false, P::kBytes, 0, 0, 1, false},
    {KVX_FORMAT_F16, "f16", &kF16, 0, false, P::kBytes, 0, 0, 1, false},
    {KVX_FORMAT_BF16, "bf16", &kBF16, 0, false, P::kBytes, 0, 0, 1, false},
    {KVX_FORMAT_FP8_E4M3, "fp8_e4m3", &kE4M3, 0, false, P::kBytes, kRow, KVX_SCALE_TYPE_F32, 1,
     false},
    {KVX_FORMAT_FP8_E5M2, "fp8_e5m2", &kE5M2, 0, false, P::kBytes, kRow, KVX_SCALE_TYPE_F32, 1,
     false},
    {KVX_FORMAT_INT8, "int8", nullptr, 127, false, P::kBytes, 64, KVX_SCALE_TYPE_F16, 1, false},
    {KVX_FORMAT_INT4, "int4", nullptr, 7, false, P::kNibbles, 64, KVX_SCALE_TYPE_F16, 2, false},
    {KVX_FORMAT_INT8_AFFINE, "int8_affine", nullptr, 255, true, P::kBytes, kRow, KVX_SCALE_TYPE_F16,
     1, false},
    {KVX_FORMAT_INT4_AFFINE, "int4_affine", nullptr, 15, true, P::kTurboMind, kRow,
     KVX_SCALE_TYPE_F16, 8, false},
    {KVX_FORMAT_MXFP4_G16, "mxfp4_g16", &kE2M1, 0, false, P::kNibbles, 16, KVX_SCALE_TYPE_E8M0, 16,
     false},
    {KVX_FORMAT_MXFP4, "mxfp4", &kE2M1, 0, false, P::kNibbles, 32, KVX_SCALE_TYPE_E8M0, 32, false},
    {KVX_FORMAT_NVFP4, "nvfp4", &kE2M1, 0, false, P::kNibbles, 16, KVX_SCALE_TYPE_E4M3, 16, true},
    {KVX_FORMAT_FP4_ROW, "fp4_row", &kE2M1, 0, false, P::kNibbles, kRow, KVX_SCALE_TYPE_F16, 8,
     false},
    {KVX_FORMAT_INT4_ROW, "int4_row", nullptr, 7, false, P::kNibbles, kRow, KVX_SCALE_TYPE_F16, 8,
     false},
};

bool is_half(const FormatFacts& facts) {
  return facts.element == &kF16 || facts.element == &kBF16;
}

bool is_f32(const FormatFacts& facts) {
  return facts.element == nullptr && facts.largest_integer == 0;
}

// ---- packing

int nibble_place(Packing packing, int i) {
  if (packing == Packing::kNibbles) return i;
  // e0|e2<<4, e4|e6<<4, e1|e3<<4, e5|e7<<4
  constexpr int kPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  return i / 8 * 8 + kPlaces[i % 8];
}

std::vector<uint8_t> pack(const FormatFacts& facts, const std::vector<uint32_t>& codes) {
  std::vector<uint8_t> bytes(static_cast<size_t>(facts.code_bytes(static_cast<int>(codes.size()))));
  for (size_t i = 0; i < codes.size(); ++i) {
    if (facts.packing != Packing::kBytes) {
      const int place = nibble_place(facts.packing, static_cast<int>(i));
      bytes[static_cast<size_t>(place / 2)] |=
          static_cast<uint8_t>((codes[i] & 0xF) << (place % 2 * 4));
    } else if (is_half(facts)) {
      bytes[2 * i] = static_cast<uint8_t>(codes[i]);
      bytes[2 * i + 1] = static_cast<uint8_t>(codes[i] >> 8);
    } else if (is_f32(facts)) {
      memcpy(bytes.data() + 4 * i, &codes[i], 4);
    } else {
      bytes[i] = static_cast<uint8_t>(codes[i]);
    }
  }
  return bytes;
}

uint32_t unpack(const FormatFacts& facts, const std::vector<uint8_t>& bytes, int i) {
  const auto at = static_cast<size_t>(i);
  if (facts.packing != Packing::kBytes) {
    const int place = nibble_place(facts.packing, i);
    return bytes[static_cast<size_t>(place / 2)] >> (place % 2 * 4) & 0xF;
  }
  if (is_half(facts)) return bytes[2 * at] | uint32_t{bytes[2 * at + 1]} << 8;
  if (!is_f32(facts)) return bytes[at];
  uint32_t bits;
  memcpy(&bits, bytes.data() + 4 * at, 4);
  return bits;
}

// ---- codes and scales

uint32_t encode_element(const FormatFacts& facts, float x) {
  if (facts.element != nullptr) return encode(*facts.element, x, true);
  const float largest = static_cast<float>(facts.largest_integer);
  return static_cast<uint32_t>(static_cast<int>(std::clamp(std::nearbyint(x), -largest, largest)));
}

double decode_element(const FormatFacts& facts, uint32_t code) {
  if (facts.element != nullptr) return decode_float(*facts.element, code);
  const int bits = facts.packing == Packing::kBytes ? 8 : 4;
  const int value = static_cast<int>(code);
  return value >= 1 << (bits - 1) ? value - (1 << bits) : value;
}

float largest_element(const FormatFacts& facts) {
  return facts.element != nullptr
             ? static_cast<float>(decode_float(*facts.element, facts.element->largest))
             : static_cast<float>(facts.largest_integer);
}

std::vector<uint8_t> little_endian(uint32_t code, int num_bytes) {
  std::vector<uint8_t> bytes;
  for (int i = 0; i < num_bytes; ++i) bytes.push_back(static_cast<uint8_t>(code >> 8 * i));
  return bytes;
}

uint32_t e8m0_ceil(float amax) {
  int e = -127;
  while (e < 127 && static_cast<double>(amax) > std::ldexp(6.0, e)) ++e;
  return static_cast<uint32_t>(e + 127);
}

uint32_t bits_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// A scale as it is stored, clamped to the type's normal range (docs/numbers.md, section 2).
uint32_t round_scale(uint32_t type, float scale) {
  switch (type) {
    case KVX_SCALE_TYPE_F16:
      return std::max(encode(kF16, scale, true), 1u);
    case KVX_SCALE_TYPE_E4M3:
      return std::max(encode(kE4M3, scale, true), 1u);
    default:
      return bits_of_float(std::max(scale, std::numeric_limits<float>::min()));
  }
}

float decode_scale(uint32_t type, const uint8_t* bytes) {
  const uint32_t half = bytes[0] | (type == KVX_SCALE_TYPE_F16 ? uint32_t{bytes[1]} << 8 : 0);
  switch (type) {
    case KVX_SCALE_TYPE_F16:
      return static_cast<float>(decode_float(kF16, half));
    case KVX_SCALE_TYPE_E4M3:
      return static_cast<float>(decode_float(kE4M3, half));
    case KVX_SCALE_TYPE_E8M0:
      return static_cast<float>(std::ldexp(1.0, bytes[0] - 127));
    default: {
      float scale;
      memcpy(&scale, bytes, 4);
      return scale;
    }
  }
}

float step_of(const FormatFacts& facts, const std::vector<uint8_t>& scales, int group,
              float tensor_scale) {
  const float scale = decode_scale(facts.scale_type, scales.data() + group * facts.scale_bytes());
  return facts.has_tensor_scale ? scale * tensor_scale : scale;
}

// ---- affine rows, in F16

CodedRow encode_affine(const FormatFacts& facts, const std::vector<float>& row) {
  const float most = static_cast<float>(facts.largest_integer);
  std::vector<float> x;
  for (const float number : row) x.push_back(round16(kF16, number));
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  const float scale = round16(kF16, (*high - *low) / most);
  const float zero = *low;
  const float inverse = round16(kF16, 1 / scale);
  std::vector<uint32_t> codes;
  for (const float number : x) {
    const float code = std::nearbyint(round16(kF16, round16(kF16, number - zero) * inverse));
    codes.push_back(std::isnan(code) ? 0 : static_cast<uint32_t>(std::clamp(code, 0.0f, most)));
  }
  CodedRow result = {pack(facts, codes), little_endian(encode_float(kF16, scale), 2)};
  const std::vector<uint8_t> zero_bytes = little_endian(encode_float(kF16, zero), 2);
  result.scales.insert(result.scales.end(), zero_bytes.begin(), zero_bytes.end());
  return result;
}

struct Affine {
  float scale;
  float zero;
};

Affine affine_of(const CodedRow& row) {
  return {decode_scale(KVX_SCALE_TYPE_F16, row.scales.data()),
          decode_scale(KVX_SCALE_TYPE_F16, row.scales.data() + 2)};
}

}  // namespace

uint32_t encode_float(const SmallFloat& type, double x) {
  return encode(type, x, !type.has_infinity);
}

int FormatFacts::groups_per_row(int head_dim) const {
  if (!has_scale()) return 0;
  const int length = group_length(head_dim);
  return (head_dim + length - 1) / length;
}

int FormatFacts::code_bytes(int head_dim) const {
  if (packing != Packing::kBytes) return head_dim / 2;
  return head_dim * (is_f32(*this) ? 4 : is_half(*this) ? 2 : 1);
}

int FormatFacts::scale_bytes() const {
  if (is_affine) return 4;
  switch (scale_type) {
    case 0:
      return 0;
    case KVX_SCALE_TYPE_F32:
      return 4;
    case KVX_SCALE_TYPE_F16:
      return 2;
    default:
      return 1;
  }
}

const std::vector<FormatFacts>& all_formats() {
  return kFacts;
}

const FormatFacts& facts_of(kvx_format_t format) {
  return kFacts.at(static_cast<size_t>(format) - 1);
}

std::vector<uint8_t> encode_scale(const FormatFacts& facts, float amax, float tensor_scale) {
  if (amax == 0) return std::vector<uint8_t>(static_cast<size_t>(facts.scale_bytes()));
  if (facts.scale_type == KVX_SCALE_TYPE_E8M0) return {static_cast<uint8_t>(e8m0_ceil(amax))};
  const float most = largest_element(facts);
  const float scale = facts.has_tensor_scale ? amax / (most * tensor_scale) : amax / most;
  return little_endian(round_scale(facts.scale_type, scale), facts.scale_bytes());
}

std::vector<uint8_t> encode_codes(const FormatFacts& facts, const std::vector<float>& row,
                                  const std::vector<uint8_t>& scales, float tensor_scale) {
  std::vector<uint32_t> codes;
  const int length = facts.group_length(static_cast<int>(row.size()));
  for (size_t i = 0; i < row.size(); ++i) {
    const int group = static_cast<int>(i) / length;
    const float inverse = std::min(1.0f / step_of(facts, scales, group, tensor_scale),
                                   std::numeric_limits<float>::max());
    codes.push_back(encode_element(facts, row[i] * inverse));
  }
  return pack(facts, codes);
}

CodedRow encode_row(const FormatFacts& facts, const std::vector<float>& row, float tensor_scale) {
  if (facts.is_affine) return encode_affine(facts, row);
  if (!facts.has_scale()) {
    std::vector<uint32_t> codes;
    for (const float x : row) {
      codes.push_back(is_f32(facts) ? bits_of_float(x) : encode_float(*facts.element, x));
    }
    return {pack(facts, codes), {}};
  }
  const auto length = static_cast<size_t>(facts.group_length(static_cast<int>(row.size())));
  CodedRow result;
  std::vector<float> kept = row;  // an all-zero group's codes are zero without a sign
  for (size_t first = 0; first < row.size(); first += length) {
    const size_t end = std::min(first + length, row.size());
    float amax = 0;
    for (size_t i = first; i < end; ++i) amax = std::max(amax, std::fabs(row[i]));
    if (amax == 0)
      std::fill(kept.begin() + static_cast<int64_t>(first),
                kept.begin() + static_cast<int64_t>(end), 0.0f);
    const std::vector<uint8_t> scale = encode_scale(facts, amax, tensor_scale);
    result.scales.insert(result.scales.end(), scale.begin(), scale.end());
  }
  // A scale of 0 would give 0 * infinity. Any step encodes zeros.
  std::vector<uint8_t> usable = result.scales;
  for (int g = 0; g < facts.groups_per_row(static_cast<int>(row.size())); ++g) {
    if (step_of(facts, usable, g, tensor_scale) > 0) continue;
    const std::vector<uint8_t> one = encode_scale(facts, 1, tensor_scale);
    std::copy(one.begin(), one.end(), usable.begin() + g * facts.scale_bytes());
  }
  result.codes = encode_codes(facts, kept, usable, tensor_scale);
  return result;
}

std::vector<float> decode_row(const FormatFacts& facts, const CodedRow& row, int head_dim,
                              float tensor_scale) {
  std::vector<float> numbers;
  for (int i = 0; i < head_dim; ++i) {
    const uint32_t code = unpack(facts, row.codes, i);
    if (is_f32(facts)) {
      float x;
      memcpy(&x, &code, 4);
      numbers.push_back(x);
    } else if (facts.is_affine) {
      const Affine affine = affine_of(row);
      const float product = round16(kF16, static_cast<float>(code) * affine.scale);
      numbers.push_back(round16(kF16, product + affine.zero));
    } else {
      const auto element = static_cast<float>(decode_element(facts, code));
      const int group = facts.has_scale() ? i / facts.group_length(head_dim) : 0;
      numbers.push_back(
          facts.has_scale() ? element * step_of(facts, row.scales, group, tensor_scale) : element);
    }
  }
  return numbers;
}

std::vector<double> decode_exactly(const FormatFacts& facts, const CodedRow& row, int head_dim,
                                   float tensor_scale) {
  if (!facts.is_affine) {
    const std::vector<float> numbers = decode_row(facts, row, head_dim, tensor_scale);
    return {numbers.begin(), numbers.end()};
  }
  const Affine affine = affine_of(row);
  std::vector<double> numbers;
  for (int i = 0; i < head_dim; ++i) {
    numbers.push_back(static_cast<double>(unpack(facts, row.codes, i)) * affine.scale +
                      affine.zero);
  }
  return numbers;
}

}  // namespace kvx::conformance

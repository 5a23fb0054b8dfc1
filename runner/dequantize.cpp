// ggml's block types, one function each; the bytes are drawn above it. Values as in ggml-common.h
// and ggml-quants.c (MIT): facts of the format, written anew.
#include "runner/dequantize.hpp"

#include <array>
#include <bit>
#include <cstring>

#include "core/float16.hpp"

namespace kvx::runner {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF is read in the machine's order");

template <class T>
T load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

float load_f16(const uint8_t* bytes) {
  return f16_to_f32(load<uint16_t>(bytes));
}

constexpr int kBlock = 32;
constexpr int kHalf = kBlock / 2;
constexpr int kSuper = 256;

void decode_f32(const uint8_t* block, float* out) {
  *out = load<float>(block);
}
void decode_f16(const uint8_t* block, float* out) {
  *out = load_f16(block);
}
void decode_bf16(const uint8_t* block, float* out) {
  *out = bf16_to_f32(load<uint16_t>(block));
}

// [d f16][codes int8 x 32]
void decode_q8_0(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  for (int i = 0; i < kBlock; ++i) out[i] = static_cast<float>(load<int8_t>(block + 2 + i)) * d;
}

// [d f16][nibbles 16 bytes]: element i in the low half of byte i, element 16 + i in the high half
void decode_q4_0(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  const uint8_t* nibbles = block + 2;
  for (int i = 0; i < kHalf; ++i) {
    out[i] = static_cast<float>((nibbles[i] & 15) - 8) * d;
    out[i + kHalf] = static_cast<float>((nibbles[i] >> 4) - 8) * d;
  }
}

// [d f16][m f16][nibbles 16 bytes]
void decode_q4_1(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  const float m = load_f16(block + 2);
  const uint8_t* nibbles = block + 4;
  for (int i = 0; i < kHalf; ++i) {
    out[i] = static_cast<float>(nibbles[i] & 15) * d + m;
    out[i + kHalf] = static_cast<float>(nibbles[i] >> 4) * d + m;
  }
}

// Element i's fifth bit is bit i of high_bits.
int five_bits(int nibble, uint32_t high_bits, int i) {
  return nibble | static_cast<int>((high_bits >> i) & 1u) << 4;
}

// [d f16][high bits u32][nibbles 16 bytes]
void decode_q5_0(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  const auto high = load<uint32_t>(block + 2);
  const uint8_t* nibbles = block + 6;
  for (int i = 0; i < kHalf; ++i) {
    out[i] = static_cast<float>(five_bits(nibbles[i] & 15, high, i) - 16) * d;
    out[i + kHalf] = static_cast<float>(five_bits(nibbles[i] >> 4, high, i + kHalf) - 16) * d;
  }
}

// [d f16][m f16][high bits u32][nibbles 16 bytes]
void decode_q5_1(const uint8_t* block, float* out) {
  const float d = load_f16(block);
  const float m = load_f16(block + 2);
  const auto high = load<uint32_t>(block + 4);
  const uint8_t* nibbles = block + 8;
  for (int i = 0; i < kHalf; ++i) {
    out[i] = static_cast<float>(five_bits(nibbles[i] & 15, high, i)) * d + m;
    out[i + kHalf] = static_cast<float>(five_bits(nibbles[i] >> 4, high, i + kHalf)) * d + m;
  }
}

struct ScaleAndMin {
  int scale;
  int min;
};

// Eight six-bit scales and eight six-bit minima in 12 bytes: 0 to 3 lie in the low six bits of
// bytes 0 to 3 and 4 to 7; 4 to 7 have their low four bits in bytes 8 to 11 (scale low nibble, min
// high nibble) and their upper two in the tops of the first eight bytes.
ScaleAndMin k_scale_and_min(const uint8_t* packed, int i) {
  if (i < 4) return {packed[i] & 63, packed[i + 4] & 63};
  return {(packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4, (packed[i + 4] >> 4) | (packed[i] >> 6)
                                                                                       << 4};
}

// Eight groups of 32 elements, step * code - min: 32 bytes of nibbles hold two groups, the first in
// the low halves; upper_bits(group, i) is what a code has above its nibble.
// block: [d f16][dmin f16][scales 12 bytes]...
template <class UpperBits>
void decode_k_groups(const uint8_t* block, const uint8_t* nibbles, UpperBits upper_bits,
                     float* out) {
  const float d = load_f16(block);
  const float dmin = load_f16(block + 2);
  for (int group = 0; group < 8; ++group) {
    const ScaleAndMin sm = k_scale_and_min(block + 4, group);
    const float step = d * static_cast<float>(sm.scale);
    const float min = dmin * static_cast<float>(sm.min);
    const uint8_t* bytes = nibbles + group / 2 * 32;
    const int shift = group % 2 * 4;
    for (int i = 0; i < 32; ++i) {
      const int code = ((bytes[i] >> shift) & 15) | upper_bits(group, i);
      out[group * 32 + i] = step * static_cast<float>(code) - min;
    }
  }
}

// [d f16][dmin f16][scales 12 bytes][nibbles 128 bytes]
void decode_q4_k(const uint8_t* block, float* out) {
  decode_k_groups(
      block, block + 16, [](int, int) { return 0; }, out);
}

// [d f16][dmin f16][scales 12 bytes][fifth bits 32 bytes][nibbles 128 bytes]: bit g of byte i is
// the fifth bit of element i of group g
void decode_q5_k(const uint8_t* block, float* out) {
  const uint8_t* fifth = block + 16;
  const auto upper_bit = [&](int group, int i) { return ((fifth[i] >> group) & 1) << 4; };
  decode_k_groups(block, block + 48, upper_bit, out);
}

// [low nibbles 128 bytes][upper two bits 64 bytes][scales int8 x 16][d f16]: each half of 128
// elements takes 64 bytes of nibbles (32 + 32, low halves before high halves) and 32 bytes of upper
// bits (two bits for each quarter)
void decode_q6_k(const uint8_t* block, float* out) {
  const uint8_t* scales = block + 192;
  const float d = load_f16(block + 208);
  for (int i = 0; i < kSuper; ++i) {
    const int half = i / 128;
    const int quarter = i % 128 / 32;
    const int lane = i % 32;
    const int nibble_byte = block[half * 64 + quarter % 2 * 32 + lane];
    const int low = (nibble_byte >> (quarter / 2 * 4)) & 15;
    const int high = (block[128 + half * 32 + lane] >> (quarter * 2)) & 3;
    const auto scale = load<int8_t>(scales + i / 16);
    out[i] = d * static_cast<float>(scale) * static_cast<float>((low | high << 4) - 32);
  }
}

struct TypeFacts {
  TensorType type;
  int elements;
  int bytes;
  void (*decode)(const uint8_t* block, float* out);
};

constexpr std::array kFacts = {
    TypeFacts{TensorType::kF32, 1, 4, decode_f32},
    TypeFacts{TensorType::kF16, 1, 2, decode_f16},
    TypeFacts{TensorType::kBF16, 1, 2, decode_bf16},
    TypeFacts{TensorType::kQ4_0, kBlock, 2 + kHalf, decode_q4_0},
    TypeFacts{TensorType::kQ4_1, kBlock, 4 + kHalf, decode_q4_1},
    TypeFacts{TensorType::kQ5_0, kBlock, 6 + kHalf, decode_q5_0},
    TypeFacts{TensorType::kQ5_1, kBlock, 8 + kHalf, decode_q5_1},
    TypeFacts{TensorType::kQ8_0, kBlock, 2 + kBlock, decode_q8_0},
    TypeFacts{TensorType::kQ4_K, kSuper, 16 + kSuper / 2, decode_q4_k},
    TypeFacts{TensorType::kQ5_K, kSuper, 16 + kSuper / 8 + kSuper / 2, decode_q5_k},
    TypeFacts{TensorType::kQ6_K, kSuper, 18 + kSuper / 4 + kSuper / 2, decode_q6_k},
};

const TypeFacts* facts_of(uint32_t number) {
  for (const TypeFacts& facts : kFacts) {
    if (static_cast<uint32_t>(facts.type) == number) return &facts;
  }
  return nullptr;
}

const TypeFacts& facts_of(TensorType type) {
  return *facts_of(static_cast<uint32_t>(type));
}

}  // namespace

std::optional<TensorType> tensor_type_from(uint32_t number) {
  const TypeFacts* facts = facts_of(number);
  return facts == nullptr ? std::nullopt : std::optional(facts->type);
}

int block_elements(TensorType type) {
  return facts_of(type).elements;
}

int block_bytes(TensorType type) {
  return facts_of(type).bytes;
}

void dequantize(TensorType type, const uint8_t* blocks, int64_t elements, float* out) {
  const TypeFacts& facts = facts_of(type);
  for (int64_t i = 0; i < elements; i += facts.elements) {
    facts.decode(blocks, out + i);
    blocks += facts.bytes;
  }
}

}  // namespace kvx::runner

// metal-marlin's 4-bit codes, as its Python and Metal sources use them.
#include "engines/marlin.hpp"

#include "core/float16.hpp"
#include "format/codec.hpp"
#include "format/group.hpp"

namespace kvx::engines {
namespace {

constexpr float kSmallestAmax = 1e-8f;  // metal-marlin's floor, so that it never divides by zero

uint8_t linear_code(float x, float scale) {
  const float steps = format::clamp(x / scale, -6.0f, 6.0f) * 2.0f;
  const float code = static_cast<float>(format::round_to_int(steps)) + 8.0f;
  return static_cast<uint8_t>(format::clamp(code, 0.0f, 15.0f));
}

float linear_value(int code, float scale) {
  return static_cast<float>(code - 8) * scale / 2.0f;
}

}  // namespace

void swap_twos_complement_and_offset_binary(std::span<uint8_t> packed_nibbles) {
  for (uint8_t& byte : packed_nibbles) byte = static_cast<uint8_t>(byte ^ 0x88);
}

uint16_t encode_metal_marlin_linear_fp4(const float* row, int head_dim, uint8_t* words) {
  const float amax = format::group_magnitude(row, head_dim).amax;
  const float scale = (amax > kSmallestAmax ? amax : kSmallestAmax) / 6.0f;
  for (int i = 0; i < head_dim; i += 2) {
    words[i / 2] =
        static_cast<uint8_t>(linear_code(row[i], scale) | (linear_code(row[i + 1], scale) << 4));
  }
  return f32_to_f16(scale);
}

void decode_metal_marlin_linear_fp4(const uint8_t* words, uint16_t scale, int head_dim,
                                    float* row) {
  const float step = f16_to_f32(scale);
  for (int i = 0; i < head_dim; i += 2) {
    row[i] = linear_value(words[i / 2] & 0xF, step);
    row[i + 1] = linear_value(words[i / 2] >> 4, step);
  }
}

}  // namespace kvx::engines

// The steps of a tile's groups, as floats that lie token beside token.
#pragma once

#include <cstring>

#include "format/scale.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/cpu/step_loops.hpp"
#include "ops/attend/cpu/vectors.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

inline float tensor_scale_of(const PackedTile& tile) {
  return tile.spec->facts->has_tensor_scale ? tile.tensor_scale : 1.0f;
}

// Numbers that each have a scale of their own: bytes of one stored scale, and how many a row has.
// An affine row's scale and zero count as two.
struct ScaleRow {
  format::ScaleType type;
  int bytes;
  int count;
};

inline ScaleRow scale_row(const format::FormatSpec& spec, int head_dim) {
  const int bytes = format::bytes_of(spec.scale_type);
  if (spec.is_affine()) return {spec.scale_type, bytes, 2};
  const int size = spec.group_size == format::kWholeRow ? head_dim : spec.group_size;
  return {spec.scale_type, bytes, (head_dim + size - 1) / size};
}

template <format::ScaleType T>
KVX_INLINE void decode_steps(const uint32_t* bits, int n, float factor, float* steps) {
  if constexpr (T == format::ScaleType::kF16) {
    decode_f16_steps(bits, n, factor, steps);
  } else {
    decode_steps_one_by_one<T>(bits, n, factor, steps);
  }
}

KVX_INLINE void decode_steps(format::ScaleType type, const uint32_t* bits, int n, float factor,
                             float* steps) {
  using format::ScaleType;
  switch (type) {
    case ScaleType::kNone:
    case ScaleType::kF32:
      return decode_steps<ScaleType::kF32>(bits, n, factor, steps);
    case ScaleType::kF16:
      return decode_steps<ScaleType::kF16>(bits, n, factor, steps);
    case ScaleType::kBF16:
      return decode_steps<ScaleType::kBF16>(bits, n, factor, steps);
    case ScaleType::kE8M0:
      return decode_steps<ScaleType::kE8M0>(bits, n, factor, steps);
    case ScaleType::kE4M3:
      return decode_steps<ScaleType::kE4M3>(bits, n, factor, steps);
  }
}

// steps[g * padded_tokens + t] = step of token t's group g, times factor. An affine tile's zeros
// are its group 1.
static void load_steps(const PackedTile& tile, const ScaleRow& row, float factor, float* steps) {
  if (load_sorted_steps(tile, row.type, row.count, factor, steps)) return;
  const int n = tile.padded_tokens();
  uint32_t bits[kMaxTileTokens];
  const int per_word = 4 / row.bytes;
  const bool in_words =
      row.count % per_word == 0 &&
      (row.count == 1 || tile.scale_group_stride == row.bytes || tile.spec->is_affine());
  if (!in_words) {
    for (int g = 0; g < row.count; ++g) {
      const int64_t offset = tile.spec->is_affine() ? g * row.bytes : g * tile.scale_group_stride;
      for (int t = 0; t < n; ++t) {
        bits[t] = format::load_scale(row.type, tile.scales[t] + offset).bits;
      }
      decode_steps(row.type, bits, n, factor, steps + g * n);
    }
    return;
  }
  uint32_t words[kMaxTileTokens];
  const int shift = 8 * row.bytes;
  for (int g = 0; g < row.count; g += per_word) {
    for (int t = 0; t < n; ++t) memcpy(&words[t], tile.scales[t] + g * row.bytes, 4);
    for (int part = 0; part < per_word; ++part) {
      const uint32_t mask = row.bytes == 4 ? ~0u : (1u << shift) - 1;
      for (int t = 0; t < n; ++t) bits[t] = (words[t] >> (part * shift % 32)) & mask;
      decode_steps(row.type, bits, n, factor, steps + (g + part) * n);
    }
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

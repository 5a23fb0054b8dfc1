// A warp turns one stored row of a dual-scale block into numbers. The arithmetic is
// format/dual_scale.hpp's.
#pragma once

#include "format/dual_scale.hpp"
#include "format/packing.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

// The code of number c of a row.
template <class Format>
__device__ inline uint32_t dual_code_at(const uint8_t* row, int c) {
  if constexpr (Format::kFacts.packing == format::Packing::kNibbles) {
    return row[c / 2] >> (c % 2 * 4) & 0xFu;
  } else if constexpr (Format::kFacts.packing == format::Packing::kQuarters) {
    return row[c / 4] >> (c % 4 * 2) & 3u;
  } else {
    static_assert(Format::kFacts.packing == format::Packing::kThreeBits);
    const uint8_t* of_64 = row + c / 64 * format::kThreeBitsBytes;
    const int bit = format::high_bit_at(c % 64);
    const uint32_t low = of_64[c % 64 / 4] >> (c % 4 * 2) & 3u;
    const uint32_t high = of_64[format::kHighBitsAt + bit / 8] >> (bit % 8) & 1u;
    return low | high << 2;
  }
}

// x: [head_dim] in shared memory. scale: the row's, as stored.
template <class Format>
__device__ inline void decode_dual_row(int head_dim, const uint8_t* codes, uint8_t scale,
                                       const uint8_t* channels, float* x, int lane) {
  using Codec = typename Format::Codec;
  const float factor = format::dual_factor(channels);
  const float of_token = format::E4M3::decode(scale);
  for (int c = lane; c < head_dim; c += kWarp) {
    const auto channel =
        format::dual_channel<Codec::kBits>(channels[c], channels[head_dim + c], factor);
    const auto code = static_cast<typename Codec::Code>(dual_code_at<Format>(codes, c));
    x[c] = format::dual_number(of_token, channel, Codec::decode(code));
  }
}

}  // namespace kvx::ops::cuda

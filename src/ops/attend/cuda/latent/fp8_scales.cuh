// fp8's binary32 scales of rows or groups, which go into the latent kernel's tiles: no other kernel
// takes them.
#pragma once

#include "ops/attend/cuda/latent/params.hpp"
#include "ops/attend/cuda/prefill/scales.cuh"

namespace kvx::ops::cuda {

// Whether a row's scales go into the tile. One scale a head multiplies scores and sums.
__device__ inline bool has_scales_in_tile(const TileSide& side) {
  return side.format.scale_path == ScalePath::kRow && side.shared_scale == nullptr;
}

// Numbers times kRaise, so that groups of small numbers have f16 scales of full precision. Numbers
// of up to 4094 fit.
struct LatentFp8Scales {
  static constexpr int kBytes = 4;
  static constexpr float kRaise = 16.0f;
  __device__ static int first_byte(const LatentParams& params, int chunk) {
    return (chunk * 16 >> params.scale_shift) * 4;
  }
  __device__ static ChunkScales of(const TileSide&, uint32_t word) {
    const float scale = __uint_as_float(word) * kRaise;
    const uint32_t factor = MmaF16::pack(scale, scale);
    return {{factor, factor}, 0};
  }
  __device__ static uint32_t apply(const ChunkScales& scales, int, uint32_t x) {
    return multiply_f16x2(x, scales.factor[0]);
  }
};
template <format::FormatId Id>
struct LatentFp8Decoder {
  using Element = typename FormatTraits<Id>::Element;
  using Scales = LatentFp8Scales;
};

}  // namespace kvx::ops::cuda

// What a stage's tokens and channels multiply, in a warp's shared memory. Eight lanes need a
// channel's numbers and four a token's: the warp makes each once a stage and leaves it here. A
// stage is 64 tokens of one block, so that its channels have one step and one zero each.
//
// A side of a stage as it was copied:
//   [codes: 64 rows][scales: E4M3 x 64][steps: E4M3 x head_dim][zeros: int8 x head_dim]
#pragma once

#include "format/dual_scale.hpp"
#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/common/mma.cuh"

namespace kvx::ops::cuda {

inline constexpr int kDualTokens = kSideStageTiles * kTileTokens;

// What copies bring of a side.
template <int Bits, int Dim>
struct DualSide {
  static constexpr int kRowBytes = Dim * Bits / 8;
  // As TileCopy (common/tile_copy.cuh): of a tile of 16 tokens, and of the whole stage.
  struct Copy {
    static constexpr int kCodeBytes = kTileTokens * kRowBytes;
    static constexpr int kScaleBytes = kTileTokens;
    static constexpr int kBytes = kCodeBytes + kScaleBytes;
    static constexpr int kChannelBytes = 2 * Dim;
  };
};

// The power of two that all steps of the head are multiplied by: the signs of the first eight.
__device__ inline float dual_factor_of_warp(uint32_t steps, int lane) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(steps + lane % 8) : "memory");
  const uint32_t bits = __ballot_sync(0xFFFFFFFFu, byte >= 0x80u) & 0xFFu;
  return format::E8M0::decode(bits);
}

// Scales of tokens g and g + 8 of each tile.
struct DualScales {
  float low[kSideStageTiles];
  float high[kSideStageTiles];
};

// [token of its tile][tile], binary32.
struct DualScaleTable {
  static constexpr int kBytes = kDualTokens * 4;

  // from: the stage's scales as stored. by: what multiplies them.
  __device__ static void fill(uint32_t from, float by, uint32_t table, int lane) {
    const float2 two = MmaF16::unpack(e4m3x4_to_f16x2(load_shared_2(from + 2 * lane)).a);
    const int tile = 2 * lane / kTileTokens, token = 2 * lane % kTileTokens;
    const uint32_t to = table + (token * kSideStageTiles + tile) * 4;
    store(to, two.x * by);
    store(to + kSideStageTiles * 4, two.y * by);
  }
  __device__ static DualScales load(uint32_t table, int g) {
    static_assert(kSideStageTiles == 4);
    const uint4 a = load_shared_16(table + g * 16), b = load_shared_16(table + (g + 8) * 16);
    return {
        {__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w)},
        {__uint_as_float(b.x), __uint_as_float(b.y), __uint_as_float(b.z), __uint_as_float(b.w)}};
  }

 private:
  __device__ static void store(uint32_t to, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
  }
};

// Zeros of any four bytes, each as 2^10 + 128 + zero in f16: bytes (a, b) and (c, d).
__device__ inline Two raised_zeros(uint32_t zeros) {
  const uint32_t unsigned_zeros = zeros ^ 0x80808080u;
  return {__byte_perm(unsigned_zeros, 0x64646464u, 0x4140),
          __byte_perm(unsigned_zeros, 0x64646464u, 0x4342)};
}

}  // namespace kvx::ops::cuda

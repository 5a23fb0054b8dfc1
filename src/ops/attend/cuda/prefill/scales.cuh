// Scales that go into the prefill kernels' tiles: what makes f16 numbers of a chunk of codes, 16
// bytes of a row, beside the codes' own decoding.
//
//   bytes_of_row  of scales, at most, of a row of so many numbers
//   first_byte    of the chunk's scales, among its row's
//   kBytes        of the chunk's scales: 4 begin on 4 bytes, 2 on 2; 0: 1 or 2, on any
//   of            from a word that begins with them, first byte lowest
//   apply         to two numbers of part i of the chunk, eight numbers each
#pragma once

#include <type_traits>

#include "ops/attend/cuda/common/decode_codes.cuh"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/common/tile_scales.cuh"
#include "ops/attend/cuda/formats.cuh"

namespace kvx::ops::cuda {

struct ChunkScales {  // pairs of the same f16
  uint32_t factor[2];
  uint32_t zero;
};

// E2M1's, of 16 or 32 numbers: a chunk has 32. From: tile_scales.cuh.
template <class From>
struct ScalesOfGroups {
  static constexpr bool kIsE4M3 =
      std::is_same_v<From, FromE4M3> || std::is_same_v<From, FromE4M3Raised>;
  static constexpr int kBytes = kIsE4M3 ? 2 : 0;
  static constexpr int bytes_of_row(int dim) { return dim / 16; }
  __device__ static int first_byte(const TileSide& side, int chunk) { return chunk * bytes(side); }
  __device__ static ChunkScales of(const TileSide& side, uint32_t word) {
    const Two factors = From::f16x2(__byte_perm(word, 0, bytes(side) == 1 ? 0x0000 : 0x1100));
    return {{factors.a, factors.b}, 0};
  }
  __device__ static uint32_t apply(const ChunkScales& scales, int i, uint32_t x) {
    return multiply_f16x2(x, scales.factor[i / 2]);
  }

 private:
  __device__ static int bytes(const TileSide& side) {  // a chunk
    if constexpr (kIsE4M3) return 2;
    return side.id == format::FormatId::kMxfp4 ? 1 : 2;  // 32 / operand_group
  }
};

// int8's and int4's, of 64 numbers. With binary32 scales on scores and weights nothing is rounded;
// here a number is, to f16.
template <int Bits>
struct ScaleOf64 {
  static constexpr int kBytes = 2;
  static constexpr int bytes_of_row(int dim) { return dim / 64 * 2; }
  __device__ static int first_byte(const TileSide&, int chunk) {
    return chunk * (128 / Bits) / 64 * 2;
  }
  __device__ static ChunkScales of(const TileSide&, uint32_t word) {
    const uint32_t factor = __byte_perm(word, 0, 0x1010);
    return {{factor, factor}, 0};
  }
  __device__ static uint32_t apply(const ChunkScales& scales, int, uint32_t x) {
    return multiply_f16x2(x, scales.factor[0]);
  }
};

// An affine row's scale, and its zero as codes less `centre` need it.
__device__ inline float2 affine_params(const TileSide& side, uint32_t bits, float centre) {
  float2 affine = __half22float2(reinterpret_cast<const __half2&>(bits));
  if (side.scale_type == format::ScaleType::kBF16) {
    affine = {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
  }
  return {affine.x, fmaf(centre, affine.x, affine.y)};
}

// Of a whole row; numbers are rounded here, as those of ScaleOf64, and so is the zero.
template <class Element>
struct ScaleAndZero {
  static constexpr int kBytes = 4;
  static constexpr int bytes_of_row(int) { return 4; }
  __device__ static int first_byte(const TileSide&, int) { return 0; }
  __device__ static ChunkScales of(const TileSide& side, uint32_t word) {
    if (side.scale_type == format::ScaleType::kBF16) {
      word = MmaF16::pack(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
    }
    const uint32_t factor = __byte_perm(word, 0, 0x1010), zero = __byte_perm(word, 0, 0x3232);
    const uint32_t middle = MmaF16::pack(Element::kMiddle, Element::kMiddle);
    return {{factor, factor}, fma_f16x2(factor, middle, zero)};
  }
  __device__ static uint32_t apply(const ChunkScales& scales, int, uint32_t x) {
    return fma_f16x2(x, scales.factor[0], scales.zero);
  }
};

// Of integers and fp8, by where a format's scales enter.
template <class Element, ScalePath Path>
struct ChunkScalesOfPath;
template <class Element>
struct ChunkScalesOfPath<Element, ScalePath::kRow> {
  using Type = NoScale;
};
template <class Element>
struct ChunkScalesOfPath<Element, ScalePath::kGroups64> {
  using Type = ScaleOf64<Element::kBits>;
};
template <class Element>
struct ChunkScalesOfPath<Element, ScalePath::kAffine> {
  using Type = ScaleAndZero<Element>;
};
template <class Element, ScalePath Path>
using ChunkScalesOf = typename ChunkScalesOfPath<Element, Path>::Type;

// How a format is decoded whose scales go into the tile: its codes, and what scales numbers there.
template <format::FormatId Id>
struct TileDecoder {
  using Element = typename FormatTraits<Id>::Element;
  using Scales = ChunkScalesOf<Element, tensor_core_format(Id).scale_path>;
};
template <format::FormatId Id>
requires(tensor_core_format(Id).scale_path == ScalePath::kOperand) struct TileDecoder<Id> {
  using Element = typename FormatTraits<Id>::Element;
  using Scales = ScalesOfGroups<typename FormatTraits<Id>::Tile>;
  using InterleavedScales = ScalesOfGroups<typename FormatTraits<Id>::Interleaved::Tile>;
};

}  // namespace kvx::ops::cuda

// A chunk of a packed latent row, 16 bytes of codes, on its way to f16 numbers: where its scales
// lie, and how it is decoded.
#pragma once

#include "ops/attend/cuda/latent/fp8_scales.cuh"
#include "ops/attend/cuda/prefill/shape.cuh"

namespace kvx::ops::cuda {

template <class Decoder>
inline constexpr bool kHasChunkScales = !std::is_same_v<typename Decoder::Scales, NoScale>;

// visit(decoder) for the rows' format, of those with so many bits.
template <int Bits, class Visit>
__device__ __forceinline__ void visit_latent_decoder(const LatentParams& params,
                                                     const Visit& visit) {
  using format::FormatId;
  const TileSide& side = params.tile_k;
  if constexpr (Bits == 8) {
    switch (side.id) {
      case FormatId::kFp8E4M3:
        return has_scales_in_tile(side) ? visit(LatentFp8Decoder<FormatId::kFp8E4M3>())
                                        : visit(TileDecoder<FormatId::kFp8E4M3>());
      case FormatId::kFp8E5M2:
        return has_scales_in_tile(side) ? visit(LatentFp8Decoder<FormatId::kFp8E5M2>())
                                        : visit(TileDecoder<FormatId::kFp8E5M2>());
      case FormatId::kInt8:
        return visit(TileDecoder<FormatId::kInt8>());
      default:
        return visit(TileDecoder<FormatId::kInt8Affine>());
    }
  } else {
    static_assert(Bits == 4);
    switch (side.id) {
      case FormatId::kInt4:
        return visit(TileDecoder<FormatId::kInt4>());
      case FormatId::kInt4Affine:
        return visit(TileDecoder<FormatId::kInt4Affine>());
      case FormatId::kNvfp4:
        return visit(TileDecoder<FormatId::kNvfp4>());
      default:
        return visit(TileDecoder<FormatId::kMxfp4>());
    }
  }
}

// Of the scales of a row's chunk, among its row's.
template <class Scales>
__device__ inline int first_scale_byte(const LatentParams& params, int chunk) {
  if constexpr (std::is_same_v<Scales, LatentFp8Scales>) {
    return Scales::first_byte(params, chunk);
  } else {
    return Scales::first_byte(params.tile_k, chunk);
  }
}
// from: the chunk's first scale.
template <class Scales>
__device__ inline uint32_t load_chunk_scales(const TileSide& side, const uint8_t* from) {
  if constexpr (Scales::kBytes == 4) return *reinterpret_cast<const uint32_t*>(from);
  if constexpr (Scales::kBytes == 2) return *reinterpret_cast<const uint16_t*>(from);
  // mxfp4 has one scale of 32 numbers, mxfp4_g16 two.
  if (side.id == format::FormatId::kMxfp4) return *from;
  return *reinterpret_cast<const uint16_t*>(from);
}

// store(j, numbers) for each eight numbers of a chunk, in the format's order of pairs.
template <class Decoder, class Store>
__device__ __forceinline__ void decode_chunk(const TileSide& side, const uint4& codes,
                                             uint32_t scale_word, const Store& store) {
  using Element = typename Decoder::Element;
  using Scales = typename Decoder::Scales;
  constexpr bool kHasScales = kHasChunkScales<Decoder>;
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  [[maybe_unused]] ChunkScales scales = {};
  if constexpr (kHasScales) scales = Scales::of(side, scale_word);
#pragma unroll
  for (int j = 0; j < 16 / Element::kBits; ++j) {
    Four x;
    if constexpr (Element::kBits == 8) {
      const Two low = Element::for_values(words[2 * j]);
      const Two high = Element::for_values(words[2 * j + 1]);
      x = {low.a, low.b, high.a, high.b};
    } else {
      static_assert(Element::kBits == 4);
      x = Element::for_values(words[j]);
    }
    if constexpr (kHasScales) {
#pragma unroll
      for (int k = 0; k < 4; ++k) x.r[k] = Scales::apply(scales, j, x.r[k]);
    }
    store(j, x);
  }
}

// A number is what lies in the tile times this: the head's scale, of keys and values alike.
__device__ inline float latent_unit(const LatentParams& params, int kv_head) {
  const TileSide& side = params.tile_k;
  const int head = kv_head - params.first_head;
  const float shared =
      side.shared_scale ? side.shared_scale[head * side.shared_scale_stride] : 1.0f;
  const float raised = has_scales_in_tile(side) ? LatentFp8Scales::kRaise : 1.0f;
  return shared * side.tensor_scale(head) * unit_of(side) / raised;
}

}  // namespace kvx::ops::cuda

// decode_chunk: lanes turn stored rows into numbers, a chunk a lane, in registers. Loading is a
// step of its own, so that the next row's bytes can be under way meanwhile.
#pragma once

#include "ops/append/hardware_codes.cuh"
#include "ops/cuda/chunk.cuh"
#include "ops/gather/decode_row.cuh"
#include "ops/gather/hardware_numbers.cuh"

namespace kvx::ops::cuda {

// A scale on its own size, or an affine row's two.
__device__ inline uint32_t scale_bits(const uint8_t* scale, int bytes) {
  if (bytes == 1) return *scale;
  if (bytes == 2) return *reinterpret_cast<const uint16_t*>(scale);
  return bytes == 4 ? *reinterpret_cast<const uint32_t*>(scale) : 0;
}

// A chunk as it is stored, with its group's scale.
template <class Format>
struct StoredChunk {
  uint32_t words[kChunkWords<Format>];
  uint32_t scale;
};

// Zeros outside, which are numbers.
template <class Format>
__device__ inline StoredChunk<Format> load_chunk(const CudaSide& side, const RowSource& from,
                                                 const ChunkPlace& place) {
  StoredChunk<Format> stored = {};
  if (!place.is_inside) return stored;
  load_codes<Format>(from.codes, place, stored.words);
  if constexpr (!format::is_plain<Format>()) {
    const uint8_t* scale = from.scales + place.group() * side.view.scales.group_stride;
    stored.scale = scale_bits(scale, side.scale_bytes);
  }
  return stored;
}

template <class Format>
__device__ inline Chunk decode_stored(const CudaSide& side, const StoredChunk<Format>& stored,
                                      float tensor_scale) {
  using Codec = typename Format::Codec;
  constexpr int kNumbers = 32 / Codec::kBits;
  Chunk chunk;
  if constexpr (format::is_affine<Format>()) {
#pragma unroll
    for (int w = 0; w < kChunkWords<Format>; ++w) {
      decode_affine_word<Codec>(side.view.spec.scale_type, stored.scale, stored.words[w],
                                chunk.x + w * kNumbers);
    }
    return chunk;
  } else {
#pragma unroll
    for (int w = 0; w < kChunkWords<Format>; ++w) {
      if constexpr (kMayHaveInterleaved<Format>) {
        if (side.view.is_interleaved) {
          HardwareNumbers<Codec>::decode_interleaved(stored.words[w], chunk.x + w * kNumbers);
          continue;
        }
      }
      HardwareNumbers<Codec>::decode(stored.words[w], chunk.x + w * kNumbers);
    }
  }
  if constexpr (!format::is_plain<Format>()) {
    const format::ScaleMaker maker = format::scale_maker<Format>(side.view.spec, tensor_scale);
    const float step = hardware_step(maker, {stored.scale});
#pragma unroll
    for (float& x : chunk.x) x *= step;
  }
  return chunk;
}

__device__ inline Chunk decode_chunk(const CudaSide& side, const RowSource& from,
                                     const ChunkPlace& place) {
  Chunk chunk = {};
  visit_chunk_format(side.id, [&]<class Format>() {
    chunk = decode_stored(side, load_chunk<Format>(side, from, place), from.tensor_scale);
  });
  return chunk;
}

}  // namespace kvx::ops::cuda

// decode_chunk: lanes turn stored rows into numbers, a chunk a lane, in registers.
#pragma once

#include "ops/cuda/chunk.cuh"
#include "ops/gather/decode_row.cuh"

namespace kvx::ops::cuda {

// Zeros outside.
template <class Format>
__device__ inline Chunk decode_chunk_of(const CudaSide& side, const RowSource& from,
                                        const ChunkPlace& place) {
  Chunk chunk = {};
  if (!place.is_inside) return chunk;
  uint32_t words[kChunkWords<Format>];
  load_codes<Format>(from.codes, place, words);
  typename Format::Codec::Code codes[kChunk];
  format::unpack<Format::kFacts.packing>(reinterpret_cast<const uint8_t*>(words), 0, kChunk, codes);
  const RowDecoder<Format> decoder{side, from, cpu::DecodeFor::kGather};
  decoder.decode(codes, place.group(), kChunk, chunk.x);
  return chunk;
}

__device__ inline Chunk decode_chunk(const CudaSide& side, const RowSource& from,
                                     const ChunkPlace& place) {
  Chunk chunk = {};
  visit_format(side.id,
               [&]<class Format>() { chunk = decode_chunk_of<Format>(side, from, place); });
  return chunk;
}

}  // namespace kvx::ops::cuda

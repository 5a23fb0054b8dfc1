// gather's fast kernel: a row's lanes walk over heads of a token.
#pragma once

#include "ops/append/encode_chunk.cuh"
#include "ops/gather/decode_chunk.cuh"
#include "ops/gather/gather_job.cuh"

namespace kvx::ops::cuda {

struct GatherChunksJob {
  GatherJob gather;
  int heads_at_once;
  FastDivide by_walks_per_token;
};

// A chunk in a caller's type, which is a format without scales.
__device__ inline void store_numbers(DType type, uint8_t* row, const ChunkPlace& place,
                                     const Chunk& chunk) {
  const RowTarget to = {row, nullptr, 1.0f};
  if (type == DType::kF32) encode_plain_chunk<format::F32>(to, place, chunk);
  if (type == DType::kF16) encode_plain_chunk<format::F16>(to, place, chunk);
  if (type == DType::kBF16) encode_plain_chunk<format::BF16>(to, place, chunk);
}

template <class Format>
__device__ inline void gather_chunk(const GatherJob& job, const GatherSide& part,
                                    const GatherSource& source, int head, const ChunkPlace& place,
                                    uint8_t* output) {
  RowSource from = {};
  if (place.is_inside) from = source.row(part.side, head);
  if (part.keeps_bits) {
    uint32_t words[kChunkWords<Format>];
    load_codes<Format>(from.codes, place, words);
    return store_codes<Format>(words, place, output);
  }
  Chunk chunk = decode_chunk_of<Format>(part.side, from, place);
  if (part.is_transformed) {
    undo_transform_chunk(gather_transform(job, part, head, source.position_block), place,
                         part.side.view.head_dim, chunk);
  }
  store_numbers(part.output.dtype, output, place, chunk);
}

// lane: of all lanes that the range's walks have.
template <class Format>
__device__ inline void walk_heads(const GatherChunksJob& chunks, const GatherSide& part,
                                  const GatherRange& range, uint32_t lane) {
  const GatherJob& job = chunks.gather;
  const uint32_t walk = lane >> part.chunks.log2_lanes;
  const uint32_t token = chunks.by_walks_per_token.quotient(walk);
  const uint32_t walk_of_token = walk - token * chunks.by_walks_per_token.divisor;
  const int first_head = static_cast<int>(walk_of_token) * chunks.heads_at_once;
  ChunkPlace place = {static_cast<int>(lane) & (part.chunks.lanes() - 1),
                      part.chunks.log2_lanes_per_group, false};
  GatherSource source;
  if (token < min(range.num_tokens, job.max_tokens)) {
    source = gather_source(job, part, range, token, place.chunk == 0 && first_head == 0);
  }
#pragma unroll 1
  for (int i = 0; i < chunks.heads_at_once; ++i) {
    const int head = min(first_head + i, job.num_heads - 1);
    place.is_inside =
        source.is_read && place.chunk < part.chunks.num_chunks && first_head + i < job.num_heads;
    gather_chunk<Format>(job, part, source, head, place,
                         part.output_row(range.first_row + token, job.first_head + head));
  }
}

// blockIdx: walks of the range, the range, K or V.
__global__ void __launch_bounds__(ChunkLaunch::kThreads, ChunkLaunch::kCtasPerMultiprocessor)
    gather_chunks(const __grid_constant__ GatherChunksJob chunks) {
  const GatherJob& job = chunks.gather;
  const GatherSide& part = job.sides[blockIdx.z];
  const GatherRange range = range_at(job.ranges, static_cast<int>(blockIdx.y));
  if (!is_inside(job, range)) {
    const bool counts = blockIdx.x == 0 && blockIdx.z == 0 && threadIdx.x == 0;
    if (counts) atomicAdd(&job.findings->out_of_range, 1ull);
    return;
  }
  if (!part.is_wanted()) return;
  const int64_t num_tokens = min(range.num_tokens, job.max_tokens);
  const int64_t num_lanes = num_tokens * chunks.by_walks_per_token.divisor
                            << part.chunks.log2_lanes;
  visit_format(part.side.id, [&]<class Format>() {
    // CTAs take turns: max_tokens may be far above what the ranges hold.
    for (int64_t first = int64_t{blockIdx.x} * ChunkLaunch::kThreads; first < num_lanes;
         first += int64_t{gridDim.x} * ChunkLaunch::kThreads) {
      walk_heads<Format>(chunks, part, range, static_cast<uint32_t>(first + threadIdx.x));
    }
  });
}

}  // namespace kvx::ops::cuda

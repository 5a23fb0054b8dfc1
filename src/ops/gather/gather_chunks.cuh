// gather's fast kernel: a row's lanes walk over heads of a token, the next head's loads under way
// while they decode this one's.
#pragma once

#include "ops/append/encode_chunk.cuh"
#include "ops/cuda/overlapping_launch.cuh"
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

// A lane's chunk of one head after the other.
struct GatherWalk {
  GatherSource source;
  int head;  // of the run
  int end;
  RowSource from;  // of this head
  uint8_t* output;
  float next_tensor_scale = 1.0f;
  ChunkPlace place;  // inside as long as there is a head

  __device__ bool has_next() const { return place.is_inside && head + 1 < end; }
  __device__ void next(const GatherSide& part) {
    place.is_inside = has_next();
    ++head;
    from.codes += part.side.view.codes.head_stride;
    from.scales += part.side.view.scales.head_stride;
    from.tensor_scale = next_tensor_scale;
    output += part.output.head_stride * bytes_of(part.output.dtype);
  }
};

// lane: of all lanes that the range's walks have.
__device__ inline GatherWalk begin_walk(const GatherChunksJob& chunks, const GatherSide& part,
                                        const GatherRange& range, uint32_t lane) {
  const GatherJob& job = chunks.gather;
  const uint32_t walk_at = lane >> part.chunks.log2_lanes;
  const uint32_t token = chunks.by_walks_per_token.quotient(walk_at);
  const uint32_t walk_of_token = walk_at - token * chunks.by_walks_per_token.divisor;
  GatherWalk walk = {};
  walk.head = static_cast<int>(walk_of_token) * chunks.heads_at_once;
  walk.end = min(walk.head + chunks.heads_at_once, job.num_heads);
  walk.place = {static_cast<int>(lane) & (part.chunks.lanes() - 1),
                part.chunks.log2_lanes_per_group, false};
  if (token >= min(range.num_tokens, job.max_tokens)) return walk;
  walk.source = gather_source(job, part, range, token, walk.place.chunk == 0 && walk.head == 0);
  walk.place.is_inside = walk.source.is_read && walk.place.chunk < part.chunks.num_chunks;
  if (!walk.place.is_inside) return walk;
  walk.from = walk.source.row(part.side, walk.head);
  walk.output = part.output_row(range.first_row + token, job.first_head + walk.head);
  return walk;
}

template <class Format>
__device__ inline void gather_chunk(const GatherJob& job, const GatherSide& part,
                                    const GatherWalk& walk, const StoredChunk<Format>& stored) {
  if (part.keeps_bits) return store_codes<Format>(stored.words, walk.place, walk.output);
  Chunk chunk = decode_stored(part.side, stored, walk.from.tensor_scale);
  if (part.is_transformed) {
    const int head = min(walk.head, job.num_heads - 1);
    undo_transform_chunk(gather_transform(job, part, head, walk.source.position_block), walk.place,
                         part.side.view.head_dim, chunk);
  }
  store_numbers(part.output.dtype, walk.output, walk.place, chunk);
}

// All lanes of a warp take as many steps.
template <class Format>
__device__ inline void walk_heads(const GatherChunksJob& chunks, const GatherSide& part,
                                  const GatherRange& range, uint32_t lane) {
  GatherWalk walk = begin_walk(chunks, part, range, lane);
  StoredChunk<Format> next = load_chunk<Format>(part.side, walk.from, walk.place);
#pragma unroll 1
  for (int i = 0; i < chunks.heads_at_once; ++i, walk.next(part)) {
    const StoredChunk<Format> stored = next;
    if (walk.has_next()) {
      const RowSource from = {walk.from.codes + part.side.view.codes.head_stride,
                              walk.from.scales + part.side.view.scales.head_stride, 1.0f};
      next = load_chunk<Format>(part.side, from, walk.place);
      walk.next_tensor_scale = part.side.tensor_scale(walk.head + 1);
    }
    gather_chunk(chunks.gather, part, walk, stored);
  }
}

// blockIdx: walks of the range, the range, K or V.
__global__ void __launch_bounds__(ChunkLaunch::kThreads, ChunkLaunch::kCtasPerMultiprocessor)
    gather_chunks(const __grid_constant__ GatherChunksJob chunks) {
  wait_for_earlier_launches();
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

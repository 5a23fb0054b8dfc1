// append's fast kernel: a row's lanes walk over heads of a token, the next head's loads under way
// while they encode this one's.
#pragma once

#include "ops/append/append_job.cuh"
#include "ops/append/encode_chunk.cuh"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {

struct AppendChunksJob {
  AppendJob append;
  int heads_at_once;
  FastDivide by_walks_per_token;
};

// A lane's chunk of one head after the other.
struct AppendWalk {
  const uint8_t* input;  // of this head, as long as there is one
  int head;              // of the run
  int end;
  AppendTarget target;
  RowTarget to;  // of this head, as far as it is stored
  float next_tensor_scale;
  ChunkPlace place;

  __device__ bool is_stored() const { return target.is_stored && head < end; }
  __device__ bool has_next() const { return head + 1 < end; }
  __device__ void next(const AppendSide& part) {
    ++head;
    input += part.input.head_stride * bytes_of(part.input.dtype);
    to.codes += part.side.view.codes.head_stride;
    to.scales += part.side.view.scales.head_stride;
    to.tensor_scale = next_tensor_scale;
  }
};

template <DType Input>
using InputChunk = uint32_t[kInputWords<Input>];

// The lane's walk, with its first chunk already being loaded into `words`. A lane without work has
// an empty one; end counts from the warp's heads alike in all lanes.
template <DType Input>
__device__ inline AppendWalk begin_walk(const AppendChunksJob& job, const AppendSide& part,
                                        InputChunk<Input>& words) {
  const AppendJob& append = job.append;
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t walk_at =
      (blockIdx.x * ChunkLaunch::kThreads + threadIdx.x) >> part.chunks.log2_lanes;
  const uint32_t token = job.by_walks_per_token.quotient(walk_at);
  const uint32_t walk_of_token = walk_at - token * job.by_walks_per_token.divisor;
  AppendWalk walk = {};
  walk.to.tensor_scale = walk.next_tensor_scale = 1.0f;
  walk.place = {lane & (part.chunks.lanes() - 1), part.chunks.log2_lanes_per_group, false};
  if (token >= append.num_tokens || walk.place.chunk >= part.chunks.num_chunks) return walk;
  walk.head = static_cast<int>(walk_of_token) * job.heads_at_once;
  walk.end = min(walk.head + job.heads_at_once, append.num_heads);
  walk.input = part.input_row(token, append.first_head + walk.head) +
               walk.place.chunk * kInputWords<Input> * 4;
  load_words(walk.input, words);
  const int64_t slot = append.slot_mapping[token];
  walk.target = append_target(append, part, token, slot, walk.place.chunk == 0 && walk.head == 0);
  if (walk.target.is_stored) walk.to = walk.target.row(part.side, walk.head);
  return walk;
}

template <class Format, DType Input>
__device__ inline void append_chunk(const AppendJob& job, const AppendSide& part,
                                    const AppendWalk& walk, const InputChunk<Input>& words) {
  ChunkPlace place = walk.place;
  place.is_inside = walk.is_stored();
  Chunk chunk = numbers_of<Input>(words);
  if (part.is_transformed) {
    const int head = min(walk.head, job.num_heads - 1);
    apply_transform_chunk(append_transform(job, part, head, walk.target.position_block), place,
                          part.side.view.head_dim, chunk);
  }
  const int counted = encode_chunk_of<Format>(part.side, walk.to, place, chunk);
  if (place.is_inside) count_nonfinite(job, counted);
}

// Calls per_chunk(words) for every head of the walk. All lanes of a warp take as many steps.
template <DType Input, class PerChunk>
__device__ __forceinline__ void walk_heads(const AppendChunksJob& job, const AppendSide& part,
                                           AppendWalk& walk, InputChunk<Input>& next,
                                           const PerChunk& per_chunk) {
#pragma unroll 1
  for (int i = 0; i < job.heads_at_once; ++i, walk.next(part)) {
    InputChunk<Input> words;
#pragma unroll
    for (int w = 0; w < kInputWords<Input>; ++w) words[w] = next[w];
    if (walk.has_next()) {
      load_words(walk.input + part.input.head_stride * bytes_of(Input), next);
      walk.next_tensor_scale = part.side.tensor_scale(walk.head + 1);
    }
    per_chunk(words);
  }
}

// blockIdx.y: K or V.
template <DType Input>
__global__ void __launch_bounds__(ChunkLaunch::kThreads, ChunkLaunch::kCtasPerMultiprocessor)
    append_chunks(const __grid_constant__ AppendChunksJob job) {
  wait_for_earlier_launches();
  const AppendSide& part = job.append.sides[blockIdx.y];
  if (!part.is_stored()) return;
  InputChunk<Input> next = {};
  AppendWalk walk = begin_walk<Input>(job, part, next);
  if (part.keeps_bits) {
    walk_heads<Input>(job, part, walk, next, [&](const InputChunk<Input>& words) {
      const int at = walk.place.chunk * kInputWords<Input> * 4;
      if (walk.is_stored()) store_words(words, walk.to.codes + at);
    });
    return;
  }
  visit_format(part.side.id, [&]<class Format>() {
    walk_heads<Input>(job, part, walk, next, [&](const InputChunk<Input>& words) {
      append_chunk<Format, Input>(job.append, part, walk, words);
    });
  });
}

}  // namespace kvx::ops::cuda

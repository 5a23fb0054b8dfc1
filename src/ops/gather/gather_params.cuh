// The parameters of both gather kernels, and where a token of a range lies.
#pragma once

#include "ops/cuda/chunk.cuh"
#include "ops/cuda/device_counters.hpp"
#include "ops/cuda/fast_divide.hpp"
#include "ops/gather/decode_row.cuh"
#include "ops/gather/gather_cuda.hpp"

namespace kvx::ops::cuda {

struct GatherSide {
  CudaSide side;
  MutableFloatRows output;
  SideTransform transform;
  ChunkRows chunks;
  bool is_transformed;
  bool keeps_bits;  // the cache's own type, untransformed

  __device__ bool is_wanted() const { return side.view.head_dim > 0 && output.data != nullptr; }
  // head: of the layer.
  __device__ uint8_t* output_row(int64_t row, int head) const {
    return output.data +
           (row * output.token_stride + head * output.head_stride) * bytes_of(output.dtype);
  }
};

struct GatherParams {
  GatherSide sides[2];  // K, V
  int first_head;
  int num_heads;  // of the run
  int num_kv_heads;
  int64_t num_blocks;
  int block_size;
  FastDivide by_block_size;
  BlockTable table;
  int64_t max_blocks_per_sequence;
  int num_sequences;
  CudaGatherRanges ranges;
  int64_t max_tokens;  // of a range
  int64_t num_rows;    // of the output
  DeviceCounters* counters;
};

// Sequence i whole; the others before it in the output.
__device__ inline GatherRange whole_sequence(const int32_t* seq_lens, int i) {
  GatherRange range = {i, 0, seq_lens[i], 0};
  for (int s = 0; s < i; ++s) range.first_row += max(seq_lens[s], 0);
  return range;
}

__device__ inline GatherRange range_at(const CudaGatherRanges& ranges, int i) {
  if (ranges.list) return ranges.list[i];
  if (!ranges.sequences) return whole_sequence(ranges.seq_lens, i);
  return {ranges.sequences[i], ranges.first_tokens[i], ranges.num_tokens[i], ranges.first_rows[i]};
}

__device__ inline bool is_inside(const GatherParams& params, const GatherRange& range) {
  const int64_t capacity = params.max_blocks_per_sequence * params.block_size;
  const bool is_known = range.sequence >= 0 && range.sequence < params.num_sequences;
  if (is_known && params.ranges.seq_lens) {
    const int64_t length = params.ranges.seq_lens[range.sequence];
    if (range.first_token > length || range.num_tokens > length - range.first_token) return false;
  }
  return is_known && range.first_token >= 0 && range.num_tokens >= 0 &&
         range.first_token <= capacity && range.num_tokens <= capacity - range.first_token &&
         range.first_row >= 0 && range.num_tokens <= params.num_rows &&
         range.first_row <= params.num_rows - range.num_tokens;
}

// Where a token lies. Not read: blocks out of range, which are counted once a token and side (by
// the lane that `counts`).
struct GatherSource {
  bool is_read = false;
  int64_t block = 0;
  int64_t offset = 0;  // in the block
  int64_t position_block = 0;

  __device__ RowSource row(const CudaSide& side, int head) const {
    return {side.codes(block, offset, head), side.scales(block, offset, head),
            side.tensor_scale(head), side.channels(block, head)};
  }
};

// Which block of its sequence a token of the range is in. Tokens are mostly fewer than 2^31, and a
// 64-bit division costs as much as decoding.
__device__ inline int64_t position_block(const GatherParams& params, int64_t token) {
  return token <= INT32_MAX ? params.by_block_size.quotient(static_cast<uint32_t>(token))
                            : token / params.block_size;
}

__device__ inline int32_t block_of_token(const GatherParams& params, const GatherRange& range,
                                         int64_t token_of_range) {
  return params.table.ids[range.sequence * params.table.row_stride +
                          position_block(params, range.first_token + token_of_range)];
}

// block: what the table has for it.
__device__ inline GatherSource gather_source(const GatherParams& params, const GatherSide& part,
                                             const GatherRange& range, int64_t token_of_range,
                                             int32_t block, bool counts) {
  GatherSource source;
  const int64_t token = range.first_token + token_of_range;
  source.position_block = position_block(params, token);
  source.offset = token - source.position_block * params.block_size;
  source.block = block;
  const bool is_outside =
      block < 0 || block >= params.num_blocks ||
      (part.transform.block_offset && source.position_block >= part.transform.num_offset_blocks);
  if (is_outside && counts) atomicAdd(&params.counters->out_of_range, 1ull);
  source.is_read = !is_outside;
  return source;
}

// head: of the run.
__device__ inline TransformRow gather_transform(const GatherParams& params, const GatherSide& part,
                                                int head, int64_t position_block) {
  return transform_row(part.transform, params.first_head + head, params.num_kv_heads,
                       part.side.view.head_dim, position_block);
}

}  // namespace kvx::ops::cuda

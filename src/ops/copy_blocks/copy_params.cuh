// The parameters of copy_blocks' kernels.
#pragma once

#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/cuda/chunk.cuh"
#include "ops/cuda/device_counters.hpp"
#include "ops/cuda/fast_divide.hpp"
#include "ops/cuda/fragments.cuh"

namespace kvx::ops::cuda {

struct CopySide {
  CudaSide from;
  CudaSide to;
  ChunkRows from_chunks;
  ChunkRows to_chunks;
  bool is_alike;    // the same bytes mean the same numbers, tensor scales aside
  bool is_skipped;  // not stored, or a part of other rows

  // Whether codes have another order there.
  KVX_HOST_DEVICE bool changes_order() const {
    return from.view.is_interleaved != to.view.is_interleaved;
  }
};

struct CopyParams {
  CopySide sides[2];  // K, V
  int num_heads;      // of the run
  int block_size;
  FastDivide by_block_size;
  int64_t num_from_blocks;
  int64_t num_to_blocks;
  CudaBlockCopies copies;
  bool counts_copies;  // that are out of range: one launch of a call does
  DeviceCounters* counters;
};

__device__ inline bool is_inside(const CopyParams& params, const BlockCopy& copy) {
  return copy.from_block >= 0 && copy.from_block < params.num_from_blocks && copy.to_block >= 0 &&
         copy.to_block < params.num_to_blocks && copy.num_tokens >= 0 &&
         copy.num_tokens <= params.block_size;
}

__device__ inline BlockCopy copy_at(const CopyParams& params, int64_t i) {
  const CudaBlockCopies& copies = params.copies;
  if (copies.list) return copies.list[i];
  return {copies.from_blocks[i], copies.to_blocks[i],
          copies.num_tokens ? copies.num_tokens[i] : params.block_size};
}

// By one thread of the launch for each copy that is not inside.
__device__ inline void count_outside(const CopyParams& params) {
  if (params.counts_copies) atomicAdd(&params.counters->out_of_range, 1ull);
}

// A row's place on both sides.
struct CopyRow {
  const uint8_t* from_codes;
  const uint8_t* from_scales;
  float from_tensor_scale;
  uint8_t* to_codes;
  uint8_t* to_scales;
  float to_tensor_scale;
  const float* to_feedback;      // of the head, or null
  const uint8_t* from_channels;  // of the block and head, where that side is dual-scale
};

__device__ inline CopyRow copy_row_at(const CopySide& side, const BlockCopy& copy, int token,
                                      int head) {
  return {side.from.codes(copy.from_block, token, head),
          side.from.scales(copy.from_block, token, head),
          side.from.tensor_scale(head),
          side.to.codes(copy.to_block, token, head),
          side.to.scales(copy.to_block, token, head),
          side.to.tensor_scale(head),
          side.to.view.feedback_of(head),
          side.from.channels(copy.from_block, head)};
}

// A word of E2M1 codes on its way between two sides, one of which has the interleaved order.
__device__ inline uint32_t in_other_order(const CopySide& side, uint32_t word) {
  return side.to.view.is_interleaved ? format::interleaved_from_nibbles(word)
                                     : format::nibbles_from_interleaved(word);
}

// By a warp. Given scales are not written.
__device__ inline void copy_as_stored(const CopySide& side, const CopyRow& row, int lane) {
  if (side.changes_order()) {
    for (int i = 4 * lane; i < side.from.code_bytes; i += 4 * kWarp) {
      uint32_t word;
      memcpy(&word, row.from_codes + i, 4);
      word = in_other_order(side, word);
      memcpy(row.to_codes + i, &word, 4);
    }
  } else {
    for (int i = lane; i < side.from.code_bytes; i += kWarp) {
      row.to_codes[byte_of_row(side.to.view.codes, i)] =
          row.from_codes[byte_of_row(side.from.view.codes, i)];
    }
  }
  if (side.from.view.spec.scale_source == format::ScaleSource::kGiven) return;
  const int bytes = side.from.scale_bytes;
  for (int i = lane; i < side.from.num_groups * bytes; i += kWarp) {
    const int64_t group = i / bytes;
    row.to_scales[group * side.to.view.scales.group_stride + i % bytes] =
        row.from_scales[group * side.from.view.scales.group_stride + i % bytes];
  }
}

}  // namespace kvx::ops::cuda

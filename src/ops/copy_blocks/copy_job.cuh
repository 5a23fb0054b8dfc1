// What both copy_blocks kernels are told.
#pragma once

#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/cuda/chunk.cuh"
#include "ops/cuda/fast_divide.hpp"

namespace kvx::ops::cuda {

struct CopySide {
  CudaSide from;
  CudaSide to;
  ChunkRows from_chunks;
  ChunkRows to_chunks;
  bool is_alike;    // the same bytes mean the same numbers, tensor scales aside
  bool is_skipped;  // not stored, or a part of other rows
};

struct CopyJob {
  CopySide sides[2];  // K, V
  int num_heads;      // of the run
  int block_size;
  FastDivide by_block_size;
  int64_t num_from_blocks;
  int64_t num_to_blocks;
  CudaBlockCopies copies;
  CudaFindings* findings;
};

__device__ inline bool is_inside(const CopyJob& job, const BlockCopy& copy) {
  return copy.from_block >= 0 && copy.from_block < job.num_from_blocks && copy.to_block >= 0 &&
         copy.to_block < job.num_to_blocks && copy.num_tokens >= 0 &&
         copy.num_tokens <= job.block_size;
}

__device__ inline BlockCopy copy_at(const CopyJob& job, int64_t i) {
  const CudaBlockCopies& copies = job.copies;
  if (copies.list) return copies.list[i];
  return {copies.from_blocks[i], copies.to_blocks[i],
          copies.num_tokens ? copies.num_tokens[i] : job.block_size};
}

// A row's place on both sides.
struct CopyRow {
  const uint8_t* from_codes;
  const uint8_t* from_scales;
  float from_tensor_scale;
  uint8_t* to_codes;
  uint8_t* to_scales;
  float to_tensor_scale;
};

__device__ inline CopyRow copy_row_at(const CopySide& side, const BlockCopy& copy, int token,
                                      int head) {
  return {side.from.codes(copy.from_block, token, head),
          side.from.scales(copy.from_block, token, head),
          side.from.tensor_scale(head),
          side.to.codes(copy.to_block, token, head),
          side.to.scales(copy.to_block, token, head),
          side.to.tensor_scale(head)};
}

}  // namespace kvx::ops::cuda

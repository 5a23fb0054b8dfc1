// What both append kernels are told, and where a row goes.
#pragma once

#include "ops/append/append.hpp"
#include "ops/append/encode_chunk.cuh"
#include "ops/cuda/fast_divide.hpp"
#include "ops/cuda/transform_row.cuh"
#include "ops/side_rows.hpp"

namespace kvx::ops::cuda {

struct AppendSide {
  CudaSide side;
  FloatRows input;
  SideTransform transform;
  ChunkRows chunks;
  bool is_transformed;
  bool keeps_bits;  // the cache's own type, untransformed

  __device__ bool is_stored() const { return side.view.head_dim > 0 && !side.view.is_alias; }
  // Of the row of a head of the layer.
  __device__ const uint8_t* input_row(uint32_t token, int head) const {
    const int64_t at = token * input.token_stride + head * input.head_stride;
    return input.data + at * bytes_of(input.dtype);
  }
};

struct AppendJob {
  AppendSide sides[2];  // K, V
  int first_head;
  int num_heads;  // of the run
  int num_kv_heads;
  int64_t num_slots;
  int block_size;
  FastDivide by_block_size;
  FastDivide by_num_heads;
  const int64_t* slot_mapping;  // [num_tokens]
  const int64_t* positions;     // [num_tokens], or null
  uint32_t num_rows;            // of a side: tokens x heads of the run
  CudaFindings* findings;
};

// Slots are mostly fewer than 2^31, and a 64-bit division costs as much as encoding.
__device__ inline TokenRun place_of_slot(const AppendJob& job, int64_t slot) {
  if (job.num_slots <= INT32_MAX) {
    const auto s = static_cast<uint32_t>(slot);
    const uint32_t block = job.by_block_size.quotient(s);
    return {block, static_cast<int>(s - block * static_cast<uint32_t>(job.block_size)), 1};
  }
  return {slot / job.block_size, static_cast<int>(slot % job.block_size), 1};
}

// A row of the call: a token, and a head of the run.
struct AppendRow {
  uint32_t token;
  int head;
};

__device__ inline AppendRow append_row_at(const AppendJob& job, uint32_t row) {
  const uint32_t token = job.by_num_heads.quotient(row);
  return {token, static_cast<int>(row - token * static_cast<uint32_t>(job.num_heads))};
}

// Where a row goes. Not stored: slots below zero, and those out of range, which are counted once a
// token and side (by the lane that says `counts`).
struct AppendTarget {
  bool is_stored = false;
  RowTarget to = {nullptr, nullptr, 1.0f};
  int64_t position_block = 0;
};

__device__ inline AppendTarget append_target(const AppendJob& job, const AppendSide& part,
                                             const AppendRow& row, int64_t slot, bool counts) {
  AppendTarget target;
  if (slot < 0) return target;
  bool is_outside = slot >= job.num_slots;
  if (part.transform.block_offset) {
    const int64_t position = job.positions[row.token];
    target.position_block = position / job.block_size;
    is_outside =
        is_outside || position < 0 || target.position_block >= part.transform.num_offset_blocks;
  }
  if (is_outside) {
    if (counts && row.head == 0) atomicAdd(&job.findings->out_of_range, 1ull);
    return target;
  }
  const TokenRun place = place_of_slot(job, slot);
  target.is_stored = true;
  target.to = {part.side.codes(place.block, place.first_token, row.head),
               part.side.scales(place.block, place.first_token, row.head),
               part.side.tensor_scale(row.head)};
  return target;
}

__device__ inline TransformRow append_transform(const AppendJob& job, const AppendSide& part,
                                                const AppendRow& row, int64_t position_block) {
  return transform_row(part.transform, job.first_head + row.head, job.num_kv_heads,
                       part.side.view.head_dim, position_block);
}

__device__ inline void count_nonfinite(const AppendJob& job, int counted) {
  if (counted > 0) {
    atomicAdd(&job.findings->nonfinite_inputs, static_cast<unsigned long long>(counted));
  }
}

}  // namespace kvx::ops::cuda

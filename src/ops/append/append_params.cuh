// The parameters of all append kernels, and where a row goes.
#pragma once

#include "ops/append/append.hpp"
#include "ops/append/encode_row.cuh"
#include "ops/cuda/chunk.cuh"
#include "ops/cuda/device_counters.hpp"
#include "ops/cuda/fast_divide.hpp"
#include "ops/side_rows.hpp"

namespace kvx::ops::cuda {

struct AppendSide {
  CudaSide side;
  FloatRows input;
  SideTransform transform;
  ChunkRows chunks;
  bool is_transformed;
  bool keeps_bits;  // the cache's own type, untransformed

  KVX_HOST_DEVICE bool is_stored() const { return side.view.is_stored(); }
  // Of the row of a head of the layer.
  __device__ const uint8_t* input_row(uint32_t token, int head) const {
    const int64_t at = token * input.token_stride + head * input.head_stride;
    return input.data + at * bytes_of(input.dtype);
  }
};

struct AppendParams {
  AppendSide sides[2];  // K, V
  int first_head;
  int num_heads;  // of the run
  int num_kv_heads;
  int64_t num_slots;
  int block_size;
  FastDivide by_block_size;
  const int64_t* slot_mapping;  // [num_tokens]
  const int64_t* positions;     // [num_tokens], or null
  uint32_t num_tokens;
  DeviceCounters* counters;
};

// Slots are mostly fewer than 2^31, and a 64-bit division costs as much as encoding.
__device__ inline TokenRun place_of_slot(const AppendParams& params, int64_t slot) {
  if (params.num_slots <= INT32_MAX) {
    const auto s = static_cast<uint32_t>(slot);
    const uint32_t block = params.by_block_size.quotient(s);
    return {block, static_cast<int>(s - block * static_cast<uint32_t>(params.block_size)), 1};
  }
  return {slot / params.block_size, static_cast<int>(slot % params.block_size), 1};
}

// Where a token goes. Not stored: slots below zero, and those out of range, which are counted once
// a token and side (by the lane that `counts`).
struct AppendTarget {
  bool is_stored = false;
  TokenRun place;
  int64_t position_block = 0;

  __device__ RowTarget row(const CudaSide& side, int head) const {
    return {side.codes(place.block, place.first_token, head),
            side.scales(place.block, place.first_token, head), side.tensor_scale(head)};
  }
};

__device__ inline AppendTarget append_target(const AppendParams& params, const AppendSide& part,
                                             uint32_t token, int64_t slot, bool counts) {
  AppendTarget target;
  if (slot < 0) return target;
  bool is_outside = slot >= params.num_slots;
  if (part.transform.block_offset) {
    const int64_t position = params.positions[token];
    target.position_block = position / params.block_size;
    is_outside =
        is_outside || position < 0 || target.position_block >= part.transform.num_offset_blocks;
  }
  if (is_outside) {
    if (counts) atomicAdd(&params.counters->out_of_range, 1ull);
    return target;
  }
  target.place = place_of_slot(params, slot);
  target.is_stored = true;
  return target;
}

// head: of the run.
__device__ inline TransformRow append_transform(const AppendParams& params, const AppendSide& part,
                                                int head, int64_t position_block) {
  return transform_row(part.transform, params.first_head + head, params.num_kv_heads,
                       part.side.view.head_dim, position_block);
}

}  // namespace kvx::ops::cuda

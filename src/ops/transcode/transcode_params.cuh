// The parameters of transcode's kernels: append's, and where the rows come from.
#pragma once

#include "ops/append/append_params.cuh"
#include "ops/gather/decode_row_apart.cuh"

namespace kvx::ops::cuda {

struct TranscodeSource {
  CudaSide side;
  SideTransform transform;
  ChunkRows chunks;
  bool is_transformed;
};

struct TranscodeSide;

struct TranscodeParams {
  AppendParams append;         // to; its slot_mapping: to_slots
  TranscodeSource sources[2];  // K, V
  int64_t num_from_slots;
  FastDivide64 by_from_block_size;
  const int64_t* from_slots;  // [num_tokens]

  __device__ TranscodeSide side(unsigned side) const;
};

// Of a token.
struct TranscodeSlots {
  int64_t from;
  int64_t to;
};

// K or V of a call.
struct TranscodeSide {
  const TranscodeParams& params;
  const TranscodeSource& source;
  const AppendSide& target;

  __device__ TranscodeSlots slots(uint32_t token) const {
    return {params.from_slots[token], params.append.slot_mapping[token]};
  }
  // Whether the token goes anywhere. The lane that `counts` counts a slot out of range.
  __device__ bool is_moved(const TranscodeSlots& slots, bool counts) const {
    if (slots.from < 0 || slots.to < 0) return false;
    if (slots.from < params.num_from_slots && slots.to < params.append.num_slots) return true;
    if (counts) atomicAdd(&params.append.counters->out_of_range, 1ull);
    return false;
  }
  // Where the token goes, or -1.
  __device__ int64_t slot(uint32_t token, bool counts) const {
    const TranscodeSlots both = slots(token);
    return is_moved(both, counts) ? both.to : -1;
  }

  // Where a row lies. head: of the run. Requires: the slot is in range.
  __device__ RowSource row(int64_t from_slot, int head) const {
    const int64_t block = params.by_from_block_size.quotient(from_slot);
    const int64_t offset = from_slot - block * params.by_from_block_size.divisor;
    return {source.side.codes(block, offset, head), source.side.scales(block, offset, head),
            source.side.tensor_scale(head)};
  }
  __device__ TransformRow source_transform(int head) const {
    return transform_row(source.transform, params.append.first_head + head,
                         params.append.num_kv_heads, source.side.view.head_dim, 0);
  }

  // What append takes into x, by the whole warp. Requires: the token has a slot.
  __device__ void load(uint32_t token, int head, float* x, int lane) const {
    const int head_dim = source.side.view.head_dim;
    __syncwarp();
    decode_row_apart(source.side, row(params.from_slots[token], head), x, lane);
    __syncwarp();
    undo_transform_row(source_transform(head), x, head_dim, lane);
    __syncwarp();
    apply_transform_row(append_transform(params.append, target, head, 0), x, head_dim, lane);
  }
};

__device__ inline TranscodeSide TranscodeParams::side(unsigned side) const {
  return {*this, sources[side], append.sides[side]};
}

}  // namespace kvx::ops::cuda

// What transcode's kernels are told. It is append with another place for its rows to come from.
#pragma once

#include "ops/append/append_job.cuh"
#include "ops/gather/decode_row_apart.cuh"

namespace kvx::ops::cuda {

struct TranscodeSource {
  CudaSide side;
  SideTransform transform;
};

struct TranscodeJob {
  AppendJob append;            // to; its slot_mapping: to_slots
  TranscodeSource sources[2];  // K, V
  int64_t num_from_slots;
  int from_block_size;
  const int64_t* from_slots;  // [num_tokens]
};

// K or V of a job.
struct TranscodeSide {
  const TranscodeJob& job;
  const TranscodeSource& source;
  const AppendSide& target;

  // Where the token goes, or -1. The lane that `counts` counts a slot out of range.
  __device__ int64_t slot(uint32_t token, bool counts) const {
    const int64_t from = job.from_slots[token];
    const int64_t to = job.append.slot_mapping[token];
    if (from < 0 || to < 0) return -1;
    if (from < job.num_from_slots && to < job.append.num_slots) return to;
    if (counts) atomicAdd(&job.append.findings->out_of_range, 1ull);
    return -1;
  }

  // What append takes into x, by the whole warp. head: of the run. Requires: the token has a slot.
  __device__ void load(uint32_t token, int head, float* x, int lane) const {
    const int64_t from = job.from_slots[token];
    const int64_t block = from / job.from_block_size;
    const int64_t offset = from % job.from_block_size;
    const CudaSide& side = source.side;
    const RowSource row = {side.codes(block, offset, head), side.scales(block, offset, head),
                           side.tensor_scale(head)};
    const int head_dim = side.view.head_dim;
    const int layer_head = job.append.first_head + head;
    const int num_heads = job.append.num_kv_heads;
    __syncwarp();
    decode_row_apart(side, row, x, lane);
    __syncwarp();
    undo_transform_row(transform_row(source.transform, layer_head, num_heads, head_dim, 0), x,
                       head_dim, lane);
    __syncwarp();
    apply_transform_row(append_transform(job.append, target, head, 0), x, head_dim, lane);
  }
};

}  // namespace kvx::ops::cuda

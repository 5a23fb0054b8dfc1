// What K's block offsets add to scores, computed before a tensor core kernel: q . offset of each
// query row and block. The kernel adds it to the sums over K's stored numbers.
#pragma once

#include "ops/attend/args.hpp"
#include "ops/cuda/device_counters.hpp"

namespace kvx::ops::cuda {

// Rows of K whose offsets the kernel takes, and a table that a call takes at most.
inline constexpr int kMostOffsetDim = 256;
inline constexpr int64_t kMostOffsetBytes = int64_t{256} << 20;

// [query row, query head, block], in the kernel's units of scores before a cap, which are units of
// log2 without one. -infinity: no offset is known, so nothing of the block is seen.
struct KeyOffsetScores {
  float* scores = nullptr;  // null: K has no block offsets
  int num_blocks = 0;

  // of_row: q row * num_q_heads + q head.
  __device__ const float* row(int64_t of_row) const { return scores + of_row * num_blocks; }
  // token: of the row's sequence; what lies behind the last block is hidden anyway.
  __device__ float at(const float* row, int token, int block_size) const {
    const int block = token / block_size;
    return row[block < num_blocks ? block : num_blocks - 1];
  }
};

// One launch for a run of heads.
struct KeyOffsetParams {
  KeyOffsetScores table;
  FloatRows q;              // [total_q, num_q_heads, dim]
  const int32_t* q_starts;  // [num_sequences + 1]
  const int32_t* seq_lens;  // [num_sequences]
  int num_sequences;
  int64_t total_q;
  int num_q_heads;
  int num_kv_heads;  // of the layer
  int first_head;    // of the run
  int num_heads;
  int dim;
  int block_size;
  const float* offsets;  // [num_offset_blocks, num_kv_heads, dim]
  int64_t num_offset_blocks;
  float softmax_scale;
  bool has_cap;
  DeviceCounters* counters;
};

}  // namespace kvx::ops::cuda

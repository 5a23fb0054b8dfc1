// AttendParams: a call's arguments as attention kernels take them, by value. The host fills it.
#pragma once

#include "ops/attend/args.hpp"
#include "ops/cuda/device_counters.hpp"
#include "ops/cuda/fast_divide.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

// A work tile's softmax over its tokens, scores in units of log2.
struct Softmax2 {
  float max;
  float sum;
};

// Balanced work tiles of one sequence; first counts those of the sequences before it.
struct SequenceWorkTiles {
  int first;
  int num;
};

// A region of a side, codes or scales, as copies address it: all but the block in 32 bits.
struct TileRegion {
  const uint8_t* base;
  uint32_t block_stride;
  int token_stride;
  int head_stride;

  // within: bytes inside the block.
  __device__ const uint8_t* at(uint32_t block, int within) const {
    return base + uint64_t{block} * block_stride + within;
  }
};

// How long the second-level cache keeps what a copy brings. Read once, it may go before what is
// read again.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictNormally = 0x1000000000000000ull;

struct TileSide {
  TileRegion codes;
  TileRegion scales;
  bool is_step;          // a head's part of a block is a step of bulk copies: codes, then scales
  bool has_scales_on_8;  // rows of 8 bytes of scales
  // Where rows are shorter than the instance's:
  int row_bytes;
  int scale_row_bytes;
  int unit_bytes;  // that codes are copied by: 16, or 8 where rows do not lie on 16
};

struct AttendParams {
  CudaRun packed;          // one run of heads
  CudaRun full_precision;  // without full-precision window: no heads
  int64_t num_packed_blocks;
  int64_t num_full_precision_blocks;
  int block_size;
  int num_kv_heads;
  FastDivide q_per_kv;
  int64_t total_q;
  int64_t max_tokens;
  int max_q_len;
  AttendArgs args;  // its views are not used here
  int num_row_tiles;
  FastDivide num_splits;
  // Where the device says how many work tiles each sequence has (balance.cuh); 0: num_splits for
  // all.
  int balanced_work_tiles;    // of all sequences together, at most
  int work_tile_granule;      // tokens
  int rows_of_work_tile;      // query rows
  int heads_of_cta;           // KV heads: of instances that take several (tiles.cuh)
  FastDivide ctas_of_heads;   // that share the run's KV heads
  FastDivide warps_of_head;   // of a CTA, that walk over the same KV head
  int merge_warps;            // that merge a row's work tiles
  bool merges_in_cluster;     // the CTAs of a row's splits do, without a launch of their own
  bool splits_off_sinks;      // a window's: the first split
  float* partial_out;         // [total_q, num_q_heads, num_splits, value dim], not normalised
  Softmax2* partial_softmax;  // [total_q, num_q_heads, num_splits]; balanced: [CTA, row] both
  SequenceWorkTiles* sequence_work_tiles;  // [num_sequences]; balanced alone: for the merge
  DeviceCounters* counters;
  TileSide tile_k;  // the tensor cores' kernels alone
  TileSide tile_v;
  TileSide tile_full_precision_k;
  TileSide tile_full_precision_v;
  bool transforms_k;
  bool transforms_v;
  int tiles_per_block;
  int tiles_per_copy;           // of a bulk copy: neighbours in one block
  const float* shared_k_scale;  // fp8 with a given scale a head: of the run's head 0, or null
  const float* shared_v_scale;
  int shared_k_scale_stride;  // floats from head to head
  int shared_v_scale_stride;
  uint64_t codes_policy;  // of the second-level cache, for 4-bit rows that come by cp.async
};

}  // namespace kvx::ops::cuda

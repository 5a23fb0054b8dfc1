// Parameters of the attention kernels, which take them by value. The host fills them
// (common/fill_params.hpp). Each kernel has a struct of its own, made of what it shares with
// others:
//
//   BatchParams            lengths, output rows, partial results    every kernel
//   ├── MergeParams                                                 merge_splits
//   └── AttendParams       queries, block table, what is visible    kernels that read the cache
//       ├── ReferenceParams                                         reference
//       └── TensorCoreParams   rows as tiles are copied
//           ├── DecodeMmaParams                                     decode_mma
//           └── PrefillParams                                       prefill
#pragma once

#include "ops/attend/args.hpp"
#include "ops/attend/cuda/common/key_offsets.hpp"
#include "ops/attend/cuda/formats.hpp"
#include "ops/cuda/device_counters.hpp"
#include "ops/cuda/fast_divide.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

// Softmax of a row over the tokens of a work tile; scores are in units of log2.
struct Softmax2 {
  float max;
  float sum;
};

struct BatchParams {
  const int32_t* seq_lens;  // [num_sequences], each length_words long
  int length_words;
  const int32_t* q_starts;  // [num_sequences + 1]
  int num_sequences;
  int64_t total_q;     // rows of q and out
  int64_t max_tokens;  // of a sequence
  int max_q_len;       // of a sequence
  int num_q_heads;
  int num_kv_heads;
  FastDivide q_per_kv;
  int first_head;  // of the run of heads that this launch computes
  int num_heads;   // of the run
  int value_dim;
  MutableFloatRows out;  // [total_q, num_q_heads, value_dim]
  float* lse;            // [total_q, num_q_heads], or null
  const float* sinks;    // [num_q_heads], or null
  SideTransform transform_v;
  FastDivide num_splits;
  // Of split rows: [total_q, num_q_heads, num_splits, value_dim], not normalised, and without
  // value_dim. With balanced work tiles: [CTA, row of its work tile, value_dim].
  float* partial_out;
  Softmax2* partial_softmax;
};

struct AttendParams : BatchParams {
  BlockTable block_table;
  FloatRows q;  // [total_q, num_q_heads, key_dim]
  int key_dim;
  int block_size;
  int64_t num_packed_blocks;
  int64_t num_full_precision_blocks;
  // The full-precision window: AttendArgs says what they are. Null: there is none.
  const int32_t* num_sink_blocks;
  const int32_t* first_recent_block;
  SideTransform transform_k;
  float softmax_scale;
  float softcap;
  bool sees_later_tokens;  // rows see tokens behind their own, less what a tree mask hides
  int window;
  const uint8_t* tree_mask;
  int64_t tree_mask_stride;
  DeviceCounters* counters;
};

struct ReferenceParams : AttendParams {
  CudaRun packed;
  CudaRun full_precision;  // without a full-precision window: no heads
  // The second segment of K's rows: key_dim counts its numbers too. One segment: no heads.
  CudaRun packed_more;
  CudaRun full_precision_more;
  int window_sinks;
};

// Where the codes or scales of a side lie, as copies of tiles address them: all but the block in 32
// bits.
struct TileRegion {
  const uint8_t* base;
  uint32_t block_stride;
  int token_stride;
  int head_stride;

  // within: bytes inside the block.
  __device__ const uint8_t* at(uint32_t block, int within) const {
    return base + uint64_t{block} * block_stride + within;
  }
  // Of scales: where a head's word begins, and where in it the scale of two bytes lies, as it does
  // where two heads share a word.
  __device__ int word_of_head(int head) const { return head * head_stride & ~3; }
  __device__ int half_of_head(int head) const { return head * head_stride & 2; }
};

// K or V of a run of heads, as the tensor core kernels copy and decode it.
struct TileSide {
  TileRegion codes;
  TileRegion scales;
  TileRegion channels;   // of dual-scale formats: a block's steps and zeros
  bool is_stage;         // a head's part of a block is a stage of bulk copies: codes, then scales,
                         // then channels
  bool has_scales_on_8;  // rows of 8 bytes of scales
  int row_bytes;         // of codes
  int scale_row_bytes;
  int copy_bytes;  // of codes that one copy of a padded tile fetches: 16, or 8 where rows do not
                   // lie on 16
  int head_dim;
  format::FormatId id;
  TensorCoreFormat format;
  format::ScaleType scale_type;
  bool is_interleaved;
  const float* tensor_scales;  // [heads of the run], or null: 1
  // A given scale a head, where an instance multiplies sums and not codes by it: of the run's head
  // 0, or null.
  const float* shared_scale;
  int shared_scale_stride;  // floats from head to head

  __device__ float tensor_scale(int head) const {
    return tensor_scales ? tensor_scales[head] : 1.0f;
  }
};

struct TensorCoreParams : AttendParams {
  TileSide tile_k;
  TileSide tile_v;
  TileSide tile_full_precision_k;
  TileSide tile_full_precision_v;
  int full_precision_first_head;
  int tiles_per_block;
  bool transforms_k;
  bool transforms_v;
  KeyOffsetScores key_offsets;
};

struct PrefillParams : TensorCoreParams {
  int num_row_tiles;
};

// The balanced work tiles of one sequence; first counts those of the sequences before it.
struct SequenceWorkTiles {
  int first;
  int num;
};

// A budget of work tiles, which the device distributes by the lengths of the sequences
// (balance.cuh).
struct BalanceParams {
  int most_work_tiles;  // of all sequences together; 0: every sequence has num_splits
  int granule;          // tokens
  int num_row_tiles;
  int rows_of_work_tile;
  SequenceWorkTiles* of_sequences;  // [num_sequences]; written by decode_mma for the merge
};

// How long the second-level cache keeps what a copy fetches. Lines that are read once may go before
// those that are read again.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
inline constexpr uint64_t kEvictNormally = 0x1000000000000000ull;

struct DecodeMmaParams : TensorCoreParams {
  TableInPlace in_place;
  bool has_plain_entries;  // in_place's
  BalanceParams balance;
  int window_sinks;
  int heads_of_cta;          // KV heads: instances with kAcceptsHeads
  FastDivide ctas_of_heads;  // CTAs that share the run's KV heads
  FastDivide warps_of_head;  // warps of a CTA that walk over the same KV head
  bool merges_in_cluster;    // the splits of a row are CTAs of one cluster
  bool splits_off_sinks;     // the sinks of a window are the first split
  int tiles_per_copy;        // neighbours in one block that a bulk copy fetches
  uint64_t codes_policy;     // of the second-level cache, for 4-bit rows that come by cp.async
};

struct MergeParams : BatchParams {
  BalanceParams balance;
  int warps_of_row;  // that share the splits of a row
};

}  // namespace kvx::ops::cuda

// Rings of tiles on their way into shared memory, a ring a warp: no warp waits for another.
//
// What all of them have: how large they are, and which tiles are where. copy_ring.cuh,
// bulk_ring.cuh and nibbles_ring.cuh are the rings themselves, tile_work_tile.cuh chooses among
// them.
#pragma once

#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/common/params.cuh"
#include "ops/attend/cuda/decode_mma/keys.cuh"
#include "ops/attend/cuda/decode_mma/values.cuh"

namespace kvx::ops::cuda {

// How many tiles a step takes, how many stages a ring has, and how many warps fit.
//
// shared memory of a warp: barriers, queries, [kStages] stages, table of values' scales. Barriers
// share their memory with nothing that comes later: PTX allows no other access there, and under
// racecheck it shows.
//
// of a side's stage:       [codes][scales], each of all the step's tiles; of dual-scale formats
//                          [steps][zeros] of the block behind them
// of a step's stage:       [keys' side][values' side]
//
// Two stages, one read and one on its way, hide memory's latency. A third does harm: what waits for
// memory beyond that is served unevenly. Multiprocessors that share their way to it with fewer
// others get more and end early, and those that are left cannot take all that memory then has to
// give (bench/log/2026-11-23-h200.md, "Two stages").
//
// IsFullPrecision: of the sequence's full-precision window, which are few tokens. One tile in one
// stage is enough, and leaves room beside it.
template <class KeyTiles, class ValueTiles, int NTiles, bool IsFullPrecision>
struct TileConfig {
  using Keys = KeyTiles;
  using Values = ValueTiles;
  static constexpr bool kIsFullPrecision = IsFullPrecision;
  static constexpr bool kIsBulk = Keys::kIsBulk;
  static constexpr bool kIsPadded = Keys::kIsPadded;
  static_assert(Keys::kIsBulk == Values::kIsBulk && Keys::kIsPadded == Values::kIsPadded);
  // Keys and values of a step are stages of their own.
  static constexpr bool kHasStagesOfSides =
      kIsBulk || (!kIsPadded && Keys::kRowBytes + Values::kRowBytes == Keys::kDim);
  // Warps of a CTA may walk over different heads: where a row is less than a line of a cache.
  static constexpr bool kAcceptsHeads = !kIsBulk && !kIsPadded && !IsFullPrecision &&
                                        std::max(Keys::kRowBytes, Values::kRowBytes) < 128;
  static constexpr int kTileBytes = Keys::Copy::kBytes + Values::Copy::kBytes;
  // 4 bits of 256 numbers too: few warps fit, so each must have more to do at once.
  static constexpr int kSmallTile = Keys::kParts > 2 ? 5120 : 4096;
  static constexpr int kTilesAtOnce = kHasStagesOfSides ? kSideStageTiles
                                      : !kIsFullPrecision && kTileBytes < kSmallTile ? 2
                                                                                     : 1;
  // Dual-scale formats: a step's tokens are of one block, whose channels are the stage's end.
  static constexpr bool kHasChannels = Keys::Copy::kChannelBytes > 0;
  static_assert(kHasChannels == (Values::Copy::kChannelBytes > 0));
  // Of a step, each over as many tiles. In a loop that is not unrolled, so that its instructions
  // stay in their cache and its scores in registers.
  static constexpr int kPasses = !kHasChannels && kTilesAtOnce > 2 &&
                                         (NTiles > 1 || !Keys::kHasRoomForSteps)
                                     ? 2
                                     : 1;
  static constexpr int kStages = kIsFullPrecision ? 1 : 2;
  static constexpr int kStepTokens = kTilesAtOnce * kTileTokens;

  static constexpr int kKeyBytes = kTilesAtOnce * Keys::Copy::kBytes + Keys::Copy::kChannelBytes;
  static constexpr int kValueBytes =
      kTilesAtOnce * Values::Copy::kBytes + Values::Copy::kChannelBytes;
  static constexpr int kSideBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  static constexpr int kStageBytes = kHasStagesOfSides ? kSideBytes : kKeyBytes + kValueBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kBarrierBytes = kIsBulk ? 32 : 0;
  // Where a multiprocessor's registers are full of sums, the second column's queries lie before the
  // ring: spilled, they would come from memory, since shared memory leaves the first cache no room.
  static constexpr bool kIsPacked = kTileBytes < 64 * Keys::kDim;
  // Shorter rows have fewer sums; of longer ones fewer warps fit, which have more registers.
  static constexpr bool kSharesQueries =
      NTiles > 1 && !kIsFullPrecision && !kHasChannels && kIsPacked && Keys::kDim == 128;
  static constexpr int kQueriesAt = kBarrierBytes;
  // Those of dual-scale formats, which every stage multiplies by its block's steps, all do.
  static constexpr int kSharedColumns = kHasChannels ? NTiles : kSharesQueries ? NTiles - 1 : 0;
  static constexpr int kQueryBytes = kSharedColumns * SharedQueries<Keys::kDim>::kBytes;
  static constexpr int kRingAt = kQueriesAt + kQueryBytes;
  // Where a step has many tokens, its values' scales go through a table.
  static constexpr bool kHasScaleTable = kHasStagesOfSides && Values::kHasScales;
  static constexpr int kTableBytes = [] {
    if constexpr (kHasChannels) return std::max(Keys::kTableBytes, Values::kTableBytes);
    if constexpr (kHasScaleTable) return Values::template Table<kTilesAtOnce>::kBytes;
    return 0;
  }();
  static constexpr int kWarpBytes = kRingAt + kRingBytes + kTableBytes;
  static_assert(kRingAt % 16 == 0 && kRingBytes % 16 == 0 && kTableBytes % 16 == 0);
};

// Which tiles a CTA walks over.
struct TileWalk {
  const DecodeMmaParams& params;
  const int32_t* table;  // of the sequence
  int seq_len;
  int head;  // of the run
  int warp;  // of those that walk over the head
  TokenRange tokens;
  TokenRange packed_range;  // in the walk over full-precision window: the packed tokens between
                            // them, whole tiles
  // A window's sinks are walked over as if they lay right before the step that `tokens` begins in,
  // in steps of their own, with which some warps begin: so many.
  int sink_steps;
  int sinks_end;      // as the walk counts: before it lie sinks, and tokens that are missing
  TokenRange packed;  // of the sequence: the others are full-precision

  __device__ int id_of(int block) const { return table[block * params.in_place.entry_words]; }
};

// Over all of a window's sinks.
__device__ inline int steps_over_sinks(const DecodeMmaParams& params, int step_tokens) {
  return (params.window_sinks + step_tokens - 1) / step_tokens;
}

// TileWalk's, of a walk over tokens from `begin` on.
__device__ inline int end_of_sinks(const DecodeMmaParams& params, int begin, int sink_steps,
                                   int step_tokens) {
  const int first = sink_steps == 0 ? 0 : (begin / step_tokens - sink_steps) * step_tokens;
  return first + params.window_sinks;
}

// Where a tile lies in the sequence's blocks.
struct TilePlace {
  int block;
  int offset;  // tokens
};

// IsPower: tiles_per_block is a power of two, as it is of dual-scale formats.
template <bool IsPower = false>
__device__ TilePlace tile_place(const DecodeMmaParams& params, int tile) {
  const int per_block = params.tiles_per_block;
  if (IsPower || (per_block & (per_block - 1)) == 0) [[likely]] {
    return {tile >> (31 - __clz(per_block)), (tile & (per_block - 1)) * kTileTokens};
  }
  return {tile / per_block, tile % per_block * kTileTokens};
}

inline constexpr int kNoTile = -0x7FFFFFFF;  // past the split's end: no block is asked for

// What all rings have: the warp's steps, the current stage, and which tiles have no block.
template <class TheConfig>
class TileRing {
 public:
  using Config = TheConfig;
  using Keys = typename Config::Keys;
  using Values = typename Config::Values;

  // shared: memory of this warp, Config::kWarpBytes.
  __device__ TileRing(const TileWalk& walk, uint32_t shared, int lane)
      : walk_(walk),
        lane_(lane),
        num_warps_(walk.params.warps_of_head),
        ring_(shared + Config::kRingAt),
        first_step_(walk.tokens.begin / Config::kStepTokens - walk.sink_steps + walk.warp) {
    const int end = walk.tokens.end - packed_range_tokens();
    const int end_step = (end + Config::kStepTokens - 1) / Config::kStepTokens;
    // Never less than 0: a range that is empty ends in its first step or behind it.
    num_steps_ = (end_step - first_step_ + num_warps_ - 1) / walk.params.warps_of_head;
  }

  __device__ int num_steps() const { return num_steps_; }
  __device__ uint32_t memory() const { return ring_; }
  __device__ uint32_t scale_table() const { return ring_ + Config::kRingBytes; }
  // The first token of step i, as the walk counts them.
  __device__ int token(int i) const {
    const int at = (first_step_ + i * num_warps_) * Config::kStepTokens;
    return Config::kIsFullPrecision && at >= walk_.packed_range.begin ? at + packed_range_tokens()
                                                                      : at;
  }

  // Tile u of the current step's keys or values.
  __device__ uint32_t keys(int u) const { return key_side() + u * Keys::Copy::kCodeBytes; }
  __device__ typename Keys::Scales key_scales(int u) const {
    return scales_at<typename Keys::ScaleOfRow>(
        side_of_keys(),
        key_side() + kDecodeMma * Keys::Copy::kCodeBytes + u * Keys::Copy::kScaleBytes);
  }
  __device__ uint32_t values(int u) const { return value_side() + u * Values::Copy::kCodeBytes; }
  __device__ typename Values::Scales value_scales(int u) const {
    return scales_at<typename Values::ScaleOfRow>(
        side_of_values(),
        value_side() + kDecodeMma * Values::Copy::kCodeBytes + u * Values::Copy::kScaleBytes);
  }
  // Which tiles of step i, which is in the ring, have no block, a bit for each; and whether any
  // tile of the ring may have none.
  __device__ uint32_t missing(int i) const {
    return missing_ >> (i % kSteps * kDecodeMma) & kStepBits;
  }
  __device__ bool may_be_missing() const { return missing_ != 0; }

 protected:
  static constexpr int kDecodeMma = Config::kTilesAtOnce;
  static constexpr int kSteps = Config::kStages;  // in the ring; or parts of so many
  static constexpr uint32_t kStepBits = (1u << kDecodeMma) - 1;

  template <class Scale>
  __device__ ScalesAt<Config::kIsPadded> scales_at(const TileSide& side, uint32_t at) const {
    if constexpr (std::is_same_v<Scale, RowWord>) at += side.scales.half_of_head(walk_.head);
    if constexpr (Config::kIsPadded) {
      return {at, side.scale_row_bytes};
    } else {
      return at;
    }
  }
  __device__ int packed_range_tokens() const {
    return Config::kIsFullPrecision ? walk_.packed_range.end - walk_.packed_range.begin : 0;
  }
  __device__ const TileSide& side_of_keys() const {
    return Config::kIsFullPrecision ? walk_.params.tile_full_precision_k : walk_.params.tile_k;
  }
  __device__ const TileSide& side_of_values() const {
    return Config::kIsFullPrecision ? walk_.params.tile_full_precision_v : walk_.params.tile_v;
  }
  __device__ bool is_block(int id) const {
    const int64_t num = Config::kIsFullPrecision ? walk_.params.num_full_precision_blocks
                                                 : walk_.params.num_packed_blocks;
    return id >= 0 && id < num;
  }
  // Whether any of these tokens is asked for, which lie in a later step than the walk's first two.
  __device__ bool requests(int first) const { return first < walk_.tokens.end; }
  // The same for steps 0 and 1. Tokens before the walk's first may have no block, or one of the
  // other kind. first: as the walk counts, then as the sequence does: step 0 may be over sinks.
  __device__ bool requests_at_first(int i, int& first, int num_tokens) const {
    const int window = walk_.tokens.begin / Config::kStepTokens * Config::kStepTokens;
    if (i == 0 && first < window) [[unlikely]] {
      first += walk_.sink_steps * Config::kStepTokens - window;
      const bool is_packed = first >= walk_.packed.begin && first < walk_.packed.end;
      return first < walk_.params.window_sinks && is_packed != Config::kIsFullPrecision;
    }
    return first < walk_.tokens.end && first + num_tokens > walk_.tokens.begin;
  }

  // Of the current step; where sides have stages of their own, of all steps.
  __device__ uint32_t key_side() const { return ring_ + stage_ * Config::kStageBytes; }
  __device__ uint32_t value_side() const {
    return key_side() + (Config::kHasStagesOfSides ? Config::kStageBytes : Config::kKeyBytes);
  }
  __device__ void note_missing(int i, uint32_t bits) {
    if ((missing_ | bits) == 0) return;
    const int at = i % kSteps * kDecodeMma;
    missing_ = (missing_ & ~(kStepBits << at)) | (bits << at);
  }

  const TileWalk& walk_;
  const int lane_;
  const int num_warps_;
  const uint32_t ring_;  // shared memory: [kStages] stages
  const int first_step_;
  int num_steps_;
  int stage_ = 0;         // of the current step
  uint32_t missing_ = 0;  // a bit for each tile of the ring
};

}  // namespace kvx::ops::cuda

// Rings of tiles on their way into shared memory, a ring a warp: no warp waits for another.
//
// CopyRing: cp.async, 16 bytes at a time, rows as they may lie; a stage is a step's keys and
// values. BulkRing: bulk copies, for rows that follow each other without a gap; keys and values of
// a step are stages of their own, and where a pool's block is a step, each of them is one copy.
// NibblesRing: the bulk ring's steps and stages by cp.async, for rows of four bits that have gaps
// or lie in blocks shorter than a step.
#pragma once

#include <type_traits>

#include "ops/attend/cuda/job.cuh"
#include "ops/attend/cuda/launch.hpp"
#include "ops/attend/cuda/tile_keys.cuh"
#include "ops/attend/cuda/tile_values.cuh"

namespace kvx::ops::cuda {

// How many tiles a step takes, how many stages a ring has, and how many warps fit.
//
// shared memory of a warp: [kStages] barriers, [kStages] stages, queries. Barriers share their
// memory with nothing that comes later: PTX allows no other access there, and under racecheck it
// shows.
// of a side's stage:       [codes][scales], each of all the step's tiles
// of a step's stage:       [keys' side][values' side]
// IsWide: of the sequence's wide ends, which are few tokens. One tile in one stage is enough, and
// leaves room beside it.
template <class KeyTiles, class ValueTiles, int Columns, bool IsWide>
struct TileConfig {
  using Keys = KeyTiles;
  using Values = ValueTiles;
  static constexpr bool kIsWide = IsWide;
  static constexpr bool kIsBulk = Keys::kIsBulk;
  static constexpr bool kIsPadded = Keys::kIsPadded;
  static_assert(Keys::kIsBulk == Values::kIsBulk && Keys::kIsPadded == Values::kIsPadded);
  // Keys and values of a step are stages of their own.
  static constexpr bool kHasStagesOfSides =
      kIsBulk || (!kIsPadded && Keys::kRowBytes + Values::kRowBytes == Keys::kDim);
  static constexpr int kTileBytes = Keys::Copy::kBytes + Values::Copy::kBytes;
  // 4 bits of 256 numbers too: few warps fit, so each must have more to do at once.
  static constexpr int kSmallTile = Keys::kParts > 2 ? 5120 : 4096;
  static constexpr int kTilesAtOnce = kHasStagesOfSides                     ? 4
                                      : !kIsWide && kTileBytes < kSmallTile ? 2
                                                                            : 1;
  static constexpr int kStages = kIsWide                                              ? 1
                                 : !kIsBulk && 2560 < kTileBytes && kTileBytes < 4096 ? 2
                                                                                      : 3;
  static constexpr int kStepTokens = kTilesAtOnce * kTileTokens;

  static constexpr int kKeyBytes = kTilesAtOnce * Keys::Copy::kBytes;
  static constexpr int kValueBytes = kTilesAtOnce * Values::Copy::kBytes;
  static constexpr int kSideBytes = kKeyBytes > kValueBytes ? kKeyBytes : kValueBytes;
  static constexpr int kStageBytes = kHasStagesOfSides ? kSideBytes : kKeyBytes + kValueBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kBarrierBytes = kIsBulk ? 32 : 0;
  // Where a multiprocessor's registers are full of sums, the second column's queries lie beside the
  // ring: spilled, they would come from memory, since shared memory leaves the first cache no room.
  static constexpr bool kIsPacked = kTileBytes < 64 * Keys::kDim;
  // Shorter rows have fewer sums; of longer ones fewer warps fit, which have more registers.
  static constexpr bool kSharesQueries = Columns > 1 && !kIsWide && kIsPacked && Keys::kDim == 128;
  static constexpr int kQueriesAt = kBarrierBytes + kRingBytes;
  static constexpr int kQueryBytes =
      kSharesQueries ? (Columns - 1) * SharedQueries<Keys::kDim>::kBytes : 0;
  static constexpr int kWarpBytes = kQueriesAt + kQueryBytes;
  static_assert(kStages * 8 <= 32 && kRingBytes % 16 == 0);
};

// Which tiles a CTA walks over.
struct TileWalk {
  const AttendJob& job;
  const int32_t* table;  // of the sequence
  int seq_len;
  int head;  // of the run
  TokenRange tokens;
  TokenRange hole;  // in the walk over wide ends: the packed tokens between them, whole tiles
};

// Where a tile lies in the sequence's blocks.
struct TilePlace {
  int block;
  int offset;  // tokens
};

__device__ inline TilePlace tile_place(const AttendJob& job, int tile) {
  const int per_block = job.tiles_per_block;
  if ((per_block & (per_block - 1)) == 0) [[likely]] {
    return {tile >> (31 - __clz(per_block)), (tile & (per_block - 1)) * kTileTokens};
  }
  return {tile / per_block, tile % per_block * kTileTokens};
}

inline constexpr int kNoTile = -0x7FFFFFFF;  // past the split's end: no block is asked for

// What both rings have: the warp's steps, the current stage, and which tiles have no block.
template <class TheConfig>
class TileRing {
 public:
  using Config = TheConfig;
  using Keys = typename Config::Keys;
  using Values = typename Config::Values;

  // shared: memory of this warp, Config::kWarpBytes.
  __device__ TileRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : walk_(walk),
        lane_(lane),
        num_warps_(static_cast<int>(blockDim.x) / kWarp),
        ring_(shared + Config::kBarrierBytes),
        first_step_(walk.tokens.begin / Config::kStepTokens + warp) {
    const int end = walk.tokens.end - hole_tokens();
    const int end_step = (end + Config::kStepTokens - 1) / Config::kStepTokens;
    num_steps_ = max(0, (end_step - first_step_ + num_warps_ - 1) / num_warps_);
  }

  __device__ int num_steps() const { return num_steps_; }
  __device__ uint32_t memory() const { return ring_; }
  // The first token of step i.
  __device__ int token(int i) const {
    const int at = (first_step_ + i * num_warps_) * Config::kStepTokens;
    return Config::kIsWide && at >= walk_.hole.begin ? at + hole_tokens() : at;
  }

  // Tile u of the current step's keys or values.
  __device__ uint32_t keys(int u) const { return stage() + u * Keys::Copy::kCodeBytes; }
  __device__ typename Keys::Scales key_scales(int u) const {
    return scales_at(side_of_keys(),
                     stage() + kTiles * Keys::Copy::kCodeBytes + u * Keys::Copy::kScaleBytes);
  }
  __device__ uint32_t values(int u) const { return value_side() + u * Values::Copy::kCodeBytes; }
  __device__ typename Values::Scales value_scales(int u) const {
    return scales_at(side_of_values(), value_side() + kTiles * Values::Copy::kCodeBytes +
                                           u * Values::Copy::kScaleBytes);
  }
  // Which tiles of step i, which is in the ring, have no block, a bit for each; and whether any
  // tile of the ring may have none.
  __device__ uint32_t missing(int i) const { return missing_ >> (i % kSteps * kTiles) & kStepBits; }
  __device__ bool may_be_missing() const { return missing_ != 0; }

 protected:
  static constexpr int kTiles = Config::kTilesAtOnce;
  static constexpr int kSteps = Config::kHasStagesOfSides ? 2 : Config::kStages;  // in the ring
  static constexpr uint32_t kStepBits = (1u << kTiles) - 1;

  __device__ static ScalesAt<Config::kIsPadded> scales_at(const TileSide& side, uint32_t at) {
    if constexpr (Config::kIsPadded) {
      return {at, side.scale_row_bytes};
    } else {
      return at;
    }
  }
  __device__ int hole_tokens() const {
    return Config::kIsWide ? walk_.hole.end - walk_.hole.begin : 0;
  }
  __device__ const TileSide& side_of_keys() const {
    return Config::kIsWide ? walk_.job.tile_wide_k : walk_.job.tile_k;
  }
  __device__ const TileSide& side_of_values() const {
    return Config::kIsWide ? walk_.job.tile_wide_v : walk_.job.tile_v;
  }
  __device__ bool is_block(int id) const {
    const int64_t num = Config::kIsWide ? walk_.job.num_wide_blocks : walk_.job.num_packed_blocks;
    return id >= 0 && id < num;
  }
  // Whether any of these tokens is asked for. Those before the walk's first may have no block, or
  // one of the other kind.
  __device__ bool is_inside(int first, int num_tokens) const {
    return first < walk_.tokens.end && first + num_tokens > walk_.tokens.begin;
  }

  __device__ uint32_t stage() const { return ring_ + stage_ * Config::kStageBytes; }
  __device__ uint32_t value_side() const {
    if constexpr (Config::kHasStagesOfSides) return ring_ + next_stage() * Config::kStageBytes;
    return stage() + Config::kKeyBytes;
  }
  __device__ int next_stage() const { return stage_ + 1 == Config::kStages ? 0 : stage_ + 1; }
  __device__ void note_missing(int i, uint32_t bits) {
    if ((missing_ | bits) == 0) return;
    const int at = i % kSteps * kTiles;
    missing_ = (missing_ & ~(kStepBits << at)) | (bits << at);
  }
  __device__ void advance() {
    if (++stage_ == Config::kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  const TileWalk& walk_;
  const int lane_;
  const int num_warps_;
  const uint32_t ring_;  // shared memory: [kStages] stages
  const int first_step_;
  int num_steps_;
  int stage_ = 0;  // of keys
  uint32_t phase_ = 0;
  uint32_t missing_ = 0;  // a bit for each tile of the ring
};

template <class TheConfig>
class CopyRing : public TileRing<TheConfig> {
  using Base = TileRing<TheConfig>;
  using Base::kTiles;
  using Base::lane_;
  using Base::num_steps_;
  using Base::ring_;
  using Base::stage_;
  using Base::walk_;
  using typename Base::Keys;
  using typename Base::Values;

 public:
  using Base::token;
  using typename Base::Config;

  __device__ CopyRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : Base(walk, shared, warp, lane),
        key_part_(Keys::Copy::lane_part(this->side_of_keys(), walk.head, lane)),
        value_part_(Values::Copy::lane_part(this->side_of_values(), walk.head, lane)) {}

  // All first blocks are asked for before the first is waited for.
  __device__ void begin() {
    Blocks first[Config::kStages];
#pragma unroll
    for (int i = 0; i < Config::kStages; ++i) first[i] = blocks_of(i);
    next_ = blocks_of(Config::kStages);
    if constexpr (Config::kIsPadded) clear_shared(ring_, Config::kRingBytes, lane_);
#pragma unroll
    for (int i = 0; i < Config::kStages; ++i) start(i, i, first[i]);
  }
  __device__ void wait_for_keys(int) {
    wait_for_copies<Config::kStages - 1>();
    __syncwarp();
  }
  __device__ void release_keys(int) {}
  __device__ void wait_for_values(int) {}
  __device__ void release_values(int i) {
    __syncwarp();
    start(i + Config::kStages, stage_, next_);
    next_ = blocks_of(i + Config::kStages + 1);
    this->advance();
  }
  __device__ void end() {
    wait_for_copies<0>();
  }

 private:
  struct Blocks {
    int id[kTiles];
    int offset[kTiles];  // of the tile in its block, in tokens
  };
  // Of step i's tiles; a step is asked for before it is needed.
  __device__ Blocks blocks_of(int i) const {
    Blocks blocks;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      const int first = token(i) + u * kTileTokens;
      const TilePlace place = tile_place(walk_.job, first / kTileTokens);
      blocks.offset[u] = place.offset;
      const bool is_inside = i < num_steps_ && this->is_inside(first, kTileTokens);
      blocks.id[u] = is_inside ? walk_.table[place.block] : kNoTile;
    }
    return blocks;
  }

  __device__ void start(int i, int stage, const Blocks& blocks) {
    if (i < num_steps_) {
      uint32_t missing = 0;
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const bool is_there = this->is_block(blocks.id[u]);
        if (!is_there) missing |= 1u << u;
        if (!is_there && blocks.id[u] != kNoTile && lane_ == 0) {
          atomicAdd(&walk_.job.findings->out_of_range, 1ull);
        }
        const int num_tokens = is_there ? walk_.seq_len - (token(i) + u * kTileTokens) : 0;
        start_tile(is_there ? blocks.id[u] : 0, blocks.offset[u], num_tokens, u,
                   ring_ + stage * Config::kStageBytes);
      }
      this->note_missing(i, missing);
    }
    commit_copies();
  }

  // num_tokens: of the tile that are there; the others become zeros: what lies past the sequence's
  // end may be a NaN, and 0 * NaN is one.
  __device__ void start_tile(int block_id, int offset, int num_tokens, int u, uint32_t step) const {
    const auto block = static_cast<uint32_t>(block_id);
    Keys::Copy::start(this->side_of_keys(), key_part_, block, offset, num_tokens,
                      step + u * Keys::Copy::kCodeBytes,
                      step + kTiles * Keys::Copy::kCodeBytes + u * Keys::Copy::kScaleBytes, lane_);
    const uint32_t values = step + Config::kKeyBytes;
    Values::Copy::start(this->side_of_values(), value_part_, block, offset, num_tokens,
                        values + u * Values::Copy::kCodeBytes,
                        values + kTiles * Values::Copy::kCodeBytes + u * Values::Copy::kScaleBytes,
                        lane_);
  }

  const typename Keys::Copy::Lane key_part_;
  const typename Values::Copy::Lane value_part_;
  Blocks next_;
};

// One lane asks for the copies; lane l knows the block of tile l % kTiles.
template <class TheConfig>
class BulkRing : public TileRing<TheConfig> {
  using Base = TileRing<TheConfig>;
  using Base::kStepBits;
  using Base::kTiles;
  using Base::lane_;
  using Base::num_steps_;
  using Base::phase_;
  using Base::ring_;
  using Base::stage_;
  using Base::walk_;
  using typename Base::Keys;
  using typename Base::Values;

 public:
  using Base::token;
  using typename Base::Config;

  __device__ BulkRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : Base(walk, shared, warp, lane), barriers_(shared) {}

  __device__ void begin() {
    if (lane_ == 0) {
      for (int i = 0; i < Config::kStages; ++i) init_barrier(barriers_ + i * 8);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      fence_bulk_copies();
    }
    __syncwarp();
    static_assert(Config::kStages == 3, "a step and the next one's keys");
    next_ = block_of(0);
    const Block second = block_of(1);
    start_keys(0, 0);
    start_values(0, 1);
    next_ = second;
    start_keys(1, 2);
  }

  __device__ void wait_for_keys(int) { wait_for_barrier(barriers_ + stage_ * 8, phase_); }
  __device__ void release_keys(int i) {
    __syncwarp();
    start_values(i + 1, stage_);
    next_ = block_of(i + 2);
  }
  __device__ void wait_for_values(int i) {
    const int stage = this->next_stage();
    wait_for_barrier(barriers_ + stage * 8, stage == 0 ? phase_ ^ 1 : phase_);
    const bool is_end = token(i) + Config::kStepTokens > walk_.seq_len;
    if (is_end || this->may_be_missing()) [[unlikely]]
      clear_unread(i);
  }
  __device__ void release_values(int i) {
    __syncwarp();
    start_keys(i + 2, this->next_stage());
    this->advance();
    this->advance();
  }
  __device__ void end() {}

 private:
  struct Block {
    int id;
    int offset;  // of the tile in its block, in tokens
  };
  // Of this lane's tile of step i: of the first tile of its copy. Asked for before it is needed.
  __device__ Block block_of(int i) const {
    const int per_copy = walk_.job.tiles_per_copy;
    const int tile = lane_ % kTiles & -per_copy;
    const int first = token(i) + tile * kTileTokens;
    const TilePlace place = tile_place(walk_.job, first / kTileTokens);
    const bool is_inside = i < num_steps_ && this->is_inside(first, per_copy * kTileTokens);
    return {is_inside ? walk_.table[place.block] : kNoTile, place.offset};
  }

  // tiles_per_copy is 1, 2 or 4.
  __device__ bool is_first_of_copy() const { return (lane_ & (walk_.job.tiles_per_copy - 1)) == 0; }

  __device__ void start_keys(int i, int stage) {
    if (i >= num_steps_) return;
    const bool is_there = this->is_block(next_.id);
    next_missing_ = ~__ballot_sync(kWholeWarp, is_there) & kStepBits;
    if (!is_there && next_.id != kNoTile && lane_ < kTiles && is_first_of_copy()) [[unlikely]] {
      atomicAdd(&walk_.job.findings->out_of_range, 1ull);
    }
    this->note_missing(i, next_missing_);
    start_side<typename Keys::Copy>(walk_.job.tile_k, stage);
  }
  // Requires: its keys were the last that were asked for.
  __device__ void start_values(int i, int stage) {
    if (i >= num_steps_) return;
    start_side<typename Values::Copy>(walk_.job.tile_v, stage);
  }

  template <class Copy>
  __device__ void start_side(const TileSide& side, int stage) {
    const uint32_t barrier = barriers_ + stage * 8;
    const uint32_t to = ring_ + stage * Config::kStageBytes;
    if (side.is_step) {
      if (!is_elected()) return;
      const bool is_there = next_missing_ == 0;
      expect_bytes(barrier, is_there ? kTiles * Copy::kBytes : 0);
      if (is_there) {
        const int within = walk_.head * side.codes.head_stride;
        copy_bulk(to, side.codes.at(static_cast<uint32_t>(next_.id), within), kTiles * Copy::kBytes,
                  barrier);
      }
      return;
    }
    if (lane_ == 0) expect_bytes(barrier, __popc(~next_missing_ & kStepBits) * Copy::kBytes);
    __syncwarp();
    const int per_copy = walk_.job.tiles_per_copy;
    if (lane_ >= kTiles || !is_first_of_copy() || (next_missing_ >> lane_ & 1u) != 0) return;
    copy_rows<Copy::kCodeBytes>(side.codes, to, per_copy, barrier);
    copy_rows<Copy::kScaleBytes>(side.scales, to + kTiles * Copy::kCodeBytes, per_copy, barrier);
  }
  // This lane's tile and what follows it in its block.
  template <int TileBytes>
  __device__ void copy_rows(const TileRegion& region, uint32_t to, int num_tiles,
                            uint32_t barrier) const {
    const int within = walk_.head * region.head_stride + next_.offset * (TileBytes / kTileTokens);
    copy_bulk(to + lane_ * TileBytes, region.at(static_cast<uint32_t>(next_.id), within),
              num_tiles * TileBytes, barrier);
  }

  // Bulk copies bring whole tiles, and none where a block is missing. Values that no query sees
  // must be zeros all the same: what lies there may be a NaN, and 0 * NaN is one.
  __device__ void clear_unread(int i) {
#pragma unroll 1
    for (int u = 0; u < kTiles; ++u) {
      const int left = walk_.seq_len - (token(i) + u * kTileTokens);
      const bool is_missing = (this->missing(i) >> u & 1u) != 0;
      const int first = is_missing ? 0 : min(max(left, 0), kTileTokens);
      clear_rows(this->values(u), first, Values::Copy::kCodeBytes / kTileTokens);
      clear_rows(this->value_scales(u), first, Values::Copy::kScaleBytes / kTileTokens);
    }
    fence_bulk_copies();
    __syncwarp();
  }
  __device__ void clear_rows(uint32_t rows, int first, int row_bytes) const {
#pragma unroll 1
    for (int b = first * row_bytes + lane_ * 2; b < kTileTokens * row_bytes; b += kWarp * 2) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(rows + b), "h"(uint16_t{0}) : "memory");
    }
  }

  const uint32_t barriers_;  // shared memory: [kStages]
  Block next_;
  uint32_t next_missing_ = 0;
};

// Eight lanes copy a tile, lanes 8 u to 8 u + 7 tile u, and know its block.
template <class TheConfig>
class NibblesRing : public TileRing<TheConfig> {
  using Base = TileRing<TheConfig>;
  using Base::kTiles;
  using Base::lane_;
  using Base::num_steps_;
  using Base::ring_;
  using Base::stage_;
  using Base::walk_;
  using typename Base::Keys;
  using typename Base::Values;
  using KeyCopy = FourTilesCopy<typename Keys::Copy>;
  using ValueCopy = FourTilesCopy<typename Values::Copy>;
  static_assert(kTiles == KeyCopy::kTiles);

 public:
  using Base::token;
  using typename Base::Config;

  __device__ NibblesRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : Base(walk, shared, warp, lane),
        key_part_(KeyCopy::lane_part(this->side_of_keys(), walk.head, lane)),
        value_part_(ValueCopy::lane_part(this->side_of_values(), walk.head, lane)) {}

  __device__ void begin() {
    static_assert(Config::kStages == 3, "a step and the next one's keys");
    next_ = block_of(0);
    const Block second = block_of(1);
    start_keys(0, 0);
    start_values(0, 1);
    next_ = second;
    start_keys(1, 2);
  }
  __device__ void wait_for_keys(int) { wait_for_oldest(); }
  __device__ void release_keys(int i) {
    __syncwarp();
    start_values(i + 1, stage_);
    next_ = block_of(i + 2);
  }
  __device__ void wait_for_values(int) { wait_for_oldest(); }
  __device__ void release_values(int i) {
    __syncwarp();
    start_keys(i + 2, this->next_stage());
    this->advance();
    this->advance();
  }
  __device__ void end() { wait_for_copies<0>(); }

 private:
  struct Block {
    int id;
    int offset;  // of the tile in its block, in tokens
  };
  // Of this lane's tile of step i. Asked for before it is needed.
  __device__ Block block_of(int i) const {
    const int first = first_token(i);
    const TilePlace place = tile_place(walk_.job, first / kTileTokens);
    const bool is_inside = i < num_steps_ && this->is_inside(first, kTileTokens);
    return {is_inside ? walk_.table[place.block] : kNoTile, place.offset};
  }
  __device__ int first_token(int i) const {
    return token(i) + KeyCopy::tile_of(lane_) * kTileTokens;
  }

  // Three sides are in the ring or on their way, in the order in which they are read.
  __device__ static void wait_for_oldest() {
    wait_for_copies<2>();
    __syncwarp();
  }

  __device__ void start_keys(int i, int stage) {
    if (i < num_steps_) {
      const bool is_there = this->is_block(next_.id);
      const uint32_t lacking = __ballot_sync(kWholeWarp, !is_there);
      this->note_missing(i, lacking == 0 ? 0 : missing_tiles(lacking));
      if (!is_there && next_.id != kNoTile && lane_ % KeyCopy::kLanes == 0) [[unlikely]] {
        atomicAdd(&walk_.job.findings->out_of_range, 1ull);
      }
      start_side<KeyCopy>(this->side_of_keys(), key_part_, i, ring_ + stage * Config::kStageBytes,
                          Keys::Copy::kCodeBytes);
    }
    commit_copies();
  }
  // Requires: its keys were the last that were asked for.
  __device__ void start_values(int i, int stage) {
    if (i < num_steps_) {
      start_side<ValueCopy>(this->side_of_values(), value_part_, i,
                            ring_ + stage * Config::kStageBytes, Values::Copy::kCodeBytes);
    }
    commit_copies();
  }
  template <class Copy>
  __device__ void start_side(const TileSide& side, const typename Copy::Lane& part, int i,
                             uint32_t to, int tile_bytes) const {
    const bool is_there = this->is_block(next_.id);
    const int num_tokens = is_there ? walk_.seq_len - first_token(i) : 0;
    Copy::start(side, part, is_there ? static_cast<uint32_t>(next_.id) : 0, next_.offset,
                num_tokens, to, to + kTiles * tile_bytes, lane_);
  }
  // A bit for each tile, of a bit for each lane.
  __device__ static uint32_t missing_tiles(uint32_t lanes) {
    uint32_t tiles = 0;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) tiles |= (lanes >> (u * KeyCopy::kLanes) & 1u) << u;
    return tiles;
  }

  const typename KeyCopy::Lane key_part_;
  const typename ValueCopy::Lane value_part_;
  Block next_;
};

template <class Config>
using RingOf = std::conditional_t<
    Config::kIsBulk, BulkRing<Config>,
    std::conditional_t<Config::kHasStagesOfSides, NibblesRing<Config>, CopyRing<Config>>>;

}  // namespace kvx::ops::cuda

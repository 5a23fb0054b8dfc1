// Rings of steps on their way into shared memory, a ring a warp: no warp waits for another.
//
// CopyRing: cp.async, 16 bytes at a time, rows as they may lie.
// BulkRing: a few bulk copies a step, for rows that follow each other without a gap.
#pragma once

#include "ops/attend/cuda/job.cuh"
#include "ops/attend/cuda/tile_keys.cuh"
#include "ops/attend/cuda/tile_values.cuh"

namespace kvx::ops::cuda {

// How many warps a CTA has, tiles a step takes and steps are on their way.
//
// shared memory of a step:
//   [keys' codes][keys' scales][values' codes][values' scales], each of all the step's tiles
template <class Keys, class Values>
struct TileConfig {
  static constexpr bool kIsBulk = Keys::kIsBulk;
  static_assert(Keys::kIsBulk == Values::kIsBulk);
  static constexpr int kTileBytes = Keys::Copy::kBytes + Values::Copy::kBytes;
  static constexpr int kWarps = 4;
  static constexpr int kTilesAtOnce = kTileBytes <= 4608 ? 2 : 1;
  static constexpr int kStages = kTileBytes <= 2560 ? 3 : kTileBytes <= 4608 ? 2 : 3;
  static constexpr int kStepTokens = kTilesAtOnce * kTileTokens;

  static constexpr int kKeyScalesAt = kTilesAtOnce * Keys::Copy::kCodeBytes;
  static constexpr int kValuesAt = kTilesAtOnce * Keys::Copy::kBytes;
  static constexpr int kValueScalesAt = kValuesAt + kTilesAtOnce * Values::Copy::kCodeBytes;
  static constexpr int kStepBytes = kTilesAtOnce * kTileBytes;
  static constexpr int kRingBytes = kWarps * kStages * kStepBytes;
  static constexpr int kBarrierBytes = kIsBulk ? kWarps * kStages * 8 : 0;
  static constexpr int kThreads = kWarps * kWarp;
  // 227 KiB of shared memory a multiprocessor, 1 KiB of it the system's for each CTA.
  static constexpr int kCtaBytes = kRingBytes + kBarrierBytes + 1024;
  static constexpr int kCtas = (227 << 10) / kCtaBytes < 4 ? (227 << 10) / kCtaBytes : 4;
};

// Which tiles a CTA walks over.
struct TileWalk {
  const AttendJob& job;
  const int32_t* table;  // of the sequence
  int seq_len;
  int head;  // of the run
  TokenRange tokens;
};

// Where a tile lies in the sequence's blocks.
struct TilePlace {
  int block;
  int offset;  // tokens
};

__device__ inline TilePlace tile_place(const AttendJob& job, int tile) {
  const int per_block = job.tiles_per_block;
  if ((per_block & (per_block - 1)) == 0) {
    return {tile >> (31 - __clz(per_block)), (tile & (per_block - 1)) * kTileTokens};
  }
  return {tile / per_block, tile % per_block * kTileTokens};
}

inline constexpr int kNoTile = -0x7FFFFFFF;  // past the split's end: no block is asked for

__device__ inline bool is_block(const AttendJob& job, int id) {
  return id >= 0 && id < job.num_packed_blocks;
}

// What both rings have: the warp's steps, the current stage, and which of its tiles have no block.
template <class Keys, class Values>
class TileRing {
 public:
  using Config = TileConfig<Keys, Values>;

  __device__ TileRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : walk_(walk),
        lane_(lane),
        ring_(shared + warp * Config::kStages * Config::kStepBytes),
        first_step_(walk.tokens.begin / Config::kStepTokens + warp) {
    const int end_step = (walk.tokens.end + Config::kStepTokens - 1) / Config::kStepTokens;
    num_steps_ = max(0, (end_step - first_step_ + Config::kWarps - 1) / Config::kWarps);
  }

  __device__ int num_steps() const { return num_steps_; }
  // The first token of step i.
  __device__ int token(int i) const {
    return (first_step_ + i * Config::kWarps) * Config::kStepTokens;
  }
  // A stage that no copy is on its way to until the queries are loaded.
  __device__ uint32_t scratch() const { return ring_ + kLast * Config::kStepBytes; }

  // Of the current step: where tile u lies, and whether its block is missing.
  __device__ uint32_t keys(int u) const { return step() + u * Keys::Copy::kCodeBytes; }
  __device__ uint32_t key_scales(int u) const {
    return step() + Config::kKeyScalesAt + u * Keys::Copy::kScaleBytes;
  }
  __device__ uint32_t values(int u) const {
    return step() + Config::kValuesAt + u * Values::Copy::kCodeBytes;
  }
  __device__ uint32_t value_scales(int u) const {
    return step() + Config::kValueScalesAt + u * Values::Copy::kScaleBytes;
  }
  __device__ bool is_missing(int u) const {
    return (missing_ >> (stage_ * Config::kTilesAtOnce + u) & 1u) != 0;
  }
  __device__ bool is_missing_some() const {
    return (missing_ >> (stage_ * Config::kTilesAtOnce) & kStepBits) != 0;
  }

 protected:
  static constexpr int kLast = Config::kStages - 1;
  static constexpr uint32_t kStepBits = (1u << Config::kTilesAtOnce) - 1;

  __device__ uint32_t step() const { return ring_ + stage_ * Config::kStepBytes; }
  __device__ void note_missing(int stage, uint32_t bits) {
    const int at = stage * Config::kTilesAtOnce;
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
  const uint32_t ring_;  // shared memory: [kStages] steps
  const int first_step_;
  int num_steps_;
  int stage_ = 0;
  uint32_t phase_ = 0;
  uint32_t missing_ = 0;  // a bit for each tile of the ring
};

template <class Keys, class Values>
class CopyRing : public TileRing<Keys, Values> {
  using Base = TileRing<Keys, Values>;
  using Base::kLast;
  using Base::lane_;
  using Base::num_steps_;
  using Base::ring_;
  using Base::stage_;
  using Base::walk_;

 public:
  using Base::token;
  using typename Base::Config;

  __device__ CopyRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : Base(walk, shared, warp, lane),
        key_part_(Keys::Copy::lane_part(walk.job.tile_k, walk.head, lane)),
        value_part_(Values::Copy::lane_part(walk.job.tile_v, walk.head, lane)) {}

  __device__ void begin() {
    ask_for_blocks(0);
    for (int i = 0; i < kLast; ++i) start(i, i);
  }
  __device__ void after_queries() {
    __syncwarp();
    start(kLast, kLast);
  }
  __device__ void wait(int) {
    wait_for_copies<kLast>();
    __syncwarp();
  }
  __device__ void next(int i) {
    __syncwarp();
    start(i + Config::kStages, stage_);
    this->advance();
  }
  __device__ void end() { wait_for_copies<0>(); }

 private:
  // The blocks of step i's tiles, a step before they are needed.
  __device__ void ask_for_blocks(int i) {
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      const int first = token(i) + u * kTileTokens;
      const TilePlace place = tile_place(walk_.job, first / kTileTokens);
      next_offset_[u] = place.offset;
      const bool is_inside = i < num_steps_ && first < walk_.tokens.end;
      next_block_[u] = is_inside ? walk_.table[place.block] : kNoTile;
    }
  }

  __device__ void start(int i, int stage) {
    if (i < num_steps_) {
      uint32_t missing = 0;
#pragma unroll
      for (int u = 0; u < Config::kTilesAtOnce; ++u) {
        const bool is_there = is_block(walk_.job, next_block_[u]);
        if (!is_there) missing |= 1u << u;
        if (!is_there && next_block_[u] != kNoTile && lane_ == 0) {
          atomicAdd(&walk_.job.findings->out_of_range, 1ull);
        }
        start_tile(token(i) + u * kTileTokens, u, is_there, ring_ + stage * Config::kStepBytes);
      }
      this->note_missing(stage, missing);
    }
    commit_copies();
    ask_for_blocks(i + 1);
  }

  // Tokens past the sequence's end become zeros: what lies there may be a NaN, and 0 * NaN is one.
  __device__ void start_tile(int first_token, int u, bool is_there, uint32_t step) {
    const int num_tokens = is_there ? walk_.seq_len - first_token : 0;
    const auto block = static_cast<uint32_t>(is_there ? next_block_[u] : 0);
    Keys::Copy::start(walk_.job.tile_k, key_part_, block, next_offset_[u], num_tokens,
                      step + u * Keys::Copy::kCodeBytes,
                      step + Config::kKeyScalesAt + u * Keys::Copy::kScaleBytes, lane_);
    Values::Copy::start(walk_.job.tile_v, value_part_, block, next_offset_[u], num_tokens,
                        step + Config::kValuesAt + u * Values::Copy::kCodeBytes,
                        step + Config::kValueScalesAt + u * Values::Copy::kScaleBytes, lane_);
  }

  const typename Keys::Copy::Lane key_part_;
  const typename Values::Copy::Lane value_part_;
  int next_offset_[Config::kTilesAtOnce];
  int next_block_[Config::kTilesAtOnce];
};

// Lane 4 c + r brings region r (keys' codes, keys' scales, values' codes, values' scales) of the
// step's copy c, which takes tiles_per_copy neighbours in one block.
template <class Keys, class Values>
class BulkRing : public TileRing<Keys, Values> {
  using Base = TileRing<Keys, Values>;
  using Base::kLast;
  using Base::lane_;
  using Base::num_steps_;
  using Base::phase_;
  using Base::ring_;
  using Base::stage_;
  using Base::walk_;

 public:
  using Base::token;
  using typename Base::Config;

  __device__ BulkRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : Base(walk, shared, warp, lane),
        barriers_(shared + Config::kRingBytes + warp * Config::kStages * 8),
        copy_(lane / kRegions) {
    choose_region();
  }

  __device__ void begin() {
    if (lane_ == 0) {
      for (int i = 0; i < Config::kStages; ++i) init_barrier(barriers_ + i * 8);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      fence_bulk_copies();
    }
    __syncwarp();
    ask_for_blocks(0);
    for (int i = 0; i < kLast; ++i) start(i, i);
  }
  __device__ void after_queries() {
    fence_bulk_copies();
    __syncwarp();
    start(kLast, kLast);
  }
  __device__ void wait(int i) {
    wait_for_barrier(barriers_ + stage_ * 8, phase_);
    if (token(i) + Config::kStepTokens > walk_.seq_len || this->is_missing_some()) clear_unread(i);
  }
  __device__ void next(int i) {
    __syncwarp();
    start(i + Config::kStages, stage_);
    this->advance();
  }
  __device__ void end() {}

 private:
  static constexpr int kRegions = 4;

  __device__ void choose_region() {
    const int r = lane_ % kRegions;
    const TileSide& k = walk_.job.tile_k;
    const TileSide& v = walk_.job.tile_v;
    const TileRegion& region = r == 0 ? k.codes : r == 1 ? k.scales : r == 2 ? v.codes : v.scales;
    tile_bytes_ = r == 0   ? Keys::Copy::kCodeBytes
                  : r == 1 ? Keys::Copy::kScaleBytes
                  : r == 2 ? Values::Copy::kCodeBytes
                           : Values::Copy::kScaleBytes;
    region_at_ = r == 0   ? 0
                 : r == 1 ? Config::kKeyScalesAt
                 : r == 2 ? Config::kValuesAt
                          : Config::kValueScalesAt;
    region_ = region.base + int64_t{walk_.head} * region.head_stride;
    block_stride_ = region.block_stride;
  }

  // The block of step i's copy of this lane, a step before it is needed.
  __device__ void ask_for_blocks(int i) {
    const int tile = copy_ * walk_.job.tiles_per_copy;
    const int first = token(i) + tile * kTileTokens;
    const TilePlace place = tile_place(walk_.job, first / kTileTokens);
    next_offset_ = place.offset;
    const bool is_inside =
        i < num_steps_ && tile < Config::kTilesAtOnce && first < walk_.tokens.end;
    next_block_ = is_inside ? walk_.table[place.block] : kNoTile;
  }

  __device__ void start(int i, int stage) {
    if (i >= num_steps_) return;
    const int tiles_per_copy = walk_.job.tiles_per_copy;
    const bool is_there = is_block(walk_.job, next_block_);
    if (!is_there && next_block_ != kNoTile && lane_ % kRegions == 0) {
      atomicAdd(&walk_.job.findings->out_of_range, 1ull);
    }
    const uint32_t there = __ballot_sync(kWholeWarp, is_there);
    uint32_t missing = 0;
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      const int lane = (tiles_per_copy == 1 ? u : 0) * kRegions;
      if ((there >> lane & 1u) == 0) missing |= 1u << u;
    }
    this->note_missing(stage, missing);
    const uint32_t barrier = barriers_ + stage * 8;
    if (lane_ == 0) {
      expect_bytes(barrier, __popc(there) / kRegions * tiles_per_copy * Config::kTileBytes);
    }
    __syncwarp();
    if (is_there) {
      const uint32_t to =
          ring_ + stage * Config::kStepBytes + region_at_ + copy_ * tiles_per_copy * tile_bytes_;
      copy_bulk(to,
                region_ + uint64_t{static_cast<uint32_t>(next_block_)} * block_stride_ +
                    next_offset_ * (tile_bytes_ / kTileTokens),
                tiles_per_copy * tile_bytes_, barrier);
    }
    ask_for_blocks(i + 1);
  }

  // Bulk copies bring whole tiles, and none where a block is missing. Values that no query sees
  // must be zeros all the same: what lies there may be a NaN, and 0 * NaN is one.
  __device__ void clear_unread(int i) {
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      const int left = walk_.seq_len - (token(i) + u * kTileTokens);
      const int first = this->is_missing(u) ? 0 : min(max(left, 0), kTileTokens);
      clear_rows(this->values(u), first, Values::Copy::kCodeBytes / kTileTokens);
      clear_rows(this->value_scales(u), first, Values::Copy::kScaleBytes / kTileTokens);
    }
    fence_bulk_copies();
    __syncwarp();
  }
  __device__ void clear_rows(uint32_t rows, int first, int row_bytes) const {
    for (int b = first * row_bytes + lane_ * 2; b < kTileTokens * row_bytes; b += kWarp * 2) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(rows + b), "h"(uint16_t{0}) : "memory");
    }
  }

  const uint32_t barriers_;  // shared memory: [kStages]
  const int copy_;
  // The region that this lane brings.
  const uint8_t* region_;
  uint32_t block_stride_;
  int tile_bytes_;
  int region_at_;  // in a step
  int next_offset_;
  int next_block_;
};

}  // namespace kvx::ops::cuda

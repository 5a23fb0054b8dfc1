// Rings of steps on their way into shared memory. A step of a CTA is kTilesAtOnce tiles for each of
// its warps, neighbours in the sequence.
//
// WarpRing: each warp copies its own tiles with cp.async, rows as they may lie.
// CtaRing: the warps share the copying: each brings one region (keys' codes, keys' scales, values'
// codes, values' scales) of all their tiles in few bulk copies.
#pragma once

#include "ops/attend/cuda/job.cuh"
#include "ops/attend/cuda/tile_keys.cuh"
#include "ops/attend/cuda/tile_values.cuh"

namespace kvx::ops::cuda {

// How many warps a CTA has, tiles a warp's step takes and steps are on their way.
//
// shared memory of a step, of a warp or of the whole CTA:
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

  // Tiles that lie together in shared memory.
  static constexpr int kTilesTogether = kIsBulk ? kWarps * kTilesAtOnce : kTilesAtOnce;
  static constexpr int kKeyScalesAt = kTilesTogether * Keys::Copy::kCodeBytes;
  static constexpr int kValuesAt = kTilesTogether * Keys::Copy::kBytes;
  static constexpr int kValueScalesAt = kValuesAt + kTilesTogether * Values::Copy::kCodeBytes;
  static constexpr int kStepBytes = kTilesAtOnce * kTileBytes;  // of a warp
  static constexpr int kRingBytes = kWarps * kStages * kStepBytes;
  static constexpr int kBarrierBytes = kIsBulk ? 2 * kStages * 8 : 0;
  static constexpr int kThreads = kWarps * kWarp;
  // 227 KiB of shared memory a multiprocessor, 1 KiB of it the system's for each CTA.
  static constexpr int kCtaBytes = kRingBytes + kBarrierBytes + 1024;
  static constexpr int kCtas = (227 << 10) / kCtaBytes < 4 ? (227 << 10) / kCtaBytes : 4;
  // Tokens that splits are multiples of.
  static constexpr int kGranule = kIsBulk ? kWarps * kStepTokens : kStepTokens;
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

// What both rings have: the current stage, and which of the warp's tiles have no block.
template <class Config>
class TileRing {
 public:
  __device__ bool is_missing(int u) const {
    return (missing_ >> (stage_ * Config::kTilesAtOnce + u) & 1u) != 0;
  }
  __device__ bool is_missing_some() const {
    return (missing_ >> (stage_ * Config::kTilesAtOnce) & kStepBits) != 0;
  }

 protected:
  static constexpr uint32_t kStepBits = (1u << Config::kTilesAtOnce) - 1;
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

  int stage_ = 0;
  uint32_t phase_ = 0;
  uint32_t missing_ = 0;  // a bit for each tile of the ring
};

template <class Keys, class Values>
class WarpRing : public TileRing<TileConfig<Keys, Values>> {
 public:
  using Config = TileConfig<Keys, Values>;

  __device__ WarpRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : walk_(walk),
        ring_(shared + warp * Config::kStages * Config::kStepBytes),
        first_step_(walk.tokens.begin / Config::kStepTokens + warp),
        lane_(lane),
        key_part_(Keys::Copy::lane_part(walk.job.tile_k, walk.head, lane)),
        value_part_(Values::Copy::lane_part(walk.job.tile_v, walk.head, lane)) {
    const int end_step = (walk.tokens.end + Config::kStepTokens - 1) / Config::kStepTokens;
    num_steps_ = max(0, (end_step - first_step_ + Config::kWarps - 1) / Config::kWarps);
  }

  __device__ int num_steps() const { return num_steps_; }
  __device__ int token(int i) const {
    return (first_step_ + i * Config::kWarps) * Config::kStepTokens;
  }
  // A stage that no copy is on its way to until the queries are loaded.
  __device__ uint32_t scratch() const { return ring_ + kLast * Config::kStepBytes; }

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
    start(i + Config::kStages, this->stage_);
    this->advance();
  }
  __device__ void end() { wait_for_copies<0>(); }

  // The current step, of tile u of the warp.
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

 private:
  static constexpr int kLast = Config::kStages - 1;

  __device__ uint32_t step() const { return ring_ + this->stage_ * Config::kStepBytes; }

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

  const TileWalk& walk_;
  const uint32_t ring_;
  const int first_step_;
  const int lane_;
  const typename Keys::Copy::Lane key_part_;
  const typename Values::Copy::Lane value_part_;
  int num_steps_;
  int next_offset_[Config::kTilesAtOnce];
  int next_block_[Config::kTilesAtOnce];
};

template <class Keys, class Values>
class CtaRing : public TileRing<TileConfig<Keys, Values>> {
 public:
  using Config = TileConfig<Keys, Values>;

  // Requires: the walk begins on a granule.
  __device__ CtaRing(const TileWalk& walk, uint32_t shared, int warp, int lane)
      : walk_(walk), ring_(shared), warp_(warp), lane_(lane) {
    num_steps_ = (walk.tokens.end - first_token() + kStepTokens - 1) / kStepTokens;
    choose_region();
  }

  __device__ int num_steps() const { return num_steps_; }
  __device__ int token(int i) const {
    return first_token() + i * kStepTokens + warp_ * Config::kStepTokens;
  }
  __device__ uint32_t scratch() const {
    return ring_ + kLast * kBytes + warp_ * Config::kStepBytes;
  }

  __device__ void begin() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2 * Config::kStages; ++i) init_barrier(full(0) + i * 8, Config::kWarps);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      fence_bulk_copies();
    }
    ask_for_blocks(0);
    __syncthreads();
    for (int i = 0; i < kLast; ++i) start(i, i);
  }
  __device__ void after_queries() {
    fence_bulk_copies();
    __syncthreads();
  }
  __device__ void wait(int i) {
    wait_for_barrier(full(this->stage_), this->phase_);
    if (token(i) + Config::kStepTokens > walk_.seq_len || this->is_missing_some()) clear_unread(i);
  }
  // The stage before this one is free when all warps have left it: the next copies go there.
  __device__ void next(int i) {
    __syncwarp();
    if (lane_ == 0) arrive(empty(this->stage_));
    const int before = this->stage_ == 0 ? kLast : this->stage_ - 1;
    const uint32_t phase_before = this->stage_ == 0 ? this->phase_ ^ 1 : this->phase_;
    if (i + kLast < num_steps_) {
      if (i > 0) wait_for_barrier(empty(before), phase_before);
      start(i + kLast, before);
    }
    this->advance();
  }
  __device__ void end() {}

  __device__ uint32_t keys(int u) const { return step() + tile(u) * Keys::Copy::kCodeBytes; }
  __device__ uint32_t key_scales(int u) const {
    return step() + Config::kKeyScalesAt + tile(u) * Keys::Copy::kScaleBytes;
  }
  __device__ uint32_t values(int u) const {
    return step() + Config::kValuesAt + tile(u) * Values::Copy::kCodeBytes;
  }
  __device__ uint32_t value_scales(int u) const {
    return step() + Config::kValueScalesAt + tile(u) * Values::Copy::kScaleBytes;
  }

 private:
  static constexpr int kLast = Config::kStages - 1;
  static constexpr int kTiles = Config::kTilesTogether;  // of a step
  static constexpr int kStepTokens = kTiles * kTileTokens;
  static constexpr int kBytes = Config::kWarps * Config::kStepBytes;
  static_assert(Config::kWarps == 4, "a warp a region");

  __device__ int first_token() const { return walk_.tokens.begin / kStepTokens * kStepTokens; }
  __device__ uint32_t step() const { return ring_ + this->stage_ * kBytes; }
  __device__ int tile(int u) const { return warp_ * Config::kTilesAtOnce + u; }
  __device__ uint32_t full(int stage) const { return ring_ + Config::kRingBytes + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(Config::kStages + stage); }

  __device__ void choose_region() {
    const TileSide& side = warp_ < 2 ? walk_.job.tile_k : walk_.job.tile_v;
    const TileRegion& region = warp_ % 2 == 0 ? side.codes : side.scales;
    const int code_bytes = warp_ < 2 ? Keys::Copy::kCodeBytes : Values::Copy::kCodeBytes;
    const int scale_bytes = warp_ < 2 ? Keys::Copy::kScaleBytes : Values::Copy::kScaleBytes;
    tile_bytes_ = warp_ % 2 == 0 ? code_bytes : scale_bytes;
    region_ = region.base + int64_t{walk_.head} * region.head_stride;
    block_stride_ = region.block_stride;
    const int at[] = {0, Config::kKeyScalesAt, Config::kValuesAt, Config::kValueScalesAt};
    region_at_ = warp_ == 0 ? at[0] : warp_ == 1 ? at[1] : warp_ == 2 ? at[2] : at[3];
  }

  // A copy takes tiles_per_copy neighbours in one block; lane l does copy l of its region.
  __device__ int num_copies() const { return kTiles / walk_.job.tiles_per_copy; }

  __device__ void ask_for_blocks(int i) {
    const int first =
        first_token() + i * kStepTokens + lane_ * walk_.job.tiles_per_copy * kTileTokens;
    const TilePlace place = tile_place(walk_.job, first / kTileTokens);
    next_offset_ = place.offset;
    const bool is_inside = i < num_steps_ && lane_ < num_copies() && first < walk_.tokens.end;
    next_block_ = is_inside ? walk_.table[place.block] : kNoTile;
  }

  __device__ void start(int i, int stage) {
    if (i >= num_steps_) return;
    const bool is_there = is_block(walk_.job, next_block_);
    if (!is_there && next_block_ != kNoTile && warp_ == 0) {
      atomicAdd(&walk_.job.findings->out_of_range, 1ull);
    }
    const uint32_t there = __ballot_sync(kWholeWarp, is_there);
    const int tiles_per_copy = walk_.job.tiles_per_copy;
    uint32_t missing = 0;
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      if ((there >> (tile(u) / tiles_per_copy) & 1u) == 0) missing |= 1u << u;
    }
    this->note_missing(stage, missing);
    const int bytes = tiles_per_copy * tile_bytes_;
    if (lane_ == 0) expect_bytes(full(stage), __popc(there) * bytes);
    __syncwarp();
    if (is_there) {
      const int row_bytes = tile_bytes_ / kTileTokens;
      copy_bulk(ring_ + stage * kBytes + region_at_ + lane_ * bytes,
                region_ + uint64_t{static_cast<uint32_t>(next_block_)} * block_stride_ +
                    next_offset_ * row_bytes,
                bytes, full(stage));
    }
    __syncwarp();
    ask_for_blocks(i + 1);
  }

  // Bulk copies bring whole tiles, and none where a block is missing. Values that no query sees
  // must be zeros all the same: what lies there may be a NaN, and 0 * NaN is one.
  __device__ void clear_unread(int i) {
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      const int left = walk_.seq_len - (token(i) + u * kTileTokens);
      const int first = this->is_missing(u) ? 0 : min(max(left, 0), kTileTokens);
      clear_rows(values(u), first, Values::Copy::kCodeBytes / kTileTokens);
      clear_rows(value_scales(u), first, Values::Copy::kScaleBytes / kTileTokens);
    }
    fence_bulk_copies();
    __syncwarp();
  }
  __device__ void clear_rows(uint32_t rows, int first, int row_bytes) const {
    for (int b = first * row_bytes + lane_ * 2; b < kTileTokens * row_bytes; b += kWarp * 2) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(rows + b), "h"(uint16_t{0}) : "memory");
    }
  }

  const TileWalk& walk_;
  const uint32_t ring_;  // shared memory: [kStages] steps, [kStages] full, [kStages] empty barriers
  const int warp_;
  const int lane_;
  int num_steps_;
  // The region that this warp brings.
  const uint8_t* region_;
  uint32_t block_stride_;
  int tile_bytes_;
  int region_at_;  // in a step
  int next_offset_;
  int next_block_;
};

}  // namespace kvx::ops::cuda

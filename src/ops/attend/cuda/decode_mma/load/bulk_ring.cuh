// BulkRing: tiles by bulk copies, for rows that follow each other without a gap. Where a pool's
// block is a step, a side of it is one copy.
#pragma once

#include "ops/attend/cuda/decode_mma/load/sides_ring.cuh"

namespace kvx::ops::cuda {

// One lane asks for the copies; lane l knows the block of tile l % kDecodeMma.
template <class Config>
class BulkRing : public SidesRing<Config, BulkRing<Config>> {
  using Base = SidesRing<Config, BulkRing>;
  friend Base;
  using Base::kStepBits, Base::kDecodeMma, Base::lane_, Base::next_, Base::num_steps_, Base::ring_,
      Base::walk_;
  using typename Base::Keys, typename Base::Values;

 public:
  __device__ BulkRing(const TileWalk& walk, uint32_t shared, int lane)
      : Base(walk, shared, lane), barriers_(shared) {}

  __device__ void begin() {
    if (lane_ == 0) {
      init_barrier(key_barrier());
      init_barrier(value_barrier());
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      fence_bulk_copies();
    }
    __syncwarp();
    this->start_first_steps();
  }

  __device__ void wait_for_keys(int) { wait_for_barrier(key_barrier(), phase_); }
  __device__ void wait_for_values(int i) {
    wait_for_barrier(value_barrier(), phase_);
    const bool is_end = this->token(i) + Config::kStepTokens > walk_.seq_len;
    if (is_end || this->may_be_missing()) [[unlikely]]
      clear_unread(i);
  }
  __device__ void release_values(int i) {
    Base::release_values(i);
    phase_ ^= 1;
  }
  __device__ void end() {}

 private:
  __device__ uint32_t key_barrier() const { return barriers_; }
  __device__ uint32_t value_barrier() const { return barriers_ + 8; }

  // A step over a dual-scale block is one copy, of which every lane knows the block.
  static constexpr bool kHasOneCopy = Config::kHasChannels;

  __device__ int first_token(int i) const {
    if constexpr (kHasOneCopy) return this->token(i);
    return this->token(i) + (lane_ % kDecodeMma & -walk_.params.tiles_per_copy) * kTileTokens;
  }
  __device__ int copy_tokens() const { return walk_.params.tiles_per_copy * kTileTokens; }

  // tiles_per_copy is 1, 2 or 4.
  __device__ bool is_first_of_copy() const {
    if constexpr (kHasOneCopy) return lane_ == 0;
    return lane_ < kDecodeMma && (lane_ & (walk_.params.tiles_per_copy - 1)) == 0;
  }

  __device__ void start_keys(int i) {
    if (i >= num_steps_) return;
    const bool is_there = this->is_block(next_.id);
    if constexpr (kHasOneCopy) {
      next_missing_ = is_there ? 0 : kStepBits;
    } else {
      next_missing_ = ~__ballot_sync(kWholeWarp, is_there) & kStepBits;
    }
    if (!is_there && next_.id != kNoTile && is_first_of_copy()) [[unlikely]] {
      atomicAdd(&walk_.params.counters->out_of_range, 1ull);
    }
    this->note_missing(i, next_missing_);
    start_side<typename Keys::Copy>(walk_.params.tile_k, this->key_side(), key_barrier());
  }
  // Requires: its keys were the last that were asked for.
  __device__ void start_values(int i) {
    if (i >= num_steps_) return;
    start_side<typename Values::Copy>(walk_.params.tile_v, this->value_side(), value_barrier());
  }

  template <class Copy>
  static constexpr int kSideBytes = kDecodeMma* Copy::kBytes + Copy::kChannelBytes;

  template <class Copy>
  __device__ void start_side(const TileSide& side, uint32_t to, uint32_t barrier) {
    if (kHasOneCopy || side.is_stage) {
      if (is_elected()) start_block<Copy>(side, to, barrier);
      return;
    }
    if (lane_ == 0) {
      expect_bytes(barrier, __popc(~next_missing_ & kStepBits) * Copy::kBytes);
    }
    __syncwarp();
    const int per_copy = walk_.params.tiles_per_copy;
    if (!is_first_of_copy() || (next_missing_ >> lane_ & 1u) != 0) return;
    copy_rows<Copy::kCodeBytes>(side.codes, to, lane_, per_copy, barrier);
    copy_rows<Copy::kScaleBytes>(side.scales, to + kDecodeMma * Copy::kCodeBytes, lane_, per_copy,
                                 barrier);
  }
  // By one lane: a step's side, all of which is in one block.
  template <class Copy>
  __device__ void start_block(const TileSide& side, uint32_t to, uint32_t barrier) const {
    if (next_missing_ != 0) [[unlikely]] {
      expect_bytes(barrier, 0);
      return;
    }
    expect_bytes(barrier, kSideBytes<Copy>);
    const auto block = static_cast<uint32_t>(next_.id);
    if (!kHasOneCopy || side.is_stage) [[likely]] {
      const int within = walk_.head * side.codes.head_stride;
      copy_bulk(to, side.codes.at(block, within), kSideBytes<Copy>, barrier);
      return;
    }
    copy_rows<Copy::kCodeBytes>(side.codes, to, 0, kDecodeMma, barrier);
    copy_rows<Copy::kScaleBytes>(side.scales, to + kDecodeMma * Copy::kCodeBytes, 0, kDecodeMma,
                                 barrier);
    copy_bulk(to + kDecodeMma * Copy::kBytes,
              side.channels.at(block, walk_.head * side.channels.head_stride), Copy::kChannelBytes,
              barrier);
  }
  // Tile `first` of the step, which next_ is the place of, and what follows it in its block.
  template <int TileBytes>
  __device__ void copy_rows(const TileRegion& region, uint32_t to, int first, int num_tiles,
                            uint32_t barrier) const {
    const int within = walk_.head * region.head_stride + next_.offset * (TileBytes / kTileTokens);
    copy_bulk(to + first * TileBytes, region.at(static_cast<uint32_t>(next_.id), within),
              num_tiles * TileBytes, barrier);
  }

  // Bulk copies bring whole tiles, and none where a block is missing. Values that no query sees
  // must be zeros all the same: what lies there may be a NaN, and 0 * NaN is one.
  __device__ void clear_unread(int i) {
#pragma unroll 1
    for (int u = 0; u < kDecodeMma; ++u) {
      const int left = walk_.seq_len - (this->token(i) + u * kTileTokens);
      const bool is_missing = (this->missing(i) >> u & 1u) != 0;
      const int first = is_missing ? 0 : min(max(left, 0), kTileTokens);
      clear_rows(this->values(u), first, Values::Copy::kCodeBytes / kTileTokens);
      clear_rows(this->value_scales(u), first, Values::Copy::kScaleBytes / kTileTokens);
    }
    if constexpr (Config::kHasChannels) {
      if (this->missing(i) != 0) {
        const uint32_t channels = this->values(0) + kDecodeMma * Values::Copy::kBytes;
        clear(channels, 0, Values::Copy::kChannelBytes);
      }
    }
    fence_bulk_copies();
    __syncwarp();
  }
  __device__ void clear_rows(uint32_t rows, int first, int row_bytes) const {
    clear(rows, first * row_bytes, kTileTokens * row_bytes);
  }
  __device__ void clear(uint32_t at, int first, int end) const {
#pragma unroll 1
    for (int b = first + lane_ * kClearedBytes; b < end; b += kWarp * kClearedBytes) {
      if constexpr (kClearedBytes == 1) {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(at + b), "r"(0) : "memory");
      } else {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(at + b), "h"(uint16_t{0}) : "memory");
      }
    }
  }

  // Rows begin on so many bytes.
  static constexpr int kClearedBytes = Config::kHasChannels ? 1 : 2;

  const uint32_t barriers_;  // shared memory: the keys', the values'
  uint32_t phase_ = 0;       // of both in the current step
  uint32_t next_missing_ = 0;
};

}  // namespace kvx::ops::cuda

// CopyRing: tiles by cp.async, 16 bytes at a time, rows as they may lie. A stage is a step's keys
// and values.
#pragma once

#include "ops/attend/cuda/decode_mma/load/ring.cuh"

namespace kvx::ops::cuda {

template <class Config>
class CopyRing : public TileRing<Config> {
  using Base = TileRing<Config>;
  using Base::kDecodeMma, Base::lane_, Base::num_steps_, Base::ring_, Base::stage_, Base::walk_;
  using typename Base::Keys, typename Base::Values;

 public:
  __device__ CopyRing(const TileWalk& walk, uint32_t shared, int lane)
      : Base(walk, shared, lane),
        key_part_(Keys::Copy::lane_part(this->side_of_keys(), walk.head, lane)),
        value_part_(Values::Copy::lane_part(this->side_of_values(), walk.head, lane)) {}

  // All first blocks are asked for before the first is waited for.
  __device__ void begin() {
    Blocks first[Config::kStages];
#pragma unroll
    for (int i = 0; i < Config::kStages; ++i) first[i] = first_blocks_of(i);
    next_ = Config::kStages < 2 ? first_blocks_of(1) : blocks_of(Config::kStages);
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
    stage_ = (stage_ + 1) % Config::kStages;
  }
  __device__ void end() {
    wait_for_copies<0>();
  }

 private:
  struct Blocks {
    int id[kDecodeMma];
    int offset[kDecodeMma];  // of the tile in its block, in tokens
  };
  // Of step i's tiles; a step is asked for before it is needed.
  __device__ Blocks blocks_of(int i) const {
    Blocks blocks;
#pragma unroll
    for (int u = 0; u < kDecodeMma; ++u) {
      const int first = this->token(i) + u * kTileTokens;
      set_block(blocks, u, first, i < num_steps_ && this->requests(first));
    }
    return blocks;
  }
  __device__ Blocks first_blocks_of(int i) const {
    Blocks blocks;
#pragma unroll
    for (int u = 0; u < kDecodeMma; ++u) {
      int first = this->token(i) + u * kTileTokens;
      const bool is_requested = this->requests_at_first(i, first, kTileTokens);
      set_block(blocks, u, first, i < num_steps_ && is_requested);
    }
    return blocks;
  }
  __device__ void set_block(Blocks& blocks, int u, int token, bool is_requested) const {
    const TilePlace place = tile_place(walk_.params, token / kTileTokens);
    blocks.offset[u] = place.offset;
    blocks.id[u] = is_requested ? walk_.id_of(place.block) : kNoTile;
  }

  __device__ void start(int i, int stage, const Blocks& blocks) {
    if (i < num_steps_) {
      uint32_t missing = 0;
#pragma unroll
      for (int u = 0; u < kDecodeMma; ++u) {
        const bool is_there = this->is_block(blocks.id[u]);
        if (!is_there) missing |= 1u << u;
        if (!is_there && blocks.id[u] != kNoTile && lane_ == 0) {
          atomicAdd(&walk_.params.counters->out_of_range, 1ull);
        }
        const int num_tokens = is_there ? walk_.seq_len - (this->token(i) + u * kTileTokens) : 0;
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
                      step + kDecodeMma * Keys::Copy::kCodeBytes + u * Keys::Copy::kScaleBytes,
                      lane_);
    const uint32_t values = step + Config::kKeyBytes;
    Values::Copy::start(
        this->side_of_values(), value_part_, block, offset, num_tokens,
        values + u * Values::Copy::kCodeBytes,
        values + kDecodeMma * Values::Copy::kCodeBytes + u * Values::Copy::kScaleBytes, lane_);
  }

  const typename Keys::Copy::Lane key_part_;
  const typename Values::Copy::Lane value_part_;
  Blocks next_;
};

}  // namespace kvx::ops::cuda

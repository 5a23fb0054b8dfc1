// NibblesRing: the bulk ring's steps and stages by cp.async, for rows of four bits that have gaps
// or lie in blocks shorter than a step.
#pragma once

#include "ops/attend/cuda/decode_mma/load/sides_ring.cuh"

namespace kvx::ops::cuda {

// Eight lanes copy a tile, lanes 8 u to 8 u + 7 tile u, and know its block.
template <class Config>
class NibblesRing : public SidesRing<Config, NibblesRing<Config>> {
  using Base = SidesRing<Config, NibblesRing>;
  friend Base;
  using Base::kDecodeMma, Base::lane_, Base::next_, Base::num_steps_, Base::walk_;
  using typename Base::Keys, typename Base::Values;
  using KeyCopy = FourTilesCopy<typename Keys::Copy>;
  using ValueCopy = FourTilesCopy<typename Values::Copy>;
  static_assert(kDecodeMma == KeyCopy::kDecodeMma);

 public:
  __device__ NibblesRing(const TileWalk& walk, uint32_t shared, int lane)
      : Base(walk, shared, lane),
        key_part_(KeyCopy::lane_part(this->side_of_keys(), walk.head, lane)),
        value_part_(ValueCopy::lane_part(this->side_of_values(), walk.head, lane)) {}

  __device__ void begin() { this->start_first_steps(); }
  __device__ void wait_for_keys(int) { wait_for_oldest<1>(); }
  __device__ void wait_for_values(int) {
    // In several passes the keys are not released yet, so nothing is on its way behind these.
    wait_for_oldest<Config::kPasses == 1 ? 1 : 0>();
  }
  __device__ void end() { wait_for_copies<0>(); }

 private:
  __device__ int first_token(int i) const {
    return this->token(i) + KeyCopy::tile_of(lane_) * kTileTokens;
  }
  __device__ static constexpr int copy_tokens() { return kTileTokens; }

  // Sides are in the ring or on their way in the order in which they are read. Behind: after the
  // one that is waited for.
  template <int Behind>
  __device__ static void wait_for_oldest() {
    wait_for_copies<Behind>();
    __syncwarp();
  }

  __device__ void start_keys(int i) {
    if (i < num_steps_) {
      const bool is_there = this->is_block(next_.id);
      const uint32_t lacking = __ballot_sync(kWholeWarp, !is_there);
      this->note_missing(i, lacking == 0 ? 0 : missing_tiles(lacking));
      if (!is_there && next_.id != kNoTile && lane_ % KeyCopy::kLanes == 0) [[unlikely]] {
        atomicAdd(&walk_.params.counters->out_of_range, 1ull);
      }
      start_side<KeyCopy>(this->side_of_keys(), key_part_, i, this->key_side(),
                          Keys::Copy::kCodeBytes);
    }
    commit_copies();
  }
  // Requires: its keys were the last that were asked for.
  __device__ void start_values(int i) {
    if (i < num_steps_) {
      start_side<ValueCopy>(this->side_of_values(), value_part_, i, this->value_side(),
                            Values::Copy::kCodeBytes);
    }
    commit_copies();
  }
  template <class Copy>
  __device__ void start_side(const TileSide& side, const typename Copy::Lane& part, int i,
                             uint32_t to, int tile_bytes) const {
    const bool is_there = this->is_block(next_.id);
    const int num_tokens = is_there ? walk_.seq_len - first_token(i) : 0;
    Copy::start(side, part, is_there ? static_cast<uint32_t>(next_.id) : 0, next_.offset,
                num_tokens, to, to + kDecodeMma * tile_bytes, lane_, walk_.params.codes_policy);
  }
  // A bit for each tile, of a bit for each lane.
  __device__ static uint32_t missing_tiles(uint32_t lanes) {
    uint32_t tiles = 0;
#pragma unroll
    for (int u = 0; u < kDecodeMma; ++u) tiles |= (lanes >> (u * KeyCopy::kLanes) & 1u) << u;
    return tiles;
  }

  const typename KeyCopy::Lane key_part_;
  const typename ValueCopy::Lane value_part_;
};

}  // namespace kvx::ops::cuda

// SidesRing: what rings have in common whose keys and values are stages of their own: one for each
// side, which the next step's side comes to as soon as this step's is read.
#pragma once

#include "ops/attend/cuda/decode_mma/load/ring.cuh"

namespace kvx::ops::cuda {

// Ring is the class that derives from it, BulkRing or NibblesRing. Its first_token(i) is that of
// the copy which this lane knows the block of, of step i; its copy_tokens() are that copy's;
// start_keys(i) and start_values(i) request a side of iteration i, whose blocks are next_.
template <class Config, class Ring>
class SidesRing : public TileRing<Config> {
 public:
  using TileRing<Config>::TileRing;

  __device__ void release_keys(int i) {
    __syncwarp();
    ring().start_keys(i + 1);
  }
  __device__ void release_values(int i) {
    __syncwarp();
    ring().start_values(i + 1);
    next_ = block_of(i + 2);
  }

 protected:
  struct Block {
    int id;
    int offset;  // of the tile in its block, in tokens
  };

  __device__ void start_first_steps() {
    next_ = first_block_of(0);
    const Block second = first_block_of(1);
    ring().start_keys(0);
    ring().start_values(0);
    next_ = second;
  }

  Block next_;  // asked for before it is needed

 private:
  __device__ Ring& ring() { return static_cast<Ring&>(*this); }
  __device__ const Ring& ring() const { return static_cast<const Ring&>(*this); }

  __device__ Block block_of(int i) const {
    const int first = ring().first_token(i);
    return block_at(first, i < this->num_steps_ && this->requests(first));
  }
  __device__ Block first_block_of(int i) const {
    int first = ring().first_token(i);
    const bool is_requested = this->requests_at_first(i, first, ring().copy_tokens());
    return block_at(first, i < this->num_steps_ && is_requested);
  }
  __device__ Block block_at(int token, bool is_requested) const {
    const TilePlace place =
        tile_place<Config::kHasChannels>(this->walk_.params, token / kTileTokens);
    return {is_requested ? this->walk_.id_of(place.block) : kNoTile, place.offset};
  }
};

}  // namespace kvx::ops::cuda

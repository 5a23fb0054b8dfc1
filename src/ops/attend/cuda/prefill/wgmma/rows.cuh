// The prefill kernel's multiplying warpgroups: 64 query rows each against the rings' tiles. While
// one warpgroup computes weights, the other's products keep the tensor cores busy; a warpgroup's
// own products with V run beside its next scores. Up to 64 rows are one warpgroup's alone.
#pragma once

#include "ops/attend/cuda/prefill/softmax.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

template <class Shape>
class PrefillRows {
  using Mma = typename Shape::Mma;
  using Ring = PrefillRing<Shape>;
  using Softmax = PrefillSoftmax<Shape>;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kScores = Softmax::kScores;
  static constexpr int kSums = Softmax::kSums;
  static constexpr int kSteps = Softmax::kSteps;
  // Of an instruction: ptxas refuses one of 256 columns to threads that begin with 128 registers.
  static constexpr int kSumsAtOnce = kSums > 64 ? 64 : kSums;
  static constexpr int kKeySteps = Shape::kKeyDim / kParts / 16;

 public:
  __device__ PrefillRows(const PrefillWorkTile& work_tile, const PrefillRing<Shape>& ring,
                         int consumer, int warp)
      : walk_(work_tile.walk),
        ring_(ring),
        consumer_(consumer),
        takes_turns_(work_tile.num_consumers() > 1),
        softmax_(work_tile.walk, ring, {work_tile, consumer, warp}) {}

  // Inline, or all that it keeps in registers would lie in memory.
  __device__ __forceinline__ void run() {
    softmax_.begin();
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums_[p][i] = 0;
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores_[p][i] = 0;
    }
    if (walk_.num_tiles > 0) attend();
  }

  __device__ void store(int split) {
    softmax_.store(sums_, split);
  }

 private:
  // Rows of the CTA's warpgroups take turns: the second waits for the first.
  static constexpr int kTurn = 1;  // named barriers: kTurn + warpgroup
  __device__ void take_turn() const {
    if (takes_turns_) wait_at(kTurn + consumer_, kConsumers * kWarpgroup);
  }
  __device__ void pass_turn() const {
    if (takes_turns_) pass(kTurn + 1 - consumer_, kConsumers * kWarpgroup);
  }

  __device__ void attend() {
    const int n = walk_.num_tiles;
    if (n > 1 && consumer_ == 1) pass_turn();  // the first begins
    ring_.wait_filled(0, 0);
    uint32_t facts = load_shared_4(ring_.tile_facts(0));
    wgmma_fence();
    multiply_keys(0);
    wgmma_commit();
    wgmma_wait<0>();
    hold_all(scores_);
    ring_.free(0, 0);
    weigh(0, facts);
    softmax_.pack(0, scores_[0], weights_);
#pragma unroll 1
    for (int i = 1; i < n; ++i) {
      ring_.wait_filled(0, i);
      facts = load_shared_4(ring_.tile_facts(i));
      take_turn();
      wgmma_fence();
      multiply_keys(i);
      wgmma_commit();
      ring_.wait_filled(1, i - 1);
      wgmma_fence();
      multiply_values(i - 1);
      wgmma_commit();
      if (consumer_ == 0 || i + 1 < n) pass_turn();  // nobody waits for the second's last
      wgmma_wait<1>();
      hold_all(scores_);
      ring_.free(0, i);
      weigh(i, facts);
      wgmma_wait<0>();
      hold_all(sums_);
      ring_.free(1, i - 1);
      softmax_.rescale(sums_);
      softmax_.pack(i, scores_[0], weights_);
    }
    ring_.wait_filled(1, n - 1);
    wgmma_fence();
    multiply_values(n - 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold_all(sums_);
  }

  __device__ void multiply_keys(int tile) {
    const uint64_t q = wgmma_tile(ring_.queries(consumer_), 16);
    const uint64_t k = wgmma_tile(ring_.tile(0, tile), 16);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int s = 0; s < kKeySteps; ++s) {
        const int step = p * kKeySteps + s;
        const int in_block = step % 4 * 32;
        wgmma_shared(Mma{}, scores_[p],
                     wgmma_advance(q, step / 4 * Shape::kQueryBlockBytes + in_block),
                     wgmma_advance(k, step / 4 * Shape::kBlockBytes + in_block), s > 0);
      }
    }
  }
  __device__ void multiply_values(int tile) {
    const uint64_t v = wgmma_tile(ring_.tile(1, tile), Shape::kBlockBytes);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int h = 0; h < kSums / kSumsAtOnce; ++h) {
          auto& sums = reinterpret_cast<float(&)[kSumsAtOnce]>(sums_[p][h * kSumsAtOnce]);
          const int block = p + h * kSumsAtOnce / 32;
          wgmma_registers(Mma{}, sums, weights_[p][s],
                          wgmma_advance(v, block * Shape::kBlockBytes + s * 16 * 128));
        }
      }
    }
  }
  template <int N>
  __device__ static void hold_all(float (&parts)[kParts][N]) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) hold(parts[p]);
  }

  __device__ void weigh(int tile, uint32_t facts) {
    if constexpr (Shape::kAcceptsFullPrecision) {
      if (Softmax::has_scales(facts)) scale_scores(tile);
    }
    softmax_.weigh(tile, facts, scores_[0]);
  }
  __device__ void scale_scores(int tile) {
    softmax_.scale(tile, scores_);
  }

  const PrefillWalk& walk_;
  const Ring& ring_;
  const int consumer_;
  const bool takes_turns_;
  Softmax softmax_;
  float scores_[kParts][kScores];
  uint32_t weights_[kParts][kSteps][4];
  float sums_[kParts][kSums];
};

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

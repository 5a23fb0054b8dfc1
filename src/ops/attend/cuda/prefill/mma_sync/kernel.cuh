// The prefill kernel on mma.sync, for all devices: 128 query rows of a KV head against tiles of 64
// tokens, by four warps that do everything. Another CTA of the multiprocessor multiplies meanwhile:
// warps that only fill would take registers from those that multiply, and without setmaxnreg could
// not give theirs away.
//
// A warp has 16 rows of each half of the CTA's, so that what ldmatrix brings of a tile meets 32:
// for 16 rows shared memory would be slower than the tensor cores.
#pragma once

#include "ops/attend/cuda/prefill/decode.cuh"
#include "ops/attend/cuda/prefill/softmax.cuh"

namespace kvx::ops::cuda {

// Fills the CTA's one tile of K and its one of V, by all threads.
template <class Shape>
class MmaFiller {
 public:
  __device__ MmaFiller(const PrefillWalk& walk, const PrefillRing<Shape>& ring)
      : walk_(walk), keys_{walk, ring, 0}, values_{walk, ring, 1}, finder_(keys_) {}

  // Tile 0.
  __device__ void begin() {
    finder_.next();
    if constexpr (Shape::kDecodes) {
      copy_unit(keys_);
      copy_unit(values_);
    } else {
      copy_rows(keys_);
    }
  }
  // Before the barrier behind which all see tile i of K.
  __device__ void finish_keys(int i) {
    if constexpr (Shape::kDecodes) {
      if (!kDecodesEarly || i == 0) decode_keys(i);
    } else {
      finder_.store_facts(i);
      wait_for_copies<0>();
    }
  }
  // Behind that barrier: V's tile is free.
  __device__ void start_values(int i) {
    if constexpr (Shape::kDecodes) {
      wait_for_copies<1>();
      decode(values_, i);
      copy_unit(values_, i + 1);
    } else {
      copy_rows(values_);
    }
  }
  // Before the barrier behind which all see tile i of V.
  __device__ void finish_values() {
    if constexpr (!Shape::kDecodes) wait_for_copies<0>();
  }
  // Behind that barrier: K's tile is free.
  __device__ void start_keys(int i) {
    if (i == walk_.num_tiles) return;
    if constexpr (!Shape::kDecodes) {
      finder_.next();
      copy_rows(keys_);
    } else if constexpr (kDecodesEarly) {
      decode_keys(i);
    }
  }

 private:
  using Side = PrefillSideWalk<Shape>;
  // Before the products with V instead of behind them: warps then wait less for each other. Where
  // scores have scales there are no registers for it.
  static constexpr bool kDecodesEarly = !Shape::kScalesScores;

  __device__ void decode_keys(int i) {
    finder_.store_facts(i);
    wait_for_copies<1>();
    decode(keys_, i);
    // V's copies of this tile are under way.
    if (i + 1 < walk_.num_tiles) finder_.next();
    copy_unit(keys_, i + 1);
  }
  __device__ void copy_rows(const Side& side) const {
    using Copier = TileCopier<Shape>;
    Copier::copy(side, finder_, Copier::own_rows(side, finder_), side.ring.tile(side.side, 0));
    commit_copies();
  }
  // A group of copies for every tile, also behind the last.
  __device__ void copy_unit(const Side& side, int tile = 0) const {
    const PackedUnits<Shape> units(side, finder_);
    if (tile < walk_.num_tiles) {
      const GroupRows own = units.own_rows();
      visit_copied<Shape>(side.facts(), [&]<class Element, class Scales>(Element, Scales) {
        units.template copy<Element, Scales>(0, units.raw_unit(0), own);
      });
    }
    commit_copies();
  }
  __device__ void decode(const Side& side, int tile) const {
    const PackedUnits<Shape> units(side, finder_);
    visit_packed<Shape>(side.facts(), [&]<class Element, class Scales>(Element, Scales) {
      units.template decode<Element, Scales>(units.raw_unit(0), tile, 0);
    });
    if constexpr (Shape::kAcceptsFullPrecision) fill_full_precision_tokens(side, tile);
  }

  const PrefillWalk& walk_;
  const Side keys_;
  const Side values_;
  GroupFinder<Shape> finder_;  // of the tile whose rows are asked for
};

template <class Shape>
class MmaRows {
  using Mma = typename Shape::Mma;
  using Ring = PrefillRing<Shape>;
  using Softmax = PrefillSoftmax<Shape>;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kScores = Softmax::kScores;
  static constexpr int kSums = Softmax::kSums;
  static constexpr int kSteps = Softmax::kSteps;
  static constexpr int kKeySteps = Shape::kKeyDim / kParts / 16;  // of a part

 public:
  __device__ MmaRows(const PrefillWorkTile& work_tile, const Ring& ring)
      : walk_(work_tile.walk), ring_(ring), low_(work_tile, ring, 0), high_(work_tile, ring, 1) {}

  // Inline, or all that it keeps in registers would lie in memory.
  __device__ __forceinline__ void run() {
    MmaFiller<Shape> filler(walk_, ring_);
    const int n = walk_.num_tiles;
    if (n > 0) filler.begin();
    each([&](Half& half) { half.softmax.begin(); });
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      filler.finish_keys(i);
      __syncthreads();
      filler.start_values(i);
      weigh(i, load_shared_4(ring_.tile_facts(i)));
      filler.finish_values();
      __syncthreads();
      filler.start_keys(i + 1);
      multiply_values();
    }
  }

  __device__ void store(int split) {
    each([&](Half& half) { half.softmax.store(half.sums, split); });
  }

 private:
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x) / kWarp;
  }

  // The warp's 16 rows of 64.
  struct Half {
    __device__ Half(const PrefillWorkTile& work_tile, const Ring& ring, int half)
        : softmax(work_tile.walk, ring, {work_tile, half, warp()}) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[p][i] = 0;
      }
    }
    Softmax softmax;
    float scores[kScores];
    uint32_t weights[kParts][kSteps][4];
    float sums[kParts][kSums];
  };
  // Not a loop over an array: its objects would lie in memory.
  template <class Do>
  __device__ void each(const Do& apply) {
    apply(low_);
    apply(high_);
  }

  __device__ void weigh(int tile, uint32_t facts) {
    find_scores(tile, facts);
    each([&](Half& half) {
      half.softmax.weigh(tile, facts, half.scores);
      half.softmax.rescale(half.sums);
      half.softmax.pack(tile, half.scores, half.weights);
    });
  }

  __device__ void find_scores(int tile, uint32_t facts) {
    each([&](Half& half) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) half.scores[i] = 0;
    });
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      multiply_keys(tile, p);
      if constexpr (Shape::kAcceptsFullPrecision) {
        if (!Softmax::has_scales(facts)) return;
        each([&](Half& half) { half.softmax.multiply_by(tile, Ring::kKeyScale + p, half.scores); });
      }
    }
    each([&](Half& half) { half.softmax.add_key_zeros(tile, half.scores); });
  }

  // sums[i] to sums[i + 3] += a times eight columns.
  template <int N>
  __device__ static void add(float (&sums)[N], int i, const uint4& a, uint32_t b0, uint32_t b1) {
    Fragment f = {{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]}};
    Mma::add(f, a.x, a.y, a.z, a.w, b0, b1);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[i + j] = f.d[j];
  }

  // This lane's row of 16, and its chunk of the first two, where a step's operand lies in a tile.
  // Steps on are other bits of the address. Queries and V: rows in the order of the lanes; K: eight
  // rows' two chunks before the next eight.
  __device__ static uint32_t rows_first() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return wgmma_chunk(lane % 16, lane / 16);
  }
  __device__ static uint32_t chunks_first() {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    return wgmma_chunk(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  // Two chunks further on, `step` times, in a tile of such blocks.
  __device__ static uint32_t at_step(uint32_t first, int step, int block_bytes) {
    return (first ^ (step % 4 * 32)) + step / 4 * block_bytes;
  }

  __device__ void multiply_keys(int tile, int part) {
    const uint32_t q = ring_.queries(0) + warp() * 16 * 128 + rows_first();
    const uint32_t k = ring_.tile(0, tile) + chunks_first();
#pragma unroll
    for (int s = part * kKeySteps; s < (part + 1) * kKeySteps; ++s) {
      const uint32_t step_q = at_step(q, s, Shape::kQueryBlockBytes);
      const uint4 low = load_matrices(step_q);
      const uint4 high = load_matrices(step_q + Shape::kQueryBytes);
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        const uint4 b = load_matrices(at_step(k, s, Shape::kBlockBytes) + n * 16 * 128);
        add(low_.scores, 8 * n, low, b.x, b.y);
        add(high_.scores, 8 * n, high, b.x, b.y);
        add(low_.scores, 8 * n + 4, low, b.z, b.w);
        add(high_.scores, 8 * n + 4, high, b.z, b.w);
      }
    }
  }

  __device__ void multiply_values() {
    const uint32_t v = ring_.tile(1, 0) + rows_first();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int c = 0; c < Shape::kValueDim / 16; ++c) {
        const uint4 b = load_matrices_transposed(at_step(v, c, Shape::kBlockBytes) + s * 16 * 128);
        const int p = 8 * c / kSums;
        each([&](Half& half) {
          const uint32_t(&w)[4] = half.weights[p][s];
          const uint4 a = {w[0], w[1], w[2], w[3]};
          add(half.sums[p], 8 * c % kSums, a, b.x, b.y);
          add(half.sums[p], 8 * c % kSums + 4, a, b.z, b.w);
        });
      }
    }
  }

  const PrefillWalk& walk_;
  const Ring& ring_;
  Half low_;
  Half high_;
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    attend_prefill_mma(const __grid_constant__ PrefillParams params) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillWorkTile work_tile = prefill_work_tile<Shape>(params);
  if (work_tile.num_rows == 0) return;
  const PrefillRing<Shape> ring(shared);
  if (threadIdx.x == 0) ring.begin(work_tile);
  __syncthreads();
  MmaRows<Shape> rows(work_tile, ring);
  rows.run();
  rows.store(work_tile.split);
}

template <class Mma, PrefillScales Scales>
PrefillKernel mma_sync_instance(const PrefillDims& dims) {
  return prefill_instance<PrefillEngine::kMmaSync, Mma, Scales>(
      dims, [](auto shape) { return attend_prefill_mma<decltype(shape)>; });
}

}  // namespace kvx::ops::cuda

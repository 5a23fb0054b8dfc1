// The latent kernel's consumers: two warpgroups with the same 64 query rows. In each step
// warpgroup 0 computes the scores and weights of buffer 0's tile, warpgroup 1 those of buffer 1's,
// and each adds both tiles' weighted values to its half of the columns, in the tiles' order:
//
//   warpgroup 0:  scores 0 | weights 0 | += weights 0 x left 0  | += weights 1 x left 1
//   warpgroup 1:  scores 1 | += weights 0 x right 0 | weights 1 | += weights 1 x right 1
//
// Rows have one maximum, which the tiles raise in turn. It only rises when a score is 2^8 above it:
// weights of up to 2^8 do no harm, and the sums are hardly ever touched.
#pragma once

#include "ops/attend/cuda/latent/instructions.cuh"
#include "ops/attend/cuda/latent/queries.cuh"
#include "ops/attend/cuda/latent/shape.cuh"
#include "ops/attend/cuda/latent/work_tile.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

template <class Mma, LatentRows Rows, int Consumer>
class LatentConsumer {
  using Shape = LatentShape;
  using Rest = LatentRestMma<Mma, Rows>;
  static constexpr int kScores = 32;      // of a thread: two rows of a tile
  static constexpr int kSumsAtOnce = 64;  // of an instruction, 128 columns
  static constexpr int kHalves = 2;       // of the warpgroup's 256 columns
  static constexpr int kSteps = kLatentTileTokens / 16;
  // Named barriers: kWeights + buffer; both warpgroups meet at kBoth.
  static constexpr int kWeights = 1;
  static constexpr int kBoth = 3;
  static constexpr int kOwn = 4;  // + consumer: warps of one warpgroup
  static constexpr int kThreads = Shape::kConsumers * kWarpgroup;

 public:
  __device__ LatentConsumer(const LatentWalk& walk, const LatentRing& ring,
                            const LatentWorkTile& work_tile, int warp)
      : walk_(walk),
        ring_(ring),
        work_tile_(work_tile),
        warp_(warp),
        g_(static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4) {}

  // The queries are in shared memory. Inline, or all that it keeps in registers would lie in
  // memory.
  __device__ __forceinline__ void run() {
    begin();
#pragma unroll 1
    for (int step = 0; step < walk_.num_steps; ++step) {
      if constexpr (Consumer == 0) {
        take_step_as_first(step);
      } else {
        take_step_as_second(step);
      }
    }
  }

  // Sums and softmax go to shared memory, where the buffers were, and from there rows go out, a
  // warp each: as code that is executed once, it must be short.
  __device__ __forceinline__ void store() {
    wait_at(kBoth, kThreads);  // the other warpgroup's products read the buffers
    const PairOrder order = walk_.params.tile_k.format.pair_order;
    const int first = first_of_pair(order, t_), second = second_of_pair(order, t_);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = sum_[r];
      sum += __shfl_xor_sync(kWholeWarp, sum, 1);
      sum += __shfl_xor_sync(kWholeWarp, sum, 2);
      if (t_ == 0) store_shared_float(ring_.sum(Consumer, row(r)), sum);
      if (t_ == 0 && Consumer == 0) store_shared_float(ring_.maximum(0, row(r)), max_[r]);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int j = 0; j < kSumsAtOnce / 4; ++j) {
          const uint32_t eight = ring_.output(row(r), (2 * Consumer + h) * 128 + 8 * j);
          store_shared_float(eight + 4 * first, sums_[h][4 * j + 2 * r]);
          store_shared_float(eight + 4 * second, sums_[h][4 * j + 2 * r + 1]);
        }
      }
    }
    wait_at(kBoth, kThreads);
#pragma unroll 1
    for (int row = Consumer * kWarpgroup / kWarp + warp_; row < work_tile_.num_rows;
         row += kThreads / kWarp) {
      store_row(row);
    }
  }

 private:
  __device__ int row(int r) const {
    return 16 * warp_ + g_ + 8 * r;
  }

  __device__ __forceinline__ void begin() {
    const LatentParams& params = walk_.params;
    plain_ = {walk_.tokens.begin, walk_.tokens.end};
    // The first row sees the fewest tokens at the end, the last the fewest at the beginning.
    const int last_row = work_tile_.first_row + work_tile_.num_rows - 1;
    const TokenRange first =
        seen_by(params, work_tile_.shape, work_tile_.first_row / params.q_per_kv);
    const TokenRange last = seen_by(params, work_tile_.shape, last_row / params.q_per_kv);
    plain_.begin = max(plain_.begin, last.begin);
    plain_.end = min(plain_.end, first.end);
    if (params.tree_mask) plain_.end = min(plain_.end, work_tile_.shape.first_new_token());
    if (params.softcap != 0) plain_.end = plain_.begin;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max_[r] = kLeastMaximum;
      sum_[r] = 0;
      by_[r] = load_shared_float(ring_.score_scale(row(r)));
    }
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) sums_[h][i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) scores_[i] = 0;
  }

  __device__ __forceinline__ void take_step_as_first(int step) {
    multiply_keys(0, step);
    weigh(0, step);
    pass(kWeights + 0, kThreads);
    rescale_sums();
    wgmma_fence();
    multiply_own_weights(0, kLeft);
    wgmma_commit();
    wgmma_wait<0>();
    hold_sums();
    ring_.free(0, kLeft);

    wait_at(kWeights + 1, kThreads);
    adopt_maximum(1);
    rescale_sums();
    wgmma_fence();
    multiply_others_weights(1, kLeft);
    wgmma_commit();
    wgmma_wait<0>();
    hold_sums();
    ring_.free(1, kLeft);
    ring_.free(1, kRest);
  }

  __device__ __forceinline__ void take_step_as_second(int step) {
    multiply_keys(1, step);
    wait_at(kWeights + 0, kThreads);
    adopt_maximum(0);
    rescale_sums();
    ring_.wait_filled(0, kRight, step);
    wgmma_fence();
    multiply_others_weights(0, kRight);
    wgmma_commit();
    weigh(1, step);
    pass(kWeights + 1, kThreads);
    wgmma_wait<0>();
    hold_sums();
    ring_.free(0, kRight);
    ring_.free(0, kRest);

    rescale_sums();
    wgmma_fence();
    multiply_own_weights(1, kRight);
    wgmma_commit();
    wgmma_wait<0>();
    hold_sums();
    ring_.free(1, kRight);
  }

  // --- products ---

  __device__ __forceinline__ void multiply_keys(int buffer, int step) {
    // Parts in the order in which they are filled.
    ring_.wait_filled(buffer, kLeft, step);
    wgmma_fence();
    multiply_key_slabs(buffer, 0, Shape::kPartSlabs);
    ring_.wait_filled(buffer, kRight, step);
    wgmma_fence();
    multiply_key_slabs(buffer, Shape::kPartSlabs, 2 * Shape::kPartSlabs);
    ring_.wait_filled(buffer, kRest, step);
    wgmma_fence();
    multiply_rest(buffer);
    wgmma_commit();
    wgmma_wait<0>();
    hold(scores_);
  }
  __device__ __forceinline__ void multiply_key_slabs(int buffer, int begin, int end) {
    const uint64_t q = wgmma_tile(ring_.queries(), 16);
    const uint64_t k = wgmma_tile(ring_.slab(buffer, 0), 16);
#pragma unroll
    for (int slab = begin; slab < end; ++slab) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = slab * Shape::kSlabBytes + i * 32;
        wgmma_shared(Mma{}, scores_, wgmma_advance(q, at), wgmma_advance(k, at), slab > 0 || i > 0);
      }
    }
  }

  // The last slab's keys, against what the queries have for them.
  __device__ __forceinline__ void multiply_rest(int buffer) {
    const uint64_t k = wgmma_tile(ring_.slab(buffer, Shape::kRestSlab), 16);
#pragma unroll
    for (int pass = 0; pass < Rest::kPasses; ++pass) {
      const uint64_t q = wgmma_tile(
          pass == 0 ? ring_.queries() + Shape::kRestSlab * Shape::kSlabBytes : ring_.low_queries(),
          16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_shared(typename Rest::Type{}, scores_, wgmma_advance(q, i * 32),
                     wgmma_advance(k, i * 32), true);
      }
    }
  }

  __device__ uint64_t values(int buffer, LatentPart part) const {
    return wgmma_tile(ring_.slab(buffer, part == kLeft ? 0 : Shape::kPartSlabs), Shape::kSlabBytes);
  }
  __device__ __forceinline__ void multiply_own_weights(int buffer, LatentPart part) {
    const uint64_t v = values(buffer, part);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        wgmma_registers(Mma{}, sums_[h], weights_[s],
                        wgmma_advance(v, h * 2 * Shape::kSlabBytes + s * 16 * 128));
      }
    }
  }
  __device__ __forceinline__ void multiply_others_weights(int buffer, LatentPart part) {
    const uint64_t v = values(buffer, part);
    const uint64_t w = wgmma_tile(ring_.weights(buffer), 16);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        wgmma_shared_weights(Mma{}, sums_[h], wgmma_advance(w, s * 32),
                             wgmma_advance(v, h * 2 * Shape::kSlabBytes + s * 16 * 128));
      }
    }
  }
  __device__ __forceinline__ void hold_sums() {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) hold(sums_[h]);
  }

  // --- softmax ---

  // Below all scores, and not -infinity, from which nothing could be taken.
  static constexpr float kLeastMaximum = -1e30f;

  // Scores become weights: 16-bit numbers in registers, and in shared memory for the others.
  __device__ __forceinline__ void weigh(int buffer, int step) {
    const int first = walk_.tokens.begin / kLatentStepTokens * kLatentStepTokens;
    const int token = first + step * kLatentStepTokens + buffer * kLatentTileTokens;
    float by[2] = {by_[0], by_[1]};
    const uint32_t missing = load_shared_4(ring_.missing(buffer));
    const bool is_plain =
        token >= plain_.begin && token + kLatentTileTokens <= plain_.end && missing == 0;
    if (!is_plain) cap_and_hide(token, missing, by);
    raise_maximum(by);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (t_ == 0) store_shared_float(ring_.maximum(buffer, row(r)), max_[r]);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      scores_[i] = fast_exp2(scores_[i] * by[r] - max_[r]);
      sum_[r] += scores_[i];
    }
    // The weights take the place of keys that other warps may still multiply.
    wait_at(kOwn + Consumer, kWarpgroup);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights_[s][i] = Mma::pack(scores_[8 * s + 2 * i], scores_[8 * s + 2 * i + 1]);
      }
      const int lane = 4 * g_ + t_;
      const int to_row = 16 * warp_ + lane % 16, to_chunk = 2 * s + lane / 16;
      store_matrices(ring_.weights(buffer) + wgmma_chunk(to_row, to_chunk), weights_[s]);
    }
    fence_bulk_copies();
  }

  __device__ __forceinline__ void raise_maximum(const float (&by)[2]) {
    constexpr float kSlack = 8.0f;
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = scores_[2 * r];
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        top[r] = fmaxf(top[r], fmaxf(scores_[i + 2 * r], scores_[i + 2 * r + 1]));
      }
      top[r] *= by[r];
    }
    const bool rises = top[0] > max_[0] + kSlack || top[1] > max_[1] + kSlack;
    if (!__any_sync(kWholeWarp, rises)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = top[r];
      most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, 2));
      raise_to(r, fmaxf(most, max_[r]));
    }
  }
  // What the other warpgroup's tile made of the maximum.
  __device__ __forceinline__ void adopt_maximum(int buffer) {
#pragma unroll
    for (int r = 0; r < 2; ++r) raise_to(r, load_shared_float(ring_.maximum(buffer, row(r))));
  }
  // The sums follow when no product is under way.
  __device__ __forceinline__ void raise_to(int r, float max) {
    const float rescale = fast_exp2(max_[r] - max);
    sum_[r] *= rescale;
    rescale_[r] *= rescale;
    max_[r] = max;
  }
  __device__ __forceinline__ void rescale_sums() {
    const bool changes = rescale_[0] != 1 || rescale_[1] != 1;
    if (!__any_sync(kWholeWarp, changes)) return;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int i = 0; i < kSumsAtOnce; ++i) sums_[h][i] *= rescale_[i / 2 % 2];
    }
    rescale_[0] = rescale_[1] = 1;
  }

  // Softcap, to units of log2; then what a row does not see. tanh(x) = 1 - 2 / (e^2x + 1).
  __device__ __forceinline__ void cap_and_hide(int token, uint32_t missing, float (&by)[2]) {
    const LatentParams& params = walk_.params;
    // Computed here: in front of the loop over steps, the compiler would keep what it is for every
    // column, and spill it.
    int t = t_;
    asm volatile("" : "+r"(t));
    if (params.softcap != 0) {
      const float most = params.softcap;
      const float to_exponent = __fdividef(2.0f * kLog2E, most);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float x = fast_exp2(scores_[i] * by[i / 2 % 2] * to_exponent);
        scores_[i] = most * kLog2E * (1.0f - __fdividef(2.0f, x + 1.0f));
      }
      by[0] = by[1] = 1;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_sequence = work_tile_.first_row + min(row(r), work_tile_.num_rows - 1);
      const int new_token = of_sequence / params.q_per_kv;
      const TokenRange seen = seen_by(params, work_tile_.shape, new_token);
      const int begin = max(seen.begin, walk_.tokens.begin), end = min(seen.end, walk_.tokens.end);
      const uint8_t* mask =
          params.tree_mask ? params.tree_mask + (int64_t{work_tile_.shape.q_start} + new_token) *
                                                    params.tree_mask_stride
                           : nullptr;
#pragma unroll
      for (int i = 0; i < kScores / 2; ++i) {
        const int column = i / 2 * 8 + 2 * t + i % 2;
        const int at = token + column;
        bool is_hidden = at < begin || at >= end || (missing >> (column / 16 * 8) & 1u) != 0;
        const int j = at - work_tile_.shape.first_new_token();
        if (mask && !is_hidden && j >= 0) is_hidden = mask[j] == 0;
        if (is_hidden) scores_[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
      }
    }
  }

  // --- the end ---

  __device__ __forceinline__ void store_row(int row) const {
    const Softmax2 tokens = {
        load_shared_float(ring_.maximum(0, row)),
        load_shared_float(ring_.sum(0, row)) + load_shared_float(ring_.sum(1, row))};
    const float unit = latent_unit(walk_.params, work_tile_.kv_head);
    store_latent_row(walk_.params, work_tile_, row, tokens, [&](int d) -> float4 {
      const uint4 bits = load_shared_16(ring_.output(row, d));
      return {__uint_as_float(bits.x) * unit, __uint_as_float(bits.y) * unit,
              __uint_as_float(bits.z) * unit, __uint_as_float(bits.w) * unit};
    });
  }

  const LatentWalk& walk_;
  const LatentRing& ring_;
  const LatentWorkTile& work_tile_;
  const int warp_;    // of the warpgroup
  const int g_;       // the thread's rows are 16 warp + g and 8 more, its columns 8 j + 2 t and the
  const int t_;       // next
  TokenRange plain_;  // seen by all rows, and their scores are not capped
  float by_[2];       // brings scores to their size; without a cap, to units of log2
  float max_[2];      // of rows, in units of log2
  float sum_[2];      // of the thread's own columns of its buffer's tiles
  float rescale_[2] = {1.0f, 1.0f};  // what the sums have not been multiplied by yet
  float scores_[kScores];
  uint32_t weights_[kSteps][4];
  float sums_[kHalves][kSumsAtOnce];
};

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

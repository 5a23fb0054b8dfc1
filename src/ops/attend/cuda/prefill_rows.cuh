// The prefill kernel's multiplying warpgroups: 64 query rows each against the rings' tiles. While
// one warpgroup computes weights, the other's products keep the tensor cores busy; a warpgroup's
// own products with V run beside its next scores.
#pragma once

#include "ops/attend/cuda/prefill_output.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

template <class Shape>
class PrefillRows {
  using Mma = typename Shape::Mma;
  using Ring = PrefillRing<Shape>;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kTokens = Shape::kTokens;
  static constexpr int kScores = kTokens / 2;             // of a thread, a part
  static constexpr int kSums = Shape::kDim / kParts / 2;  // likewise
  static constexpr int kSteps = kTokens / 16;             // of a product with V
  static constexpr int kKeySteps = Shape::kDim / kParts / 16;

 public:
  // warp: of all that multiply.
  __device__ PrefillRows(const PrefillWalk& walk, const SequenceShape& shape,
                         const PrefillRing<Shape>& ring, int warp, int first_row, int num_rows)
      : walk_(walk),
        job_(walk.job),
        ring_(ring),
        consumer_(warp / 4),
        rows_{walk.job,
              shape,
              walk.head,
              warp / 4,
              warp % 4,
              first_row + warp / 4 * kConsumerRows,
              min(max(num_rows - warp / 4 * kConsumerRows, 0), kConsumerRows)} {}

  __device__ void run() {
    const PrefillQueries<Shape> queries(rows_, ring_.shared);
    queries.load();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PrefillRowFacts facts = queries.facts_of(rows_.row(r));
      score_scale_[r] = facts.score_scale;
      query_sum_[r] = facts.sum;
    }
    find_seen();
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
    PrefillRowEnd ends[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // What all scores of a row have in common only moves its maximum; a cap has seen it.
      const float bias = job_.args.softcap == 0 ? bias_of(r) : 0.0f;
      ends[r] = {{max_[r] - unit_ + bias, over_quad_sum(sum_[r])}, over_quad_sum(zeros_[r])};
    }
    PrefillOutput<Shape>(rows_, sums_).store(ends, split);
  }

 private:
  // Rows of the CTA's warpgroups take turns: the second waits for the first.
  static constexpr int kTurn = 1;  // named barriers: kTurn + warpgroup
  __device__ void take_turn() const {
    wait_at(kTurn + consumer_, kConsumers * kWarpgroup);
  }
  __device__ void pass_turn() const {
    pass(kTurn + 1 - consumer_, kConsumers * kWarpgroup);
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
    pack_weights(0);
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
      rescale_sums();
      pack_weights(i);
    }
    ring_.wait_filled(1, n - 1);
    wgmma_fence();
    multiply_values(n - 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold_all(sums_);
  }

  __device__ void multiply_keys(int tile) {
    const uint64_t q = wgmma_tile(PrefillQueries<Shape>(rows_, ring_.shared).tile(), 16);
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
        wgmma_registers(Mma{}, sums_[p], weights_[p][s],
                        wgmma_advance(v, p * Shape::kBlockBytes + s * 16 * 128));
      }
    }
  }
  template <int N>
  __device__ static void hold_all(float (&parts)[kParts][N]) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) hold(parts[p]);
  }

  __device__ TokenRange seen_of(int r) const {
    if (r >= rows_.num_rows) return {0, 0};
    return seen_by(job_, rows_.shape, (rows_.first_row + r) / job_.q_per_kv);
  }
  __device__ void find_seen() {
    const TokenRange& tokens = walk_.tokens;
    if (rows_.num_rows > 0) {
      seen_by_all_ = {max(seen_of(rows_.num_rows - 1).begin, tokens.begin),
                      min(seen_of(0).end, tokens.end)};
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const TokenRange seen = seen_of(rows_.row(r));
      seen_[r] = {max(seen.begin, tokens.begin), min(seen.end, tokens.end)};
    }
  }

  // Of a tile's numbers, one a token, those of this thread's two columns of eight.
  __device__ float2 pair_of(uint32_t numbers, int eight) const {
    const uint2 bits = load_shared_8(numbers + 4 * (8 * eight + 2 * rows_.t));
    return {__uint_as_float(bits.x), __uint_as_float(bits.y)};
  }

  // Scores of a tile become weights, 2^(score - reference); sums_ have to be multiplied by by_.
  __device__ void weigh(int tile, uint32_t facts) {
    [[maybe_unused]] const bool has_scales =
        Shape::kScalesScores || (Shape::kTakesWide && (facts & kHasWideScales) != 0);
    if constexpr (Shape::kTakesWide) {
      if (has_scales) scale_scores(tile);
    }
    float by_unit[2] = {score_scale_[0], score_scale_[1]};
    if (job_.args.softcap != 0) {
      cap();
      by_unit[0] = by_unit[1] = 1.0f;
    }
    const int token = walk_.first_token + tile * kTokens;
    const uint32_t missing = Shape::kTakesWide ? facts & kMissingGroups : facts;
    const bool sees_all =
        token >= seen_by_all_.begin && token + kTokens <= seen_by_all_.end && missing == 0;
    if (!sees_all) hide(token, missing);
    raise_maximum(by_unit);
    if constexpr (Shape::kTakesWide) {
      if (has_scales) choose_unit(tile);
    }
    const float reference[2] = {max_[0] - unit_, max_[1] - unit_};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      scores_[0][i] = fast_exp2(fmaf(scores_[0][i], by_unit[r], -reference[r]));
      sum_[r] += scores_[0][i];
    }
    if constexpr (Shape::kScalesScores) {
      add_zeros(tile);
    } else if constexpr (Shape::kTakesWide) {
      if (has_scales) scale_weights(tile);
    }
  }

  // Sums over codes become scores: of the parts, each with its scale, and the zero's share.
  __device__ void scale_scores(int tile) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t scales = ring_.token_scales(tile, Ring::kKeyScale + p);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float2 by = pair_of(scales, i / 4);
#pragma unroll
        for (int j = i; j < i + 4; ++j) {
          const float scale = j % 2 == 0 ? by.x : by.y;
          scores_[0][j] =
              p == 0 ? scores_[0][j] * scale : fmaf(scores_[p][j], scale, scores_[0][j]);
        }
      }
    }
    if constexpr (!Shape::kScalesScores) return;
    if (!has_zeros(job_.packed.k)) return;
    const uint32_t zeros = ring_.token_scales(tile, Ring::kKeyZero);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 zero = pair_of(zeros, i / 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scores_[0][i + 2 * r] = fmaf(query_sum_[r], zero.x, scores_[0][i + 2 * r]);
        scores_[0][i + 2 * r + 1] = fmaf(query_sum_[r], zero.y, scores_[0][i + 2 * r + 1]);
      }
    }
  }
  __device__ static bool has_zeros(const CudaSide& side) {
    return side.view.spec.scale_rule == format::ScaleRule::kAffine;
  }

  // Of scores: q . mean where K has had its mean taken away.
  __device__ float bias_of(int r) const {
    return PrefillQueries<Shape>(rows_, ring_.shared).facts_of(rows_.row(r)).bias;
  }

  // Softcap, to units of log2. tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it.
  __device__ void cap() {
    const float most = job_.args.softcap;
    const float to_exponent = 2.0f * kLog2E / most;
    const float bias[2] = {bias_of(0) * to_exponent, bias_of(1) * to_exponent};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      const float x = fmaf(scores_[0][i], score_scale_[r] * to_exponent, bias[r]);
      scores_[0][i] = most * kLog2E * (1.0f - __fdividef(2.0f, fast_exp2(x) + 1.0f));
    }
  }

  __device__ void hide(int token, uint32_t missing) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = i / 4 * 8 + 2 * rows_.t + i % 2;
      const TokenRange& seen = seen_[i / 2 % 2];
      const bool is_missing = (missing >> (i / 8) & 1) != 0;
      if (is_missing || token + column < seen.begin || token + column >= seen.end) {
        scores_[0][i] = -INFINITY;
      }
    }
  }

  // The maximum only rises when a score is 2^8 above it: weights of up to 2^8 do no harm, and the
  // sums are hardly ever touched.
  __device__ void raise_maximum(const float (&by_unit)[2]) {
    constexpr float kSlack = 8.0f;
    float top[2] = {scores_[0][0], scores_[0][2]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores_[0][i]);
    bool rises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] *= by_unit[r];
      rises |= top[r] > max_[r] + kSlack;
      by_[r] = 1.0f;
    }
    is_rescaled_ = __any_sync(kWholeWarp, rises);
    if (!is_rescaled_) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float most = fmaxf(over_quad_max(top[r]), max_[r]);
      by_[r] = fast_exp2(max_[r] - most);
      max_[r] = most;
      sum_[r] *= by_[r];
      zeros_[r] *= by_[r];
    }
  }
  __device__ static float over_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
  }
  // Weights go to 16 bits after they are multiplied by V's scales, so those must not be far from 1:
  // all weights are 2^unit_ times as large. It falls when a scale is too large for it.
  __device__ void choose_unit(int tile) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < Shape::kTops; ++i) {
      top = fmaxf(top, __uint_as_float(load_shared_4(ring_.tops(tile) + 4 * i)));
    }
    constexpr float kMost = 16.0f, kLargestUnit = 60.0f;
    if (!(top > 0 && top < INFINITY) || (has_unit_ && top * exp2f(unit_) <= kMost)) return;
    const float unit = fminf(fmaxf(-static_cast<float>(ilogbf(top)), -kLargestUnit), kLargestUnit);
    const float by = exp2f(unit - unit_);
    unit_ = unit;
    has_unit_ = true;
    is_rescaled_ = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      by_[r] *= by;
      sum_[r] *= by;
      zeros_[r] *= by;
    }
  }

  __device__ void add_zeros(int tile) {
    if (!has_zeros(job_.packed.v)) return;
    const uint32_t zeros = ring_.token_scales(tile, Ring::kValueZero);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 zero = pair_of(zeros, i / 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* weights = &scores_[0][i + 2 * r];
        zeros_[r] = fmaf(weights[0], zero.x, fmaf(weights[1], zero.y, zeros_[r]));
      }
    }
  }

  // Where packed tokens have no scales: weights of all tokens, by V's.
  __device__ void scale_weights(int tile) {
    const uint32_t scales = ring_.token_scales(tile, Ring::kValueScale);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 by = pair_of(scales, i / 4);
#pragma unroll
      for (int j = i; j < i + 4; ++j) scores_[0][j] *= j % 2 == 0 ? by.x : by.y;
    }
  }

  __device__ void rescale_sums() {
    if (!is_rescaled_) return;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums_[p][i] *= by_[i / 2 % 2];
    }
  }

  // To 16 bits: what a step's product takes.
  __device__ void pack_weights(int tile) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t scales = ring_.token_scales(tile, Ring::kValueScale + p);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        float2 by = {1.0f, 1.0f};
        if constexpr (Shape::kScalesScores) by = pair_of(scales, i / 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* weights = &scores_[0][i + 2 * r];
          weights_[p][i / 8][i % 8 / 2 + r] = Mma::pack(weights[0] * by.x, weights[1] * by.y);
        }
      }
    }
  }

  const PrefillWalk& walk_;
  const AttendJob& job_;
  const Ring& ring_;
  const int consumer_;
  const PrefillRowSet rows_;
  TokenRange seen_by_all_ = {0, 0};
  TokenRange seen_[2];
  float score_scale_[2];
  float query_sum_[2];
  // Far below every score, but finite: no difference of two of them is a NaN.
  float max_[2] = {-1e30f, -1e30f};
  float sum_[2] = {};
  float zeros_[2] = {};  // what V's zeros add to every channel
  float by_[2] = {1.0f, 1.0f};
  float unit_ = 0;
  bool has_unit_ = !Shape::kScalesScores;  // packed tokens without scales: theirs are 1
  bool is_rescaled_ = false;
  float scores_[kParts][kScores];
  uint32_t weights_[kParts][kSteps][4];
  float sums_[kParts][kSums];
};

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

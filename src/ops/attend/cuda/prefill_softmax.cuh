// The prefill kernels' softmax: 64 query rows of four warps, two of a thread. A tile's scores
// become weights in registers, in the order in which the tensor cores leave sums and take operands.
#pragma once

#include "ops/attend/cuda/prefill_output.cuh"

namespace kvx::ops::cuda {

template <class Shape>
class PrefillSoftmax {
  using Mma = typename Shape::Mma;
  using Ring = PrefillRing<Shape>;

 public:
  static constexpr int kParts = Shape::kParts;
  static constexpr int kTokens = Shape::kTokens;
  static constexpr int kScores = kTokens / 2;             // of a thread, a part
  static constexpr int kSums = Shape::kDim / kParts / 2;  // likewise
  static constexpr int kSteps = kTokens / 16;             // of a product with V

  __device__ PrefillSoftmax(const PrefillWalk& walk, const Ring& ring, const PrefillRowSet& rows)
      : walk_(walk), job_(walk.job), ring_(ring), rows_(rows) {}

  __device__ void begin() {
    const PrefillQueries<Shape> queries(rows_, ring_);
    queries.load();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PrefillRowFacts facts = queries.facts_of(rows_.row(r));
      score_scale_[r] = facts.score_scale;
      query_sum_[r] = facts.sum;
    }
    find_seen();
  }

  // Whether sums of products have scales beside those in the tile. facts: the tile's.
  __device__ static bool has_scales(uint32_t facts) {
    return Shape::kScalesScores || (Shape::kTakesWide && (facts & kHasWideScales) != 0);
  }
  // Sums over codes become scores, for eight tokens at a time: of a part, with its scale, beside
  // those of the parts before it.
  __device__ void add_part(int tile, int part, int eight, const float* sums, float* scores) const {
    const float2 by = pair_of(ring_.token_scales(tile, Ring::kKeyScale + part), eight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float scale = j % 2 == 0 ? by.x : by.y;
      scores[j] = part == 0 ? sums[j] * scale : fmaf(sums[j], scale, scores[j]);
    }
  }
  // By number `which` of each token.
  __device__ void multiply_by(int tile, int which, float (&scores)[kScores]) const {
    const uint32_t numbers = ring_.token_scales(tile, which);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 by = pair_of(numbers, i / 4);
#pragma unroll
      for (int j = i; j < i + 4; ++j) scores[j] *= j % 2 == 0 ? by.x : by.y;
    }
  }
  // What K's zeros add to scores.
  __device__ void add_key_zeros(int tile, float (&scores)[kScores]) const {
    if constexpr (!Shape::kScalesScores) return;
    if (!has_zeros(job_.packed.k)) return;
    const uint32_t zeros = ring_.token_scales(tile, Ring::kKeyZero);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 zero = pair_of(zeros, i / 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scores[i + 2 * r] = fmaf(query_sum_[r], zero.x, scores[i + 2 * r]);
        scores[i + 2 * r + 1] = fmaf(query_sum_[r], zero.y, scores[i + 2 * r + 1]);
      }
    }
  }

  // Scores of a tile become weights, 2^(score - reference); the sums of the tiles before it have to
  // be rescaled.
  __device__ void weigh(int tile, uint32_t facts, float (&scores)[kScores]) {
    float by_unit[2] = {score_scale_[0], score_scale_[1]};
    if (job_.args.softcap != 0) {
      cap(scores);
      by_unit[0] = by_unit[1] = 1.0f;
    }
    const int token = walk_.first_token + tile * kTokens;
    const uint32_t missing = Shape::kTakesWide ? facts & kMissingGroups : facts;
    const bool sees_all =
        token >= seen_by_all_.begin && token + kTokens <= seen_by_all_.end && missing == 0;
    if (!sees_all) hide(token, missing, scores);
    raise_maximum(by_unit, scores);
    if constexpr (Shape::kTakesWide) {
      if (has_scales(facts)) choose_unit(tile);
    }
    const float reference[2] = {max_[0] - unit_, max_[1] - unit_};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      scores[i] = fast_exp2(fmaf(scores[i], by_unit[r], -reference[r]));
      sum_[r] += scores[i];
    }
    if constexpr (Shape::kScalesScores) {
      add_zeros(tile, scores);
    } else if constexpr (Shape::kTakesWide) {
      // Of all tokens, where packed ones have no scales.
      if (has_scales(facts)) multiply_by(tile, Ring::kValueScale, scores);
    }
  }

  __device__ void rescale(float (&sums)[kParts][kSums]) const {
    if (!is_rescaled_) return;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[p][i] *= by_[i / 2 % 2];
    }
  }

  // To 16 bits: what a step's product takes.
  __device__ void pack(int tile, const float (&scores)[kScores],
                       uint32_t (&weights)[kParts][kSteps][4]) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t scales = ring_.token_scales(tile, Ring::kValueScale + p);
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        float2 by = {1.0f, 1.0f};
        if constexpr (Shape::kScalesScores) by = pair_of(scales, i / 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* pair = &scores[i + 2 * r];
          weights[p][i / 8][i % 8 / 2 + r] = Mma::pack(pair[0] * by.x, pair[1] * by.y);
        }
      }
    }
  }

  // Divides the sums and stores them.
  __device__ void store(float (&sums)[kParts][kSums], int split) const {
    PrefillRowEnd ends[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // What all scores of a row have in common only moves its maximum; a cap has seen it.
      const float bias = job_.args.softcap == 0 ? bias_of(r) : 0.0f;
      ends[r] = {{max_[r] - unit_ + bias, over_quad_sum(sum_[r])}, over_quad_sum(zeros_[r])};
    }
    PrefillOutput<Shape>(rows_, sums).store(ends, split);
  }

 private:
  // Of the piece's tokens.
  __device__ TokenRange seen_of(int r) const {
    if (r >= rows_.num_rows) return {0, 0};
    const TokenRange seen = seen_by(job_, rows_.shape, (rows_.first_row + r) / job_.q_per_kv);
    return {max(seen.begin, walk_.tokens.begin), min(seen.end, walk_.tokens.end)};
  }
  __device__ void find_seen() {
    if (rows_.num_rows > 0) {
      seen_by_all_ = {seen_of(rows_.num_rows - 1).begin, seen_of(0).end};
    }
  }

  // Of a tile's numbers, one a token, those of this thread's two columns of eight.
  __device__ float2 pair_of(uint32_t numbers, int eight) const {
    const uint2 bits = load_shared_8(numbers + 4 * (8 * eight + 2 * rows_.t));
    return {__uint_as_float(bits.x), __uint_as_float(bits.y)};
  }

  __device__ static bool has_zeros(const CudaSide& side) {
    return side.view.spec.scale_rule == format::ScaleRule::kAffine;
  }

  // Of scores: q . mean where K has had its mean taken away.
  __device__ float bias_of(int r) const {
    return PrefillQueries<Shape>(rows_, ring_).facts_of(rows_.row(r)).bias;
  }

  // Softcap, to units of log2. tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it.
  __device__ void cap(float (&scores)[kScores]) const {
    const float most = job_.args.softcap;
    const float to_exponent = 2.0f * kLog2E / most;
    const float bias[2] = {bias_of(0) * to_exponent, bias_of(1) * to_exponent};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      const float x = fmaf(scores[i], score_scale_[r] * to_exponent, bias[r]);
      scores[i] = most * kLog2E * (1.0f - __fdividef(2.0f, fast_exp2(x) + 1.0f));
    }
  }

  // What rows see is found here, where few tiles come: it would take four registers of all.
  __device__ void hide(int first_token, uint32_t missing, float (&scores)[kScores]) const {
    const TokenRange seen[2] = {seen_of(rows_.row(0)), seen_of(rows_.row(1))};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int token = first_token + i / 4 * 8 + 2 * rows_.t + i % 2;
      const TokenRange& by_row = seen[i / 2 % 2];
      const bool is_missing = (missing >> (i / 8) & 1) != 0;
      if (is_missing || token < by_row.begin || token >= by_row.end) {
        scores[i] = -INFINITY;
      }
    }
  }

  // The maximum only rises when a score is 2^8 above it: weights of up to 2^8 do no harm, and the
  // sums are hardly ever touched.
  __device__ void raise_maximum(const float (&by_unit)[2], const float (&scores)[kScores]) {
    constexpr float kSlack = 8.0f;
    float top[2] = {scores[0], scores[2]};
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
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

  __device__ void add_zeros(int tile, const float (&scores)[kScores]) {
    if (!has_zeros(job_.packed.v)) return;
    const uint32_t zeros = ring_.token_scales(tile, Ring::kValueZero);
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
      const float2 zero = pair_of(zeros, i / 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* weights = &scores[i + 2 * r];
        zeros_[r] = fmaf(weights[0], zero.x, fmaf(weights[1], zero.y, zeros_[r]));
      }
    }
  }

  const PrefillWalk& walk_;
  const AttendJob& job_;
  const Ring& ring_;
  const PrefillRowSet rows_;  // not a reference: the object that has both would lie in memory
  TokenRange seen_by_all_ = {0, 0};
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
};

}  // namespace kvx::ops::cuda

// The prefill kernels' softmax: 64 query rows of four warps, two of a thread. A tile's scores
// become weights in registers, in the order in which the tensor cores leave sums and take operands.
#pragma once

#include "ops/attend/cuda/prefill/output.cuh"

namespace kvx::ops::cuda {

template <class Shape>
class PrefillSoftmax {
  using Mma = typename Shape::Mma;
  using Ring = PrefillRing<Shape>;

 public:
  static constexpr int kParts = Shape::kParts;
  static constexpr int kTokens = Shape::kTokens;
  static constexpr int kScores = kTokens / 2;                  // of a thread, a part
  static constexpr int kSums = Shape::kValueDim / kParts / 2;  // likewise
  static constexpr int kSteps = kTokens / 16;                  // of a product with V

  __device__ PrefillSoftmax(const PrefillWalk& walk, const Ring& ring, const PrefillRowSet& rows)
      : walk_(walk), params_(walk.params), ring_(ring), rows_(rows) {}

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
    return Shape::kScalesScores ||
           (Shape::kAcceptsFullPrecision && (facts & kHasFullPrecisionScales) != 0);
  }
  // Sums over codes, of the parts of a row, become scores, in those of the first part.
  __device__ void scale(int tile, float (&sums)[kParts][kScores]) const {
    float(&scores)[kScores] = sums[0];
    if constexpr (kParts == 2) {
      each_token<2>(tile, Ring::kKeyScale, [&](int i, const float(&by)[2]) {
        scores[i] = fmaf(sums[1][i], by[1], scores[i] * by[0]);
      });
    } else if (!has_key_zeros()) {
      multiply_by(tile, Ring::kKeyScale, scores);
      return;
    } else {
      static_assert(!Shape::kScalesScores || Ring::kKeyZero == Ring::kKeyScale + kParts);
      each_token<2>(tile, Ring::kKeyScale, [&](int i, const float(&of)[2]) {
        scores[i] = fmaf(query_sum_[i / 2 % 2], of[1], scores[i] * of[0]);
      });
      return;
    }
    add_key_zeros(tile, scores);
  }
  // By number `which` of each token.
  __device__ void multiply_by(int tile, int which, float (&scores)[kScores]) const {
    each_token<1>(tile, which, [&](int i, const float(&by)[1]) { scores[i] *= by[0]; });
  }
  // What K's zeros add to scores.
  __device__ void add_key_zeros(int tile, float (&scores)[kScores]) const {
    if (!has_key_zeros()) return;
    each_token<1>(tile, Ring::kKeyZero, [&](int i, const float(&zero)[1]) {
      scores[i] = fmaf(query_sum_[i / 2 % 2], zero[0], scores[i]);
    });
  }

  // Scores of a tile become weights, 2^(score - reference); the sums of the tiles before it have to
  // be rescaled.
  __device__ void weigh(int tile, uint32_t facts, float (&scores)[kScores]) {
    float by_unit[2] = {score_scale_[0], score_scale_[1]};
    const int token = walk_.first_token + tile * kTokens;
    if (params_.key_offsets.scores != nullptr) add_offsets(token, by_unit, scores);
    if (params_.softcap != 0) cap(by_unit, scores);
    const uint32_t missing = Shape::kAcceptsFullPrecision ? facts & kMissingGroups : facts;
    const bool sees_all =
        token >= seen_by_all_.begin && token + kTokens <= seen_by_all_.end && missing == 0;
    if (!sees_all) hide(token, missing, scores);
    raise_maximum(by_unit, scores);
    if constexpr (Shape::kAcceptsFullPrecision) {
      if (has_scales(facts)) choose_unit(tile);
    }
    const float reference[2] = {max_[0] - unit_, max_[1] - unit_};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      scores[i] = fast_exp2(fmaf(scores[i], by_unit[r], -reference[r]));
      sum_[r] += scores[i];
    }
    if constexpr (Shape::kAcceptsFullPrecision && !Shape::kScalesScores) {
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

  // To 16 bits: what a step's product takes. V's zeros take their share.
  __device__ void pack(int tile, const float (&scores)[kScores],
                       uint32_t (&weights)[kParts][kSteps][4]) {
    const auto pack_pair = [&](int p, int i, float a, float b) {
      weights[p][i / 8][i % 8 / 2] = Mma::pack(scores[i] * a, scores[i + 1] * b);
    };
    if constexpr (!Shape::kScalesScores) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) pack_pair(0, i, 1.0f, 1.0f);
    } else if (!has_zeros(params_.tile_v)) {
      each_pair<kParts>(tile, Ring::kValueScale,
                        [&](int i, const float(&a)[kParts], const float(&b)[kParts]) {
#pragma unroll
                          for (int p = 0; p < kParts; ++p) pack_pair(p, i, a[p], b[p]);
                        });
    } else {
      static_assert(Ring::kValueZero == Ring::kValueScale + kParts);
      constexpr int kNumbers = kParts + 1;
      each_pair<kNumbers>(tile, Ring::kValueScale,
                          [&](int i, const float(&a)[kNumbers], const float(&b)[kNumbers]) {
                            float& zeros = zeros_[i / 2 % 2];
                            zeros =
                                fmaf(scores[i], a[kParts], fmaf(scores[i + 1], b[kParts], zeros));
#pragma unroll
                            for (int p = 0; p < kParts; ++p) pack_pair(p, i, a[p], b[p]);
                          });
    }
  }

  // Divides the sums and stores them.
  __device__ void store(float (&sums)[kParts][kSums], int split) const {
    PrefillRowEnd ends[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // What all scores of a row have in common only moves its maximum; a cap has seen it.
      const float bias = params_.softcap == 0 ? bias_of(r) : 0.0f;
      ends[r] = {{max_[r] - unit_ + bias, over_quad_sum(sum_[r])}, over_quad_sum(zeros_[r])};
    }
    PrefillOutput<Shape>(rows_, sums).store(ends, split);
  }

 private:
  // Of the work tile's tokens.
  __device__ TokenRange seen_of(int r) const {
    if (r >= rows_.num_rows) return {0, 0};
    const TokenRange seen = seen_by(params_, rows_.shape, (rows_.first_row + r) / params_.q_per_kv);
    return {max(seen.begin, walk_.tokens.begin), min(seen.end, walk_.tokens.end)};
  }
  __device__ void find_seen() {
    if (rows_.num_rows > 0) {
      seen_by_all_ = {seen_of(rows_.num_rows - 1).begin, seen_of(0).end};
    }
  }

  // visit(i, a, b): of the tokens that scores i and i + 1 are of, Count numbers from `which` on.
  template <int Count, class Visit>
  __device__ void each_pair(int tile, int which, const Visit& visit) const {
    const uint32_t numbers = ring_.token_scales(tile, which) + 16 * rows_.t;
#pragma unroll
    for (int i = 0; i < kScores; i += 8) {
      uint4 four[Count];
      float a[2][Count], b[2][Count];
#pragma unroll
      for (int n = 0; n < Count; ++n) {
        four[n] = load_shared_16(numbers + n * kTokens * 4 + 8 * i);
        a[0][n] = __uint_as_float(four[n].x);
        b[0][n] = __uint_as_float(four[n].y);
        a[1][n] = __uint_as_float(four[n].z);
        b[1][n] = __uint_as_float(four[n].w);
      }
#pragma unroll
      for (int j = 0; j < 8; j += 2) visit(i + j, a[j / 4], b[j / 4]);
    }
  }
  // visit(i, numbers)
  template <int Count, class Visit>
  __device__ void each_token(int tile, int which, const Visit& visit) const {
    each_pair<Count>(tile, which, [&](int i, const float(&a)[Count], const float(&b)[Count]) {
      visit(i, a);
      visit(i + 1, b);
    });
  }

  __device__ bool has_key_zeros() const {
    return Shape::kScalesScores && has_zeros(params_.tile_k);
  }
  __device__ static bool has_zeros(const TileSide& side) {
    return side.format.scale_path == ScalePath::kAffine;
  }

  // Of scores: q . mean where K has had its mean taken away.
  __device__ float bias_of(int r) const {
    return PrefillQueries<Shape>(rows_, ring_).facts_of(rows_.row(r)).bias;
  }

  // Scores at their size, with what the block offsets of their tokens add.
  __device__ void add_offsets(int first_token, float (&by_unit)[2],
                              float (&scores)[kScores]) const {
    const float* const of_rows[2] = {offsets_of_row(0), offsets_of_row(1)};
#pragma unroll
    for (int i = 0; i < kScores; i += 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float offset =
            params_.key_offsets.at(of_rows[r], first_token + 2 * i, params_.block_size);
        scores[i + 2 * r] = fmaf(scores[i + 2 * r], by_unit[r], offset);
        scores[i + 2 * r + 1] = fmaf(scores[i + 2 * r + 1], by_unit[r], offset);
      }
    }
    by_unit[0] = by_unit[1] = 1.0f;
  }
  // Rows that are not there have the last row's.
  __device__ const float* offsets_of_row(int r) const {
    const QueryRowAt at = rows_.at(min(rows_.row(r), max(rows_.num_rows - 1, 0)));
    const int64_t q_row = int64_t{rows_.shape.q_start} + at.new_token;
    return params_.key_offsets.row(q_row * params_.num_q_heads + at.q_head);
  }

  // Softcap, to units of log2. tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it. A score of
  // -infinity stays hidden. by_unit: what brings scores to their size; 1 then.
  __device__ void cap(float (&by_unit)[2], float (&scores)[kScores]) const {
    const float most = params_.softcap;
    const float to_exponent = 2.0f * kLog2E / most;
    const float bias[2] = {bias_of(0) * to_exponent, bias_of(1) * to_exponent};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      const float x = fmaf(scores[i], by_unit[r] * to_exponent, bias[r]);
      const float capped = most * kLog2E * (1.0f - __fdividef(2.0f, fast_exp2(x) + 1.0f));
      scores[i] = x == -INFINITY ? x : capped;
    }
    by_unit[0] = by_unit[1] = 1.0f;
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

  const PrefillWalk& walk_;
  const PrefillParams& params_;
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

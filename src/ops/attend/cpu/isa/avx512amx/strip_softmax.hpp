// The softmax of a strip of rows of a tile that every row sees: scores become weights in two BF16
// parts. It is taken a row at a time, between products of the matrix unit.
#pragma once

#include <algorithm>
#include <limits>

#include "ops/attend/cpu/isa/avx512amx/packing.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

inline constexpr int kScoreVectors = kMaxTileTokens / 16;

// By how many powers of two a weight may exceed 1 before what is subtracted from its row's scores
// follows. Weights are floats, so they need not stay below 1; what this saves is finding a row's
// maximum in every tile.
inline constexpr float kMostPower = 12.0f;
inline constexpr float kLog2E = 0x1.715476p0f;

// 2^x, relative error below 3e-7: a polynomial of the rest that is left when x is rounded.
KVX_INLINE __m512 power_of_two(__m512 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m512 n = _mm512_roundscale_ps(x, kNearest);
  const __m512 f = _mm512_sub_ps(x, n);
  __m512 p = _mm512_set1_ps(0x1.5C08E6p-10f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.3D0C52p-7f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.C6B6E4p-5f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.EBF918p-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62E428p-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

// The odd words of two vectors: the high halves of 32 floats.
constexpr Table<uint16_t, 32> high_words() {
  Table<uint16_t, 32> order = {};
  for (int i = 0; i < 32; ++i) order.at[i] = static_cast<uint16_t>(2 * i + 1);
  return order;
}

// Weights as two parts, the high one cut off: a term's error is at most 2^-17. Without a low part
// the high one is rounded.
template <bool HasLow>
KVX_INLINE void store_weight_parts(const __m512* weights, float* row) {
  static constexpr Table<uint16_t, 32> kHighWords = high_words();
  const __m512i high_words_of_two = _mm512_load_si512(kHighWords.at);
  const __m512i high_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  auto* parts = reinterpret_cast<uint16_t*>(row);
  for (int v = 0; v < kScoreVectors; v += 2) {
    if constexpr (!HasLow) {
      _mm512_storeu_si512(parts + 16 * v, round_to_bf16(weights[v], weights[v + 1]));
      continue;
    }
    const __m512i first = _mm512_castps_si512(weights[v]);
    const __m512i second = _mm512_castps_si512(weights[v + 1]);
    const auto rest_of = [&](__m512 number, __m512i bits) {
      return _mm512_sub_ps(number, _mm512_castsi512_ps(_mm512_and_si512(bits, high_half)));
    };
    _mm512_storeu_si512(parts + 16 * v,
                        _mm512_permutex2var_epi16(first, high_words_of_two, second));
    _mm512_storeu_si512(parts + kMaxTileTokens + 16 * v,
                        round_to_bf16(rest_of(weights[v], first), rest_of(weights[v + 1], second)));
  }
}

// While a row has no maximum, any finite number will do.
KVX_INLINE float subtracted(const SoftmaxState& state) {
  return state.max == -std::numeric_limits<float>::infinity() ? 0.0f : state.max;
}

// What is subtracted from the row's scores becomes their largest. powers: of the weights so far.
[[gnu::noinline]] static void grow_row(__m512 powers, SoftmaxState& state, float* sums,
                                       int num_sums) {
  const float above = _mm512_reduce_max_ps(powers) / kLog2E;
  const float factor = state.sum == 0.0f ? 0.0f : exp_of_negative<float>(-above);
  state = {subtracted(state) + above, state.sum * factor};
  const __m512 factors = _mm512_set1_ps(factor);
  for (int i = 0; i < num_sums; i += 16) {
    _mm512_storeu_ps(sums + i, _mm512_mul_ps(_mm512_loadu_ps(sums + i), factors));
  }
}

// Of a tile's tokens: what scores and weights are still to be multiplied with, [kMaxTileTokens].
struct TileSteps {
  const float* keys = nullptr;
  const float* values = nullptr;
};

// HasSteps: of keys or values; without, both are null. HasLow: of the weights' parts.
template <bool HasSteps, bool HasLow>
KVX_INLINE void absorb_strip_row(const MatrixTileParams& p, const TileSteps& steps, int row) {
  QueryRow& state = p.rows[row];
  float* scores = p.scores + row * kMaxTileTokens;
  const float scale = p.softmax_scale * kLog2E;
  const __m512 scales = _mm512_set1_ps(scale);
  __m512 x[kScoreVectors];  // powers of two
  const auto load_powers = [&] {
    const __m512 offset = _mm512_set1_ps(state.bias * scale - subtracted(state.softmax) * kLog2E);
    for (int v = 0; v < kScoreVectors; ++v) {
      __m512 score = _mm512_loadu_ps(scores + 16 * v);
      if constexpr (HasSteps) score = _mm512_mul_ps(score, _mm512_loadu_ps(steps.keys + 16 * v));
      x[v] = _mm512_fmadd_ps(score, scales, offset);
    }
  };
  load_powers();
  const __m512 largest = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
  const float most =
      state.softmax.sum == 0.0f ? -std::numeric_limits<float>::infinity() : kMostPower;
  if (_mm512_cmp_ps_mask(largest, _mm512_set1_ps(most), _CMP_GT_OQ) != 0) {
    grow_row(largest, state.softmax, p.sums + int64_t{row} * p.values.head_dim, p.values.head_dim);
    load_powers();
  }
  __m512 weights[kScoreVectors];
  for (int v = 0; v < kScoreVectors; ++v) weights[v] = power_of_two(x[v]);
  const __m512 total =
      _mm512_add_ps(_mm512_add_ps(weights[0], weights[1]), _mm512_add_ps(weights[2], weights[3]));
  if constexpr (HasSteps) {
    for (int v = 0; v < kScoreVectors; ++v) {
      weights[v] = _mm512_mul_ps(weights[v], _mm512_loadu_ps(steps.values + 16 * v));
    }
  }
  store_weight_parts<HasLow>(weights, scores);
  state.softmax.sum += sum_of_lanes(static_cast<Widest>(total));
}

// A strip's softmax, a row at a time.
template <bool HasSteps, bool HasLow>
class StripSoftmax {
 public:
  // num_steps: the calls of step() among which the strip's rows are spread.
  StripSoftmax(const MatrixTileParams& params, const TileSteps& steps, int row, int num_steps)
      : params_(params),
        steps_(steps),
        row_(row),
        end_(std::min(row + kStripRows, params.num_rows)),
        rate_(num_steps > 0 ? ((end_ - row) * kOne + num_steps - 1) / num_steps : 0) {}

  KVX_INLINE void step() {
    for (owed_ += rate_; owed_ >= kOne && row_ < end_; owed_ -= kOne) take();
  }
  KVX_INLINE void finish() {
    while (row_ < end_) take();
  }

 private:
  static constexpr int kOne = 1 << 8;  // a row in the fixed-point numbers rate_ and owed_

  KVX_INLINE void take() { absorb_strip_row<HasSteps, HasLow>(params_, steps_, row_++); }

  const MatrixTileParams& params_;
  TileSteps steps_;
  int row_;
  int end_;
  int rate_;
  int owed_ = 0;
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

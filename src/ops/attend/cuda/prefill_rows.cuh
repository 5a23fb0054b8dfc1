// The prefill kernel's multiplying warpgroups: 64 query rows each against the rings' tiles. While
// one warpgroup computes weights, the other's products keep the tensor cores busy; a warpgroup's
// own products with V run beside its next scores.
#pragma once

#include "ops/attend/cuda/prefill_shape.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

template <class Shape>
class PrefillRows {
  using Mma = typename Shape::Mma;
  using Ring = PrefillRing<Shape>;
  static constexpr int kParts = Shape::kParts;
  static constexpr int kTokens = Shape::kTokens;
  static constexpr int kDim = Shape::kDim;
  static constexpr int kScores = kTokens / 2;      // of a thread, a part
  static constexpr int kSums = kDim / kParts / 2;  // likewise
  static constexpr int kSteps = kTokens / 16;      // of a product with V
  static constexpr int kKeySteps = kDim / kParts / 16;

 public:
  // warp: of all that multiply.
  __device__ PrefillRows(const PrefillWalk& walk, const SequenceShape& shape,
                         const PrefillRing<Shape>& ring, int warp, int first_row, int num_rows)
      : walk_(walk),
        job_(walk.job),
        shape_(shape),
        ring_(ring),
        consumer_(warp / 4),
        warp_(warp % 4),
        g_(static_cast<int>(threadIdx.x) % kWarp / 4),
        t_(static_cast<int>(threadIdx.x) % 4),
        kv_head_(walk.job.packed.first_head + walk.head),
        first_row_(first_row + consumer_ * kConsumerRows),
        num_rows_(min(max(num_rows - consumer_ * kConsumerRows, 0), kConsumerRows)) {}

  __device__ void run() {
    load_queries();
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

  __device__ void store(int split);

 private:
  // Rows of the CTA's warpgroups take turns: the second waits for the first.
  static constexpr int kTurn = 1;     // named barriers: kTurn + warpgroup
  static constexpr int kQueries = 3;  // kQueries + warpgroup
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
    uint32_t missing = load_shared_4(ring_.missing(0));
    wgmma_fence();
    multiply_keys(0);
    wgmma_commit();
    wgmma_wait<0>();
    hold_scores();
    ring_.free(0, 0);
    if (Shape::kScalesScores) ring_.wait_filled(1, 0);
    weigh(0, missing);
    pack_weights(0);
#pragma unroll 1
    for (int i = 1; i < n; ++i) {
      ring_.wait_filled(0, i);
      missing = load_shared_4(ring_.missing(i));
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
      hold_scores();
      ring_.free(0, i);
      if (Shape::kScalesScores) ring_.wait_filled(1, i);
      weigh(i, missing);
      wgmma_wait<0>();
      hold_sums();
      ring_.free(1, i - 1);
      rescale_sums();
      pack_weights(i);
    }
    ring_.wait_filled(1, n - 1);
    wgmma_fence();
    multiply_values(n - 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold_sums();
  }

  __device__ uint32_t queries() const {
    return ring_.shared + consumer_ * Shape::kQueryBytes;
  }

  __device__ void multiply_keys(int tile) {
    const uint64_t q = wgmma_tile(queries(), 16);
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
  __device__ void hold_scores() {
#pragma unroll
    for (int p = 0; p < kParts; ++p) hold(scores_[p]);
  }
  __device__ void hold_sums() {
#pragma unroll
    for (int p = 0; p < kParts; ++p) hold(sums_[p]);
  }

  // This thread's rows are 16 warp + g and 8 more.
  __device__ int row(int r) const {
    return 16 * warp_ + g_ + 8 * r;
  }
  __device__ TokenRange seen_of(int r) const {
    if (r >= num_rows_) return {0, 0};
    return seen_by(job_, shape_, (first_row_ + r) / job_.q_per_kv);
  }
  __device__ void find_seen() {
    const TokenRange& tokens = walk_.tokens;
    if (num_rows_ > 0) {
      seen_by_all_ = {max(seen_of(num_rows_ - 1).begin, tokens.begin),
                      min(seen_of(0).end, tokens.end)};
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const TokenRange seen = seen_of(row(r));
      seen_[r] = {max(seen.begin, tokens.begin), min(seen.end, tokens.end)};
    }
  }

  // Second-level and given scales of the head.
  __device__ float key_scale_of_head() const {
    const float given =
        job_.shared_k_scale ? job_.shared_k_scale[walk_.head * job_.shared_k_scale_stride] : 1.0f;
    return given * job_.packed.k.tensor_scale(walk_.head) * unit_of(job_.packed.k.id);
  }
  __device__ float value_scale_of_head() const {
    const float given =
        job_.shared_v_scale ? job_.shared_v_scale[walk_.head * job_.shared_v_scale_stride] : 1.0f;
    return given * job_.packed.v.tensor_scale(walk_.head) * unit_of(job_.packed.v.id);
  }

  // Eight numbers of a query row as they lie: 16 bytes, or 32.
  struct Eight {
    uint4 words[2];
  };
  __device__ static Eight load_eight(DType type, const uint8_t* row, int chunk) {
    const uint4* from = reinterpret_cast<const uint4*>(row);
    if (type == DType::kF32) return {from[2 * chunk], from[2 * chunk + 1]};
    return {from[chunk], {}};
  }
  __device__ static void widen(DType type, const Eight& eight, float (&x)[8]) {
    const uint4 a = eight.words[0], b = eight.words[1];
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    if (type == DType::kF32) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(words[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (type == DType::kF16) {
        const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      } else {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
      }
    }
  }

  // Queries into shared memory, as 16-bit numbers in the keys' order; a row's scale and sum beside
  // them. Rows that are not there become zeros.
  __device__ void load_queries() {
    constexpr int kLanes = kDim / 8;  // of a row
    constexpr int kRowsAtOnce = kWarp / kLanes;
    constexpr int kRounds = 16 / kRowsAtOnce;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int chunk = lane % kLanes;
    const PairOrder order = pair_order_of(job_.packed.k.id);
    const FloatRows& q = job_.args.q;
    // Scores are compared before they are multiplied, so the factor's sign goes into the queries.
    const float factor = job_.args.softmax_scale * key_scale_of_head();
    const float sign = factor < 0 ? -1.0f : factor == 0 ? 0.0f : 1.0f;
    const float to_log2 = job_.args.softcap == 0 ? kLog2E : 1.0f;
    Eight eights[kRounds];  // all are asked for before the first is used
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int r = 16 * warp_ + i * kRowsAtOnce + lane / kLanes;
      eights[i] = {};
      if (r >= num_rows_) continue;
      const QueryRowAt at = query_row(job_, kv_head_, first_row_ + r);
      const int64_t first = (int64_t{shape_.q_start} + at.new_token) * q.token_stride +
                            int64_t{at.q_head} * q.head_stride;
      eights[i] = load_eight(q.dtype, q.data + first * bytes_of(q.dtype), chunk);
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int r = 16 * warp_ + i * kRowsAtOnce + lane / kLanes;
      float x[8];
      widen(q.dtype, eights[i], x);
      float scale = 1.0f;  // into f16's range, by a power of two
      if (Mma::kScalesQueries && q.dtype != DType::kF16) {
        float largest = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(x[j]));
        for (int other = 1; other < kLanes; other *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, other));
        }
        if (largest > 0 && largest < INFINITY) scale = exp2f(-static_cast<float>(ilogbf(largest)));
      }
      Four pairs;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int a = first_of_pair(order, j), b = second_of_pair(order, j);
        float low = 0, high = 0;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          low = c == a ? x[c] : low;
          high = c == b ? x[c] : high;
        }
        pairs.r[j] = Mma::pack(low * (scale * sign), high * (scale * sign));
        if constexpr (Shape::kScalesScores) {
          const float2 rounded = Mma::unpack(pairs.r[j]);
          sum += rounded.x + rounded.y;
        }
      }
      store_chunk(queries() + chunk / 8 * Shape::kQueryBlockBytes + wgmma_chunk(r, chunk % 8),
                  pairs);
      for (int other = 1; other < kLanes; other *= 2) {
        sum += __shfl_xor_sync(kWholeWarp, sum, other);
      }
      // Never 0: a hidden score, -infinity, is multiplied by it.
      const float by = fmaxf(fabsf(factor) / scale * to_log2, 1e-37f);
      if (chunk == 0) row_facts()[consumer_ * kConsumerRows + r] = {by, sum};
    }
    fence_bulk_copies();
    wait_at(kQueries + consumer_, kWarpgroup);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 facts = row_facts()[consumer_ * kConsumerRows + row(r)];
      score_scale_[r] = facts.x;
      query_sum_[r] = facts.y;
    }
  }
  // [scale of the scores, sum of the query] of every row.
  __device__ float2* row_facts() const {
    return static_cast<float2*>(__cvta_shared_to_generic(ring_.shared + Shape::kRowFacts));
  }
  // Of a tile's numbers, one a token, those of this thread's two columns of eight.
  __device__ float2 pair_of(uint32_t numbers, int eight) const {
    const uint2 bits = load_shared_8(numbers + 4 * (8 * eight + 2 * t_));
    return {__uint_as_float(bits.x), __uint_as_float(bits.y)};
  }

  // Scores of a tile become weights, 2^(score - reference); sums_ have to be multiplied by by_.
  __device__ void weigh(int tile, uint32_t missing) {
    if constexpr (Shape::kScalesScores) scale_scores(tile);
    float by_unit[2] = {score_scale_[0], score_scale_[1]};
    if (job_.args.softcap != 0) {
      cap();
      by_unit[0] = by_unit[1] = 1.0f;
    }
    const int token = walk_.first_token + tile * kTokens;
    const bool sees_all =
        token >= seen_by_all_.begin && token + kTokens <= seen_by_all_.end && missing == 0;
    if (!sees_all) hide(token, missing);
    raise_maximum(by_unit);
    if constexpr (Shape::kScalesScores) choose_unit(tile);
    const float reference[2] = {max_[0] - unit_, max_[1] - unit_};
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int r = i / 2 % 2;
      scores_[0][i] = fast_exp2(fmaf(scores_[0][i], by_unit[r], -reference[r]));
      sum_[r] += scores_[0][i];
    }
    if constexpr (Shape::kScalesScores) add_zeros(tile);
  }

  // Sums over codes become scores: of the parts, each with its scale, and the zero's share.
  __device__ void scale_scores(int tile) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t scales = ring_.token_scales(tile, Ring::kKeyScale + p);
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        const float2 by = pair_of(scales, i / 4);
        const float first = p == 0 ? 0.0f : scores_[0][i],
                    second = p == 0 ? 0.0f : scores_[0][i + 1];
        scores_[0][i] = fmaf(scores_[p][i], by.x, first);
        scores_[0][i + 1] = fmaf(scores_[p][i + 1], by.y, second);
      }
    }
    if (!has_zeros(job_.packed.k)) return;
    const uint32_t zeros = ring_.token_scales(tile, Ring::kKeyZero);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float2 zero = pair_of(zeros, i / 4);
      scores_[0][i] = fmaf(query_sum_[i / 2 % 2], zero.x, scores_[0][i]);
      scores_[0][i + 1] = fmaf(query_sum_[i / 2 % 2], zero.y, scores_[0][i + 1]);
    }
  }
  __device__ static bool has_zeros(const CudaSide& side) {
    return side.view.spec.scale_rule == format::ScaleRule::kAffine;
  }

  // Softcap, to units of log2. tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it.
  __device__ void cap() {
    const float most = job_.args.softcap;
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float x = scores_[0][i] * (score_scale_[i / 2 % 2] * (2.0f * kLog2E / most));
      scores_[0][i] = most * kLog2E * (1.0f - __fdividef(2.0f, fast_exp2(x) + 1.0f));
    }
  }

  __device__ void hide(int token, uint32_t missing) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int column = i / 4 * 8 + 2 * t_ + i % 2;
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
  __device__ static float over_quad_sum(float x) {
    x += __shfl_xor_sync(kWholeWarp, x, 1);
    return x + __shfl_xor_sync(kWholeWarp, x, 2);
  }

  // Weights go to 16 bits after they are multiplied by V's scales, so those must not be far from 1:
  // all weights are 2^unit_ times as large. It falls when a scale is too large for it.
  __device__ void choose_unit(int tile) {
    float top = 0;
#pragma unroll
    for (int i = 0; i < kTokens / kWarp; ++i) {
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
    for (int i = 0; i < kScores; i += 2) {
      const float2 zero = pair_of(zeros, i / 4);
      float& sum = zeros_[i / 2 % 2];
      sum = fmaf(scores_[0][i], zero.x, fmaf(scores_[0][i + 1], zero.y, sum));
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
      for (int i = 0; i < kScores; i += 2) {
        float2 by = {1.0f, 1.0f};
        if constexpr (Shape::kScalesScores) by = pair_of(scales, i / 4);
        weights_[p][i / 8][i / 2 % 4] = Mma::pack(scores_[0][i] * by.x, scores_[0][i + 1] * by.y);
      }
    }
  }

  // From a tile's order of channels to the rows'.
  __device__ void put_in_order() {
    if constexpr (Shape::kScales == PrefillScales::kNone) return;
    const PairOrder order = pair_order_of(job_.packed.v.id);
    if (order == PairOrder::kNeighbours) return;
    const int from = 4 * g_ + 2 * t_ % 4;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kSums; i += 2) {
        float& a = sums_[p][i];
        float& b = sums_[p][i + 1];
        if (order == PairOrder::kBytes) {  // (0, 2), (1, 3): neighbours exchange
          const float other = __shfl_xor_sync(kWholeWarp, t_ % 2 == 0 ? b : a, 1);
          (t_ % 2 == 0 ? b : a) = other;
        } else {  // (0, 4), (1, 5), (2, 6), (3, 7)
          const float low_a = __shfl_sync(kWholeWarp, a, from);
          const float low_b = __shfl_sync(kWholeWarp, a, from + 1);
          const float high_a = __shfl_sync(kWholeWarp, b, from);
          const float high_b = __shfl_sync(kWholeWarp, b, from + 1);
          a = t_ < 2 ? low_a : high_a;
          b = t_ < 2 ? low_b : high_b;
        }
      }
    }
  }
  // This thread's numbers of row r, as (sum + zero) * share: columns 8 i + 2 t and the next. Store:
  // takes i and the pair.
  template <class Store>
  __device__ void for_pairs(int r, float zero, float share, const Store& store) const {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      const float* sums = &sums_[i / (kSums / 4)][i % (kSums / 4) * 4 + 2 * r];
      store(i, (sums[0] + zero) * share, (sums[1] + zero) * share);
    }
  }
  __device__ void store_row(int r, DType type, uint8_t* row, float zero, float share) const {
    if (type == DType::kF32) {
      float2* out = reinterpret_cast<float2*>(row) + t_;
      for_pairs(r, zero, share, [&](int i, float a, float b) { out[4 * i] = {a, b}; });
      return;
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(row) + t_;
    if (type == DType::kF16) {
      for_pairs(r, zero, share, [&](int i, float a, float b) { out[4 * i] = MmaF16::pack(a, b); });
    } else {
      for_pairs(r, zero, share, [&](int i, float a, float b) { out[4 * i] = MmaBf16::pack(a, b); });
    }
  }
  // A row that saw nothing: weights of 0, but 0 * NaN is NaN.
  __device__ void clear_sums(int r) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (i / 2 % 2 == r) sums_[p][i] = 0;
      }
    }
  }

  const PrefillWalk& walk_;
  const AttendJob& job_;
  const SequenceShape& shape_;
  const Ring& ring_;
  const int consumer_;
  const int warp_;
  const int g_;
  const int t_;
  const int kv_head_;
  const int first_row_;  // of the warpgroup
  const int num_rows_;
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
  bool has_unit_ = false;
  bool is_rescaled_ = false;
  float scores_[kParts][kScores];
  uint32_t weights_[kParts][kSteps][4];
  float sums_[kParts][kSums];
};

// Whole rows, or what this split leaves for the merge.
template <class Shape>
__device__ void PrefillRows<Shape>::store(int split) {
  const float unit = value_scale_of_head();
  const bool is_whole = job_.num_splits == 1;
  put_in_order();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Softmax2 tokens = {max_[r] - unit_, over_quad_sum(sum_[r])};
    const float zero = over_quad_sum(zeros_[r]);
    if (row(r) >= num_rows_) continue;
    if (tokens.sum == 0) clear_sums(r);
    const QueryRowAt at = query_row(job_, kv_head_, first_row_ + row(r));
    const int64_t token = shape_.q_start + at.new_token;
    if (is_whole) {
      const Softmax2 whole = with_sink(job_, at.q_head, tokens);
      store_row(r, job_.args.out.dtype, output_row(job_, token, at.q_head), zero,
                unit * share_of(tokens, whole));
      if (t_ == 0 && job_.args.lse) {
        job_.args.lse[token * job_.args.num_q_heads + at.q_head] = log_sum_exp(whole);
      }
    } else {
      const int64_t index = partial_index(job_, token, at.q_head, split);
      store_row(r, DType::kF32, reinterpret_cast<uint8_t*>(job_.partial_out + index * kDim), zero,
                unit);
      if (t_ == 0) job_.partial_softmax[index] = tokens;
    }
  }
}

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

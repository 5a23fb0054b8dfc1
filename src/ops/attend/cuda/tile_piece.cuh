// TilePiece: the walk of a warp over tokens of a piece, keys and values as tensor core operands,
// and what it leaves: weighted sums of values and their softmax. tiles.cuh says how pieces make a
// call.
#pragma once

#include <type_traits>

#include "ops/attend/cuda/finish_row.cuh"
#include "ops/attend/cuda/launch.hpp"
#include "ops/attend/cuda/tile_queries.cuh"
#include "ops/attend/cuda/tile_ring.cuh"

namespace kvx::ops::cuda {

// Softmax of queries 2t and 2t + 1 of each column of 8, in a lane: of its own tokens, but with the
// warp's maximum.
template <int Columns>
struct LaneSoftmax {
  float2 max[Columns];
  float2 sum[Columns];
};

// What a warp leaves in shared memory: weighted sums of V's numbers, and their softmax.
template <int Dim, int Columns>
struct WarpRows {
  static constexpr int kDim = Dim;
  static constexpr int kColumns = Columns;
  static constexpr int kRows = Columns * kTileRows;
  // Lanes that store one channel of different rows meet no bank twice.
  alignas(16) float sums[kRows][Dim + 4];
  Softmax2 softmax[kRows];
};

template <class Keys, class Values, int Dim, int Columns, bool IsWide>
class TilePiece {
 public:
  using Config = TileConfig<Keys, Values, Columns, IsWide>;
  using Ring = std::conditional_t<Config::kIsBulk, BulkRing<Config>, CopyRing<Config>>;
  using Rows = WarpRows<Dim, Columns>;

  __device__ TilePiece(const TileWalk& walk, const SequenceShape& shape, int first_row,
                       int num_rows, uint32_t shared)
      : job_(walk.job),
        shape_(shape),
        tokens_(walk.tokens),
        head_(walk.head),
        kv_head_(run_of_heads().first_head + walk.head),
        first_row_(first_row),
        num_rows_(num_rows),
        lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp),
        ring_(walk, shared, warp_, lane_) {}

  __device__ void begin() {
    find_seen();
    QueryColumn<Keys, Dim> columns[Columns];
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const int r = c * kTileRows + lane_ / 4;
      columns[c].ask(job_, shape_, kv_head_, first_row_ + r, r < num_rows_, lane_);
    }
    ring_.begin();
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      columns[c].finish(job_, kv_head_, key_scale_of_head(), lane_, queries_[c], score_scale_[c],
                        bias_[c]);
    }
  }
  __device__ void start_empty() {
    // Far below every score, but finite: no difference of two of them is a NaN.
    for (float2& max : softmax_.max) max = {-1e30f, -1e30f};
    for (float2& sum : softmax_.sum) sum = {};
  }
  // Goes on where the walk over packed tokens ended.
  __device__ void start_with(const Rows& rows, const LaneSoftmax<Columns>& softmax);
  __device__ void run() {
    for (int i = 0; i < ring_.num_steps(); ++i) {
      attend_step(i);
    }
    ring_.end();
    __syncwarp();
  }
  __device__ const LaneSoftmax<Columns>& softmax() const {
    return softmax_;
  }
  __device__ void leave_sums(Rows& rows);
  __device__ void leave_softmax(Rows& rows);

 private:
  __device__ const CudaRun& run_of_heads() const {
    return IsWide ? job_.wide : job_.packed;
  }

  // Where all queries see everything.
  __device__ void find_seen() {
    seen_by_all_ = {seen_of(num_rows_ - 1).begin, seen_of(0).end};
    seen_by_all_.begin = max(seen_by_all_.begin, tokens_.begin);
    seen_by_all_.end = min(seen_by_all_.end, tokens_.end);
    if (job_.args.tree_mask) {
      seen_by_all_.end = min(seen_by_all_.end, shape_.first_new_token());
    }
  }
  __device__ TokenRange seen_of(int r) const {
    if (r >= num_rows_) return {0, 0};
    const TokenRange seen = seen_by(job_, shape_, (first_row_ + r) / job_.q_per_kv);
    return {max(seen.begin, tokens_.begin), min(seen.end, tokens_.end)};
  }

  using Scores = Fragment[Config::kTilesAtOnce][Columns];

  __device__ void attend_step(int i) {
    Scores scores;
    ring_.wait_for_keys(i);
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      Keys::score(ring_.keys(u), ring_.key_scales(u), queries_, key_scale_is_bf16(), lane_,
                  scores[u]);
    }
    ring_.release_keys(i);
    weigh(i, scores);
    ring_.wait_for_values(i);
    if constexpr (Values::kScalesWeights) find_scale_unit();
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      Values::add(ring_.values(u), ring_.value_scales(u), scores[u], scale_unit_,
                  value_scale_is_bf16(), lane_, sums_);
    }
    ring_.release_values(i);
  }

  // Scores of step i become weights.
  __device__ void weigh(int i, Scores& scores) {
    const int token = ring_.token(i);
    const bool has_cap = job_.args.softcap != 0;
    const bool sees_all = token >= seen_by_all_.begin &&
                          token + Config::kStepTokens <= seen_by_all_.end &&
                          !ring_.may_be_missing();
    float2 by[Columns];  // what is left to bring scores to units of log2
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      if (has_cap) [[unlikely]]
        cap(scores, c);
      by[c] = has_cap ? float2{1.0f, 1.0f} : score_scale_[c];
      if (!sees_all) [[unlikely]]
        hide(i, scores, c);
    }
    raise_maximum(scores, by);
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
#pragma unroll
      for (int c = 0; c < Columns; ++c) {
        Fragment& w = scores[u][c];
        w.d[0] = fast_exp2(w.d[0] * by[c].x - softmax_.max[c].x);
        w.d[1] = fast_exp2(w.d[1] * by[c].y - softmax_.max[c].y);
        w.d[2] = fast_exp2(w.d[2] * by[c].x - softmax_.max[c].x);
        w.d[3] = fast_exp2(w.d[3] * by[c].y - softmax_.max[c].y);
        softmax_.sum[c].x += w.d[0] + w.d[2];
        softmax_.sum[c].y += w.d[1] + w.d[3];
      }
    }
  }

  // Second-level and given scales of the head.
  __device__ float key_scale_of_head() const {
    if constexpr (IsWide) return 1.0f;
    const float scale =
        job_.shared_k_scale ? job_.shared_k_scale[head_ * job_.shared_k_scale_stride] : 1.0f;
    return scale * job_.packed.k.tensor_scale(head_);
  }
  __device__ float value_scale_of_head() const {
    if constexpr (IsWide) return 1.0f;
    const float scale =
        job_.shared_v_scale ? job_.shared_v_scale[head_ * job_.shared_v_scale_stride] : 1.0f;
    return scale * job_.packed.v.tensor_scale(head_);
  }
  __device__ bool key_scale_is_bf16() const {
    return job_.packed.k.view.spec.scale_type == format::ScaleType::kBF16;
  }
  __device__ bool value_scale_is_bf16() const {
    return job_.packed.v.view.spec.scale_type == format::ScaleType::kBF16;
  }

  // Softcap, to units of log2. tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it.
  __device__ void cap(Scores& scores, int c) const {
    const float most = job_.args.softcap;
#pragma unroll
    for (int i = 0; i < 4 * Config::kTilesAtOnce; ++i) {
      float& x = scores[i / 4][c].d[i % 4];
      x = x * (i % 2 == 0 ? score_scale_[c].x : score_scale_[c].y) +
          (i % 2 == 0 ? bias_[c].x : bias_[c].y);
      x *= 2.0f * kLog2E / most;
      x = most * kLog2E * (1.0f - __fdividef(2.0f, fast_exp2(x) + 1.0f));
    }
  }

  __device__ void hide(int step, Scores& scores, int c) const {
    const int g = lane_ / 4, t = lane_ % 4;
    const int row = c * kTileRows + 2 * t;
    const TokenRange seen_by_columns[2] = {seen_of(row), seen_of(row + 1)};
#pragma unroll
    for (int i = 0; i < 4 * Config::kTilesAtOnce; ++i) {
      const int at = ring_.token(step) + i / 4 * kTileTokens + g + 8 * (i % 4 / 2);
      const TokenRange& seen = seen_by_columns[i % 2];
      if (ring_.is_missing(step, i / 4) || at < seen.begin || at >= seen.end ||
          is_masked(row + i % 2, at)) {
        scores[i / 4][c].d[i % 4] = -INFINITY;
      }
    }
  }
  // By the tree mask. Requires: row r is there.
  __device__ bool is_masked(int r, int token) const {
    const int j = token - shape_.first_new_token();
    if (!job_.args.tree_mask || j < 0) return false;
    const int new_token = (first_row_ + r) / job_.q_per_kv;
    const int64_t row = int64_t{shape_.q_start} + new_token;
    return job_.args.tree_mask[row * job_.args.tree_mask_stride + j] == 0;
  }

  // The maximum only rises when a score is 2^8 above it: weights of up to 2^8 do no harm, and the
  // sums are hardly ever touched. by_unit: what brings scores to units of log2.
  __device__ void raise_maximum(const Scores& scores, const float2 (&by_unit)[Columns]) {
    constexpr float kSlack = 8.0f;
    float2 top[Columns];
    bool rises = false;
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      const float* first = scores[0][c].d;
      top[c] = {fmaxf(first[0], first[2]), fmaxf(first[1], first[3])};
#pragma unroll
      for (int u = 1; u < Config::kTilesAtOnce; ++u) {
        const float* d = scores[u][c].d;
        top[c] = {fmaxf(top[c].x, fmaxf(d[0], d[2])), fmaxf(top[c].y, fmaxf(d[1], d[3]))};
      }
      top[c] = {top[c].x * by_unit[c].x, top[c].y * by_unit[c].y};
      rises |= top[c].x > softmax_.max[c].x + kSlack || top[c].y > softmax_.max[c].y + kSlack;
    }
    if (!__any_sync(kWholeWarp, rises)) [[likely]]
      return;
#pragma unroll
    for (int c = 0; c < Columns; ++c) {
      float2 most = top[c];
      for (int offset = 4; offset < kWarp; offset *= 2) {
        most.x = fmaxf(most.x, __shfl_xor_sync(kWholeWarp, most.x, offset));
        most.y = fmaxf(most.y, __shfl_xor_sync(kWholeWarp, most.y, offset));
      }
      float2& max = softmax_.max[c];
      most = {fmaxf(most.x, max.x), fmaxf(most.y, max.y)};
      const float2 by = {fast_exp2(max.x - most.x), fast_exp2(max.y - most.y)};
      max = most;
      softmax_.sum[c].x *= by.x;
      softmax_.sum[c].y *= by.y;
      sums_[c].multiply(by);
    }
  }

  // Weights go to 16 bits after they are multiplied by V's scales, so those must not be far from 1.
  __device__ void find_scale_unit() {
    typename Values::Largest found;
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      Values::find_largest(ring_.value_scales(u), value_scale_is_bf16(), lane_, found);
    }
    const float largest = found.value();
    constexpr float kMost = 16.0f;
    // Not a number of f32's range: nothing to bring nearer.
    const bool is_too_large = largest * scale_unit_ > kMost || scale_unit_ == 0;
    const bool changes = is_too_large && largest > 0 && largest < INFINITY;
    if (!__any_sync(kWholeWarp, changes)) [[likely]]
      return;
    float top = largest < INFINITY ? largest : 0.0f;
    for (int offset = 4; offset < kWarp; offset *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, offset));
    }
    const float unit = exp2f(-static_cast<float>(ilogbf(top)));
    const float by = scale_unit_ == 0 ? 0.0f : unit / scale_unit_;
    scale_unit_ = unit;
#pragma unroll
    for (int c = 0; c < Columns; ++c) sums_[c].multiply({by, by});
  }

  const AttendJob& job_;
  const SequenceShape& shape_;
  const TokenRange tokens_;
  const int head_;  // of the run
  const int kv_head_;
  const int first_row_;
  const int num_rows_;
  const int lane_;
  const int warp_;
  Ring ring_;
  TokenRange seen_by_all_;
  Queries<Dim> queries_[Columns];
  float2 score_scale_[Columns];
  float2 bias_[Columns];  // of scores: before the cap, or in units of log2
  ValueSums<Dim> sums_[Columns] = {};
  LaneSoftmax<Columns> softmax_;
  float scale_unit_ = 0;  // of V's scales; 0: none seen
};

template <class Keys, class Values, int Dim, int Columns, bool IsWide>
__device__ void TilePiece<Keys, Values, Dim, Columns, IsWide>::start_with(
    const Rows& rows, const LaneSoftmax<Columns>& softmax) {
  const int g = lane_ / 4, t = lane_ % 4;
  softmax_ = softmax;
#pragma unroll
  for (int i = 0; i < Columns * Dim / 16; ++i) {
    const int c = i / (Dim / 16), f = i % (Dim / 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums_[c].f[f].d[j] = rows.sums[c * kTileRows + 2 * t + j % 2][Values::channel(f, g, j / 2)];
    }
  }
}

template <class Keys, class Values, int Dim, int Columns, bool IsWide>
__device__ void TilePiece<Keys, Values, Dim, Columns, IsWide>::leave_sums(Rows& rows) {
  const int g = lane_ / 4, t = lane_ % 4;
  float unit = Values::unit() * value_scale_of_head();
  if constexpr (Values::kScalesWeights) unit = scale_unit_ > 0 ? unit / scale_unit_ : 0;
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
    float2& zeros = sums_[c].zeros;
    for (int offset = 4; offset < kWarp; offset *= 2) {
      zeros.x += __shfl_xor_sync(kWholeWarp, zeros.x, offset);
      zeros.y += __shfl_xor_sync(kWholeWarp, zeros.y, offset);
    }
#pragma unroll
    for (int i = 0; i < Dim / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float zero = j % 2 == 0 ? zeros.x : zeros.y;
        rows.sums[c * kTileRows + 2 * t + j % 2][Values::channel(i, g, j / 2)] =
            (sums_[c].f[i].d[j] + zero) * unit;
      }
    }
  }
}

template <class Keys, class Values, int Dim, int Columns, bool IsWide>
__device__ void TilePiece<Keys, Values, Dim, Columns, IsWide>::leave_softmax(Rows& rows) {
  const bool has_cap = job_.args.softcap != 0;
#pragma unroll
  for (int c = 0; c < Columns; ++c) {
    float2 sum = softmax_.sum[c];
    for (int offset = 4; offset < kWarp; offset *= 2) {
      sum.x += __shfl_xor_sync(kWholeWarp, sum.x, offset);
      sum.y += __shfl_xor_sync(kWholeWarp, sum.y, offset);
    }
    if (lane_ / 4 != 0) continue;
    // What all scores of a row have in common only moves its maximum.
    const float2 bias = has_cap ? float2{} : bias_[c];
    Softmax2* softmax = &rows.softmax[c * kTileRows + 2 * (lane_ % 4)];
    softmax[0] = {softmax_.max[c].x + bias.x, sum.x};
    softmax[1] = {softmax_.max[c].y + bias.y, sum.y};
  }
}

}  // namespace kvx::ops::cuda

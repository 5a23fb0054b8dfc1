// TileWorkTile: the walk of a warp over tokens of a work tile, keys and values as tensor core
// operands, and what it leaves: weighted sums of values and their softmax. tiles.cuh says how work
// tiles make a call.
#pragma once

#include <type_traits>

#include "ops/attend/cuda/common/finish_row.cuh"
#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/decode_mma/load/bulk_ring.cuh"
#include "ops/attend/cuda/decode_mma/load/copy_ring.cuh"
#include "ops/attend/cuda/decode_mma/load/nibbles_ring.cuh"
#include "ops/attend/cuda/decode_mma/load/ring.cuh"
#include "ops/attend/cuda/decode_mma/queries.cuh"

namespace kvx::ops::cuda {

// Softmax of queries 2t and 2t + 1 of each query n-tile, in a lane: of its own tokens, but with the
// warp's maximum.
template <int NTiles>
struct LaneSoftmax {
  float2 max[NTiles];
  float2 sum[NTiles];
};

// What is added to the scores of those queries.
template <int NTiles>
struct LaneBias {
  float2 of[NTiles];
};

// What a warp leaves in shared memory: weighted sums of V's numbers, and their softmax.
template <int Dim, int NTiles>
struct WarpRows {
  static constexpr int kDim = Dim;
  static constexpr int kNTiles = NTiles;
  static constexpr int kRows = NTiles * kNTileRows;
  // Lanes that store one channel of different rows meet no bank twice.
  alignas(16) float sums[kRows][Dim + 4];
  Softmax2 softmax[kRows];
};

// Up to the work tile's end, the tokens that its row r sees, less what a tree mask hides, without a
// window's sinks.
__device__ inline TokenRange seen_by_row(const DecodeMmaParams& params, const SequenceShape& shape,
                                         int end, int first_row, int num_rows, int r) {
  if (r >= num_rows) return {0, 0};
  const TokenRange seen = seen_by(params, shape, (first_row + r) / params.q_per_kv);
  return {seen.begin, min(seen.end, end)};
}

// Which of a lane's scores are hidden from their query, at the edges of what is seen: bit 4 u + j
// for number j of tile u's fragment. row: of the lane's first query; token: of its first score;
// missing: a bit for each tile: those before the walk's first token too. In loops, so that it takes
// little of the instructions' cache.
template <int NumTiles>
__device__ uint32_t hidden_scores(const DecodeMmaParams& params, const SequenceShape& shape,
                                  int end, int sinks_end, int first_row, int num_rows, int row,
                                  int token, uint32_t missing) {
  uint32_t hidden = 0;
#pragma unroll 1
  for (int column = 0; column < 2; ++column) {
    const int r = row + column;
    const TokenRange seen = seen_by_row(params, shape, end, first_row, num_rows, r);
    const int64_t q_token = int64_t{shape.q_start} + (first_row + r) / params.q_per_kv;
    const uint8_t* mask =
        params.tree_mask ? params.tree_mask + q_token * params.tree_mask_stride : nullptr;
#pragma unroll 1
    for (int i = 0; i < 2 * NumTiles; ++i) {
      const int at = token + i / 2 * kTileTokens + i % 2 * 8;
      const bool is_sink = at < sinks_end;
      const int token_of_sequence = is_sink ? at - sinks_end + params.window_sinks : at;
      const int new_token = token_of_sequence - shape.first_new_token();
      const bool is_before = at < seen.begin && !is_sink;
      bool is_hidden = (missing >> (i / 2) & 1u) != 0 || is_before || at >= seen.end;
      if (!is_hidden && mask && new_token >= 0) is_hidden = mask[new_token] == 0;
      hidden |= is_hidden ? 1u << (2 * i + column) : 0u;
    }
  }
  return hidden;
}

template <class Config>
using RingOf = std::conditional_t<
    Config::kIsBulk, BulkRing<Config>,
    std::conditional_t<Config::kHasStagesOfSides, NibblesRing<Config>, CopyRing<Config>>>;

template <class Keys, class Values, int Dim, int NTiles, bool IsFullPrecision>
class TileWorkTile {
 public:
  using Config = TileConfig<Keys, Values, NTiles, IsFullPrecision>;
  using Ring = RingOf<Config>;
  using Rows = WarpRows<Dim, NTiles>;

  __device__ TileWorkTile(const TileWalk& walk, const SequenceShape& shape, int first_row,
                          int num_rows, uint32_t shared)
      : params_(walk.params),
        shape_(shape),
        end_(walk.tokens.end),
        sinks_end_(walk.sinks_end),
        head_(walk.head),
        kv_head_(first_kv_head() + walk.head),
        first_row_(first_row),
        num_rows_(num_rows),
        lane_(kept<Config::kIsPacked>(static_cast<int>(threadIdx.x % kWarp))),
        ring_(walk, kept<Config::kIsPacked>(shared), lane_) {
    queries_.shared.at = shared + Config::kQueriesAt + lane_ * 8;
  }

  __device__ void begin() {
    find_seen();
    QueryNTile<Keys, Dim> columns[NTiles];
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      const int r = c * kNTileRows + lane_ / 4;
      columns[c].request(params_, shape_, kv_head_, first_row_ + r, r < num_rows_, lane_);
    }
    const float key_scale = key_scale_of_head();  // asked for early too
    if constexpr (Config::kIsPadded) {
      transform_padded();
    } else {
      ring_.begin();
    }
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      columns[c].finish(params_, kv_head_, key_scale, transformed_row(), lane_, queries_.columns[c],
                        score_scale_[c], bias_[c]);
    }
    if constexpr (Config::kIsPadded) {
      __syncwarp();
      ring_.begin();
    }
    queries_.share();
  }
  // The walk over full-precision tokens begins with queries that the one over packed tokens left at
  // `from`, in the ring's memory.
  __device__ void begin_with(uint32_t from, const LaneBias<NTiles>& bias) {
    find_seen();
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      const uint32_t column = from + FullPrecisionQueries<Dim>::bytes(c);
      FullPrecisionQueries<Dim>::template load<Keys>(column, lane_, queries_.columns[c]);
      const float log2 = params_.softcap == 0 ? kLog2E : 1.0f;
      const float scale = fabsf(params_.softmax_scale) * log2;
      score_scale_[c] = {scale, scale};
      bias_[c] = bias.of[c];
    }
    __syncwarp();
    ring_.begin();
  }
  // Whether this warp has no step to take.
  __device__ bool is_empty() const {
    return ring_.num_steps() == 0;
  }
  __device__ void start_empty() {
    // Far below every score, but finite: no difference of two of them is a NaN.
    for (float2& max : softmax_.max) max = {-1e30f, -1e30f};
    for (float2& sum : softmax_.sum) sum = {};
  }
  // Goes on where the walk over packed tokens ended.
  __device__ void start_with(const Rows& rows, const LaneSoftmax<NTiles>& softmax);
  __device__ void run() {
    for (int i = 0; i < ring_.num_steps(); ++i) {
      if constexpr (Config::kHasChannels) {
        attend_block_step(i);
      } else {
        attend_step(i);
      }
    }
    ring_.end();
    __syncwarp();
  }
  __device__ const LaneSoftmax<NTiles>& softmax() const {
    return softmax_;
  }
  // What all scores of a row have in common.
  __device__ LaneBias<NTiles> bias() const {
    LaneBias<NTiles> bias;
#pragma unroll
    for (int c = 0; c < NTiles; ++c) bias.of[c] = bias_[c];
    return bias;
  }
  __device__ void store_sums(Rows& rows);
  __device__ void store_softmax(Rows& rows);
  // For begin_with.
  __device__ void store_queries(uint32_t to) const {
    const float sign = params_.softmax_scale < 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      FullPrecisionQueries<Dim>::template store<Keys>(
          queries_, c, sign, to + FullPrecisionQueries<Dim>::bytes(c), lane_);
    }
    __syncwarp();
  }

 private:
  __device__ int first_kv_head() const {
    return IsFullPrecision ? params_.full_precision_first_head : params_.first_head;
  }

  // Queries of rows of any length, if they are to be transformed: in the ring's memory, before its
  // tiles come there.
  __device__ void transform_padded() const {
    static_assert(!Config::kIsPadded ||
                  (NTiles == 1 && kNTileRows * transformed_row_bytes(Dim) <= Config::kRingBytes));
    if (!params_.transforms_k) return;
    const QueryWorkTile rows = {shape_.q_start, kv_head_, first_row_, num_rows_};
    transform_queries<Dim>(params_, rows, ring_.memory(), lane_);
  }
  __device__ uint32_t transformed_row() const {
    return ring_.memory() + lane_ / 4 * transformed_row_bytes(Dim);
  }

  // Where all queries see everything.
  __device__ void find_seen() {
    seen_by_all_ = {seen_of(num_rows_ - 1).begin, seen_of(0).end};
    if (params_.tree_mask) {
      seen_by_all_.end = min(seen_by_all_.end, shape_.first_new_token());
    }
    const bool is_plain = params_.softcap == 0 && params_.key_offsets.scores == nullptr;
    plain_ = is_plain ? seen_by_all_ : TokenRange{};
  }
  __device__ TokenRange seen_of(int r) const {
    return seen_by_row(params_, shape_, end_, first_row_, num_rows_, r);
  }

  static constexpr int kTilesOfPass = Config::kTilesAtOnce / Config::kPasses;
  using Scores = Fragment[kTilesOfPass][NTiles];

  // Of a dual-scale block.
  __device__ void attend_block_step(int i) {
    Scores scores;
    ring_.wait_for_keys(i);
    Keys::score(ring_.keys(0), ring_.scale_table(), queries_, lane_, scores);
    ring_.release_keys(i);
    weigh(i, 0, scores);
    ring_.wait_for_values(i);
    Values::add(ring_.values(0), ring_.scale_table(), scores, lane_, sums_);
    ring_.release_values(i);
  }

  __device__ void attend_step(int i) {
    ring_.wait_for_keys(i);
#pragma unroll 1
    for (int first = 0; first < Config::kTilesAtOnce; first += kTilesOfPass) {
      Scores scores;
#pragma unroll
      for (int u = 0; u < kTilesOfPass; ++u) {
        Keys::score(ring_.keys(first + u), ring_.key_scales(first + u), queries_,
                    key_scale_has_asked_type(), lane_, scores[u]);
      }
      if (first + kTilesOfPass == Config::kTilesAtOnce) ring_.release_keys(i);
      weigh(i, first, scores);
      if (first == 0) {
        ring_.wait_for_values(i);
        if constexpr (Config::kHasScaleTable) fill_scale_table();
      }
      if constexpr (Values::kScalesWeights && !Config::kHasScaleTable) find_inverse_scale(first);
#pragma unroll
      for (int u = 0; u < kTilesOfPass; ++u) {
        Values::add(ring_.values(first + u), value_scales(first + u), scores[u], inverse_scale_,
                    value_scale_has_asked_type(), lane_, sums_);
      }
    }
    ring_.release_values(i);
  }

  __device__ void fill_scale_table() {
    using Table = typename Values::template Table<Config::kTilesAtOnce>;
    const auto scales = ring_.value_scales(0);
    if constexpr (Values::kScalesWeights) {
      const auto a = Values::load_scales(scales, 2 * lane_, value_scale_has_asked_type());
      const auto b = Values::load_scales(scales, 2 * lane_ + 1, value_scale_has_asked_type());
      float largest = 0;
      for (const float x : a.scale) largest = fmaxf(largest, x);
      for (const float x : b.scale) largest = fmaxf(largest, x);
      update_inverse_scale(largest);
      Table::fill(ring_.scale_table(), Values::normalised(a, inverse_scale_),
                  Values::normalised(b, inverse_scale_), lane_);
    } else {
      Table::fill(ring_.scale_table(), scales, lane_);
    }
    __syncwarp();
  }
  __device__ auto value_scales(int u) const {
    if constexpr (Config::kHasScaleTable) {
      return Values::template Table<Config::kTilesAtOnce>::tile(ring_.scale_table(), u);
    } else {
      return ring_.value_scales(u);
    }
  }

  // Scores of step i's tiles from `first` on become weights.
  __device__ void weigh(int i, int first, Scores& scores) {
    float2 by[NTiles];  // what is left to bring scores to units of log2
#pragma unroll
    for (int c = 0; c < NTiles; ++c) by[c] = score_scale_[c];
    const int token = ring_.token(i) + first * kTileTokens;
    if (!is_within(token, plain_) || ring_.may_be_missing()) [[unlikely]] {
      cap_and_hide(token, ring_.missing(i) >> first, scores, by);
    }
    raise_maximum(scores, by);
#pragma unroll
    for (int u = 0; u < kTilesOfPass; ++u) {
#pragma unroll
      for (int c = 0; c < NTiles; ++c) {
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

  __device__ static bool is_within(int token, TokenRange tokens) {
    return token >= tokens.begin && token + kTilesOfPass * kTileTokens <= tokens.end;
  }
  // token: of the first score; missing: a bit for each tile. Scores that are capped, or get what
  // K's block offsets add, are in units of log2 then.
  __device__ void cap_and_hide(int token, uint32_t missing, Scores& scores,
                               float2 (&by)[NTiles]) const {
    const bool has_cap = params_.softcap != 0;
    const bool has_offsets = params_.key_offsets.scores != nullptr;
    const bool sees_all = is_within(token, seen_by_all_) && !ring_.may_be_missing();
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      if (has_offsets) add_offsets(token, scores, c);
      if (has_cap) cap(scores, c, has_offsets ? float2{1.0f, 1.0f} : score_scale_[c]);
      if (has_cap || has_offsets) by[c] = {1.0f, 1.0f};
      if (!sees_all) hide(token, missing, scores, c);
    }
  }

  // Second-level and given scales of the head.
  __device__ float key_scale_of_head() const {
    if constexpr (IsFullPrecision) return 1.0f;
    const float scale =
        params_.tile_k.shared_scale
            ? params_.tile_k.shared_scale[head_ * params_.tile_k.shared_scale_stride]
            : 1.0f;
    return scale * params_.tile_k.tensor_scale(head_);
  }
  __device__ float value_scale_of_head() const {
    if constexpr (IsFullPrecision) return 1.0f;
    const float scale =
        params_.tile_v.shared_scale
            ? params_.tile_v.shared_scale[head_ * params_.tile_v.shared_scale_stride]
            : 1.0f;
    return scale * params_.tile_v.tensor_scale(head_);
  }
  // What load() of scales is told.
  __device__ bool key_scale_has_asked_type() const {
    return params_.tile_k.scale_type == kAskedType<typename Keys::ScaleOfRow>;
  }
  __device__ bool value_scale_has_asked_type() const {
    return params_.tile_v.scale_type == kAskedType<typename Values::ScaleOfRow>;
  }

  // Scores at their size, with what the block offset of each tile's tokens adds.
  __device__ void add_offsets(int token, Scores& scores, int c) const {
    const float* const rows[2] = {offsets_of_row(c, 0), offsets_of_row(c, 1)};
#pragma unroll
    for (int u = 0; u < kTilesOfPass; ++u) {
      float(&d)[4] = scores[u][c].d;
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float offset =
            params_.key_offsets.at(rows[column], token + u * kTileTokens, params_.block_size);
        const float scale = column == 0 ? score_scale_[c].x : score_scale_[c].y;
        d[column] = d[column] * scale + offset;
        d[2 + column] = d[2 + column] * scale + offset;
      }
    }
  }
  // Columns without a row have the last row's.
  __device__ const float* offsets_of_row(int c, int column) const {
    const int r = min(c * kNTileRows + lane_ % 4 * 2 + column, num_rows_ - 1);
    const QueryRowAt at = query_row(params_, kv_head_, first_row_ + r);
    const int64_t q_row = int64_t{shape_.q_start} + at.new_token;
    return params_.key_offsets.row(q_row * params_.num_q_heads + at.q_head);
  }

  // Softcap, to units of log2. tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it. A score of
  // -infinity stays hidden.
  __device__ void cap(Scores& scores, int c, float2 scale) const {
    const float most = params_.softcap;
    const float to_exponent = __fdividef(2.0f * kLog2E, most);
#pragma unroll
    for (int i = 0; i < 4 * kTilesOfPass; ++i) {
      float& x = scores[i / 4][c].d[i % 4];
      x = x * (i % 2 == 0 ? scale.x : scale.y) + (i % 2 == 0 ? bias_[c].x : bias_[c].y);
      x *= to_exponent;
      const float capped = most * kLog2E * (1.0f - __fdividef(2.0f, fast_exp2(x) + 1.0f));
      x = x == -INFINITY ? x : capped;
    }
  }

  __device__ void hide(int token, uint32_t missing, Scores& scores, int c) const {
    const uint32_t hidden =
        hidden_scores<kTilesOfPass>(params_, shape_, end_, sinks_end_, first_row_, num_rows_,
                                    c * kNTileRows + lane_ % 4 * 2, token + lane_ / 4, missing);
#pragma unroll
    for (int i = 0; i < 4 * kTilesOfPass; ++i) {
      if ((hidden >> i & 1u) != 0) scores[i / 4][c].d[i % 4] = -INFINITY;
    }
  }

  // The maximum only rises when a score is 2^8 above it: weights of up to 2^8 do no harm, and the
  // sums are hardly ever touched. by_unit: what brings scores to units of log2.
  __device__ void raise_maximum(const Scores& scores, const float2 (&by_unit)[NTiles]) {
    constexpr float kSlack = 8.0f;
    float2 top[NTiles];
    bool rises = false;
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
      const float* first = scores[0][c].d;
      top[c] = {fmaxf(first[0], first[2]), fmaxf(first[1], first[3])};
#pragma unroll
      for (int u = 1; u < kTilesOfPass; ++u) {
        const float* d = scores[u][c].d;
        top[c] = {fmaxf(top[c].x, fmaxf(d[0], d[2])), fmaxf(top[c].y, fmaxf(d[1], d[3]))};
      }
      top[c] = {top[c].x * by_unit[c].x, top[c].y * by_unit[c].y};
      rises |= top[c].x > softmax_.max[c].x + kSlack || top[c].y > softmax_.max[c].y + kSlack;
    }
    if (!__any_sync(kWholeWarp, rises)) [[likely]]
      return;
#pragma unroll
    for (int c = 0; c < NTiles; ++c) {
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
  // first: of the pass's tiles.
  __device__ void find_inverse_scale(int first) {
    typename Values::Largest found;
#pragma unroll
    for (int u = 0; u < kTilesOfPass; ++u) {
      Values::find_largest(ring_.value_scales(first + u), value_scale_has_asked_type(), lane_,
                           found);
    }
    update_inverse_scale(found.value());
  }
  // largest: of this lane's scales.
  __device__ void update_inverse_scale(float largest) {
    constexpr float kMost = 16.0f;
    // Not a number of f32's range: nothing to bring nearer.
    const bool is_too_large = largest * inverse_scale_ > kMost || inverse_scale_ == 0;
    const bool changes = is_too_large && largest > 0 && largest < INFINITY;
    if (!__any_sync(kWholeWarp, changes)) [[likely]]
      return;
    float top = largest < INFINITY ? largest : 0.0f;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, offset));
    }
    const float unit = exp2f(-static_cast<float>(ilogbf(top)));
    const float by = inverse_scale_ == 0 ? 0.0f : unit / inverse_scale_;
    inverse_scale_ = unit;
#pragma unroll
    for (int c = 0; c < NTiles; ++c) sums_[c].multiply({by, by});
  }

  const DecodeMmaParams& params_;
  const SequenceShape& shape_;
  const int end_;        // of the walk's tokens
  const int sinks_end_;  // TileWalk's
  const int head_;       // of the run
  const int kv_head_;
  const int first_row_;
  const int num_rows_;
  const int lane_;
  Ring ring_;
  TokenRange seen_by_all_;
  TokenRange plain_;  // seen by all, and nothing but a factor brings their scores to their size
  std::conditional_t<Config::kHasChannels, AllSharedQueries<Dim, NTiles>,
                     AllQueries<Dim, NTiles, Config::kSharesQueries>>
      queries_;
  float2 score_scale_[NTiles];
  float2 bias_[NTiles];  // of scores: before the cap, or in units of log2
  ValueSums<Dim> sums_[NTiles] = {};
  LaneSoftmax<NTiles> softmax_;
  float inverse_scale_ = 0;  // of V's scales; 0: none seen
};

template <class Keys, class Values, int Dim, int NTiles, bool IsFullPrecision>
__device__ void TileWorkTile<Keys, Values, Dim, NTiles, IsFullPrecision>::start_with(
    const Rows& rows, const LaneSoftmax<NTiles>& softmax) {
  const int g = lane_ / 4, t = lane_ % 4;
  softmax_ = softmax;
#pragma unroll
  for (int i = 0; i < NTiles * Dim / 16; ++i) {
    const int c = i / (Dim / 16), f = i % (Dim / 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums_[c].f[f].d[j] = rows.sums[c * kNTileRows + 2 * t + j % 2][Values::channel(f, g, j / 2)];
    }
  }
}

template <class Keys, class Values, int Dim, int NTiles, bool IsFullPrecision>
__device__ void TileWorkTile<Keys, Values, Dim, NTiles, IsFullPrecision>::store_sums(Rows& rows) {
  const int g = lane_ / 4, t = lane_ % 4;
  float unit = Values::unit() * value_scale_of_head();
  if constexpr (Values::kScalesWeights) unit = inverse_scale_ > 0 ? unit / inverse_scale_ : 0;
#pragma unroll
  for (int c = 0; c < NTiles; ++c) {
    float2& zeros = sums_[c].zeros;
    for (int offset = 4; offset < kWarp; offset *= 2) {
      zeros.x += __shfl_xor_sync(kWholeWarp, zeros.x, offset);
      zeros.y += __shfl_xor_sync(kWholeWarp, zeros.y, offset);
    }
    // Neighbours in one access: one by one, lanes of 4-bit rows would meet every bank four times.
    constexpr int kFragments = Values::kNeighbours > 2 ? Values::kNeighbours / 2 : 1;
#pragma unroll
    for (int i = 0; i < Dim / 16; i += kFragments) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const float zero = column == 0 ? zeros.x : zeros.y;
        float x[2 * kFragments];
#pragma unroll
        for (int n = 0; n < 2 * kFragments; ++n) {
          const float by = unit * Values::factor(i + n / 2, n % 2);
          x[n] = (sums_[c].f[i + n / 2].d[column + 2 * (n % 2)] + zero) * by;
        }
        float* row = rows.sums[c * kNTileRows + 2 * t + column];
        float* to = row + Values::channel(i, g, 0);
        if constexpr (Values::kNeighbours == 4) {
          *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
        } else if constexpr (Values::kNeighbours == 2) {
          *reinterpret_cast<float2*>(to) = {x[0], x[1]};
        } else {
          *to = x[0];
          row[Values::channel(i, g, 1)] = x[1];
        }
      }
    }
  }
}

template <class Keys, class Values, int Dim, int NTiles, bool IsFullPrecision>
__device__ void TileWorkTile<Keys, Values, Dim, NTiles, IsFullPrecision>::store_softmax(
    Rows& rows) {
  const bool has_cap = params_.softcap != 0;
#pragma unroll
  for (int c = 0; c < NTiles; ++c) {
    float2 sum = softmax_.sum[c];
    for (int offset = 4; offset < kWarp; offset *= 2) {
      sum.x += __shfl_xor_sync(kWholeWarp, sum.x, offset);
      sum.y += __shfl_xor_sync(kWholeWarp, sum.y, offset);
    }
    if (lane_ / 4 != 0) continue;
    // What all scores of a row have in common only moves its maximum.
    const float2 bias = has_cap ? float2{} : bias_[c];
    Softmax2* softmax = &rows.softmax[c * kNTileRows + 2 * (lane_ % 4)];
    softmax[0] = {softmax_.max[c].x + bias.x, sum.x};
    softmax[1] = {softmax_.max[c].y + bias.y, sum.y};
  }
}

}  // namespace kvx::ops::cuda

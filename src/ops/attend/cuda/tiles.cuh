// The tensor cores' attention kernel: up to 8 query rows of a KV head against a split of its
// tokens. Every warp works alone: it copies tiles of 16 tokens into a ring of its own, turns packed
// bytes into mma operands, and keeps its own softmax and sums; the CTA's warps merge at the end.
//
// The cache is the A operand of both products (keys: tokens x channels; values: channels x tokens)
// and the queries and weights are B, 8 columns: with few queries a KV head nothing is wasted, and
// rows that are not there cost little.
#pragma once

#include <type_traits>

#include "ops/attend/cuda/job.cuh"
#include "ops/attend/cuda/launch.hpp"
#include "ops/attend/cuda/tile_ring.cuh"

namespace kvx::ops::cuda {

// Softmax and sums of queries 2t and 2t + 1 in a lane.
template <int Dim>
struct WarpState {
  ValueSums<Dim> sums = {};
  // Far below every score, but finite: no difference of two of them is a NaN.
  float2 max = {-1e30f, -1e30f};
  float2 sum = {};
  float scale_unit = 0;  // of V's scales; 0: none seen
};

template <class Keys, class Values, int Dim>
class TilePiece {
 public:
  using Config = TileConfig<Keys, Values>;
  using Ring = std::conditional_t<Config::kIsBulk, BulkRing<Keys, Values>, CopyRing<Keys, Values>>;

  __device__ TilePiece(const TileWalk& walk, const SequenceShape& shape, int first_row,
                       int num_rows, uint32_t shared)
      : job_(walk.job),
        shape_(shape),
        tokens_(walk.tokens),
        head_(walk.head),
        kv_head_(walk.job.packed.first_head + walk.head),
        first_row_(first_row),
        num_rows_(num_rows),
        lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp),
        ring_(walk, shared, warp_, lane_) {}

  __device__ void run() {
    find_seen();
    ring_.begin();
    load_queries(ring_.scratch());
    ring_.after_queries();
    for (int i = 0; i < ring_.num_steps(); ++i) {
      ring_.wait(i);
      attend_step(ring_.token(i));
      ring_.next(i);
    }
    ring_.end();
  }

  // Requires: the CTA's rings are no longer used. shared: kWarps * 8 * (Dim + 4) floats and a
  // Softmax2 for each row of each warp.
  __device__ void merge_and_store(float* shared, int split);

 private:
  // What this lane's two queries see, and where all queries see everything.
  __device__ void find_seen() {
    const int t = lane_ % 4;
    seen_[0] = seen_of(2 * t);
    seen_[1] = seen_of(2 * t + 1);
    seen_by_all_ = {seen_of(num_rows_ - 1).begin, seen_of(0).end};
    seen_by_all_.begin = max(seen_by_all_.begin, tokens_.begin);
    seen_by_all_.end = min(seen_by_all_.end, tokens_.end);
  }
  __device__ TokenRange seen_of(int r) const {
    if (r >= num_rows_) return {0, 0};
    const TokenRange seen = seen_by(job_, shape_, (first_row_ + r) / job_.q_per_kv);
    return {max(seen.begin, tokens_.begin), min(seen.end, tokens_.end)};
  }

  // The queries in binary32 into shared memory, rows that are not there as zeros. All lanes load
  // four numbers at a time where rows lie so.
  __device__ void stage_queries(uint32_t staged) const {
    constexpr int kQuads = Dim / 4;  // of a row
    const FloatRows& q = job_.args.q;
    const int quad_bytes = 4 * bytes_of(q.dtype);
    const bool is_aligned = reinterpret_cast<uintptr_t>(q.data) % quad_bytes == 0 &&
                            q.token_stride % 4 == 0 && q.head_stride % 4 == 0;
#pragma unroll
    for (int i = 0; i < kTileRows * kQuads / kWarp; ++i) {
      const int r = (lane_ + i * kWarp) / kQuads;
      const int first = (lane_ + i * kWarp) % kQuads * 4;
      float4 x = {};
      if (r < num_rows_) {
        const QueryRowAt at = query_row(job_, kv_head_, first_row_ + r);
        const uint8_t* row = q.data + ((int64_t{shape_.q_start} + at.new_token) * q.token_stride +
                                       at.q_head * q.head_stride) *
                                          bytes_of(q.dtype);
        x = load_quad(q.dtype, row, first, is_aligned);
      }
      asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(staged + (r * Dim + first) * 4),
                   "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                   : "memory");
    }
    __syncwarp();
  }
  __device__ static float4 load_quad(DType type, const uint8_t* row, int first, bool is_aligned) {
    if (!is_aligned) {
      return {load_float(type, row, first), load_float(type, row, first + 1),
              load_float(type, row, first + 2), load_float(type, row, first + 3)};
    }
    if (type == DType::kF32) return reinterpret_cast<const float4*>(row)[first / 4];
    const uint2 bits = reinterpret_cast<const uint2*>(row)[first / 4];
    const auto number = [type](uint32_t half) {
      return type == DType::kF16 ? __half2float(__ushort_as_half(static_cast<uint16_t>(half)))
                                 : __uint_as_float(half << 16);
    };
    return {number(bits.x & 0xFFFFu), number(bits.x >> 16), number(bits.y & 0xFFFFu),
            number(bits.y >> 16)};
  }

  // Query g of four lanes, each with the channels that its part of the keys has.
  __device__ void load_queries(uint32_t staged) {
    stage_queries(staged);
    const int g = lane_ / 4, t = lane_ % 4;
    const auto number = [&](int channel) {
      return __uint_as_float(load_shared_4(staged + (g * Dim + channel) * 4));
    };
    float scale = 1.0f;  // into the 16-bit type's range, by a power of two
    if (Keys::Mma::kScalesQueries && job_.args.q.dtype != DType::kF16) {
      float largest = 0;
      for (int d = t; d < Dim; d += 4) largest = fmaxf(largest, fabsf(number(d)));
      largest = over_quad(largest, [](float a, float b) { return fmaxf(a, b); });
      if (largest > 0) scale = exp2f(-static_cast<float>(ilogbf(largest)));
    }
    float sum = 0;
#pragma unroll
    for (int s = 0; s < Dim / 16; ++s) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int2 c = Keys::channels(t, s, r);
        const float x = number(c.x) * scale, y = number(c.y) * scale;
        sum += x + y;
        queries_.b[s][r] = Keys::Mma::pack(x, y);
      }
    }
    sum = over_quad(sum, [](float a, float b) { return a + b; });
    // Row g's facts go to the lanes whose columns are 2t and 2t + 1.
    const float factor = job_.args.softmax_scale * Keys::unit() * key_scale_of_head() / scale;
    query_sums_ = {__shfl_sync(kWholeWarp, sum, 8 * t), __shfl_sync(kWholeWarp, sum, 8 * t + 4)};
    score_scale_ = {__shfl_sync(kWholeWarp, factor, 8 * t),
                    __shfl_sync(kWholeWarp, factor, 8 * t + 4)};
    if (job_.args.softcap == 0) {
      score_scale_.x *= kLog2E;
      score_scale_.y *= kLog2E;
    }
  }
  template <class Combine>
  __device__ static float over_quad(float x, const Combine& combine) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, 1));
    return combine(x, __shfl_xor_sync(kWholeWarp, x, 2));
  }

  // token: the step's first.
  __device__ void attend_step(int token) {
    Fragment scores[Config::kTilesAtOnce];
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      scores[u] = Keys::score(ring_.keys(u), ring_.key_scales(u), queries_, query_sums_,
                              key_scale_is_bf16(), lane_);
      scale_scores(scores[u]);
    }
    if (token < seen_by_all_.begin || token + Config::kStepTokens > seen_by_all_.end ||
        ring_.is_missing_some()) {
#pragma unroll
      for (int u = 0; u < Config::kTilesAtOnce; ++u) {
        hide(token + u * kTileTokens, ring_.is_missing(u), scores[u]);
      }
    }
    raise_maximum(scores);
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      Fragment& w = scores[u];
      w.d[0] = fast_exp2(w.d[0] - state_.max.x);
      w.d[1] = fast_exp2(w.d[1] - state_.max.y);
      w.d[2] = fast_exp2(w.d[2] - state_.max.x);
      w.d[3] = fast_exp2(w.d[3] - state_.max.y);
      state_.sum.x += w.d[0] + w.d[2];
      state_.sum.y += w.d[1] + w.d[3];
      if constexpr (Values::kScalesWeights) find_scale_unit(ring_.value_scales(u));
      Values::add(ring_.values(u), ring_.value_scales(u), w, state_.scale_unit,
                  value_scale_is_bf16(), lane_, state_.sums);
    }
  }

  // Second-level and given scales of the head.
  __device__ float key_scale_of_head() const {
    const float scale =
        job_.shared_k_scale ? job_.shared_k_scale[head_ * job_.shared_k_scale_stride] : 1.0f;
    return scale * job_.packed.k.tensor_scale(head_);
  }
  __device__ float value_scale_of_head() const {
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

  // To units of log2.
  __device__ void scale_scores(Fragment& scores) const {
    scores.d[0] *= score_scale_.x;
    scores.d[1] *= score_scale_.y;
    scores.d[2] *= score_scale_.x;
    scores.d[3] *= score_scale_.y;
    const float cap = job_.args.softcap;
    if (cap == 0) return;
      // tanh(x) = 1 - 2 / (e^2x + 1), within 2^-22 of it.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float exponential = fast_exp2(scores.d[i] * (2.0f * kLog2E / cap));
      scores.d[i] = cap * kLog2E * (1.0f - __fdividef(2.0f, exponential + 1.0f));
    }
  }

  __device__ void hide(int token, bool is_missing, Fragment& scores) const {
    const int g = lane_ / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token + g + 8 * (i / 2);
      const TokenRange& seen = seen_[i % 2];
      if (is_missing || at < seen.begin || at >= seen.end) scores.d[i] = -INFINITY;
    }
  }

  // The maximum only rises when a score is 2^8 above it: weights of up to 2^8 do no harm, and the
  // sums are hardly ever touched.
  __device__ void raise_maximum(const Fragment* scores) {
    float2 top = {-INFINITY, -INFINITY};
#pragma unroll
    for (int u = 0; u < Config::kTilesAtOnce; ++u) {
      top.x = fmaxf(top.x, fmaxf(scores[u].d[0], scores[u].d[2]));
      top.y = fmaxf(top.y, fmaxf(scores[u].d[1], scores[u].d[3]));
    }
    constexpr float kSlack = 8.0f;
    const bool rises = top.x > state_.max.x + kSlack || top.y > state_.max.y + kSlack;
    if (!__any_sync(kWholeWarp, rises)) return;
    for (int offset = 4; offset < kWarp; offset *= 2) {
      top.x = fmaxf(top.x, __shfl_xor_sync(kWholeWarp, top.x, offset));
      top.y = fmaxf(top.y, __shfl_xor_sync(kWholeWarp, top.y, offset));
    }
    top = {fmaxf(top.x, state_.max.x), fmaxf(top.y, state_.max.y)};
    const float2 by = {fast_exp2(state_.max.x - top.x), fast_exp2(state_.max.y - top.y)};
    state_.max = top;
    state_.sum.x *= by.x;
    state_.sum.y *= by.y;
    state_.sums.multiply(by);
  }

  // Weights go to 16 bits after they are multiplied by V's scales, so those must not be far from 1.
  __device__ void find_scale_unit(uint32_t scales) {
    const float largest = Values::largest_scale(scales, value_scale_is_bf16(), lane_);
    constexpr float kMost = 16.0f;
    // Not a number of f32's range: nothing to bring nearer.
    const bool is_too_large = largest * state_.scale_unit > kMost || state_.scale_unit == 0;
    if (!__any_sync(kWholeWarp, is_too_large && largest > 0 && largest < INFINITY)) return;
    float top = largest < INFINITY ? largest : 0.0f;
    for (int offset = 4; offset < kWarp; offset *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, offset));
    }
    const float unit = exp2f(-static_cast<float>(ilogbf(top)));
    const float by = state_.scale_unit == 0 ? 0.0f : unit / state_.scale_unit;
    state_.scale_unit = unit;
    state_.sums.multiply({by, by});
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
  static_assert(Config::kStepBytes >= kTileRows * Dim * 4, "queries pass through a stage");
  TokenRange seen_[2];
  TokenRange seen_by_all_;
  Queries<Dim> queries_;
  float2 query_sums_;
  float2 score_scale_;
  WarpState<Dim> state_;
};

template <class Keys, class Values, int Dim>
__device__ void TilePiece<Keys, Values, Dim>::merge_and_store(float* shared, int split) {
  constexpr int kStride = Dim + 4;
  constexpr int kRows = kTileRows;
  float* out = shared;  // [kWarps][kRows][kStride]
  auto* softmax = reinterpret_cast<Softmax2*>(shared + Config::kWarps * kRows * kStride);
  const int g = lane_ / 4, t = lane_ % 4;
  for (int offset = 4; offset < kWarp; offset *= 2) {
    state_.sum.x += __shfl_xor_sync(kWholeWarp, state_.sum.x, offset);
    state_.sum.y += __shfl_xor_sync(kWholeWarp, state_.sum.y, offset);
    state_.sums.zeros.x += __shfl_xor_sync(kWholeWarp, state_.sums.zeros.x, offset);
    state_.sums.zeros.y += __shfl_xor_sync(kWholeWarp, state_.sums.zeros.y, offset);
  }
  float unit = Values::unit() * value_scale_of_head();
  if constexpr (Values::kScalesWeights) unit = state_.scale_unit > 0 ? unit / state_.scale_unit : 0;
#pragma unroll
  for (int i = 0; i < Dim / 16; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = 2 * t + j % 2;
      const float zero = j % 2 == 0 ? state_.sums.zeros.x : state_.sums.zeros.y;
      out[(warp_ * kRows + r) * kStride + Values::channel(i, g, j / 2)] =
          (state_.sums.f[i].d[j] + zero) * unit;
    }
  }
  if (g == 0) {
    softmax[warp_ * kRows + 2 * t] = {state_.max.x, state_.sum.x};
    softmax[warp_ * kRows + 2 * t + 1] = {state_.max.y, state_.sum.y};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows_ * Dim; i += Config::kThreads) {
    const int r = i / Dim, d = i % Dim;
    float max = -INFINITY;
    for (int w = 0; w < Config::kWarps; ++w) max = fmaxf(max, softmax[w * kRows + r].max);
    float sum = 0, total = 0;
    for (int w = 0; w < Config::kWarps; ++w) {
      const Softmax2& part = softmax[w * kRows + r];
      if (part.sum == 0) continue;
      const float weight = fast_exp2(part.max - max);
      sum += weight * part.sum;
      total += weight * out[(w * kRows + r) * kStride + d];
    }
    const QueryRowAt at = query_row(job_, kv_head_, first_row_ + r);
    const int64_t token = shape_.q_start + at.new_token;
    if (job_.num_splits == 1) {  // nothing to merge with
      store_output(job_, token, at.q_head, d, {max, sum}, total);
      continue;
    }
    const int64_t index = partial_index(job_, token, at.q_head, split);
    job_.partial_out[index * Dim + d] = total;
    if (d == 0) job_.partial_softmax[index] = {max, sum};
  }
}

template <class Keys, class Values>
constexpr int tile_shared_bytes(int dim) {
  using Config = TileConfig<Keys, Values>;
  const int merge = Config::kWarps * kTileRows * ((dim + 4) * 4 + 8);
  const int ring = Config::kRingBytes + Config::kBarrierBytes;
  return merge > ring ? merge : ring;
}

template <class Keys, class Values, int Dim>
__global__ void __launch_bounds__(TileConfig<Keys, Values>::kThreads,
                                  TileConfig<Keys, Values>::kCtas)
    attend_tiles(const __grid_constant__ AttendJob job) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int split = blockIdx.x;
  const int head = blockIdx.y % job.packed.num_heads;
  const int first_row = blockIdx.y / job.packed.num_heads * kTileRows;
  const SequenceShape shape = sequence_shape(job, blockIdx.z);
  const int num_rows = min(kTileRows, shape.q_len * job.q_per_kv - first_row);
  if (!shape.is_valid) {
    return leave_empty(job, shape, job.packed.first_head + head, first_row, num_rows, split,
                       job.num_splits == 1);
  }
  if (num_rows <= 0) return;
  const TokenRange tokens = split_of(seen_by_rows(job, shape, first_row, num_rows), job.num_splits,
                                     split, TileConfig<Keys, Values>::kStepTokens);
  const TileWalk walk = {
      job, job.args.block_table.ids + int64_t{blockIdx.z} * job.args.block_table.row_stride,
      shape.seq_len, head, tokens};
  TilePiece<Keys, Values, Dim> piece(walk, shape, first_row, num_rows,
                                     static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  piece.run();
  __syncthreads();
  piece.merge_and_store(reinterpret_cast<float*>(shared), split);
}

// What an instance tells the host.
template <class Keys, class Values, int Dim>
TileKernel tile_kernel() {
  using Config = TileConfig<Keys, Values>;
  return {
      .function = reinterpret_cast<const void*>(&attend_tiles<Keys, Values, Dim>),
      .threads = Config::kThreads,
      .shared_bytes = tile_shared_bytes<Keys, Values>(Dim),
      .ctas_per_multiprocessor = Config::kCtas,
      .granule = Config::kStepTokens * Config::kWarps,
      .tiles_at_once = Config::kTilesAtOnce,
  };
}

}  // namespace kvx::ops::cuda

// The latent kernel's queries on their way into shared memory, as 16-bit numbers: a row a warp.
#pragma once

#include "ops/attend/cuda/latent/decode_chunk.cuh"
#include "ops/attend/cuda/latent/shape.cuh"

namespace kvx::ops::cuda {

// How the last 64 numbers of a row are multiplied. Beside packed rows, queries take what the rows'
// unit is into account: in bf16, which has binary32's range, a query is the sum of two numbers.
template <class Mma, LatentRows Rows>
struct LatentRestMma {
  static constexpr bool kIsBf16 = Rows.rest == LatentRest::kBf16;
  using Type = std::conditional_t<kIsBf16, MmaBf16, Mma>;
  static constexpr int kPasses = kIsBf16 ? 2 : 1;
};

template <class Mma, LatentRows Rows>
class LatentQueries {
  using Shape = LatentShape;
  using Rest = LatentRestMma<Mma, Rows>;
  static constexpr int kChunks = kLatentKeyDim / 8;                    // of a row
  static constexpr int kChunksOfLane = (kChunks + kWarp - 1) / kWarp;  // 32 apart
  static constexpr int kWarps = Shape::kConsumers * kWarpgroup / kWarp;
  static constexpr int kRowsAtOnce = 2;
  static constexpr DType kType = Mma::kScalesQueries ? DType::kF16 : DType::kBF16;

 public:
  __device__ LatentQueries(const LatentParams& params, const SequenceShape& shape, int kv_head,
                           int first_row, int num_rows)
      : params_(params),
        shape_(shape),
        kv_head_(kv_head),
        first_row_(first_row),
        num_rows_(num_rows),
        lane_(static_cast<int>(threadIdx.x) % kWarp) {}

  // By the consumers' warps. Rows that are not there become zeros. This is executed once, and waits
  // for its instructions as much as for the rows: queries that are as keys are, are copied.
  __device__ void load(const LatentRing& ring, int warp) const {
    const FloatRows& q = params_.q;
    const int64_t row_bytes = bytes_of(q.dtype);
    const bool is_on_16 =
        (reinterpret_cast<uintptr_t>(q.data) | static_cast<uintptr_t>(q.token_stride * row_bytes) |
         static_cast<uintptr_t>(q.head_stride * row_bytes)) %
            16 ==
        0;
    const bool is_alike = params_.tile_k.format.pair_order == PairOrder::kNeighbours &&
                          q.dtype == kType && params_.softmax_scale > 0;
    if (!is_beside(Rows) && is_alike && is_on_16) {
      copy_rows(ring, warp);
    } else {
#pragma unroll 1
      for (int first = warp; first < kLatentRows; first += kWarps * kRowsAtOnce) {
        Eight eights[kRowsAtOnce][kChunksOfLane];  // all are asked for before the first is used
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) ask(first + i * kWarps, is_on_16, eights[i]);
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) store(ring, first + i * kWarps, eights[i]);
      }
    }
    fence_bulk_copies();
  }

 private:
  // Eight numbers of a query row as they lie: 16 bytes, or 32.
  struct Eight {
    uint4 words[2];
  };

  // Null where it is not there.
  __device__ const uint8_t* row_at(int row) const {
    if (row >= num_rows_) return nullptr;
    const FloatRows& q = params_.q;
    const QueryRowAt at = query_row(params_, kv_head_, first_row_ + row);
    const int64_t number = (int64_t{shape_.q_start} + at.new_token) * q.token_stride +
                           int64_t{at.q_head} * q.head_stride;
    return q.data + number * bytes_of(q.dtype);
  }

  __device__ void copy_rows(const LatentRing& ring, int warp) const {
#pragma unroll 2
    for (int row = warp; row < kLatentRows; row += kWarps) {
      const uint8_t* from = row_at(row);
#pragma unroll
      for (int c = 0; c < kChunksOfLane; ++c) {
        const int chunk = lane_ + c * kWarp;
        if (chunk >= kChunks) continue;
        copy_async_16(place(ring, row, chunk), from ? from + chunk * 16 : params_.q.data,
                      from ? 16 : 0);
      }
      store_score_scale(ring, row, 1.0f);
    }
    commit_copies();
    wait_for_copies<0>();
  }
  __device__ static uint32_t place(const LatentRing& ring, int row, int chunk) {
    return ring.queries() + chunk / 8 * Shape::kSlabBytes + wgmma_chunk(row, chunk % 8);
  }
  // scale: that the query was multiplied by.
  __device__ void store_score_scale(const LatentRing& ring, int row, float scale) const {
    // Never 0: a hidden score, -infinity, is multiplied by it.
    const float to_log2 = params_.softcap == 0 ? kLog2E : 1.0f;
    const float by = fmaxf(fabsf(factor()) / scale * to_log2, 1e-37f);
    if (lane_ == 0) store_shared_float(ring.score_scale(row), by);
  }
  __device__ float factor() const {
    return params_.softmax_scale * key_unit();
  }
  // Beside a segment, rows of a unit so small that their scores are nothing: queries cannot be
  // divided by it, and the segment's scores are all there is.
  __device__ bool has_empty_rows() const {
    constexpr float kLeastUnit = 1e-20f;
    return is_beside(Rows) && fabsf(latent_unit(params_, kv_head_)) < kLeastUnit;
  }
  __device__ float key_unit() const {
    return has_empty_rows() ? 1.0f : latent_unit(params_, kv_head_);
  }

  __device__ void ask(int row, bool is_on_16, Eight (&eights)[kChunksOfLane]) const {
    const uint8_t* from = row_at(row);
#pragma unroll
    for (int c = 0; c < kChunksOfLane; ++c) {
      const int chunk = lane_ + c * kWarp;
      eights[c] = {};
      if (from == nullptr || chunk >= kChunks) continue;
      eights[c] = is_on_16 ? load_eight(from, chunk) : load_eight_apart(from, chunk);
    }
  }
  __device__ Eight load_eight(const uint8_t* row, int chunk) const {
    const uint4* from = reinterpret_cast<const uint4*>(row);
    if (params_.q.dtype == DType::kF32) return {from[2 * chunk], from[2 * chunk + 1]};
    return {from[chunk], {}};
  }
  __device__ Eight load_eight_apart(const uint8_t* row, int chunk) const {
    uint32_t words[8] = {};
    if (params_.q.dtype == DType::kF32) {
      for (int i = 0; i < 8; ++i) words[i] = reinterpret_cast<const uint32_t*>(row)[8 * chunk + i];
    } else {
      const auto* from = reinterpret_cast<const uint16_t*>(row) + 8 * chunk;
      for (int i = 0; i < 4; ++i) words[i] = from[2 * i] | uint32_t{from[2 * i + 1]} << 16;
    }
    return {{{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}}};
  }

  __device__ void widen(const Eight& eight, float (&x)[8]) const {
    const uint4 a = eight.words[0], b = eight.words[1];
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    const DType type = params_.q.dtype;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair =
          type == DType::kF16 ? MmaF16::unpack(words[i]) : MmaBf16::unpack(words[i]);
      x[2 * i] = type == DType::kF32 ? __uint_as_float(words[2 * i]) : pair.x;
      x[2 * i + 1] = type == DType::kF32 ? __uint_as_float(words[2 * i + 1]) : pair.y;
    }
  }

  __device__ void store(const LatentRing& ring, int row,
                        const Eight (&eights)[kChunksOfLane]) const {
    // Scores are compared before they are multiplied, so the factor's sign goes into the queries.
    const float sign = factor() < 0 ? -1.0f : factor() == 0 ? 0.0f : 1.0f;
    float scale = 1;
    if constexpr (Mma::kScalesQueries) {
      const bool may_be_out_of_range = Rows.rest == LatentRest::kF16;
      if (may_be_out_of_range || params_.q.dtype != DType::kF16) scale = scale_of(eights);
    }
    const float of_values = has_empty_rows() ? 0.0f : scale;
#pragma unroll
    for (int c = 0; c < kChunksOfLane; ++c) {
      const int chunk = lane_ + c * kWarp;
      if (chunk >= kChunks) continue;
      float x[8];
      widen(eights[c], x);
      if (is_beside(Rows) && is_rest(c)) {
        store_rest(ring, row, chunk, x, scale * sign / key_unit());
        continue;
      }
      const Four pairs =
          chunk_of<Mma>(params_.tile_k.format.pair_order, x, of_values * sign);  // as keys decode
      store_chunk(place(ring, row, chunk), pairs);
    }
    store_score_scale(ring, row, scale);
  }

  // Whether the lanes' chunks c are of the last 64 numbers.
  __device__ static constexpr bool is_rest(int c) {
    return c * kWarp >= kLatentValueDim / 8;
  }
  static_assert(kLatentValueDim / 8 % kWarp == 0);

  __device__ void store_rest(const LatentRing& ring, int row, int chunk, const float (&x)[8],
                             float scale) const {
    using Type = typename Rest::Type;
    const Four pairs = chunk_of<Type>(PairOrder::kNeighbours, x, scale);
    store_chunk(place(ring, row, chunk), pairs);
    if constexpr (Rest::kPasses == 2) {
      float low[8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 high = Type::unpack(pairs.r[i]);
        low[2 * i] = x[2 * i] * scale - high.x;
        low[2 * i + 1] = x[2 * i + 1] * scale - high.y;
      }
      store_chunk(ring.low_queries() + wgmma_chunk(row, chunk % 8),
                  chunk_of<Type>(PairOrder::kNeighbours, low, 1.0f));
    }
  }

  // Into f16's range, by a power of two. Where a segment's numbers may be far larger than the
  // others, the largest comes to its end.
  __device__ float scale_of(const Eight (&eights)[kChunksOfLane]) const {
    float largest = 0;
#pragma unroll
    for (int c = 0; c < kChunksOfLane; ++c) {
      if (Rows.rest == LatentRest::kBf16 && is_rest(c)) continue;
      const bool is_in_units = Rows.rest == LatentRest::kF16 && is_rest(c);
      const float by = is_in_units ? 1.0f / key_unit() : 1.0f;
      float x[8];
      widen(eights[c], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i] * by));
    }
    for (int other = 1; other < kWarp; other *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, other));
    }
    const int top = Rows.rest == LatentRest::kF16 ? 14 : 0;
    return largest > 0 && largest < INFINITY ? exp2f(static_cast<float>(top - ilogbf(largest)))
                                             : 1.0f;
  }

  const LatentParams& params_;
  const SequenceShape& shape_;
  const int kv_head_;
  const int first_row_;
  const int num_rows_;
  const int lane_;
};

}  // namespace kvx::ops::cuda

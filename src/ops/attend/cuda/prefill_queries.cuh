// The prefill kernel's query rows: which a warpgroup has, and their way into shared memory, as
// 16-bit numbers in the keys' order.
#pragma once

#include "ops/attend/cuda/prefill_shape.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

// The rows of a multiplying warpgroup, as one of its threads sees them.
struct PrefillRowSet {
  const AttendJob& job;
  const SequenceShape& shape;
  int head;       // of the run
  int consumer;   // which warpgroup
  int warp;       // of it
  int first_row;  // of the sequence's rows
  int num_rows;
  // The thread's own rows are 16 warp + g and 8 more, its columns 8 i + 2 t and the next.
  int g = static_cast<int>(threadIdx.x) % kWarp / 4;
  int t = static_cast<int>(threadIdx.x) % 4;

  __device__ int lane() const { return 4 * g + t; }
  __device__ int row(int r) const { return 16 * warp + g + 8 * r; }
  __device__ QueryRowAt at(int row) const {
    return query_row(job, job.packed.first_head + head, first_row + row);
  }
};

// Second-level and given scales of a head, of K or of V.
__device__ inline float scale_of_head(const CudaSide& side, const float* given, int given_stride,
                                      int head) {
  const float shared = given ? given[head * given_stride] : 1.0f;
  return shared * side.tensor_scale(head) * unit_of(side.id);
}

template <class Shape>
class PrefillQueries {
  using Mma = typename Shape::Mma;
  static constexpr int kLanes = Shape::kDim / 8;  // of a row
  static constexpr int kRowsAtOnce = kWarp / kLanes;
  static constexpr int kRounds = 16 / kRowsAtOnce;
  static constexpr int kQueries = 3;  // a named barrier: kQueries + warpgroup

 public:
  __device__ PrefillQueries(const PrefillRowSet& rows, uint32_t shared)
      : rows_(rows), shared_(shared) {}

  __device__ uint32_t tile() const { return shared_ + rows_.consumer * Shape::kQueryBytes; }

  // Rows that are not there become zeros.
  __device__ void load() const {
    const AttendJob& job = rows_.job;
    const int chunk = rows_.lane() % kLanes;
    const FloatRows& q = job.args.q;
    Eight eights[kRounds];  // all are asked for before the first is used
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int r = row_of_round(i);
      eights[i] = {};
      if (r >= rows_.num_rows) continue;
      const QueryRowAt at = rows_.at(r);
      const int64_t first = (int64_t{rows_.shape.q_start} + at.new_token) * q.token_stride +
                            int64_t{at.q_head} * q.head_stride;
      eights[i] = load_eight(q.dtype, q.data + first * bytes_of(q.dtype), chunk);
    }
    // Scores are compared before they are multiplied, so the factor's sign goes into the queries.
    const float factor =
        job.args.softmax_scale *
        scale_of_head(job.packed.k, job.shared_k_scale, job.shared_k_scale_stride, rows_.head);
    const float sign = factor < 0 ? -1.0f : factor == 0 ? 0.0f : 1.0f;
    const float to_log2 = job.args.softcap == 0 ? kLog2E : 1.0f;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int r = row_of_round(i);
      float x[8];
      widen(q.dtype, eights[i], x);
      const float scale = Mma::kScalesQueries && q.dtype != DType::kF16 ? scale_of(x) : 1.0f;
      const float sum = store(r, chunk, x, scale * sign);
      // Never 0: a hidden score, -infinity, is multiplied by it.
      const float by = fmaxf(fabsf(factor) / scale * to_log2, 1e-37f);
      if (chunk == 0) facts()[rows_.consumer * kConsumerRows + r] = {by, sum};
    }
    fence_bulk_copies();
    wait_at(kQueries + rows_.consumer, kWarpgroup);
  }

  // [what multiplies scores, sum of the query's numbers] of a row.
  __device__ float2 facts_of(int row) const {
    return facts()[rows_.consumer * kConsumerRows + row];
  }

 private:
  // Eight numbers of a query row as they lie: 16 bytes, or 32.
  struct Eight {
    uint4 words[2];
  };

  __device__ int row_of_round(int i) const {
    return 16 * rows_.warp + i * kRowsAtOnce + rows_.lane() / kLanes;
  }
  __device__ float2* facts() const {
    return static_cast<float2*>(__cvta_shared_to_generic(shared_ + Shape::kRowFacts));
  }

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

  // Into f16's range, by a power of two.
  __device__ static float scale_of(const float (&x)[8]) {
    float largest = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fabsf(x[j]));
    for (int other = 1; other < kLanes; other *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, other));
    }
    return largest > 0 && largest < INFINITY ? exp2f(-static_cast<float>(ilogbf(largest))) : 1.0f;
  }

  // Returns the row's sum, of the numbers as they are stored, where scores need it.
  __device__ float store(int r, int chunk, const float (&x)[8], float scale) const {
    const PairOrder order = pair_order_of(rows_.job.packed.k.id);
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
      pairs.r[j] = Mma::pack(low * scale, high * scale);
      if constexpr (Shape::kScalesScores) {
        const float2 rounded = Mma::unpack(pairs.r[j]);
        sum += rounded.x + rounded.y;
      }
    }
    store_chunk(tile() + chunk / 8 * Shape::kQueryBlockBytes + wgmma_chunk(r, chunk % 8), pairs);
    for (int other = 1; Shape::kScalesScores && other < kLanes; other *= 2) {
      sum += __shfl_xor_sync(kWholeWarp, sum, other);
    }
    return sum;
  }

  const PrefillRowSet rows_;
  const uint32_t shared_;
};

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

// The prefill kernels' query rows: which four warps have, and their way into shared memory,
// transformed as K was, as 16-bit numbers in the keys' order.
#pragma once

#include "ops/attend/cuda/prefill/shape.cuh"
#include "ops/cuda/transform_row.cuh"

namespace kvx::ops::cuda {

// 64 rows of a CTA, as a thread of the four warps that multiply them sees them.
struct PrefillRowSet {
  const PrefillParams& params;
  const SequenceShape& shape;
  int head;       // of the run
  int consumer;   // which 64 rows: those of a warpgroup with wgmma
  int warp;       // of the four
  int first_row;  // of the sequence's rows
  int num_rows;

  __device__ PrefillRowSet(const PrefillWorkTile& work_tile, int consumer_of_cta,
                           int warp_of_consumer)
      : params(work_tile.walk.params),
        shape(work_tile.shape),
        head(work_tile.walk.head),
        consumer(consumer_of_cta),
        warp(warp_of_consumer),
        first_row(work_tile.first_row + consumer * kConsumerRows),
        num_rows(min(max(work_tile.num_rows - consumer * kConsumerRows, 0), kConsumerRows)) {}

  // The thread's own rows are 16 warp + g and 8 more, its columns 8 i + 2 t and the next.
  int g = static_cast<int>(threadIdx.x) % kWarp / 4;
  int t = static_cast<int>(threadIdx.x) % 4;

  __device__ int lane() const { return 4 * g + t; }
  __device__ int row(int r) const { return 16 * warp + g + 8 * r; }
  __device__ QueryRowAt at(int row) const {
    return query_row(params, params.first_head + head, first_row + row);
  }
};

// What a query row's scores need beside the sums of products.
struct PrefillRowFacts {
  float score_scale;  // brings them to their size; without a cap, in units of log2
  float bias;         // is added then: what K's mean brings
  float sum;          // of the query's numbers, as they are stored; where scores have scales
};

template <class Shape>
class PrefillQueries {
  using Mma = typename Shape::Mma;
  static constexpr int kChunks = Shape::kKeyDim / 8;  // of a row
  static constexpr int kLanes = kChunks > 16 ? 32 : kChunks;
  static constexpr int kRowsAtOnce = kWarp / kLanes;
  static constexpr int kRounds = 16 / kRowsAtOnce;
  static constexpr int kRoundsAtOnce = kRounds > 8 ? 8 : kRounds;  // what registers hold
  static constexpr int kQueries = 3;  // a named barrier: kQueries + which 64 rows

 public:
  __device__ PrefillQueries(const PrefillRowSet& rows, const PrefillRing<Shape>& ring)
      : rows_(rows), ring_(ring) {}

  // Rows that are not there become zeros.
  __device__ void load() const {
#pragma unroll
    for (int first = 0; first < kRounds; first += kRoundsAtOnce) load_rounds(first);
    if constexpr (Shape::kIsWgmma) fence_bulk_copies();
    wait_at(kQueries + rows_.consumer, kWarpgroup);
  }

  __device__ PrefillRowFacts facts_of(int row) const {
    const float* at = facts() + row;
    return {at[0], at[kConsumerRows], Shape::kScalesScores ? at[2 * kConsumerRows] : 0.0f};
  }

 private:
  __device__ void load_rounds(int first) const {
    const PrefillParams& params = rows_.params;
    const int chunk = rows_.lane() % kLanes;
    const FloatRows& q = params.q;
    Eight eights[kRoundsAtOnce];  // all are asked for before the first is used
#pragma unroll
    for (int i = 0; i < kRoundsAtOnce; ++i) {
      const int r = row_of_round(first + i);
      eights[i] = {};
      if (r >= rows_.num_rows || 8 * chunk >= dim()) continue;
      const QueryRowAt at = rows_.at(r);
      const int64_t number = (int64_t{rows_.shape.q_start} + at.new_token) * q.token_stride +
                             int64_t{at.q_head} * q.head_stride;
      eights[i] = load_eight(q.dtype, q.data + number * bytes_of(q.dtype), chunk);
    }
    // Scores are compared before they are multiplied, so the factor's sign goes into the queries.
    const float factor = params.softmax_scale * key_scale_of_head(params, rows_.head);
    const float sign = factor < 0 ? -1.0f : factor == 0 ? 0.0f : 1.0f;
    const float to_log2 = params.softcap == 0 ? kLog2E : 1.0f;
#pragma unroll
    for (int i = 0; i < kRoundsAtOnce; ++i) {
      const int r = row_of_round(first + i);
      float x[8];
      widen(q.dtype, eights[i], x);
      const bool is_transformed = params.transforms_k;
      const float added = is_transformed ? fold_transform(chunk, x) : 0.0f;
      const bool may_be_large = is_transformed || q.dtype != DType::kF16;
      const float scale = Mma::kScalesQueries && may_be_large ? scale_of(x) : 1.0f;
      const float sum = store(r, chunk, x, scale * sign);
      // Never 0: a hidden score, -infinity, is multiplied by it.
      const float by = fmaxf(fabsf(factor) / scale * to_log2, 1e-37f);
      if (chunk == 0) store_facts(r, {by, added * params.softmax_scale * to_log2, sum});
    }
  }
  // Eight numbers of a query row as they lie: 16 bytes, or 32.
  struct Eight {
    uint4 words[2];
  };

  __device__ int row_of_round(int i) const {
    return 16 * rows_.warp + i * kRowsAtOnce + rows_.lane() / kLanes;
  }
  // [kFactsOfRow][kConsumerRows]
  __device__ float* facts() const {
    return static_cast<float*>(__cvta_shared_to_generic(ring_.shared + Shape::kRowFacts)) +
           rows_.consumer * Shape::kFactsOfRow * kConsumerRows;
  }
  __device__ void store_facts(int row, const PrefillRowFacts& of_row) const {
    float* at = facts() + row;
    at[0] = of_row.score_scale;
    at[kConsumerRows] = of_row.bias;
    if constexpr (Shape::kScalesScores) at[2 * kConsumerRows] = of_row.sum;
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
      const float2 pair =
          type == DType::kF16 ? MmaF16::unpack(words[i]) : MmaBf16::unpack(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }

  // The query as it meets K's transformed rows. Returns what the score has beside them: q . mean.
  __device__ float fold_transform(int chunk, float (&x)[8]) const {
    const PrefillParams& params = rows_.params;
    const int kv_head = params.first_head + rows_.head;
    const TransformRow k =
        transform_row(params.transform_k, kv_head, params.num_kv_heads, dim(), 0);
    float added = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int d = 8 * chunk + j;
      if (d >= dim()) break;
      if (k.mean) added += x[j] * k.mean[d];
      if (k.factor) x[j] = __fdividef(x[j], k.factor[d]);
    }
    if (k.hadamard) rotate(chunk, x);
    return over_row(added);
  }
  __device__ int dim() const {
    return rows_.params.key_dim;
  }

  // Hadamard: within a lane's numbers, then over the lanes of a block.
  __device__ void rotate(int chunk, float (&x)[8]) const {
    const int block = hadamard_block(dim());  // of 8 numbers and more
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if ((j & stride) == 0) butterfly(x[j], x[j + stride]);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      if (8 * lanes >= block) break;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float other = __shfl_xor_sync(kWholeWarp, x[j], lanes);
        x[j] = (chunk & lanes) == 0 ? x[j] + other : other - x[j];
      }
    }
    const float norm = hadamard_norm(block);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= norm;
  }
  __device__ static float over_row(float x) {
    for (int other = 1; other < kLanes; other *= 2) x += __shfl_xor_sync(kWholeWarp, x, other);
    return x;
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
    const Four pairs = chunk_of<Mma>(rows_.params.tile_k.format.pair_order, x, scale);
    if (kChunks == kLanes || chunk < kChunks) {
      store_chunk(ring_.queries(rows_.consumer) + chunk / 8 * Shape::kQueryBlockBytes +
                      wgmma_chunk(r, chunk % 8),
                  pairs);
    }
    float sum = 0;
    if constexpr (Shape::kScalesScores) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 rounded = Mma::unpack(pairs.r[j]);
        sum += rounded.x + rounded.y;
      }
      sum = over_row(sum);
    }
    return sum;
  }

  const PrefillRowSet rows_;
  const PrefillRing<Shape>& ring_;
};

}  // namespace kvx::ops::cuda

// The prefill kernel's sums on their way out: whole rows, or what a split leaves for the merge.
#pragma once

#include "ops/attend/cuda/prefill_queries.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

__device__ inline float over_quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}

// One of a thread's two rows: its softmax, and what V's zeros add to every channel.
struct PrefillRowEnd {
  Softmax2 tokens;
  float zero;
};

// sums: of a thread, by parts of a row: four a column 8 i + 2 t and the next, of both rows.
template <class Shape>
class PrefillOutput {
  static constexpr int kParts = Shape::kParts;
  static constexpr int kSums = Shape::kDim / kParts / 2;

 public:
  __device__ PrefillOutput(const PrefillRowSet& rows, float (&sums)[kParts][kSums])
      : rows_(rows), job_(rows.job), sums_(sums) {}

  // ends: of both rows, over all lanes.
  __device__ void store(const PrefillRowEnd (&ends)[2], int split) {
    const float unit =
        scale_of_head(job_.packed.v, job_.shared_v_scale, job_.shared_v_scale_stride, rows_.head);
    put_in_order();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto& [tokens, zero] = ends[r];
      if (rows_.row(r) >= rows_.num_rows) continue;
      if (tokens.sum == 0) clear(r);
      const QueryRowAt at = rows_.at(rows_.row(r));
      const int64_t token = rows_.shape.q_start + at.new_token;
      if (job_.num_splits == 1) {
        const Softmax2 whole = with_sink(job_, at.q_head, tokens);
        store_row(r, job_.args.out.dtype, output_row(job_, token, at.q_head), zero,
                  unit * share_of(tokens, whole));
        if (rows_.t == 0 && job_.args.lse) {
          job_.args.lse[token * job_.args.num_q_heads + at.q_head] = log_sum_exp(whole);
        }
      } else {
        const int64_t index = partial_index(job_, token, at.q_head, split);
        float* out = job_.partial_out + index * Shape::kDim;
        store_row(r, DType::kF32, reinterpret_cast<uint8_t*>(out), zero, unit);
        if (rows_.t == 0) job_.partial_softmax[index] = tokens;
      }
    }
  }

 private:
  // From a tile's order of channels to the rows'.
  __device__ void put_in_order() {
    if constexpr (Shape::kScales == PrefillScales::kNone) return;
    const PairOrder order = pair_order_of(job_.packed.v.id);
    if (order == PairOrder::kNeighbours) return;
    const int t = rows_.t;
    const int from = 4 * rows_.g + 2 * t % 4;
#pragma unroll
    for (int n = 0; n < Shape::kDim / 2; n += 2) {
      float& a = sums_[n / kSums][n % kSums];
      float& b = sums_[n / kSums][n % kSums + 1];
      if (order == PairOrder::kBytes) {  // (0, 2), (1, 3): neighbours exchange
        const float other = __shfl_xor_sync(kWholeWarp, t % 2 == 0 ? b : a, 1);
        (t % 2 == 0 ? b : a) = other;
      } else {  // (0, 4), (1, 5), (2, 6), (3, 7)
        const float low_a = __shfl_sync(kWholeWarp, a, from);
        const float low_b = __shfl_sync(kWholeWarp, a, from + 1);
        const float high_a = __shfl_sync(kWholeWarp, b, from);
        const float high_b = __shfl_sync(kWholeWarp, b, from + 1);
        a = t < 2 ? low_a : high_a;
        b = t < 2 ? low_b : high_b;
      }
    }
  }

  // This thread's numbers of row r, as (sum + zero) * share. Store: takes i and the pair.
  template <class Store>
  __device__ void for_pairs(int r, float zero, float share, const Store& store) const {
#pragma unroll
    for (int i = 0; i < Shape::kDim / 8; ++i) {
      const float* sums = &sums_[i / (kSums / 4)][i % (kSums / 4) * 4 + 2 * r];
      store(i, (sums[0] + zero) * share, (sums[1] + zero) * share);
    }
  }
  __device__ void store_row(int r, DType type, uint8_t* row, float zero, float share) const {
    if (type == DType::kF32) {
      float2* out = reinterpret_cast<float2*>(row) + rows_.t;
      for_pairs(r, zero, share, [&](int i, float a, float b) { out[4 * i] = {a, b}; });
      return;
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(row) + rows_.t;
    if (type == DType::kF16) {
      for_pairs(r, zero, share, [&](int i, float a, float b) { out[4 * i] = MmaF16::pack(a, b); });
    } else {
      for_pairs(r, zero, share, [&](int i, float a, float b) { out[4 * i] = MmaBf16::pack(a, b); });
    }
  }
  // A row that saw nothing: weights of 0, but 0 * NaN is NaN.
  __device__ void clear(int r) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (i / 2 % 2 == r) sums_[p][i] = 0;
      }
    }
  }

  const PrefillRowSet rows_;
  const AttendJob& job_;
  float (&sums_)[kParts][kSums];
};

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

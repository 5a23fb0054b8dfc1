// The prefill kernels' sums on their way out: whole rows with V's transform undone, or what a split
// leaves for the merge.
#pragma once

#include "ops/attend/cuda/prefill/queries.cuh"

namespace kvx::ops::cuda {

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
  static constexpr int kSums = Shape::kValueDim / kParts / 2;

 public:
  __device__ PrefillOutput(const PrefillRowSet& rows, float (&sums)[kParts][kSums])
      : rows_(rows), params_(rows.params), sums_(sums) {}

  // ends: of both rows, over all lanes.
  __device__ void store(const PrefillRowEnd (&ends)[2], int split) {
    put_in_order();
    const bool is_whole = params_.num_splits == 1;
    const float unit = value_scale_of_head(params_, rows_.head);
    Softmax2 whole[2];
    float probabilities[2];  // what the tokens have of each row's softmax, beside a sink
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto& [tokens, zero] = ends[r];
      if (tokens.sum == 0) clear(r);
      whole[r] = with_sink(params_, rows_.at(rows_.row(r)).q_head, tokens);
      const float share = share_of(tokens, whole[r]);
      probabilities[r] = tokens.sum * share;
      multiply(r, zero, is_whole ? unit * share : unit);
    }
    if (is_whole && params_.transforms_v) undo_transform(probabilities);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows_.row(r) >= rows_.num_rows) continue;
      const QueryRowAt at = rows_.at(rows_.row(r));
      const int64_t token = rows_.shape.q_start + at.new_token;
      if (is_whole) {
        store_row(r, params_.out.dtype, output_row(params_, token, at.q_head));
        if (rows_.t == 0 && params_.lse) {
          params_.lse[token * params_.num_q_heads + at.q_head] = log_sum_exp(whole[r]);
        }
      } else {
        const int64_t index = partial_index(params_, token, at.q_head, split);
        float* out = params_.partial_out + index * dim();
        store_row(r, DType::kF32, reinterpret_cast<uint8_t*>(out));
        if (rows_.t == 0) params_.partial_softmax[index] = ends[r].tokens;
      }
    }
  }

 private:
  __device__ int dim() const {
    return params_.value_dim;
  }

  // From a tile's order of channels to the rows'.
  __device__ void put_in_order() {
    if constexpr (!Shape::kDecodes) return;
    const PairOrder order = params_.tile_v.format.pair_order;
    if (order == PairOrder::kNeighbours) return;
    const int t = rows_.t;
    const int from = 4 * rows_.g + 2 * t % 4;
#pragma unroll
    for (int n = 0; n < Shape::kValueDim / 2; n += 2) {
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

  // This thread's pairs of row r: number i is of channels 8 i + 2 t and the next.
  __device__ float* pair(int r, int i) const {
    return &sums_[i / (kSums / 4)][i % (kSums / 4) * 4 + 2 * r];
  }
  static constexpr int kPairs = Shape::kValueDim / 8;

  __device__ void multiply(int r, float zero, float by) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float* x = pair(r, i);
      x[0] = (x[0] + zero) * by;
      x[1] = (x[1] + zero) * by;
    }
  }

  __device__ void undo_transform(const float (&probabilities)[2]) {
    const int kv_head = params_.first_head + rows_.head;
    const TransformRow v =
        transform_row(params_.transform_v, kv_head, params_.num_kv_heads, dim(), 0);
    if (v.hadamard) {
      rotate(0);
      rotate(1);
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int d = 8 * i + 2 * rows_.t + j;
        if (8 * i >= dim()) break;
        const float factor = v.factor ? v.factor[d] : 1.0f;
        const float mean = v.mean ? v.mean[d] : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& x = pair(r, i)[j];
          x = fmaf(probabilities[r], mean, __fdividef(x, factor));
        }
      }
    }
  }
  // Hadamard of row r: within a pair, over the four lanes, over the pairs of a block.
  __device__ void rotate(int r) {
    const int block = hadamard_block(dim());  // of 8 numbers and more
#pragma unroll
    for (int i = 0; i < kPairs; ++i) butterfly(pair(r, i)[0], pair(r, i)[1]);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      const float sign = (rows_.t & lanes) == 0 ? 1.0f : -1.0f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float* x = pair(r, i);
        x[0] = fmaf(sign, x[0], __shfl_xor_sync(kWholeWarp, x[0], lanes));
        x[1] = fmaf(sign, x[1], __shfl_xor_sync(kWholeWarp, x[1], lanes));
      }
    }
#pragma unroll
    for (int step = 1; step < kPairs; step *= 2) {
      if (8 * step >= block) break;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if ((i & step) != 0) continue;
        butterfly(pair(r, i)[0], pair(r, i + step)[0]);
        butterfly(pair(r, i)[1], pair(r, i + step)[1]);
      }
    }
    const float norm = hadamard_norm(block);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pair(r, i)[0] *= norm;
      pair(r, i)[1] *= norm;
    }
  }

  __device__ void store_row(int r, DType type, uint8_t* row) const {
    if (type == DType::kF32) {
      float2* out = reinterpret_cast<float2*>(row) + rows_.t;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (8 * i < dim()) out[4 * i] = {pair(r, i)[0], pair(r, i)[1]};
      }
      return;
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(row) + rows_.t;
    if (type == DType::kF16) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (8 * i < dim()) out[4 * i] = MmaF16::pack(pair(r, i)[0], pair(r, i)[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        if (8 * i < dim()) out[4 * i] = MmaBf16::pack(pair(r, i)[0], pair(r, i)[1]);
      }
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
  const PrefillParams& params_;
  float (&sums_)[kParts][kSums];
};

}  // namespace kvx::ops::cuda

// What attention kernels share: the checked lengths of a sequence, which tokens a query sees, and
// how rows of the output and partial results are stored.
#pragma once

#include "ops/attend/cuda/common/mma.cuh"
#include "ops/attend/cuda/common/params.hpp"
#include "ops/attend/splits.hpp"
#include "ops/cuda/floats.cuh"

namespace kvx::ops::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// One sequence's lengths, read from device memory and checked.
struct SequenceShape {
  int seq_len;
  int q_start;
  int q_len;
  bool has_rows;  // its rows of q and out are there
  bool is_valid;
  __device__ int first_new_token() const { return seq_len - q_len; }
};

// A length of 64 bits that 32 do not hold is -1.
__device__ inline int length_of(const BatchParams& params, int sequence) {
  const int32_t* at = params.seq_lens + int64_t{sequence} * params.length_words;
  return params.length_words == 2 && at[1] != 0 ? -1 : at[0];
}

__device__ inline SequenceShape sequence_shape(const BatchParams& params, int sequence) {
  SequenceShape shape;
  shape.seq_len = length_of(params, sequence);
  shape.q_start = params.q_starts[sequence];
  const int64_t q_end = params.q_starts[sequence + 1];
  shape.q_len = static_cast<int>(q_end - shape.q_start);  // without rows: anything
  shape.has_rows = shape.q_start >= 0 && q_end >= shape.q_start && q_end <= params.total_q;
  shape.is_valid = shape.has_rows && shape.q_len <= params.max_q_len &&
                   shape.seq_len >= shape.q_len && shape.seq_len <= params.max_tokens;
  return shape;
}

// Row r of a sequence is its new token r / q_per_kv and query head r % q_per_kv of the KV head.
struct QueryRowAt {
  int new_token;
  int q_head;
};

__device__ inline QueryRowAt query_row(const BatchParams& params, int kv_head, int row) {
  return {row / params.q_per_kv, kv_head * params.q_per_kv + row % params.q_per_kv};
}

// The tokens that a query sees, less what a tree mask hides.
__device__ inline TokenRange seen_by(const AttendParams& params, const SequenceShape& shape,
                                     int new_token) {
  const int position = shape.first_new_token() + new_token;
  const int window = params.window;
  return {window > 0 ? max(0, position - window + 1) : 0,
          params.sees_later_tokens ? shape.seq_len : position + 1};
}

// The tokens that any of rows [first_row, first_row + num_rows) sees.
__device__ inline TokenRange seen_by_rows(const AttendParams& params, const SequenceShape& shape,
                                          int first_row, int num_rows) {
  const TokenRange first = seen_by(params, shape, first_row / params.q_per_kv);
  const TokenRange last = seen_by(params, shape, (first_row + num_rows - 1) / params.q_per_kv);
  return {first.begin, last.end};
}

// Of a sequence's tokens; the others are full precision.
__device__ inline TokenRange packed_tokens(const AttendParams& params, int sequence, int seq_len) {
  if (!params.num_sink_blocks) return {0, seq_len};
  const int num_blocks = (seq_len + params.block_size - 1) / params.block_size;
  const int head = min(max(params.num_sink_blocks[sequence], 0), num_blocks);
  const int tail = min(max(params.first_recent_block[sequence], head), num_blocks);
  return {head * params.block_size, tail * params.block_size};
}

__device__ inline int64_t partial_index(const BatchParams& params, int64_t q_token, int q_head,
                                        int split) {
  return (q_token * params.num_q_heads + q_head) * params.num_splits + split;
}

// All of a row's tokens together with its sink, if it has one.
__device__ inline Softmax2 with_sink(const BatchParams& params, int q_head,
                                     const Softmax2& tokens) {
  if (!params.sinks) return tokens;
  const float sink = params.sinks[q_head] * kLog2E;
  const float max = tokens.sum == 0 ? sink : fmaxf(tokens.max, sink);
  const float sum = tokens.sum == 0 ? 0.0f : tokens.sum * exp2f(tokens.max - max);
  return {max, sum + exp2f(sink - max)};
}

// What turns a weighted sum over the tokens into their share of the output.
__device__ inline float share_of(const Softmax2& tokens, const Softmax2& whole) {
  return tokens.sum == 0 ? 0.0f : exp2f(tokens.max - whole.max) / whole.sum;
}

__device__ inline float log_sum_exp(const Softmax2& whole) {
  return whole.sum == 0 ? -INFINITY : (whole.max + log2f(whole.sum)) * kLn2;
}

__device__ inline uint8_t* output_row(const BatchParams& params, int64_t token, int q_head) {
  const MutableFloatRows& out = params.out;
  return out.data + (token * out.token_stride + q_head * out.head_stride) * bytes_of(out.dtype);
}

// Number d of a row whose tokens are all in one work tile, and no transform of V is to be undone.
__device__ inline void store_output(const BatchParams& params, int64_t token, int q_head, int d,
                                    const Softmax2& tokens, float weighted_sum) {
  const Softmax2 whole = with_sink(params, q_head, tokens);
  const float x = tokens.sum == 0 ? 0.0f : weighted_sum * share_of(tokens, whole);
  store_float(params.out.dtype, x, output_row(params, token, q_head), d);
  if (params.lse && d == 0) {
    params.lse[token * params.num_q_heads + q_head] = log_sum_exp(whole);
  }
}

// The same for numbers d to d + 3; d is a multiple of 4.
__device__ inline void store_output_quad(const BatchParams& params, int64_t token, int q_head,
                                         int d, const Softmax2& tokens,
                                         const float4& weighted_sums) {
  const Softmax2 whole = with_sink(params, q_head, tokens);
  const float share = share_of(tokens, whole);
  const float4 x = {weighted_sums.x * share, weighted_sums.y * share, weighted_sums.z * share,
                    weighted_sums.w * share};
  const DType type = params.out.dtype;
  uint8_t* row = output_row(params, token, q_head);
  uint8_t* to = row + d * bytes_of(type);
  const bool is_aligned = reinterpret_cast<uintptr_t>(to) % (4 * bytes_of(type)) == 0;
  if (is_aligned && type == DType::kF32) {
    *reinterpret_cast<float4*>(to) = x;
  } else if (is_aligned && type == DType::kF16) {
    *reinterpret_cast<uint2*>(to) = {MmaF16::pack(x.x, x.y), MmaF16::pack(x.z, x.w)};
  } else if (is_aligned) {
    *reinterpret_cast<uint2*>(to) = {MmaBf16::pack(x.x, x.y), MmaBf16::pack(x.z, x.w)};
  } else {
    const float numbers[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) store_float(type, numbers[i], row, d + i);
  }
  if (params.lse && d == 0) {
    params.lse[token * params.num_q_heads + q_head] = log_sum_exp(whole);
  }
}

// Stores the rows of a sequence that is not valid as rows that see no token, and counts the
// sequence once, unless it is a padding sequence of length 0. stores_output: no merge follows.
__device__ inline void store_empty_rows(const AttendParams& params, const SequenceShape& shape,
                                        int kv_head, int first_row, int num_rows, int split,
                                        bool stores_output) {
  const bool is_padding = shape.has_rows && shape.seq_len == 0;
  if (threadIdx.x == 0 && split == 0 && kv_head == 0 && first_row == 0 && !is_padding) {
    atomicAdd(&params.counters->out_of_range, 1ull);
  }
  if (!shape.has_rows) return;
  for (int r = threadIdx.x; r < num_rows; r += blockDim.x) {
    const QueryRowAt at = query_row(params, kv_head, first_row + r);
    const int64_t token = shape.q_start + at.new_token;
    if (stores_output) {
      const int dim = params.value_dim;
      for (int d = 0; d < dim; ++d)
        store_output(params, token, at.q_head, d, {-INFINITY, 0.0f}, 0.0f);
    } else {
      params.partial_softmax[partial_index(params, token, at.q_head, split)] = {-INFINITY, 0.0f};
    }
  }
}

}  // namespace kvx::ops::cuda

// TileKernels: the f32 arithmetic of attention on small tiles that fit in the first cache, one
// table for each CPU level. They decide no stored byte, so products may be fused (FMA), and levels
// agree to rounding only.
#pragma once

#include "device/cpu_level.hpp"
#include "ops/attend/cpu/matrix/kernels.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/precision.hpp"
#include "ops/attend/query_row.hpp"

namespace kvx::ops::cpu {

// c += a * b, row-major; a stride is the distance of two rows in floats.
struct TileProduct {
  const float* a;  // [rows, inner]
  int a_stride;
  const float* b;  // [inner, columns]
  int b_stride;
  float* c;  // [rows, columns]
  int c_stride;
  int rows;
  int inner;
  int columns;
};

// The softmax step of a full tile without hidden tokens.
struct SoftmaxParams {
  float* scores;  // [num_rows, kMaxTileTokens]: q . k in, exp(score - max) out
  int scores_stride;
  QueryRow* rows;  // [num_rows]: biases in, states in and out
  int num_rows;
  float softmax_scale;
  float* sums;  // [num_rows, num_sums]: the rows' weighted sums of values so far
  int num_sums;
};

struct TileKernels {
  void (*add_product)(const TileProduct&);

  // source: dense [rows, columns]; element (r, c) goes to target[c * target_stride + r].
  void (*transpose)(const float* source, int rows, int columns, float* target, int target_stride);

  float (*dot)(const float* a, const float* b, int n);

  bool (*all_finite)(const float* values, int n);

  // scores[i] = softcap((scores[i] + bias) * softmax_scale); softcap 0: none.
  void (*scale_scores)(float* scores, int n, float bias, float softmax_scale, float softcap);

  // Adds n scores to a row's softmax. scores: [n], out comes exp(score - state.max). sums:
  // [num_sums], the row's weighted sum of values so far, rescaled when the maximum grows.
  void (*absorb_scores)(float* scores, int n, SoftmaxState& state, float* sums, int num_sums);

  // scale_scores without a softcap and absorb_scores, for all rows.
  void (*absorb_tile)(const SoftmaxParams&);

  // addresses[i] = first + i * stride, as integers: first may be null. addresses: [count].
  void (*fill_addresses)(const uint8_t* first, int64_t stride, int count,
                         const uint8_t** addresses);

  // Null: rows of this format and head_dim are decoded first.
  const PackedKernels* (*find_packed)(const format::FormatSpec& spec, int head_dim,
                                      Precision precision);

  // Null: the level has no matrix unit.
  const MatrixKernels* matrix;
};

// Requires: device::supports(level).
const TileKernels& tile_kernels(device::CpuLevel level);

}  // namespace kvx::ops::cpu

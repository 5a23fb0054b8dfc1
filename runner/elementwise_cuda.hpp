// The element-wise parts of a Llama layer on a GPU, as elementwise.hpp computes them on the host:
// sums in double, no contraction. Every pointer is one that the device reads; each call launches
// one kernel on the stream and returns. UNSUPPORTED in a build without CUDA.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "core/result.hpp"
#include "device/cuda.hpp"

namespace kvx::runner::gpu {

// What a product left: out [num_rows, size], to which bias [size] is still to be added (null:
// none).
struct ProductRows {
  const float* out = nullptr;
  const float* bias = nullptr;
};

struct NormArgs {
  float* x = nullptr;              // [num_rows, size]
  ProductRows delta;               // is added to x first; delta.out null: nothing is
  const float* weights = nullptr;  // [size]
  float epsilon = 0;
  void* normed = nullptr;     // [num_rows, size] in type: x / sqrt(mean(x^2) + epsilon) * weights
  float* also_f32 = nullptr;  // the same in f32, or null
};
Status launch_add_norm(device::CudaStream stream, const NormArgs& args, int num_rows, int size,
                       DType type);

// Queries, keys and values of a token, one behind the other: [num_rows][q heads][kv heads][kv
// heads], each head_dim numbers. Adds bias [all of a token] to all of them (null: none) and rotates
// queries and keys as elementwise.hpp's rope(); cosines, sines: [num_rows, num_pairs].
// Requires: an even head_dim.
struct RotateArgs {
  float* rows = nullptr;
  const float* bias = nullptr;
  const float* cosines = nullptr;
  const float* sines = nullptr;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int num_pairs = 0;
};
Status launch_rotate(device::CudaStream stream, const RotateArgs& args, int num_rows);

// out [num_rows, size] in type: silu(gate) * up of gate_up's [num_rows][gate: size][up: size].
Status launch_silu_multiply(device::CudaStream stream, const ProductRows& gate_up, int num_rows,
                            int size, DType type, void* out);

// x [count] rounded to type.
Status launch_round(device::CudaStream stream, const float* x, int64_t count, DType type,
                    void* out);

}  // namespace kvx::runner::gpu

// One CTA a row where a row has a sum, one thread a number (or a pair) otherwise. These kernels are
// small: what counts is that there are few of them.
#include <cuda_bf16.h>

#include <type_traits>

#include "device/cuda_error.hpp"
#include "runner/elementwise_cuda.hpp"

namespace kvx::runner::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kNumWarps = kThreads / kWarpSize;

cudaStream_t stream_of(device::CudaStream stream) {
  return static_cast<cudaStream_t>(stream);
}

unsigned num_ctas(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ float rounded(float x, float) {
  return x;
}
__device__ __nv_bfloat16 rounded(float x, __nv_bfloat16) {
  return __float2bfloat16_rn(x);
}

// The same number in every thread.
__device__ double sum_over_cta(double x) {
  __shared__ double warp_sums[kNumWarps];
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  double sum = 0;
  for (int warp = 0; warp < kNumWarps; ++warp) sum += warp_sums[warp];
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_norm(NormArgs args, int size) {
  const int64_t begin = int64_t{blockIdx.x} * size;
  float* x = args.x + begin;
  double squares = 0;
  for (int i = threadIdx.x; i < size; i += kThreads) {
    float number = x[i];
    if (args.delta.out != nullptr) {
      float delta = args.delta.out[begin + i];
      if (args.delta.bias != nullptr) delta += args.delta.bias[i];
      number += delta;
      x[i] = number;
    }
    squares += double{number} * number;
  }
  const double mean = sum_over_cta(squares) / static_cast<double>(size);
  const auto factor = static_cast<float>(1.0 / sqrt(mean + double{args.epsilon}));
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const float normed = x[i] * factor * args.weights[i];
    static_cast<T*>(args.normed)[begin + i] = rounded(normed, T());
    if (args.also_f32 != nullptr) args.also_f32[begin + i] = normed;
  }
}

// A thread has a pair of numbers. Requires: an even head_dim.
__global__ void __launch_bounds__(kThreads)
    rotate(RotateArgs args, int64_t pairs_of_token, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t row = index / pairs_of_token;
  const int64_t at = 2 * (index % pairs_of_token);
  float* pair = args.rows + row * 2 * pairs_of_token + at;
  float a = pair[0];
  float b = pair[1];
  if (args.bias != nullptr) {
    a += args.bias[at];
    b += args.bias[at + 1];
  }
  const int64_t rotated = int64_t{args.num_q_heads + args.num_kv_heads} * args.head_dim;
  const int64_t pair_of_head = at % args.head_dim / 2;
  if (at < rotated && pair_of_head < args.num_pairs) {
    const float cosine = args.cosines[row * args.num_pairs + pair_of_head];
    const float sine = args.sines[row * args.num_pairs + pair_of_head];
    pair[0] = a * cosine - b * sine;
    pair[1] = a * sine + b * cosine;
  } else {
    pair[0] = a;
    pair[1] = b;
  }
}

// expf of the device is off by up to 2 units in the last place, the host's by half of one: double
// makes them alike.
__device__ float silu(float x) {
  return x / (1.0f + static_cast<float>(exp(-double{x})));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    silu_multiply(ProductRows gate_up, int size, int64_t count, T* out) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t row = index / size;
  const int64_t i = index % size;
  float gate = gate_up.out[2 * row * size + i];
  float up = gate_up.out[(2 * row + 1) * size + i];
  if (gate_up.bias != nullptr) {
    gate += gate_up.bias[i];
    up += gate_up.bias[size + i];
  }
  out[index] = rounded(silu(gate) * up, T());
}

template <class T>
__global__ void __launch_bounds__(kThreads) round_all(const float* x, int64_t count, T* out) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < count) out[index] = rounded(x[index], T());
}

// Calls launch with a number of the type.
template <class Launch>
void with_type(DType type, const Launch& launch) {
  if (type == DType::kF32) {
    launch(float());
  } else {
    launch(__nv_bfloat16());
  }
}

}  // namespace

Status launch_add_norm(device::CudaStream stream, const NormArgs& args, int num_rows, int size,
                       DType type) {
  with_type(type, [&](auto number) {
    add_norm<decltype(number)>
        <<<static_cast<unsigned>(num_rows), kThreads, 0, stream_of(stream)>>>(args, size);
  });
  return device::cuda_launch_status("add_norm");
}

Status launch_rotate(device::CudaStream stream, const RotateArgs& args, int num_rows) {
  const int64_t size = int64_t{args.num_q_heads + 2 * args.num_kv_heads} * args.head_dim;
  const int64_t pairs_of_token = size / 2;
  const int64_t count = num_rows * pairs_of_token;
  rotate<<<num_ctas(count), kThreads, 0, stream_of(stream)>>>(args, pairs_of_token, count);
  return device::cuda_launch_status("rotate");
}

Status launch_silu_multiply(device::CudaStream stream, const ProductRows& gate_up, int num_rows,
                            int size, DType type, void* out) {
  const int64_t count = int64_t{num_rows} * size;
  with_type(type, [&](auto number) {
    using T = decltype(number);
    silu_multiply<<<num_ctas(count), kThreads, 0, stream_of(stream)>>>(gate_up, size, count,
                                                                       static_cast<T*>(out));
  });
  return device::cuda_launch_status("silu_multiply");
}

Status launch_round(device::CudaStream stream, const float* x, int64_t count, DType type,
                    void* out) {
  with_type(type, [&](auto number) {
    using T = decltype(number);
    round_all<<<num_ctas(count), kThreads, 0, stream_of(stream)>>>(x, count, static_cast<T*>(out));
  });
  return device::cuda_launch_status("round_all");
}

}  // namespace kvx::runner::gpu

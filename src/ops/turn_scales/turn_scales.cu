// The turn of scales on a GPU: a warp takes four tokens of a head, whose bytes its lanes hold while
// they are written.
#include "core/checked.hpp"
#include "ops/cuda/overlapping_launch.cuh"
#include "ops/cuda/side.cuh"
#include "ops/turn_scales/turn_scales.hpp"

namespace kvx::ops {
namespace {

using cuda::kWarp;

constexpr int kThreads = 128;
constexpr int kBytesOfLane = ScaleRows::kTokens * ScaleRows::kMaxGroups / kWarp;

struct TurnParams {
  ScaleRows scales;
  int64_t num_fours;
  bool makes_linear;
};

__global__ void __launch_bounds__(kThreads) turn(const __grid_constant__ TurnParams params) {
  cuda::wait_for_earlier_launches();
  const ScaleRows& scales = params.scales;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (i >= params.num_fours) return;
  const int num_bytes = ScaleRows::kTokens * scales.num_groups;
  uint8_t* const rows = scales.four(i);
  uint8_t bytes[kBytesOfLane];
#pragma unroll
  for (int n = 0; n < kBytesOfLane; ++n) {
    const int b = lane + n * kWarp;
    if (b < num_bytes) bytes[n] = rows[scales.byte(scales.source(b, params.makes_linear))];
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kBytesOfLane; ++n) {
    const int b = lane + n * kWarp;
    if (b < num_bytes) rows[scales.byte(b)] = bytes[n];
  }
}

}  // namespace

Status turn_scales(const CudaContext& context, const ScaleRows& scales, bool makes_linear) {
  constexpr int64_t kFoursOfCta = kThreads / kWarp;
  constexpr int64_t kMostFours = INT32_MAX * kFoursOfCta;
  if (scales.num_fours() > kMostFours) {
    return invalid_argument("scales have {} times four tokens; a call on a GPU takes at most {}",
                            scales.num_fours(), kMostFours);
  }
  if (scales.num_fours() == 0) return {};
  const int64_t num_ctas = ceil_div(scales.num_fours(), kFoursOfCta);
  return cuda::launch_overlapping(
      context, "turn_scales", turn,
      {.grid = dim3(static_cast<unsigned>(num_ctas)), .threads = kThreads},
      {scales, scales.num_fours(), makes_linear});
}

}  // namespace kvx::ops

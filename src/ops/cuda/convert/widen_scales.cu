// A thread for each scale.
#include "core/checked.hpp"
#include "ops/cuda/convert/widen_scales.hpp"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops {
namespace {

constexpr int kThreads = 128;

struct WidenParams {
  copy_rows::ScaleView scales;
  ScaleCounts counts;
  float* wide;
};

__global__ void __launch_bounds__(kThreads) widen(const __grid_constant__ WidenParams params) {
  cuda::wait_for_earlier_launches();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= params.counts.blocks * params.counts.heads) return;
  const int64_t block = i / params.counts.heads;
  params.wide[i] = params.scales.at(block, i - block * params.counts.heads);
}

}  // namespace

Status widen_scales(const CudaContext& context, const copy_rows::ScaleView& scales,
                    const ScaleCounts& counts, float* wide) {
  const auto ctas = static_cast<unsigned>(ceil_div<int64_t>(counts.total(), kThreads));
  return cuda::launch_overlapping(context, "widen_scales", widen,
                                  {.grid = dim3(ctas), .threads = kThreads},
                                  {scales, counts, wide});
}

}  // namespace kvx::ops

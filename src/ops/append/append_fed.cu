// append with error feedback on a GPU: few rows get eight lanes each, and V comes with them.
#include <cuda_runtime.h>

#include "device/cuda_error.hpp"
#include "ops/append/append_fed.cuh"
#include "ops/append/append_fed.hpp"

namespace kvx::ops::cuda {
namespace {

constexpr int kSharedBytes = 48 * 1024;  // that a launch has without asking

template <int Lanes>
Status launch(const CudaContext& context, const AppendParams& params) {
  using Launch = FedLaunch<Lanes>;
  const auto& [k, v] = params.sides;
  const int v_bytes = v.side.view.head_dim * static_cast<int>(sizeof(float));
  const dim3 grid(ceil_div(params.num_tokens, uint32_t{Launch::kRows}),
                  static_cast<unsigned>(params.num_heads), v.is_stored() ? 2 : 1);
  append_fed<Lanes><<<grid, kWarp, std::max(Launch::shared_bytes(k.side), v_bytes),
                      static_cast<cudaStream_t>(context.stream)>>>(params);
  return device::cuda_launch_status("append_fed");
}

}  // namespace

Status launch_fed(const CudaContext& context, AppendParams& params) {
  AppendParams fed = params;
  params.sides[0] = {};
  // A lane a row takes twice as long for a row, and a third of the instructions.
  const int64_t num_rows = int64_t{params.num_tokens} * params.num_heads;
  const bool fills_device = num_rows > int64_t{64} * context.device.num_multiprocessors;
  if (fills_device && FedLaunch<1>::shared_bytes(fed.sides[0].side) <= kSharedBytes) {
    fed.sides[1] = {};
    return launch<1>(context, fed);
  }
  if (fills_device) {
    fed.sides[1] = {};
  } else {
    params.sides[1] = {};
  }
  return launch<8>(context, fed);
}

}  // namespace kvx::ops::cuda

// process_rows on a GPU: a thread a pair, or a number behind the pairs.
#include <cuda_runtime.h>

#include <algorithm>

#include "device/cuda_error.hpp"
#include "ops/process_rows/process_rows.hpp"

namespace kvx::ops {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    process(const __grid_constant__ ProcessRows args, DeviceCounters* counters) {
  const int64_t units = args.num_units();
  const int64_t of_token = units * args.num_heads;
  const int64_t count = args.num_tokens * of_token;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t token = i / of_token;
    const auto in_token = static_cast<int>(i % of_token);
    if (args.slots[token] < 0) continue;
    if (!args.has_position(token)) {
      if (in_token == 0) atomicAdd(&counters->out_of_range, 1ull);
      continue;
    }
    process_unit(args, token, in_token / static_cast<int>(units),
                 in_token % static_cast<int>(units));
  }
}

}  // namespace
}  // namespace cuda

Status process_rows(const CudaContext& context, const ProcessRows& args, DeviceCounters* counters) {
  constexpr int64_t kCtasPerMultiprocessor = 8;
  const int64_t count = args.num_tokens * args.num_heads * args.num_units();
  if (count == 0) return {};
  const int64_t ctas =
      std::min<int64_t>((count + cuda::kThreads - 1) / cuda::kThreads,
                        kCtasPerMultiprocessor * context.device.num_multiprocessors);
  cuda::process<<<static_cast<unsigned>(ctas), cuda::kThreads, 0,
                  static_cast<cudaStream_t>(context.stream)>>>(args, counters);
  return device::cuda_launch_status("process_rows");
}

}  // namespace kvx::ops

// Timing on a GPU: launches in a graph, between two events.
#pragma once

#include <functional>

#include "core/result.hpp"
#include "device/cuda.hpp"

namespace kvx::tool {

inline constexpr int kCudaReplays = 11;

// Seconds of one of the calls that `record` puts into a graph: the median of kCudaReplays replays.
Result<double> time_graph(device::CudaStream stream, int num_calls,
                          const std::function<Status()>& record);

struct CudaBandwidth {
  double read = 0;  // GB/s, 4 GiB once
  double copy = 0;  // GB/s, bytes read and written together
};

Result<CudaBandwidth> measure_cuda_bandwidth(const device::CudaDevice& device);

}  // namespace kvx::tool

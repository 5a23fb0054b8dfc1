// Timing on a GPU, and its bandwidth to read and to copy.
#include "tools/kvx/bench/cuda_timing.hpp"

#include <vector>

#include "cache/pool/memory.hpp"
#include "device/cuda_bandwidth.hpp"
#include "tools/kvx/bench/timing.hpp"

namespace kvx::tool {

Result<double> time_graph(device::CudaStream stream, int num_calls,
                          const std::function<Status()>& record) {
  KVX_ASSIGN_OR_RETURN(const device::CudaGraph graph, device::CudaGraph::capture(stream, record));
  std::vector<double> seconds;
  for (int i = -3; i < kCudaReplays; ++i) {  // the first three warm up
    KVX_ASSIGN_OR_RETURN(const float milliseconds, graph.time(stream));
    if (i >= 0) seconds.push_back(1e-3 * static_cast<double>(milliseconds) / num_calls);
  }
  return median(seconds);
}

Result<CudaBandwidth> measure_cuda_bandwidth(const device::CudaDevice& device) {
  constexpr int64_t kBytes = int64_t{4} << 30;
  KVX_ASSIGN_OR_RETURN(const std::unique_ptr<cache::Memory> memory,
                       cache::cuda_memory(device.index));
  KVX_ASSIGN_OR_RETURN(const cache::Region data, memory->allocate(2 * kBytes, "a read"));
  KVX_ASSIGN_OR_RETURN(const cache::Region sink, memory->allocate(256, "a read"));
  KVX_ASSIGN_OR_RETURN(const device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  CudaBandwidth bandwidth;
  KVX_ASSIGN_OR_RETURN(const double read, time_graph(stream.get(), 1, [&] {
                         return device::cuda_launch_read(device, stream.get(), data.data(), kBytes,
                                                         sink.data());
                       }));
  KVX_ASSIGN_OR_RETURN(const double copy, time_graph(stream.get(), 1, [&] {
                         return device::cuda_launch_copy(device, stream.get(), data.data(), kBytes,
                                                         data.data() + kBytes);
                       }));
  bandwidth.read = static_cast<double>(kBytes) / read / 1e9;
  bandwidth.copy = 2.0 * static_cast<double>(kBytes) / copy / 1e9;
  return bandwidth;
}

}  // namespace kvx::tool

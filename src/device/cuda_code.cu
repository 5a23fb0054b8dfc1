// cuda_code_version: the host cannot know which of a build's targets a driver has chosen.
#include <array>
#include <atomic>

#include "device/cuda.hpp"

namespace kvx::device {
namespace {

__global__ void any_kernel() {}

int find_code_version() {
  cudaFuncAttributes found;
  if (cudaFuncGetAttributes(&found, any_kernel) == cudaSuccess) return found.ptxVersion;
  cudaGetLastError();  // not sticky: the next call shall not see it
  return 0;
}

}  // namespace

int cuda_code_version(const CudaDevice& device) {
  constexpr int kMostDevices = 64;  // further ones are asked each time
  static std::array<std::atomic<int>, kMostDevices> known = {};
  if (device.index >= kMostDevices) return find_code_version();
  std::atomic<int>& version = known[static_cast<size_t>(device.index)];
  if (version.load() == 0) version.store(find_code_version());
  return version.load();
}

}  // namespace kvx::device

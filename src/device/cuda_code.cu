// cuda_code_version: the host cannot know which of a build's targets a driver has chosen.
#include <map>
#include <mutex>
#include <utility>

#include "device/cuda.hpp"

namespace kvx::device {
namespace {

__global__ void any_kernel() {}

int find_code_version(const void* kernel) {
  cudaFuncAttributes found;
  if (cudaFuncGetAttributes(&found, kernel) == cudaSuccess) return found.ptxVersion;
  cudaGetLastError();  // not sticky: the next call shall not see it
  return 0;
}

}  // namespace

int cuda_code_version(const CudaDevice& device) {
  return cuda_code_version(device, reinterpret_cast<const void*>(&any_kernel));
}

int cuda_code_version(const CudaDevice& device, const void* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> versions;  // a query costs as much as a launch
  const std::pair key(device.index, kernel);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = versions.find(key); found != versions.end()) return found->second;
  }
  const int version = find_code_version(kernel);
  const std::lock_guard lock(mutex);
  if (version != 0) versions.emplace(key, version);
  return version;
}

}  // namespace kvx::device

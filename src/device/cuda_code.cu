// What is asked of CUDA about a kernel, once a thread: the host cannot know which of a build's
// targets a driver has chosen, and a question costs about as much as a launch.
#include <array>
#include <cstdint>

#include "device/cuda.hpp"
#include "device/cuda_kernel.hpp"

namespace kvx::device {
namespace {

__global__ void any_kernel() {}

// An answer for each of the kernels that a thread launched last; 0 is no answer. A model's layers
// launch a handful of kernels in turns.
class KernelAnswers {
 public:
  int& of(int device, const void* kernel) {
    Entry& entry = entries_[(reinterpret_cast<uintptr_t>(kernel) >> 4) % entries_.size()];
    if (entry.device != device || entry.kernel != kernel) entry = {device, kernel, 0};
    return entry.answer;
  }

 private:
  struct Entry {
    int device = -1;
    const void* kernel = nullptr;
    int answer = 0;
  };
  std::array<Entry, 61> entries_;  // a prime: kernels' addresses lie at regular distances
};

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
  thread_local KernelAnswers versions;
  int& version = versions.of(device.index, kernel);
  if (version == 0) version = find_code_version(kernel);
  return version;
}

cudaError_t allow_shared_bytes(int device, const void* kernel, int bytes) {
  thread_local KernelAnswers allowed;
  int& known = allowed.of(device, kernel);
  if (bytes <= known) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) known = bytes;
  return error;
}

}  // namespace kvx::device

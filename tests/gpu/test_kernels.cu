// Kernels of the tests' own. No GoogleTest here: nvcc takes four seconds to read it.
#include "tests/gpu/test_kernels.hpp"

#include <cuda_runtime.h>

#include <cstdint>

namespace kvx::tests {
namespace {

// A CTA a multiprocessor, as large as one can be, writes all of its shared memory.
__global__ void fill_shared_memory(int bytes) {
  extern __shared__ volatile uint32_t words[];
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = 0xFFFFFFFFu;
}

__global__ void tell_architecture([[maybe_unused]] int* version) {
#if defined(__CUDA_ARCH__)
  *version = __CUDA_ARCH__ / 10;
#endif
}

__global__ void fail() {
  __trap();
}

std::string text_of(cudaError_t error) {
  return error == cudaSuccess ? std::string() : cudaGetErrorString(error);
}

}  // namespace

std::string poison_shared_memory(const ops::CudaContext& context) {
  const int bytes = context.device.shared_bytes_per_cta;
  const cudaError_t is_set =
      cudaFuncSetAttribute(fill_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (is_set != cudaSuccess) return text_of(is_set);
  fill_shared_memory<<<context.device.num_multiprocessors, 1024, bytes,
                       static_cast<cudaStream_t>(context.stream)>>>(bytes);
  return text_of(cudaGetLastError());
}

std::string tell_code_version(const ops::CudaContext& context, int* on_device) {
  tell_architecture<<<1, 1, 0, static_cast<cudaStream_t>(context.stream)>>>(on_device);
  return text_of(cudaGetLastError());
}

const void* kernel_that_reports_code_version() {
  return reinterpret_cast<const void*>(&tell_architecture);
}

std::string break_context(const ops::CudaContext& context) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  fail<<<1, 1, 0, stream>>>();
  return text_of(cudaStreamSynchronize(stream));
}

}  // namespace kvx::tests

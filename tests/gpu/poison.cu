// A CTA a multiprocessor, as large as one can be, writes all of its shared memory.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/gpu/poison.hpp"

namespace kvx::tests {
namespace {

__global__ void fill_shared_memory(int bytes) {
  extern __shared__ volatile uint32_t words[];
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = 0xFFFFFFFFu;
}

}  // namespace

void poison_shared_memory(const ops::CudaContext& context) {
  const int bytes = context.device.shared_bytes_per_cta;
  ASSERT_EQ(
      cudaFuncSetAttribute(fill_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      cudaSuccess);
  fill_shared_memory<<<context.device.num_multiprocessors, 1024, bytes,
                       static_cast<cudaStream_t>(context.stream)>>>(bytes);
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace kvx::tests

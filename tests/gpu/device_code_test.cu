// The host's idea of which code a device runs.
#include <iostream>

#include "tests/gpu/gpu.hpp"

namespace kvx::tests {
namespace {

__global__ void tell_architecture([[maybe_unused]] int* version) {
#if defined(__CUDA_ARCH__)
  *version = __CUDA_ARCH__ / 10;
#endif
}

using GpuDeviceCode = GpuTest;

TEST_F(GpuDeviceCode, IsWhatTheHostThinks) {
  auto region = memory().allocate(sizeof(int), "a version");
  ASSERT_TRUE(region.ok());
  auto* on_device = reinterpret_cast<int*>(region.value().data());
  tell_architecture<<<1, 1, 0, static_cast<cudaStream_t>(context().stream)>>>(on_device);
  synchronize();
  int version = 0;
  ASSERT_TRUE(device::cuda_copy(&version, on_device, sizeof version).ok());
  std::cout << "kernels compiled for " << version / 10 << '.' << version % 10 << '\n';
  const auto* kernel = reinterpret_cast<const void*>(&tell_architecture);
  EXPECT_EQ(device::cuda_code_version(context().device, kernel), version);
  EXPECT_EQ(device::cuda_code_version(context().device), version) << "both have every target";
}

}  // namespace
}  // namespace kvx::tests

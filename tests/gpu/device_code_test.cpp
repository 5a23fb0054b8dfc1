// The host's idea of which code a device runs.
#include <iostream>

#include "tests/gpu/gpu.hpp"
#include "tests/gpu/test_kernels.hpp"

namespace kvx::tests {
namespace {

using GpuDeviceCode = GpuTest;

TEST_F(GpuDeviceCode, IsWhatTheHostThinks) {
  auto region = memory().allocate(sizeof(int), "a version");
  ASSERT_TRUE(region.ok());
  auto* on_device = reinterpret_cast<int*>(region.value().data());
  ASSERT_EQ(tell_code_version(context(), on_device), "");
  synchronize();
  int version = 0;
  ASSERT_TRUE(device::cuda_copy(&version, on_device, sizeof version).ok());
  std::cout << "kernels compiled for " << version / 10 << '.' << version % 10 << '\n';
  EXPECT_EQ(device::cuda_code_version(context().device, kernel_that_reports_code_version()),
            version);
  EXPECT_EQ(device::cuda_code_version(context().device), version) << "both have every target";
}

}  // namespace
}  // namespace kvx::tests

// Which devices run what a build's kernels are compiled for.
#include "device/cuda_targets.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/support/environment.hpp"

namespace kvx::device {
namespace {

constexpr const char* kRelease = "80 80-virtual 89 90a 100f 120f";

TEST(CudaTargets, OfTheEverydayBuildRunOnHopperAlone) {
  EXPECT_TRUE(cuda_targets_run_on("90a", 9, 0));
  EXPECT_FALSE(cuda_targets_run_on("90a", 8, 9));
  EXPECT_FALSE(cuda_targets_run_on("90a", 9, 1));
  EXPECT_FALSE(cuda_targets_run_on("90a", 10, 0));
}

TEST(CudaTargets, OfAReleaseRunOnEverythingFrom80On) {
  EXPECT_FALSE(cuda_targets_run_on(kRelease, 7, 5));
  for (const int capability : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121, 130}) {
    EXPECT_TRUE(cuda_targets_run_on(kRelease, capability / 10, capability % 10)) << capability;
  }
}

TEST(CudaTargets, AsMachineCodeRunOnLaterMinorNumbersAlone) {
  EXPECT_TRUE(cuda_targets_run_on("80", 8, 6));
  EXPECT_FALSE(cuda_targets_run_on("89", 8, 6));
  EXPECT_FALSE(cuda_targets_run_on("80", 9, 0));
  EXPECT_TRUE(cuda_targets_run_on("100f", 10, 3));
  EXPECT_FALSE(cuda_targets_run_on("100f", 12, 0));
}

TEST(CudaTargets, AsPtxRunOnEverythingThatIsAsNew) {
  EXPECT_TRUE(cuda_targets_run_on("80-virtual", 12, 0));
  EXPECT_FALSE(cuda_targets_run_on("80-virtual", 7, 5));
}

TEST(CudaTargets, ForOneCapabilityOnAnotherRunOnTheOther) {
  EXPECT_TRUE(cuda_targets_run_on("80-on-90", 9, 0));
  EXPECT_FALSE(cuda_targets_run_on("80-on-90", 8, 0));
}

TEST(CudaTargets, ThatAreNoneRunNowhere) {
  EXPECT_FALSE(cuda_targets_run_on("", 9, 0));
}

CudaDevice device_of(int major, int minor) {
  CudaDevice device;
  device.index = 1;
  device.name = "a card";
  device.compute_major = major;
  device.compute_minor = minor;
  return device;
}

TEST(CudaTargets, RefuseADeviceByItsCapability) {
  EXPECT_TRUE(check_has_kernels(device_of(9, 0), "90a").ok());
  const Status too_old = check_has_kernels(device_of(7, 5), kRelease);
  ASSERT_FALSE(too_old.ok());
  EXPECT_EQ(too_old.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(too_old.error().message,
            "CUDA device 1 (a card) has compute capability 7.5; kvx needs 8.0 or later");
  const Status without_kernels = check_has_kernels(device_of(8, 9), "90a");
  ASSERT_FALSE(without_kernels.ok());
  EXPECT_EQ(without_kernels.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(without_kernels.error().message,
            "CUDA device 1 (a card) has compute capability 8.9; this build has kernels for 90a");
}

// Where CUDA finds no device, on a machine that has one too: in a process of its own, since CUDA
// looks once. Under an emulator a program cannot start itself again, and run_arm64.sh says so.
TEST(NoCudaDeviceDeathTest, OpeningOneSaysSo) {
  if (!std::getenv("GTEST_DEATH_TEST_STYLE")) GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto open_without_devices = [] {
    tests::set_variable("CUDA_VISIBLE_DEVICES", "");
    const Result<CudaDevice> device = open_cuda_device(0);
    const bool says_so = !device.ok() && device.error().code == ErrorCode::kUnsupported;
    std::fputs(device.ok() ? device.value().name.c_str() : device.error().message.c_str(), stderr);
    std::exit(says_so ? 0 : 1);
  };
  EXPECT_EXIT(open_without_devices(), testing::ExitedWithCode(0), "no CUDA");
}

}  // namespace
}  // namespace kvx::device

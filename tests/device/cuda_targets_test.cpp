// Which devices run what a build's kernels are compiled for.
#include "device/cuda_targets.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace kvx::device

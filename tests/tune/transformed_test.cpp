// Statistics of transformed rows are those of rows that a transform was applied to.
#include "tune/transformed.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "device/cpu_level.hpp"

namespace kvx::tune::transformed_test {
namespace {

constexpr int kDim = 16;
constexpr int kRows = 12;
constexpr int kBlockSize = 4;

TEST(TransformedRows, HaveTheirMeanAndBlockOffsetTakenAway) {
  const kv::CacheGeometry geometry{1, 2, kDim, kDim};
  const auto plans =
      kv::plan_layers(geometry, kv::parse_recipe("int8:source=given").value(), {}).value();
  kv::LayerCalibration tables;
  tables.v_mean.assign(2 * kDim, 3.0f);
  for (int block = 0; block < kRows / kBlockSize; ++block) {
    tables.k_block_offset.insert(tables.k_block_offset.end(), 2 * kDim, static_cast<float>(block));
  }
  const auto transforms = transforms_of(geometry, plans, {&tables, 1}, kBlockSize, kRows);
  ASSERT_TRUE(transforms.ok()) << transforms.error().message;

  StatisticsConfig config{1, 2, 2, kDim, kDim, {}, false};
  Statistics statistics = Statistics::create(config).value();
  const std::vector<float> k(kRows * 2 * kDim, 10.0f);
  const std::vector<float> v(kRows * 2 * kDim, 3.5f);
  const ops::CpuContext context{&ops::cpu::kernel_table(device::CpuLevel::kScalar),
                                &serial_executor()};
  // In two parts: the offset goes by a row's position, not by its place in a call.
  for (const int first : {0, 5}) {
    const int count = first == 0 ? 5 : kRows - 5;
    ASSERT_TRUE(feed_transformed(statistics, context, transforms.value()[0].transform(), kBlockSize,
                                 0, first, count, k.data(), v.data())
                    .ok());
  }
  EXPECT_EQ(statistics.percentile(0, Side::kK, 1, 0, kDim, 100), 10);
  EXPECT_NEAR(statistics.mean(0, Side::kK)[3], (4 * 9.0 + 4 * 8.0) / 8, 1e-6);
  EXPECT_EQ(statistics.percentile(0, Side::kV, 0, 0, kDim, 100), 0.5);
}

}  // namespace
}  // namespace kvx::tune::transformed_test

// LogHistogram: percentiles are within its stated error of exact ones.
#include "tune/log_histogram.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace kvx::tune {
namespace {

double exact_percentile(std::vector<float> magnitudes, double percent) {
  std::sort(magnitudes.begin(), magnitudes.end());
  const auto rank =
      static_cast<size_t>(std::ceil(percent / 100 * static_cast<double>(magnitudes.size())));
  return magnitudes[rank - 1];
}

TEST(LogHistogram, EveryMagnitudeLiesWithinTheErrorOfItsBucketsMiddle) {
  for (float magnitude = std::ldexp(1.0f, -16); magnitude < 65536.0f; magnitude *= 1.0037f) {
    const double middle = LogHistogram::middle_of(LogHistogram::bucket_of(magnitude));
    EXPECT_LE(std::fabs(middle - magnitude), LogHistogram::kRelativeError * magnitude) << magnitude;
  }
}

TEST(LogHistogram, HasFirstAndLastBucketsForAllElse) {
  EXPECT_EQ(LogHistogram::bucket_of(0.0f), 0);
  EXPECT_EQ(LogHistogram::bucket_of(1e-30f), 0);
  EXPECT_EQ(LogHistogram::bucket_of(std::ldexp(1.0f, -16)), 1);
  EXPECT_EQ(LogHistogram::bucket_of(65535.0f), LogHistogram::kNumBuckets - 1);
  EXPECT_EQ(LogHistogram::bucket_of(3e38f), LogHistogram::kNumBuckets - 1);
}

TEST(LogHistogram, PercentilesAreNearExactOnes) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> magnitudes;
  std::vector<uint32_t> counts(LogHistogram::kNumBuckets);
  for (int i = 0; i < 20000; ++i) {
    magnitudes.push_back(std::fabs(std::exp(normal(random) / 2)));
    ++counts[LogHistogram::bucket_of(magnitudes.back())];
  }
  const double largest = *std::max_element(magnitudes.begin(), magnitudes.end());
  for (const double percent : {1.0, 25.0, 50.0, 90.0, 99.0, 99.9, 99.99}) {
    const double exact = exact_percentile(magnitudes, percent);
    EXPECT_NEAR(percentile_of(counts, percent, largest), exact,
                LogHistogram::kRelativeError * exact)
        << percent;
  }
  EXPECT_EQ(percentile_of(counts, 100, largest), largest);
}

TEST(LogHistogram, CountsWhatExceedsALimit) {
  std::vector<uint32_t> counts(LogHistogram::kNumBuckets);
  for (const float x : {0.0f, 1.0f, 2.0f, 100.0f, 101.0f}) ++counts[LogHistogram::bucket_of(x)];
  EXPECT_EQ(count_above(counts, 50), 2);
  EXPECT_EQ(count_above(counts, 1e9), 0);
}

}  // namespace
}  // namespace kvx::tune

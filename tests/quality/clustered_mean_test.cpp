// ClusteredMean against numbers worked out by hand.
#include "quality/clustered_mean.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace kvx::quality {
namespace {

TEST(ClusteredMean, IsTheUsualStandardErrorWithClustersOfOne) {
  // 1 2 3 4: mean 2.5, sample variance 5/3, error sqrt(5/3 / 4).
  const std::vector<double> numbers = {1, 2, 3, 4};
  ClusteredMean mean;
  add_in_clusters(numbers, 1, mean);
  EXPECT_EQ(mean.count(), 4);
  EXPECT_DOUBLE_EQ(mean.mean(), 2.5);
  EXPECT_NEAR(mean.standard_error(), std::sqrt(5.0 / 12.0), 1e-12);
}

TEST(ClusteredMean, CountsARunOfEqualNumbersOnce) {
  // Two clusters of three equal numbers are two draws, 1 and 3: variance 2, error sqrt(2 / 2) = 1.
  const std::vector<double> numbers = {1, 1, 1, 3, 3, 3};
  ClusteredMean mean;
  add_in_clusters(numbers, 3, mean);
  EXPECT_DOUBLE_EQ(mean.mean(), 2);
  EXPECT_NEAR(mean.standard_error(), 1, 1e-12);
}

TEST(ClusteredMean, WeighsClustersByTheirCount) {
  // Clusters {0, 0, 0} and {4}: mean 1, residuals 0 - 3 * 1 and 4 - 1 * 1, error sqrt(2 * 18) / 4.
  ClusteredMean mean;
  mean.add_cluster(std::vector<double>{0, 0, 0});
  mean.add_cluster(std::vector<double>{4});
  EXPECT_DOUBLE_EQ(mean.mean(), 1);
  EXPECT_NEAR(mean.standard_error(), 1.5, 1e-12);
}

TEST(ClusteredMean, KeepsTheShorterLastCluster) {
  const std::vector<double> numbers = {0, 0, 0, 4};
  ClusteredMean mean;
  add_in_clusters(numbers, 3, mean);
  EXPECT_NEAR(mean.standard_error(), 1.5, 1e-12);
}

TEST(ClusteredMean, KnowsNoErrorFromOneCluster) {
  ClusteredMean mean;
  EXPECT_TRUE(std::isnan(mean.mean()));
  mean.add_cluster(std::vector<double>{1, 2});
  EXPECT_DOUBLE_EQ(mean.mean(), 1.5);
  EXPECT_TRUE(std::isnan(mean.standard_error()));
}

TEST(ClusteredMean, ShowsANanInItsNumbers) {
  ClusteredMean mean;
  const std::vector<double> numbers = {1, std::numeric_limits<double>::quiet_NaN(), 2};
  add_in_clusters(numbers, 1, mean);
  EXPECT_TRUE(std::isnan(mean.mean()));
  EXPECT_TRUE(std::isnan(mean.standard_error()));
}

}  // namespace
}  // namespace kvx::quality

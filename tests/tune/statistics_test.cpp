// Statistics against plain loops over the same rows; parts against the whole.
#include "tune/statistics.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace kvx::tune::tune_statistics_test {
namespace {

using ::testing::HasSubstr;

constexpr int kRows = 150;

StatisticsConfig config_of() {
  StatisticsConfig config;
  config.num_layers = 2;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.k_head_dim = 20;
  config.v_head_dim = 8;
  config.has_k_moments = true;
  return config;
}

// [kRows, num_heads, head_dim]; channels differ in mean and spread.
std::vector<float> random_rows(int num_heads, int head_dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<size_t>(kRows) * num_heads * head_dim);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int channel = static_cast<int>(i % (static_cast<size_t>(num_heads) * head_dim));
    rows[i] =
        normal(random) * (1.0f + static_cast<float>(channel % 7)) + static_cast<float>(channel % 3);
  }
  return rows;
}

struct Rows {
  std::vector<float> k = random_rows(2, 20, 1);
  std::vector<float> v = random_rows(2, 8, 2);
  std::vector<float> q = random_rows(4, 20, 3);
};

void feed(Statistics& statistics, const Rows& rows, int layer, int first, int count,
          Executor& executor = serial_executor()) {
  ASSERT_TRUE(statistics
                  .feed(layer, first, count, rows.k.data() + first * 40, rows.v.data() + first * 16,
                        executor)
                  .ok());
  ASSERT_TRUE(
      statistics.feed_queries(layer, first, count, rows.q.data() + first * 80, executor).ok());
}

void feed_all(Statistics& statistics, const Rows& rows, Executor& executor = serial_executor()) {
  for (int layer = 0; layer < 2; ++layer) feed(statistics, rows, layer, 0, kRows, executor);
}

void expect_equal_channels(const ChannelStatistics& a, const ChannelStatistics& b) {
  EXPECT_EQ(a.num_rows, b.num_rows);
  EXPECT_EQ(a.num_mean_rows, b.num_mean_rows);
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_EQ(a.largest, b.largest);
  for (size_t i = 0; i < a.sums.size(); ++i) {
    EXPECT_NEAR(a.sums[i], b.sums[i], 1e-9 * (1 + std::fabs(a.sums[i])));
    EXPECT_NEAR(a.square_sums[i], b.square_sums[i], 1e-9 * a.square_sums[i]);
  }
}

TEST(Statistics, CountsEveryRowAndLeavesSinksOutOfMeans) {
  Statistics statistics = Statistics::create(config_of()).value();
  const Rows rows;
  feed_all(statistics, rows);
  EXPECT_EQ(statistics.of(1, Side::kK).num_rows, kRows);
  double sum = 0;
  float largest = 0;
  for (int r = 0; r < kRows; ++r) {
    const float x = rows.k[r * 40 + 23];
    if (r >= kSinkTokens) sum += x;
    largest = std::max(largest, std::fabs(x));
  }
  EXPECT_FLOAT_EQ(statistics.mean(1, Side::kK)[23],
                  static_cast<float>(sum / (kRows - kSinkTokens)));
  EXPECT_EQ(statistics.of(1, Side::kK).largest[23], largest);
  EXPECT_EQ(statistics.percentile(1, Side::kK, 1, 3, 1, 100), largest);
}

TEST(Statistics, PercentilesCoverTheChannelsOfAGroup) {
  Statistics statistics = Statistics::create(config_of()).value();
  const Rows rows;
  feed_all(statistics, rows);
  std::vector<float> magnitudes;
  for (int r = 0; r < kRows; ++r) {
    for (int d = 4; d < 8; ++d) magnitudes.push_back(std::fabs(rows.v[r * 16 + 8 + d]));
  }
  std::sort(magnitudes.begin(), magnitudes.end());
  const double exact =
      magnitudes[static_cast<size_t>(std::ceil(0.9 * static_cast<double>(magnitudes.size()))) - 1];
  EXPECT_NEAR(statistics.percentile(0, Side::kV, 1, 4, 4, 90), exact,
              LogHistogram::kRelativeError * exact);
}

TEST(Statistics, SecondMomentsAreThoseOfAllQueryHeadsOfAKvHead) {
  Statistics statistics = Statistics::create(config_of()).value();
  const Rows rows;
  feed_all(statistics, rows);
  const std::vector<double> moments = statistics.query_moments(0, 1);
  const std::vector<double> keys = statistics.key_moments(0, 1);
  for (const auto& [i, j] : {std::pair(0, 0), std::pair(3, 17), std::pair(17, 3)}) {
    double q_sum = 0;
    double k_sum = 0;
    for (int r = 0; r < kRows; ++r) {
      for (int head = 2; head < 4; ++head) {
        const float* q = rows.q.data() + r * 80 + head * 20;
        q_sum += double{q[i]} * q[j];
      }
      k_sum += double{rows.k[r * 40 + 20 + i]} * rows.k[r * 40 + 20 + j];
    }
    EXPECT_NEAR(moments[i * 20 + j], q_sum / (2 * kRows), 1e-4);
    EXPECT_NEAR(keys[i * 20 + j], k_sum / kRows, 1e-4);
  }
}

TEST(Statistics, MergedPartsAreTheWhole) {
  const Rows rows;
  Statistics whole = Statistics::create(config_of()).value();
  feed_all(whole, rows);
  Statistics first = Statistics::create(config_of()).value();
  Statistics second = Statistics::create(config_of()).value();
  for (int layer = 0; layer < 2; ++layer) {
    feed(first, rows, layer, 0, 64, serial_executor());
    feed(second, rows, layer, 64, kRows - 64, serial_executor());
  }
  ASSERT_TRUE(first.merge(second).ok());
  for (int layer = 0; layer < 2; ++layer) {
    expect_equal_channels(first.of(layer, Side::kK), whole.of(layer, Side::kK));
    expect_equal_channels(first.of(layer, Side::kV), whole.of(layer, Side::kV));
    EXPECT_EQ(first.query_moments(layer, 0), whole.query_moments(layer, 0));
  }
}

TEST(Statistics, ThreadsChangeNothing) {
  const Rows rows;
  Statistics alone = Statistics::create(config_of()).value();
  Statistics shared = Statistics::create(config_of()).value();
  feed_all(alone, rows);
  const std::unique_ptr<Executor> threads = make_thread_pool(4);
  feed_all(shared, rows, *threads);
  expect_equal_channels(alone.of(1, Side::kK), shared.of(1, Side::kK));
  EXPECT_EQ(alone.query_moments(1, 1), shared.query_moments(1, 1));
}

// Rows that are one vector, turned by their positions.
void expect_finds_mean_before_rope(kv::RopePairs pairs) {
  StatisticsConfig config = config_of();
  config.rope = kv::Rope{pairs, {1.0, 0.3, 0.01}, 1.5};
  Statistics statistics = Statistics::create(config).value();
  const Rows rows;
  std::vector<float> k(rows.k.size());
  const auto vector = [](int d) { return 1.0 + 0.25 * d; };
  for (int r = 0; r < kRows; ++r) {
    for (int head = 0; head < 2; ++head) {
      float* row = k.data() + r * 40 + head * 20;
      for (int d = 6; d < 20; ++d) row[d] = static_cast<float>(vector(d));
      for (int i = 0; i < 3; ++i) {
        const bool is_interleaved = pairs == kv::RopePairs::kInterleaved;
        const int a = is_interleaved ? 2 * i : i;
        const int b = is_interleaved ? 2 * i + 1 : i + 3;
        const double angle = (70 + r) * config.rope->inv_freq[i];
        row[a] =
            static_cast<float>(1.5 * (std::cos(angle) * vector(a) - std::sin(angle) * vector(b)));
        row[b] =
            static_cast<float>(1.5 * (std::sin(angle) * vector(a) + std::cos(angle) * vector(b)));
      }
    }
  }
  ASSERT_TRUE(statistics.feed(1, 70, kRows, k.data(), rows.v.data()).ok());
  const std::vector<float> mean = statistics.rope_mean(1);
  for (int d = 0; d < 20; ++d) EXPECT_NEAR(mean[20 + d], vector(d), 1e-5) << d;
}

TEST(Statistics, FindsKsMeanBeforeRopeInHalves) {
  expect_finds_mean_before_rope(kv::RopePairs::kHalves);
}

TEST(Statistics, FindsKsMeanBeforeRopeInPairsOfNeighbours) {
  expect_finds_mean_before_rope(kv::RopePairs::kInterleaved);
}

TEST(Statistics, CountsOutliers) {
  Statistics statistics = Statistics::create(config_of()).value();
  Rows rows;
  for (float& x : rows.v) x = 1;
  rows.v[7 * 16 + 5] = 100;
  rows.v[9 * 16 + 2] = -100;
  feed_all(statistics, rows);
  EXPECT_EQ(statistics.num_outliers(0, Side::kV, 0, 6), 2);
  EXPECT_EQ(statistics.num_outliers(0, Side::kV, 1, 6), 0);
}

TEST(Statistics, NamesTheLayerOfANumberThatIsNotFinite) {
  Statistics statistics = Statistics::create(config_of()).value();
  Rows rows;
  rows.k[12 * 40 + 20 + 3] = std::nanf("");
  const Status status = statistics.feed(1, 100, kRows, rows.k.data(), rows.v.data());
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.error().message,
              HasSubstr("k of layer 1 is nan at position 112, head 1, channel 3"));
  EXPECT_EQ(statistics.of(1, Side::kK).num_rows, 0);
  rows.q[5] = INFINITY;
  const Status of_queries = statistics.feed_queries(0, 0, kRows, rows.q.data());
  ASSERT_FALSE(of_queries.ok());
  EXPECT_THAT(of_queries.error().message, HasSubstr("q of layer 0 is inf"));
}

TEST(Statistics, RefusesWhatDoesNotFit) {
  StatisticsConfig config = config_of();
  config.num_q_heads = 3;
  EXPECT_THAT(Statistics::create(config).error().message, HasSubstr("num_q_heads is 3"));
  config = config_of();
  config.v_head_dim = 0;
  EXPECT_THAT(Statistics::create(config).error().message, HasSubstr("v_head_dim is 0"));
  Statistics statistics = Statistics::create(config_of()).value();
  const Rows rows;
  EXPECT_THAT(statistics.feed(2, 0, 1, rows.k.data(), rows.v.data()).error().message,
              HasSubstr("layer is 2"));
  config = config_of();
  config.k_head_dim = 24;
  EXPECT_THAT(statistics.merge(Statistics::create(config).value()).error().message,
              HasSubstr("statistics are of"));
}

TEST(Statistics, IsIncompleteUntilEveryLayerWasFed) {
  Statistics statistics = Statistics::create(config_of()).value();
  const Rows rows;
  feed(statistics, rows, 0, 0, kRows);
  EXPECT_THAT(statistics.check_complete().error().message, HasSubstr("layer 1 was fed 0 rows"));
  feed(statistics, rows, 1, 0, kRows);
  EXPECT_TRUE(statistics.check_complete().ok());
}

}  // namespace
}  // namespace kvx::tune::tune_statistics_test

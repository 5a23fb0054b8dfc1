// Statistics that a GPU counts against those of the CPU: counts, maxima and histograms are equal,
// sums but for the order of their terms.
#include "tune/cuda/device_statistics.hpp"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "core/float16.hpp"
#include "tests/api/owned_cache.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests::device_statistics_test {
namespace {

using api_test::sized;
using tune::ChannelStatistics;
using tune::DeviceStatistics;
using tune::Side;
using tune::Statistics;
using tune::StatisticsCollector;
using tune::StatisticsConfig;

constexpr int kRows = 333;  // no multiple of a run
constexpr int kKvHeads = 3;
constexpr int kQHeads = 9;

// Rows on both sides, as queries, keys and values of one projection lie: behind each other.
struct Rows {
  DType dtype = DType::kF32;
  int k_head_dim = 0;
  int v_head_dim = 0;
  std::vector<float> q, k, v;     // dense, as the host's statistics take them
  std::vector<uint8_t> together;  // [kRows][q][k][v] in dtype

  int64_t token_stride() const {
    return int64_t{kQHeads + kKvHeads} * k_head_dim + int64_t{kKvHeads} * v_head_dim;
  }
  FloatRows from(const uint8_t* data, int64_t first, int head_dim) const {
    return {data + first * bytes_of(dtype), dtype, token_stride(), head_dim};
  }
};

float stored(float x, DType dtype, uint8_t* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &x, 4);
    return x;
  }
  const uint16_t bits = dtype == DType::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
  std::memcpy(to, &bits, 2);
  return dtype == DType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

Rows make_rows(DType dtype, int k_head_dim, int v_head_dim) {
  Rows rows{dtype, k_head_dim, v_head_dim, {}, {}, {}, {}};
  rows.together.resize(static_cast<size_t>(kRows * rows.token_stride()) * bytes_of(dtype));
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  uint8_t* to = rows.together.data();
  const auto add = [&](std::vector<float>& dense, int count, float spread) {
    for (int i = 0; i < count; ++i, to += bytes_of(dtype)) {
      const float x = i % 11 == 0 ? 0.0f : normal(random) * spread + static_cast<float>(i % 5);
      dense.push_back(stored(x, dtype, to));
    }
  };
  for (int r = 0; r < kRows; ++r) {
    add(rows.q, kQHeads * k_head_dim, 2.0f);
    add(rows.k, kKvHeads * k_head_dim, 8.0f);
    add(rows.v, kKvHeads * v_head_dim, 1e-3f);
  }
  return rows;
}

StatisticsConfig config_of(const Rows& rows, std::optional<kv::Rope> rope = {}) {
  StatisticsConfig config;
  config.num_layers = 2;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = kKvHeads;
  config.k_head_dim = rows.k_head_dim;
  config.v_head_dim = rows.v_head_dim;
  config.rope = std::move(rope);
  return config;
}

kv::Rope rope_of(kv::RopePairs pairs, int num_pairs) {
  kv::Rope rope{pairs, {}, 1.25};
  for (int i = 0; i < num_pairs; ++i) rope.inv_freq.push_back(std::pow(1e4, -i / 16.0));
  return rope;
}

class GpuStatistics : public GpuTest {
 protected:
  // Rows [first, first + count) as rows of positions that begin at `position`.
  static void feed_host(Statistics& to, const Rows& rows, int first, int count, int64_t position) {
    const auto at = [first](const std::vector<float>& dense, int heads, int head_dim) {
      return dense.data() + int64_t{first} * heads * head_dim;
    };
    ASSERT_TRUE(to.feed(1, position, count, at(rows.k, kKvHeads, rows.k_head_dim),
                        at(rows.v, kKvHeads, rows.v_head_dim))
                    .ok());
    ASSERT_TRUE(to.feed_queries(1, position, count, at(rows.q, kQHeads, rows.k_head_dim)).ok());
  }

  void feed_device(DeviceStatistics& to, const Rows& rows, const uint8_t* data, int first,
                   int count, int64_t position) {
    data += first * rows.token_stride() * bytes_of(rows.dtype);
    const int64_t k = int64_t{kQHeads} * rows.k_head_dim;
    const int64_t v = k + int64_t{kKvHeads} * rows.k_head_dim;
    const Status fed =
        to.feed(context().stream, 1, position, count, rows.from(data, k, rows.k_head_dim),
                rows.from(data, v, rows.v_head_dim));
    ASSERT_TRUE(fed.ok()) << fed.error().message;
    ASSERT_TRUE(
        to.feed_queries(context().stream, 1, position, count, rows.from(data, 0, rows.k_head_dim))
            .ok());
  }

  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected,
                          double tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], tolerance * (1 + std::fabs(expected[i])))
          << "number " << i;
    }
  }

  static void expect_same(const Statistics& found, const Statistics& expected) {
    for (const Side side : {Side::kK, Side::kV}) {
      SCOPED_TRACE(side == Side::kK ? "K" : "V");
      const ChannelStatistics& a = found.of(1, side);
      const ChannelStatistics& b = expected.of(1, side);
      EXPECT_EQ(a.num_rows, b.num_rows);
      EXPECT_EQ(a.num_mean_rows, b.num_mean_rows);
      EXPECT_EQ(a.largest, b.largest);
      EXPECT_TRUE(a.counts == b.counts);
      expect_near(a.sums, b.sums, 1e-12);
      expect_near(a.square_sums, b.square_sums, 1e-12);
      expect_near(a.unturned_sums, b.unturned_sums, 1e-6);
    }
    for (int head = 0; head < kKvHeads; ++head) {
      expect_near(found.query_moments(1, head), expected.query_moments(1, head), 2e-6);
    }
    EXPECT_FALSE(found.check_rows_of(0).ok());  // of layer 0 nothing was fed
  }

  void expect_counts_as_the_cpu(const Rows& rows, const std::optional<kv::Rope>& rope = {}) {
    const StatisticsConfig config = config_of(rows, rope);
    Statistics expected = Statistics::create(config).value();
    feed_host(expected, rows, 0, 2, 0);  // a part of the sink tokens
    feed_host(expected, rows, 2, kRows - 2, 2);
    StatisticsCollector collector(Statistics::create(config).value());
    const auto on_device = collector.on_device(0);
    ASSERT_TRUE(on_device.ok()) << on_device.error().message;
    Mirror mirror(memory());
    const uint8_t* data = mirror.add(rows.together.data(), std::ssize(rows.together));
    feed_device(*on_device.value(), rows, data, 0, 2, 0);
    feed_device(*on_device.value(), rows, data, 2, kRows - 2, 2);
    const auto found = collector.collected();
    ASSERT_TRUE(found.ok()) << found.error().message;
    expect_same(*found.value(), expected);
  }
};

TEST_F(GpuStatistics, AreTheCpusForEveryTypeAndHeadDim) {
  expect_counts_as_the_cpu(make_rows(DType::kF32, 64, 64));
  expect_counts_as_the_cpu(make_rows(DType::kF16, 128, 96));
  expect_counts_as_the_cpu(make_rows(DType::kBF16, 80, 20));
  expect_counts_as_the_cpu(make_rows(DType::kBF16, 256, 256));
}

TEST_F(GpuStatistics, UndoTheRotationOfKeys) {
  expect_counts_as_the_cpu(make_rows(DType::kF32, 64, 64), rope_of(kv::RopePairs::kHalves, 32));
  expect_counts_as_the_cpu(make_rows(DType::kBF16, 64, 32),
                           rope_of(kv::RopePairs::kInterleaved, 24));  // a part of a head
}

// Cosines and sines are computed for 8192 rows at a time.
TEST_F(GpuStatistics, UndoTheRotationOfManyRows) {
  constexpr int kManyRows = 8192 + 300;
  StatisticsConfig config;
  config.num_layers = config.num_q_heads = config.num_kv_heads = 1;
  config.k_head_dim = config.v_head_dim = 32;
  config.rope = rope_of(kv::RopePairs::kHalves, 16);
  std::vector<float> k(size_t{kManyRows} * 32);
  for (size_t i = 0; i < k.size(); ++i) k[i] = std::sin(static_cast<float>(i % 1013));
  Statistics expected = Statistics::create(config).value();
  ASSERT_TRUE(expected.feed(0, 2, kManyRows, k.data(), k.data()).ok());
  auto counted = DeviceStatistics::create(config, 0).value();
  Mirror mirror(memory());
  const FloatRows rows = dense_rows(static_cast<const float*>(mirror.add(k)), DType::kF32, 1, 32);
  ASSERT_TRUE(counted->feed(context().stream, 0, 2, kManyRows, rows, rows).ok());
  Statistics found = Statistics::create(config).value();
  ASSERT_TRUE(counted->drain(found).ok());
  expect_near(found.of(0, Side::kK).unturned_sums, expected.of(0, Side::kK).unturned_sums, 1e-6);
  EXPECT_TRUE(found.of(0, Side::kK).counts == expected.of(0, Side::kK).counts);
}

TEST_F(GpuStatistics, GoOnAfterTheyWereReadAndJoinTheHosts) {
  const Rows rows = make_rows(DType::kF32, 64, 64);
  const StatisticsConfig config = config_of(rows);
  Statistics expected = Statistics::create(config).value();
  for (const int first : {0, 100, 200}) feed_host(expected, rows, first, 100, 0);
  StatisticsCollector collector(Statistics::create(config).value());
  DeviceStatistics& on_device = *collector.on_device(0).value();
  Mirror mirror(memory());
  const uint8_t* data = mirror.add(rows.together.data(), std::ssize(rows.together));
  feed_device(on_device, rows, data, 0, 100, 0);
  ASSERT_TRUE(collector.collected().ok());
  feed_host(collector.on_host(), rows, 100, 100, 0);
  feed_device(on_device, rows, data, 200, 100, 0);
  expect_same(*collector.collected().value(), expected);
  expect_same(*collector.collected().value(), expected);  // nothing is counted twice
}

TEST_F(GpuStatistics, GiveTheSameSumsEveryTime) {
  const Rows rows = make_rows(DType::kF32, 64, 64);
  Mirror mirror(memory());
  const uint8_t* data = mirror.add(rows.together.data(), std::ssize(rows.together));
  const auto sums = [&] {
    StatisticsCollector collector(Statistics::create(config_of(rows)).value());
    feed_device(*collector.on_device(0).value(), rows, data, 0, kRows, 0);
    const Statistics& all = *collector.collected().value();
    return std::pair(all.of(1, Side::kK).sums, all.query_moments(1, 2));
  };
  const auto first = sums();
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(sums() == first);
}

TEST_F(GpuStatistics, NameANumberThatIsNotFinite) {
  Rows rows = make_rows(DType::kF32, 64, 64);
  const int64_t at = 50 * rows.token_stride() + (kQHeads + 1) * 64 + 5;  // K, head 1
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(rows.together.data() + 4 * at, &infinity, 4);
  StatisticsCollector collector(Statistics::create(config_of(rows)).value());
  Mirror mirror(memory());
  const uint8_t* data = mirror.add(rows.together.data(), std::ssize(rows.together));
  feed_device(*collector.on_device(0).value(), rows, data, 0, kRows, 7);
  for (int i = 0; i < 2; ++i) {
    const auto found = collector.collected();
    ASSERT_FALSE(found.ok());
    EXPECT_NE(found.error().message.find("k of layer 1 is inf at position 57, head 1, channel 5"),
              std::string::npos)
        << found.error().message;
  }
}

TEST_F(GpuStatistics, RefuseALayerThatIsNotThereAndMomentsOfKeys) {
  const Rows rows = make_rows(DType::kF32, 64, 64);
  StatisticsConfig config = config_of(rows);
  auto statistics = DeviceStatistics::create(config, 0);
  ASSERT_TRUE(statistics.ok());
  const Status status = statistics.value()->feed(context().stream, 2, 0, 1, {}, {});
  EXPECT_EQ(status.error().message, "layer is 2; expected 0 to 1");
  config.has_k_moments = true;
  EXPECT_EQ(DeviceStatistics::create(config, 0).error().code, ErrorCode::kUnsupported);
}

TEST_F(GpuStatistics, ComeThroughTheCAbi) {
  const Rows rows = make_rows(DType::kBF16, 64, 64);
  auto config = sized<kvx_statistics_config_t>();
  config.num_layers = 1;
  config.num_q_heads = kQHeads;
  config.num_kv_heads = kKvHeads;
  config.k_head_dim = config.v_head_dim = 64;
  Mirror mirror(memory());
  const uint8_t* on_device = mirror.add(rows.together.data(), std::ssize(rows.together));
  const auto means_of = [&](const uint8_t* data, bool is_device) {
    std::vector<float> means(size_t{kKvHeads} * 64);
    kvx_statistics_t statistics = nullptr;
    EXPECT_EQ(kvx_statistics_create(&config, &statistics), KVX_STATUS_OK) << kvx_last_error();
    const auto rows_at = [&](int64_t first) {
      auto side = sized<kvx_rows_t>();
      side.data = const_cast<uint8_t*>(data) + 2 * first;
      side.dtype = KVX_DTYPE_BF16;
      side.token_stride = rows.token_stride();
      return side;
    };
    const kvx_rows_t q = rows_at(0), k = rows_at(kQHeads * 64),
                     v = rows_at((kQHeads + kKvHeads) * 64);
    auto args = sized<kvx_statistics_rows_t>();
    args.num_rows = kRows;
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.memory = is_device ? KVX_MEMORY_DEVICE : KVX_MEMORY_HOST;
    args.stream = is_device ? context().stream : nullptr;
    EXPECT_EQ(kvx_statistics_feed(statistics, &args), KVX_STATUS_OK) << kvx_last_error();
    auto values = sized<kvx_statistics_layer_t>();
    values.k_mean = means.data();
    EXPECT_EQ(kvx_statistics_layer(statistics, 0, &values), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(values.num_rows, kRows);
    kvx_statistics_free(statistics);
    return means;
  };
  const std::vector<float> expected = means_of(rows.together.data(), false);
  const std::vector<float> found = means_of(on_device, true);
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-5) << i;
}

// What a layer of 2048 tokens costs beside its forward pass: Llama-3-8B's shape.
TEST_F(GpuStatistics, TimeOfALayerIsRecorded) {
  constexpr int kTokens = 2048;
  StatisticsConfig config;
  config.num_layers = 1;
  config.num_q_heads = 32;
  config.num_kv_heads = 8;
  config.k_head_dim = config.v_head_dim = 128;
  config.rope = rope_of(kv::RopePairs::kHalves, 64);
  auto statistics = DeviceStatistics::create(config, 0);
  ASSERT_TRUE(statistics.ok());
  std::vector<uint16_t> numbers(static_cast<size_t>(kTokens) * 32 * 128);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (uint16_t& number : numbers) number = f32_to_bf16(normal(random));
  Mirror mirror(memory());
  const auto* data = reinterpret_cast<const uint8_t*>(mirror.add(numbers));
  const FloatRows kv = dense_rows(data, DType::kBF16, 8, 128);
  const FloatRows q = dense_rows(data, DType::kBF16, 32, 128);
  const auto feed = [&] {
    const Status fed = statistics.value()->feed(context().stream, 0, 0, kTokens, kv, kv);
    return fed.ok() ? statistics.value()->feed_queries(context().stream, 0, 0, kTokens, q) : fed;
  };
  ASSERT_TRUE(feed().ok());
  synchronize();
  constexpr int kTimes = 20;
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimes; ++i) ASSERT_TRUE(feed().ok());
  synchronize();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  RecordProperty("microseconds", std::to_string(took.count() / kTimes));
  std::printf("a layer of %d tokens: %.0f us\n", kTokens, took.count() / kTimes);
}

}  // namespace
}  // namespace kvx::tests::device_statistics_test

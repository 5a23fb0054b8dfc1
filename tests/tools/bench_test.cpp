// kvx bench's cache really holds what its verbs read, and its report says what was measured.
// Nothing here judges time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tools/kvx/bench/bench_report.hpp"
#include "tools/kvx/engine.hpp"

namespace kvx::tool {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

BenchShape small_shape() {
  BenchShape shape;
  shape.num_sequences = 2;
  shape.length = 40;
  shape.num_kv_heads = 2;
  shape.num_q_heads = 4;
  shape.head_dim = 64;
  shape.block_size = 16;
  shape.prefill_tokens = 8;
  return shape;
}

std::string creation_error(const BenchShape& shape, std::string_view recipe) {
  const Engine engine = std::move(make_engine(1)).value();
  const auto cache = BenchCache::create(shape, kv::parse_recipe(recipe).value(), engine.context);
  return cache.ok() ? "accepted" : cache.error().message;
}

TEST(BenchCache, RunsEveryVerb) {
  const Engine engine = std::move(make_engine(2)).value();
  for (const char* recipe : {"bf16", "int8/int4", "nvfp4:k.hadamard,search", "int4_affine"}) {
    const auto cache =
        BenchCache::create(small_shape(), kv::parse_recipe(recipe).value(), engine.context);
    ASSERT_TRUE(cache.ok()) << cache.error().message;
    EXPECT_TRUE(cache.value()->append_all().ok()) << recipe;
    EXPECT_TRUE(cache.value()->gather(1).ok()) << recipe;
    EXPECT_TRUE(cache.value()->read_blocks().ok()) << recipe;
    EXPECT_TRUE(cache.value()->attend_decode().ok()) << recipe;
    EXPECT_TRUE(cache.value()->attend_prefill(1).ok()) << recipe;
  }
}

TEST(BenchCache, CountsCodesAndScales) {
  const Engine engine = std::move(make_engine(1)).value();
  const auto cache =
      BenchCache::create(small_shape(), kv::parse_recipe("nvfp4").value(), engine.context);
  ASSERT_TRUE(cache.ok());
  EXPECT_EQ(cache.value()->packed_bytes(10), 10 * 2 * 2 * (32 + 4));  // tokens, heads, K and V
}

// The window's tokens are exact in both caches: what differs is read from packed blocks.
TEST(BenchCache, ReadsTheFullPrecisionWindowOfARecipe) {
  const Engine engine = std::move(make_engine(1)).value();
  BenchShape shape = small_shape();
  shape.length = 100;  // 7 blocks: 1 of sinks, 3 packed, 3 recent
  const auto cache = BenchCache::create(shape, kv::parse_recipe("nvfp4:sink=16,recent=32").value(),
                                        engine.context);
  ASSERT_TRUE(cache.ok()) << cache.error().message;
  EXPECT_TRUE(cache.value()->has_full_precision_window());
  ASSERT_TRUE(cache.value()->append_all().ok());
  EXPECT_TRUE(cache.value()->attend_decode().ok());
  EXPECT_TRUE(cache.value()->attend_prefill(1).ok());
  constexpr int64_t kHeadsAndSides = 2 * 2;
  EXPECT_EQ(cache.value()->packed_bytes(200),
            2 * kHeadsAndSides * (4 * 16 * 64 * 2 + (100 - 64) * (32 + 4)));
}

TEST(BenchCache, TakesARecommendedRecipe) {
  EXPECT_EQ(creation_error(small_shape(), "int4:auto"), "accepted");
}

TEST(BenchCache, NamesWhatDoesNotFit) {
  BenchShape shape = small_shape();
  shape.num_q_heads = 3;
  EXPECT_THAT(creation_error(shape, "int8"), HasSubstr("q-heads is 3"));
  shape = small_shape();
  shape.prefill_tokens = 41;
  EXPECT_THAT(creation_error(shape, "int8"), HasSubstr("prefill is 41"));
  shape = small_shape();
  shape.head_dim = 20;
  EXPECT_THAT(creation_error(shape, "nvfp4"), HasSubstr("head_dim is 20"));
}

BenchReport one_measurement() {
  BenchReport report;
  report.cpu_level = "avx2";
  report.threads = 1;
  report.read_gigabytes_per_second = 10;
  report.measurements.push_back(
      {"int8:g32,search", "append", small_shape(), 0.5, 1'000'000'000, 80});
  return report;
}

TEST(BenchReport, ComparesWithReadingMemory) {
  const BenchReport report = one_measurement();
  EXPECT_DOUBLE_EQ(report.measurements[0].gigabytes_per_second(), 2);
  EXPECT_DOUBLE_EQ(report.percent_of_read(report.measurements[0]), 20);
  EXPECT_THAT(bench_table(report, false), HasSubstr("20.0"));
}

TEST(BenchReport, ComparesDecodingWithReadingItsBlocksAndWithBf16) {
  BenchReport report;
  report.read_gigabytes_per_second = 10;
  const auto add = [&](const char* format, const char* verb, double seconds) {
    report.measurements.push_back({format, verb, small_shape(), seconds, 1'000'000'000, 80});
  };
  add("bf16", kAttendDecode, 2.0);
  add("int8", kReadBlocks, 0.5);
  add("int8", kAttendDecode, 1.0);
  EXPECT_DOUBLE_EQ(report.percent_of_block_read(report.measurements[2]).value(), 50);
  EXPECT_DOUBLE_EQ(report.time_over_bf16(report.measurements[2]).value(), 0.5);
  EXPECT_FALSE(report.percent_of_block_read(report.measurements[0]).has_value());
  EXPECT_FALSE(report.time_over_bf16(report.measurements[1]).has_value());
  const auto json = nlohmann::json::parse(bench_json(report));
  EXPECT_TRUE(json["measurements"][1]["time_over_bf16"].is_null());
}

TEST(BenchReport, IsJson) {
  const auto json = nlohmann::json::parse(bench_json(one_measurement()));
  EXPECT_EQ(json["measurements"][0]["gb_per_second"], 2);
  EXPECT_EQ(json["measurements"][0]["head_dim"], 64);
}

TEST(BenchReport, IsCsvThatKeepsARecipesCommasInOneCell) {
  const std::string csv = bench_csv(one_measurement());
  EXPECT_THAT(csv, StartsWith("format,verb,sequences,"));
  EXPECT_THAT(csv, HasSubstr("\n\"int8:g32,search\",\"append\",2,40,"));
}

}  // namespace
}  // namespace kvx::tool

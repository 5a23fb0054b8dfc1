// kvx bench's cache really holds what its verbs read, and its report says what was measured.
// Nothing here judges time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tools/kvx/bench/bench_report.hpp"
#include "tools/kvx/bench/cuda_bench.hpp"
#include "tools/kvx/bench/latent_shape.hpp"
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

TEST(BenchCache, KeepsALatentRowOnce) {
  const Engine engine = std::move(make_engine(1)).value();
  BenchShape shape = parse_latent_batch("mla2x40h4")->shape;
  shape.block_size = 16;
  shape.prefill_tokens = 8;
  for (const auto& [recipe, row_bytes] : {std::pair("bf16", 1152), std::pair("int8+bf16", 656),
                                          std::pair("nvfp4+bf16", 416), std::pair("int4", 306)}) {
    const auto cache = BenchCache::create(shape, kv::parse_recipe(recipe).value(), engine.context);
    ASSERT_TRUE(cache.ok()) << recipe << ": " << cache.error().message;
    EXPECT_EQ(cache.value()->packed_bytes(80), 80 * row_bytes) << recipe;
    EXPECT_TRUE(cache.value()->append_all().ok());
    EXPECT_TRUE(cache.value()->gather(1).ok());
    EXPECT_TRUE(cache.value()->read_blocks().ok());
    EXPECT_TRUE(cache.value()->attend_decode().ok());
    EXPECT_TRUE(cache.value()->attend_prefill(1).ok());
  }
}

TEST(BenchCache, ReadsAWindowOfLatentRows) {
  const Engine engine = std::move(make_engine(1)).value();
  BenchShape shape = parse_latent_batch("mla2x100h4")->shape;
  shape.block_size = 16;
  shape.prefill_tokens = 8;
  const auto cache = BenchCache::create(
      shape, kv::parse_recipe("nvfp4+bf16:sink=16,recent=32").value(), engine.context);
  ASSERT_TRUE(cache.ok()) << cache.error().message;
  ASSERT_TRUE(cache.value()->append_all().ok());
  EXPECT_TRUE(cache.value()->attend_decode().ok());
  EXPECT_EQ(cache.value()->packed_bytes(200), 2 * (4 * 16 * 1152 + 36 * 416));
}

TEST(LatentBatch, IsReadFromAName) {
  const LatentBatch batch = parse_latent_batch("mla64x8192h16").value();
  EXPECT_EQ(latent_batch_name(batch.shape), "mla64x8192h16");
  EXPECT_EQ(parse_latent_batch("mla1x32")->shape.num_q_heads, 128);
  EXPECT_TRUE(parse_latent_batch("mlamixed")->is_mixed);
  for (const char* name : {"mla", "mla1", "mla1x", "mla0x8", "mla1x8h", "mla1x8h0", "mla1x8h129",
                           "mla1x8h16x", "mla5000x1", "mla1x1048577", "a"}) {
    EXPECT_FALSE(parse_latent_batch(name).has_value()) << name;
  }
}

TEST(CudaShapes, HaveLatentRows) {
  const auto shapes = parse_cuda_shapes("mla64x8192h16,a,mlamixedh8,pc192/128", 16);
  ASSERT_TRUE(shapes.ok()) << shapes.error().message;
  const CudaBenchShape& latent = shapes.value()[0];
  EXPECT_TRUE(latent.shape.is_latent());
  EXPECT_EQ(latent.shape.block_size, 16);
  EXPECT_EQ(latent.value_dim, 512);
  EXPECT_FALSE(shapes.value()[1].shape.is_latent());
  EXPECT_TRUE(shapes.value()[2].is_mixed);
  EXPECT_EQ(shapes.value()[3].value_dim, 128);
}

TEST(BenchReport, ComparesBatchesOfOneLengthApart) {
  BenchReport report;
  report.read_gigabytes_per_second = 10;
  for (const auto& [name, format, seconds] :
       {std::tuple("mla1x64h1", "bf16", 1.0), std::tuple("mla1x64h2", "bf16", 4.0),
        std::tuple("mla1x64h2", "int8", 2.0)}) {
    report.measurements.push_back(
        {format, kAttendDecode, parse_latent_batch(name)->shape, seconds, 1, 1});
  }
  EXPECT_DOUBLE_EQ(report.time_over_bf16(report.measurements[2]).value(), 0.5);
  EXPECT_THAT(bench_table(report, false), HasSubstr("mla1x64h2"));
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

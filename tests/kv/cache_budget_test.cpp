// Budgets in bytes, blocks and shares, for caches of any recipe.
#include "kv/plan/cache_budget.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kv/stream.hpp"

namespace kvx::kv {
namespace {

using testing::HasSubstr;

TEST(CacheBudget, InBlocksGivesThatMany) {
  for (const char* recipe : {"bf16", "int8/int4", "nvfp4:immediate"}) {
    KvCacheConfig config = config_of(recipe);
    config.memory_budget_bytes = cache_budget_bytes(config, "70", 0).value();
    const auto snapshot = created(config)->snapshot();
    ASSERT_EQ(snapshot.classes.size(), 1u) << recipe;
    EXPECT_EQ(snapshot.classes[0].num_free, 70) << recipe;
  }
}

TEST(CacheBudget, CountsEveryRegionAndTheFullPrecisionWindow) {
  for (const char* recipe : {"int4:auto", "int8:sink=10,recent=40", "int8:source=page,immediate"}) {
    KvCacheConfig config = config_of(recipe);
    config.cuda.reset();
    config.geometry.layer_windows = {0, 50};
    config.memory_budget_bytes = cache_budget_bytes(config, "120", 0).value();
    const int64_t allocated = created(config)->account().allocated.total();
    EXPECT_LE(allocated, config.memory_budget_bytes) << recipe;
    EXPECT_GT(allocated, config.memory_budget_bytes * 9 / 10) << recipe;
  }
}

TEST(CacheBudget, InBytesOrAShareIsWhatItSays) {
  const KvCacheConfig config = config_of("int8");
  EXPECT_EQ(cache_budget_bytes(config, "3MiB", 0).value(), 3 << 20);
  EXPECT_EQ(cache_budget_bytes(config, "0.25", 1 << 20).value(), 1 << 18);
}

TEST(CacheBudget, BelowABlockIsRefused) {
  const KvCacheConfig config = config_of("int8");
  EXPECT_THAT(cache_budget_bytes(config, "0.5", 100).error().message, HasSubstr("is 50 bytes"));
  EXPECT_THAT(cache_budget_bytes(config, "much", 100).error().message, HasSubstr("'much'"));
}

}  // namespace
}  // namespace kvx::kv

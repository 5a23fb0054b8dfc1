// The texts of errors and statuses, and the features that the library reports.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>

#include "kvx/kvx_abi.h"

namespace {

TEST(StatusName, IsGivenForEveryNumber) {
  EXPECT_STREQ(kvx_status_name(KVX_STATUS_OK), "OK");
  EXPECT_STREQ(kvx_status_name(KVX_STATUS_INVALID_ARGUMENT), "INVALID_ARGUMENT");
  EXPECT_STREQ(kvx_status_name(KVX_STATUS_UNSUPPORTED), "UNSUPPORTED");
  EXPECT_STREQ(kvx_status_name(KVX_STATUS_OUT_OF_RANGE), "OUT_OF_RANGE");
  EXPECT_STREQ(kvx_status_name(KVX_STATUS_INCOMPATIBLE), "INCOMPATIBLE");
  EXPECT_STREQ(kvx_status_name(KVX_STATUS_INTERNAL_ERROR), "INTERNAL_ERROR");
  EXPECT_STREQ(kvx_status_name(static_cast<kvx_status_t>(7)), "UNKNOWN");
}

TEST(LastError, NamesTheFieldItsValueAndWhatWasExpected) {
  kvx_cache_desc_t cache{};
  cache.size = 5;
  ASSERT_EQ(kvx_validate_cache_desc(&cache), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(kvx_last_error(), "cache.size is 5; expected 280");
}

TEST(LastError, BelongsToItsThreadAndOutlivesCallsThatSucceed) {
  ASSERT_EQ(kvx_validate_cache_desc(nullptr), KVX_STATUS_INVALID_ARGUMENT);
  const std::string mine = kvx_last_error();
  std::string others = "?";
  std::thread([&others] { others = kvx_last_error(); }).join();
  EXPECT_EQ(others, "");
  kvx_version_t version{};
  ASSERT_EQ(kvx_get_version(&version), KVX_STATUS_OK);
  EXPECT_EQ(kvx_last_error(), mine);
}

TEST(QueryFeatures, FillsNoMoreThanTheCallersSize) {
  std::array<uint64_t, 16> memory;
  memory.fill(0xABABABABABABABABu);
  auto* features = reinterpret_cast<kvx_features_t*>(memory.data());
  features->size = 24;
  ASSERT_EQ(kvx_query_features(features), KVX_STATUS_OK);
  EXPECT_EQ(features->size, 24u);
  EXPECT_EQ(memory[3], 0xABABABABABABABABu);
  EXPECT_NE(features->layouts & (1u << KVX_LAYOUT_BLOCK_NHD), 0u);
  features->size = sizeof memory;
  ASSERT_EQ(kvx_query_features(features), KVX_STATUS_OK);
  EXPECT_EQ(features->size, sizeof(kvx_features_t));
  EXPECT_EQ(memory[sizeof(kvx_features_t) / 8], 0xABABABABABABABABu);
}

TEST(QueryFeatures, RefusesASizeThatHoldsNothing) {
  kvx_features_t features{};
  for (uint32_t size = 0; size < 8; ++size) {
    features.size = size;
    EXPECT_EQ(kvx_query_features(&features), KVX_STATUS_INVALID_ARGUMENT) << size;
  }
}

TEST(QueryFeatures, ClaimsHostMemoryOnlyInABuildWithoutADevice) {
  kvx_features_t features{};
  features.size = sizeof features;
  ASSERT_EQ(kvx_query_features(&features), KVX_STATUS_OK);
  EXPECT_EQ(features.memory_types, uint64_t{1} << KVX_MEMORY_HOST);
  EXPECT_EQ(features.table_formats, 0b1110u);
  EXPECT_EQ(features.scale_granularities, 0b11111u);
}

}  // namespace

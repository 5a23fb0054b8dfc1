// Owned caches through the ABI: speculative steps, and the options for the pools' memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

constexpr const char* kPageRecipe = "int8:source=page,immediate";

api::Cache page_cache(uint32_t max_speculative_tokens) {
  auto options = sized<kvx_cache_options_t>();
  options.max_speculative_tokens = max_speculative_tokens;
  return sharing_cache(kPageRecipe, options);
}

api::Status begin_marked(api::Cache& cache, int32_t sequence, int32_t count, uint8_t mark) {
  const int32_t sequences[] = {sequence};
  const int32_t counts[] = {count};
  const uint8_t marks[] = {mark};
  return cache.begin_step(sequences, counts, marks);
}

// Louder than what append() and feed() write: a page's scale grows.
void append_loud(api::Cache& cache, int32_t count) {
  std::vector<float> rows = test_rows(count, kOwnedHeads, kOwnedDim, 3.0f);
  for (float& x : rows) x *= 20.0f;
  step_layers(cache, test_rows(count, kQHeads, kOwnedDim, 1.0f), rows, rows);
}

// The step stays open.
void speculate(api::Cache& cache, int32_t sequence, int32_t count) {
  ASSERT_TRUE(begin_marked(cache, sequence, count, 1).ok()) << kvx_last_error();
  append_loud(cache, count);
}

TEST(OwnedSpeculation, TakesPagesWithASharedScaleBackBitForBit) {
  api::Cache cache = page_cache(16);
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 13);
  const std::vector<float> before = rows_of(cache, sequence);
  speculate(cache, sequence, 6);
  ASSERT_TRUE(cache.end_step().ok()) << kvx_last_error();
  EXPECT_NE(rows_of(cache, sequence, 13), before) << "the scale grew, so the codes are others";
  ASSERT_TRUE(cache.truncate_sequence(sequence, 13).ok()) << kvx_last_error();
  EXPECT_EQ(rows_of(cache, sequence), before);

  speculate(cache, sequence, 6);
  ASSERT_TRUE(cache.cancel_step().ok());
  EXPECT_EQ(rows_of(cache, sequence), before);
}

TEST(OwnedSpeculation, KeepsWhatAVerificationAcceptsAsIfNoMoreHadCome) {
  api::Cache cache = page_cache(16);
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 13);
  speculate(cache, sequence, 6);
  const int32_t two[] = {2};
  ASSERT_TRUE(cache.end_step(two).ok()) << kvx_last_error();
  EXPECT_EQ(*cache.num_tokens(sequence), 15);

  api::Cache other = page_cache(0);
  const int32_t expected = *other.create_sequence();
  feed(other, expected, 0, 13);
  begin(other, expected, 2);
  append_loud(other, 2);
  ASSERT_TRUE(other.end_step().ok());
  EXPECT_EQ(rows_of(cache, sequence), rows_of(other, expected));
}

TEST(OwnedSpeculation, KeepsNothingOfStepsWithoutAMark) {
  api::Cache cache = page_cache(16);
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 13);
  ASSERT_TRUE(begin_marked(cache, sequence, 2, 0).ok()) << kvx_last_error();
  append_loud(cache, 2);
  ASSERT_TRUE(cache.end_step().ok());
  const api::Status cut = cache.truncate_sequence(sequence, 13);
  ASSERT_FALSE(cut.ok());
  EXPECT_EQ(cut.failure().status, KVX_STATUS_UNSUPPORTED);
}

TEST(OwnedSpeculation, RefusesMarksWithoutRoomForThem) {
  api::Cache cache = page_cache(0);
  EXPECT_FALSE(begin_marked(cache, *cache.create_sequence(), 1, 1).ok());
  EXPECT_THAT(kvx_last_error(), HasSubstr("max_speculative_tokens"));
  const int32_t sequences[] = {0, 1};
  EXPECT_FALSE(cache.begin_step(sequences, sequences, std::vector<uint8_t>{1}).ok());
}

TEST(OwnedMemory, RefusesPlacesThatAreNotThere) {
  const auto refusal = [](auto change) {
    auto options = sized<kvx_cache_options_t>();
    change(options);
    const auto cache = api::Cache::create(owned_config("int8"), &options);
    EXPECT_FALSE(cache.ok());
    return cache.ok() ? api::Failure{} : cache.failure();
  };
  EXPECT_THAT(refusal([](auto& o) { o.memory = 7; }).text, HasSubstr("options.memory is 7"));
  EXPECT_THAT(refusal([](auto& o) { o.max_step_tokens = 8; }).text, HasSubstr("KVX_MEMORY_DEVICE"));
  EXPECT_THAT(refusal([](auto& o) { o.max_speculative_tokens = UINT32_MAX; }).text,
              HasSubstr("options.max_speculative_tokens is 4294967295"));
  EXPECT_THAT(refusal([](auto& o) {
                o.memory = KVX_MEMORY_DEVICE;
                o.max_step_tokens = UINT32_MAX;
              }).text,
              HasSubstr("options.max_step_tokens is 4294967295"));
  const api::Failure no_device = refusal([](auto& o) {
    o.memory = KVX_MEMORY_DEVICE;
    o.device = 4096;
  });
  EXPECT_EQ(no_device.status, KVX_STATUS_UNSUPPORTED) << no_device.text;
}

TEST(OwnedMemory, OfTheHostHasNothingToWaitFor) {
  auto options = sized<kvx_cache_options_t>();
  options.memory = KVX_MEMORY_HOST;
  api::Cache cache = sharing_cache("int8", options);
  EXPECT_TRUE(cache.synchronize().ok());
}

}  // namespace
}  // namespace kvx::api_test

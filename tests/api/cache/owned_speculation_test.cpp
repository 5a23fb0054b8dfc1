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

// Two branches of a tree behind one root: each token sees its ancestors alone.
TEST(OwnedSpeculation, ATreeMaskShowsEachTokenItsOwnBranch) {
  for (const char* recipe : {"f32", "int8", "int8:sink=8,recent=8"}) {
    SCOPED_TRACE(recipe);
    // The tree: 0 - 1 - 2, and 0 - 3. 17 tokens before it leave room in the open block.
    const std::vector<uint8_t> mask = {1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1};
    const std::vector<float> k = test_rows(4, kOwnedHeads, kOwnedDim, 3.0f);
    const std::vector<float> q = test_rows(4, kQHeads, kOwnedDim, 1.0f);
    const auto outputs = [&](const std::vector<int>& tokens, const uint8_t* tree_mask) {
      api::Cache cache = sharing_cache(recipe);
      const int32_t sequence = *cache.create_sequence();
      feed(cache, sequence, 0, 17);
      begin(cache, sequence, static_cast<int32_t>(tokens.size()));
      std::vector<float> k_rows;
      std::vector<float> q_rows;
      for (const int token : tokens) {
        k_rows.insert(k_rows.end(), k.begin() + token * 64, k.begin() + (token + 1) * 64);
        q_rows.insert(q_rows.end(), q.begin() + token * 128, q.begin() + (token + 1) * 128);
      }
      std::vector<float> out(q_rows.size());
      const kvx_rows_t q_view = api::rows(q_rows.data(), KVX_DTYPE_F32);
      const kvx_rows_t k_view = api::rows(k_rows.data(), KVX_DTYPE_F32);
      const kvx_rows_t out_view = api::rows(out.data(), KVX_DTYPE_F32);
      auto args = sized<kvx_step_layer_args_t>();
      args.num_q_heads = kQHeads;
      args.q = &q_view;
      args.k = args.v = &k_view;
      args.out = &out_view;
      args.tree_mask = tree_mask;
      args.tree_mask_stride = 4;
      EXPECT_TRUE(cache.step_layer(args).ok()) << kvx_last_error();
      return out;
    };
    const std::vector<float> tree = outputs({0, 1, 2, 3}, mask.data());
    const std::vector<float> first = outputs({0, 1, 2}, nullptr);
    const std::vector<float> second = outputs({0, 3}, nullptr);
    const auto row = [](const std::vector<float>& out, int i) {
      return std::vector<float>(out.begin() + i * 128, out.begin() + (i + 1) * 128);
    };
    for (int i = 0; i < 3; ++i) EXPECT_LT(largest_difference(row(tree, i), row(first, i)), 1e-5);
    EXPECT_LT(largest_difference(row(tree, 3), row(second, 1)), 1e-5);
    EXPECT_GT(largest_difference(row(tree, 3), row(outputs({0, 1, 2, 3}, nullptr), 3)), 1e-3);
  }
}

TEST(OwnedSpeculation, RefusesTreesThatDoNotFit) {
  const std::vector<uint8_t> mask(100, 1);
  const std::vector<float> rows = test_rows(10, kQHeads, kOwnedDim, 1.0f);
  std::vector<float> out(rows.size());
  const kvx_rows_t view = api::rows(rows.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_view = api::rows(out.data(), KVX_DTYPE_F32);
  const auto refusal = [&](const char* recipe, int64_t stride) {
    api::Cache cache = sharing_cache(recipe);
    const int32_t sequence = *cache.create_sequence();
    begin(cache, sequence, 10);
    auto args = sized<kvx_step_layer_args_t>();
    args.num_q_heads = kQHeads;
    args.q = args.k = args.v = &view;
    args.out = &out_view;
    args.tree_mask = mask.data();
    args.tree_mask_stride = stride;
    EXPECT_FALSE(cache.step_layer(args).ok());
    return std::string(kvx_last_error());
  };
  EXPECT_THAT(refusal("int8", 9), HasSubstr("tree_mask_stride is 9; expected at least 10"));
  EXPECT_THAT(refusal("int8:sink=8,recent=8", 10), HasSubstr("goes over a block's end"));
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

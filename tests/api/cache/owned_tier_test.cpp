// Owned caches through the ABI: a host tier behind the pool.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test::owned_tier_test {
namespace {

using testing::HasSubstr;

constexpr int32_t kTokens = 40;  // five blocks of 8

// The pool has room for one sequence.
api::Result<api::Cache> tiered_cache(int64_t host_tier_bytes, uint32_t flags = KVX_CACHE_PREFIXES,
                                     const char* folder = nullptr) {
  auto config = owned_config("int8");
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kTokens;
  auto options = sharing_options();
  options.flags = flags;
  options.host_tier_bytes = host_tier_bytes;
  options.host_tier_folder = folder;
  return api::Cache::create(config, &options);
}

// A sequence of tokens first, first + 1, ... comes and goes.
void come_and_go(api::Cache& cache, int32_t first) {
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, first, first + kTokens);
  ASSERT_TRUE(cache.free_sequence(sequence).ok());
  ASSERT_TRUE(cache.wait_for_tiers().ok());
}

void expect_what_the_pool_had_no_room_for(api::Cache cache) {
  const int32_t first = *cache.create_sequence();
  feed(cache, first, 0, kTokens);
  const std::vector<float> before = rows_of(cache, first, 32);
  ASSERT_TRUE(cache.free_sequence(first).ok());
  ASSERT_TRUE(cache.wait_for_tiers().ok());  // a step waits for files for a while only
  come_and_go(cache, 1000);
  const kvx_cache_snapshot_t seen = *cache.snapshot();
  EXPECT_EQ(seen.host_stored, 10);
  EXPECT_EQ(seen.host_loaded, 0);
  EXPECT_GT(seen.host_held_bytes, 0);
  EXPECT_LE(seen.host_held_bytes, seen.host_allocated_bytes);

  const int32_t again = *cache.create_sequence_from(token_ids(0, kTokens));
  EXPECT_EQ(*cache.num_tokens(again), 32) << "all but the last block, whose last token is computed";
  EXPECT_EQ(rows_of(cache, again), before);
  EXPECT_GT(cache.snapshot()->host_loaded, 0);
  EXPECT_EQ(cache.snapshot()->host_bad, 0);
}

TEST(OwnedTier, GivesBackWhatThePoolHadNoRoomFor) {
  expect_what_the_pool_had_no_room_for(std::move(*tiered_cache(1 << 20)));
}

TEST(OwnedTier, GivesItBackFromFilesToo) {
  const std::string folder = testing::TempDir();
  expect_what_the_pool_had_no_room_for(
      std::move(*tiered_cache(1 << 20, KVX_CACHE_PREFIXES, folder.c_str())));
}

TEST(OwnedTier, RefusesAFolderWithoutABudgetOrThatIsNone) {
  const auto without_budget = tiered_cache(0, KVX_CACHE_PREFIXES, "/tmp");
  ASSERT_FALSE(without_budget.ok());
  EXPECT_EQ(without_budget.failure().status, KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(without_budget.failure().text,
              HasSubstr("options.host_tier_folder is '/tmp'; expected host_tier_bytes with it"));
  const auto no_folder = tiered_cache(1 << 20, KVX_CACHE_PREFIXES, "/none");
  ASSERT_FALSE(no_folder.ok());
  EXPECT_EQ(no_folder.failure().status, KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(no_folder.failure().text,
              HasSubstr("'/none' takes no files (No such file or directory)"));
}

TEST(OwnedTier, BringsBlocksBackAheadOfTime) {
  api::Cache cache = std::move(*tiered_cache(1 << 20));
  come_and_go(cache, 0);
  come_and_go(cache, 1000);
  const uint64_t prefetch = *cache.prefetch(token_ids(0, kTokens));
  ASSERT_TRUE(cache.wait_for_tiers().ok());
  uint32_t is_done = 0;
  ASSERT_EQ(kvx_prefetch_is_done(cache.handle(), prefetch, &is_done), KVX_STATUS_OK);
  EXPECT_EQ(is_done, 1u);
  EXPECT_TRUE(*cache.is_prefetch_done(prefetch));
  const int64_t num_loaded = cache.snapshot()->host_loaded;
  EXPECT_GT(num_loaded, 0);
  ASSERT_TRUE(cache.end_prefetch(prefetch).ok());
  EXPECT_EQ(*cache.num_tokens(*cache.create_sequence_from(token_ids(0, kTokens))), 32);
  EXPECT_EQ(cache.snapshot()->host_loaded, num_loaded) << "they were there";

  const auto twice = cache.end_prefetch(prefetch);
  ASSERT_FALSE(twice.ok());
  EXPECT_THAT(twice.failure().text, HasSubstr("has ended, or never existed"));
  EXPECT_EQ(kvx_prefetch_is_done(cache.handle(), prefetch, &is_done), KVX_STATUS_INVALID_ARGUMENT);
}

// What a step that goes on from the cached beginning gives, and the rows of the beginning.
struct Continued {
  int64_t num_cached = 0;
  std::vector<float> out;
  std::vector<float> rows;
};

Continued go_on(api::Cache& cache, const api::Sequence& sequence) {
  Continued seen;
  seen.num_cached = *sequence.num_tokens();
  const int32_t count = kTokens - static_cast<int32_t>(seen.num_cached);
  begin(cache, sequence.number(), count);
  seen.out = step_layers(cache, test_rows(count, kQHeads, kOwnedDim, 1),
                         test_rows(count, kOwnedHeads, kOwnedDim, 2),
                         test_rows(count, kOwnedHeads, kOwnedDim, 3));
  EXPECT_TRUE(cache.end_step().ok());
  seen.rows = rows_of(cache, sequence.number());
  return seen;
}

TEST(OwnedTier, LoadsLayerByLayerBesideTheStep) {
  const std::vector<int32_t> tokens = token_ids(0, kTokens);
  std::vector<Continued> both;
  for (const bool by_layer : {false, true}) {
    api::Cache cache = std::move(*tiered_cache(1 << 20));
    come_and_go(cache, 0);
    come_and_go(cache, 1000);
    const auto sequence = by_layer ? api::Sequence::create_loading(cache, tokens)
                                   : api::Sequence::create_from(cache, tokens);
    ASSERT_TRUE(sequence.ok());
    both.push_back(go_on(cache, *sequence));
    EXPECT_GT(cache.snapshot()->host_loaded, 0);
  }
  EXPECT_EQ(both[1].num_cached, 32);
  EXPECT_EQ(both[1].num_cached, both[0].num_cached);
  EXPECT_EQ(both[1].out, both[0].out);
  EXPECT_EQ(both[1].rows, both[0].rows);
}

TEST(OwnedTier, ASequenceThatLoadsIsLeftAloneUntilItsEnd) {
  api::Cache cache = std::move(*tiered_cache(1 << 20));
  come_and_go(cache, 0);
  come_and_go(cache, 1000);
  auto sequence = std::move(*api::Sequence::create_loading(cache, token_ids(0, kTokens)));
  const auto refused = sequence.fork();
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.failure().text, HasSubstr("is still loading layer by layer"));
  EXPECT_TRUE(sequence.wait_for_layer(kOwnedLayers - 1).ok());
  const auto beyond = sequence.wait_for_layer(kOwnedLayers);
  ASSERT_FALSE(beyond.ok());
  EXPECT_THAT(beyond.failure().text, HasSubstr("layer is 2; the cache has layers 0 to 1"));
  EXPECT_EQ(*sequence.end_loading(), 32);
  EXPECT_EQ(*sequence.end_loading(), 32) << "and of one that does not load";
  EXPECT_EQ(kvx_sequence_end_loading(cache.handle(), sequence.number(), nullptr), KVX_STATUS_OK);
  EXPECT_EQ(kvx_sequence_end_loading(cache.handle(), 12345, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(OwnedTier, FreesACacheWhoseSequenceStillLoads) {
  api::Cache cache = std::move(*tiered_cache(1 << 20));
  come_and_go(cache, 0);
  come_and_go(cache, 1000);
  EXPECT_TRUE(cache.create_sequence_loading(token_ids(0, kTokens)).ok());
}

TEST(OwnedTier, FreesACacheThatStillPrefetches) {
  api::Cache cache = std::move(*tiered_cache(1 << 20));
  come_and_go(cache, 0);
  come_and_go(cache, 1000);
  EXPECT_TRUE(cache.prefetch(token_ids(0, kTokens)).ok());
}

TEST(OwnedTier, TellsTheTierOfAnEvent) {
  struct Heard {
    int of_pool = 0;
    int of_host = 0;
  } heard;
  api::Cache cache = std::move(*tiered_cache(1 << 20));
  auto listener = sized<kvx_cache_listener_t>();
  listener.user = &heard;
  listener.on_event = [](void* user, const kvx_cache_event_t* event) {
    auto& count = *static_cast<Heard*>(user);
    if (event->kind != KVX_CACHE_EVENT_STORED) return;
    ++(event->tier == KVX_CACHE_TIER_HOST ? count.of_host : count.of_pool);
  };
  ASSERT_EQ(kvx_cache_set_listener(cache.handle(), &listener), KVX_STATUS_OK);
  come_and_go(cache, 0);
  EXPECT_EQ(heard.of_pool, 5);
  EXPECT_EQ(heard.of_host, 5);
}

// The first tier has room for two sequences of five blocks, the second for all.
TEST(OwnedTier, MovesBlocksThroughAChainOfTiers) {
  auto config = owned_config("int8");
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kTokens;
  auto options = sharing_options();
  options.host_tier_bytes = 0;
  const std::string tiers =
      fmt::format("host(64KiB, policy=2q), disk(\"{}\", 1MiB)", testing::TempDir());
  options.tiers = tiers.c_str();
  api::Cache cache = std::move(*api::Cache::create(config, &options));
  const int32_t first = *cache.create_sequence();
  feed(cache, first, 0, kTokens);
  const std::vector<float> before = rows_of(cache, first, 32);
  ASSERT_TRUE(cache.free_sequence(first).ok());
  ASSERT_EQ(cache.snapshot()->num_tiers, 2u);
  for (int32_t i = 1; i <= 40; ++i) come_and_go(cache, 1000 * i);
  const kvx_cache_tier_facts_t host = *cache.tier_facts(0);
  EXPECT_EQ(host.tier, static_cast<uint32_t>(KVX_CACHE_TIER_HOST));
  EXPECT_GT(host.num_stored, 0);
  EXPECT_GT(host.num_moved_down, 0);
  EXPECT_LE(host.held_bytes, 64 << 10);
  EXPECT_GT(cache.tier_facts(1)->num_stored, 0);
  const int32_t again = *cache.create_sequence_from(token_ids(0, kTokens));
  EXPECT_EQ(*cache.num_tokens(again), 32);
  EXPECT_EQ(rows_of(cache, again), before);
  const kvx_cache_tier_facts_t disk = *cache.tier_facts(1);
  EXPECT_EQ(disk.tier, static_cast<uint32_t>(KVX_CACHE_TIER_DISK));
  EXPECT_GT(disk.num_loaded, 0);
  EXPECT_EQ(host.num_bad + disk.num_bad, 0);
  EXPECT_GT(disk.load_p99_us, 0);
  const auto beyond = cache.tier_facts(2);
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.failure().status, KVX_STATUS_OUT_OF_RANGE);
  EXPECT_THAT(beyond.failure().text, HasSubstr("index is 2; the cache has 2 tiers"));
}

TEST(OwnedTier, RefusesTiersThatDoNotFit) {
  const auto refused_with = [](const char* tiers, int64_t host_tier_bytes, uint32_t flags) {
    auto options = sharing_options();
    options.flags = flags;
    options.host_tier_bytes = host_tier_bytes;
    options.tiers = tiers;
    return api::Cache::create(owned_config("int8"), &options).failure().text;
  };
  EXPECT_THAT(refused_with("tape(1GiB)", 0, KVX_CACHE_PREFIXES),
              HasSubstr("tiers has a tier 'tape'; expected host, disk, folder, redis"));
  EXPECT_THAT(refused_with("host(1MiB)", 0, 0),
              HasSubstr("options.tiers is 'host(1MiB)'; expected KVX_CACHE_PREFIXES with it"));
  EXPECT_THAT(refused_with("host(1MiB)", 1 << 20, KVX_CACHE_PREFIXES),
              HasSubstr("options.host_tier_bytes is 1048576; expected 0 with options.tiers"));
  EXPECT_THAT(refused_with("host(1KiB)", 0, KVX_CACHE_PREFIXES),
              HasSubstr("budget_bytes of the host tier is 1024"));
}

TEST(OwnedTier, SaysWhatIsWrong) {
  const auto text_of = [](const api::Result<api::Cache>& cache) { return cache.failure().text; };
  EXPECT_THAT(text_of(tiered_cache(-1)), HasSubstr("host_tier_bytes is -1"));
  EXPECT_THAT(text_of(tiered_cache(1 << 20, 0)), HasSubstr("KVX_CACHE_PREFIXES"));
  const auto tiny = tiered_cache(100);
  EXPECT_EQ(tiny.failure().status, KVX_STATUS_OUT_OF_RANGE);

  auto options = sharing_options();
  options.host_tier_eviction = 5;
  const auto config = owned_config("int8");
  EXPECT_THAT(text_of(api::Cache::create(config, &options)), HasSubstr("host_tier_eviction is 5"));

  api::Cache plain = sharing_cache("int8");
  const auto refused = plain.prefetch(token_ids(0, 8));
  EXPECT_EQ(refused.failure().status, KVX_STATUS_UNSUPPORTED);
  EXPECT_TRUE(plain.wait_for_tiers().ok());
}

}  // namespace
}  // namespace kvx::api_test::owned_tier_test

// The host tier behind an assembled cache: what the pool had no room for comes back, byte for byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/kv/stream.hpp"

namespace kvx::kv::host_tier_test {
namespace {

using testing::HasSubstr;

constexpr int kBlockSize = 16;
constexpr int kNumTokens = 112;
constexpr const char* kRecipes[] = {"bf16", "int8/int4", "nvfp4:immediate", "nvfp4:auto",
                                    "int4:sink=10,recent=40,full_precision=f16"};

std::vector<int32_t> token_ids(int count, int32_t first) {
  std::vector<int32_t> ids(count);
  for (int i = 0; i < count; ++i) ids[i] = first + i;
  return ids;
}

tier::TierConfig tier_of(int64_t budget_bytes, const std::string& folder = "") {
  return {folder.empty() ? tier::TierKind::kHost : tier::TierKind::kDisk, budget_bytes, folder};
}

// Room for num_sequences sequences; a host tier of host_bytes, in files where there is a folder, or
// none.
std::unique_ptr<KvCache> tiered_cache(std::string_view recipe, int num_sequences,
                                      int64_t host_bytes, const std::string& folder = "") {
  KvCacheConfig config = config_of(recipe, kBlockSize);
  config.max_sequences = num_sequences;
  config.max_tokens_per_sequence = kNumTokens;
  config.prefix.is_on = true;
  if (host_bytes > 0) config.tiers = {tier_of(host_bytes, folder)};
  return created(std::move(config));
}

// A sequence of its own comes and goes; its tokens are 1000 * seed and on.
void write_and_leave(KvCache& cache, int seed, int num_tokens) {
  const int sequence = cache.create_sequence().value();
  const Stream stream(num_tokens, seed);
  feed(cache, sequence, stream, 0, num_tokens, 1000);
  ASSERT_TRUE(cache.record_tokens(sequence, token_ids(num_tokens, 1000 * seed)).ok());
  ASSERT_TRUE(cache.free_sequence(sequence).ok());
}

// What a sequence that begins with what is cached of stream `seed` gives for the rest.
std::vector<float> continue_cached(KvCache& cache, int seed, int64_t& num_cached,
                                   tier::LoadOrder order = tier::LoadOrder::kWholeBlocks) {
  const Result<int> sequence =
      cache.create_sequence_from({}, token_ids(kNumTokens, 1000 * seed), "", order);
  EXPECT_TRUE(sequence.ok()) << sequence.error().message;
  num_cached = cache.num_tokens(sequence.value());
  const Stream stream(kNumTokens, seed);
  const auto out =
      feed(cache, sequence.value(), stream, static_cast<int>(num_cached), kNumTokens, 1000);
  EXPECT_TRUE(cache.free_sequence(sequence.value()).ok());
  return out;
}

// A step waits for files for a while, which a machine that stalls may take, and then drops blocks.
void give_files_time(KvCache& cache, const std::string& folder) {
  if (!folder.empty()) cache.wait_for_tiers();
}

void expect_what_the_pool_had_no_room_for(const char* recipe, const std::string& folder) {
  const auto roomy = tiered_cache(recipe, 4, 0);
  const auto tiered = tiered_cache(recipe, 1, 4 << 20, folder);
  for (int seed : {1, 2, 3}) {
    write_and_leave(*roomy, seed, kNumTokens);
    write_and_leave(*tiered, seed, kNumTokens);
    give_files_time(*tiered, folder);
  }
  int64_t num_cached = 0, num_cached_in_tiers = 0;
  const auto expected = continue_cached(*roomy, 1, num_cached);
  EXPECT_EQ(continue_cached(*tiered, 1, num_cached_in_tiers), expected);
  EXPECT_EQ(num_cached, kNumTokens - kBlockSize);
  EXPECT_EQ(num_cached_in_tiers, num_cached);
  const tier::HostTierSnapshot host = tiered->snapshot().tiers[0];
  EXPECT_GT(host.num_loaded, 0);
  EXPECT_EQ(host.num_bad, 0);
  EXPECT_EQ(host.num_dropped, 0);
  EXPECT_GT(host.held_bytes, 0);
  EXPECT_LE(host.held_bytes, host.allocated_bytes);
  EXPECT_LE(host.allocated_bytes, 4 << 20);
}

TEST(HostTier, GivesBackWhatThePoolHadNoRoomFor) {
  for (const std::string& folder : {std::string(), testing::TempDir()}) {
    for (const char* recipe : kRecipes) {
      SCOPED_TRACE(std::string(recipe) + (folder.empty() ? " in memory" : " in files"));
      expect_what_the_pool_had_no_room_for(recipe, folder);
    }
  }
}

// More blocks than the pool's index of prefixes has nodes to spare: those of the prompt that is
// there have to go first.
TEST(HostTier, GivesALongPromptBackWholeWhereAnotherFillsThePool) {
  constexpr int kLong = 100 * kBlockSize;
  for (const auto order : {tier::LoadOrder::kWholeBlocks, tier::LoadOrder::kLayerByLayer}) {
    KvCacheConfig config = config_of("int8", kBlockSize);
    config.max_sequences = 1;
    config.max_tokens_per_sequence = kLong;
    config.prefix.is_on = true;
    config.tiers = {tier_of(64 << 20)};
    const auto cache = created(config);
    for (const int seed : {1, 2}) write_and_leave(*cache, seed, kLong);
    for (const int seed : {1, 2, 1}) {
      const auto tokens = token_ids(kLong, 1000 * seed);
      const Result<int> sequence = cache->create_sequence_from({}, tokens, "", order);
      ASSERT_TRUE(sequence.ok()) << sequence.error().message;
      EXPECT_EQ(cache->num_tokens(sequence.value()), kLong - kBlockSize) << "stream " << seed;
      EXPECT_TRUE(cache->free_sequence(sequence.value()).ok());
    }
  }
}

// The first tier has room for two sequences, the one below for all.
TEST(HostTier, WhatItHasNoRoomForMovesToTheTierBelow) {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const auto roomy = tiered_cache(recipe, 8, 0);
    KvCacheConfig config = config_of(recipe, kBlockSize);
    config.max_sequences = 1;
    config.max_tokens_per_sequence = kNumTokens;
    config.prefix.is_on = true;
    const int64_t two_sequences = tiered_cache(recipe, 2, 0)->account().allocated.total();
    config.tiers = {tier_of(two_sequences), tier_of(16 << 20, testing::TempDir())};
    const auto tiered = created(config);
    for (int seed = 1; seed <= 6; ++seed) {
      write_and_leave(*roomy, seed, kNumTokens);
      write_and_leave(*tiered, seed, kNumTokens);
      tiered->wait_for_tiers();
    }
    for (int seed = 1; seed <= 6; ++seed) {
      int64_t num_cached = 0, num_cached_in_tiers = 0;
      const auto expected = continue_cached(*roomy, seed, num_cached);
      EXPECT_EQ(continue_cached(*tiered, seed, num_cached_in_tiers), expected);
      EXPECT_EQ(num_cached_in_tiers, num_cached) << "stream " << seed;
      tiered->wait_for_tiers();
    }
    const auto tiers = tiered->snapshot().tiers;
    EXPECT_GT(tiers[0].num_moved_down, 0);
    EXPECT_GT(tiers[1].num_loaded, 0);
    EXPECT_EQ(tiers[0].num_bad + tiers[1].num_bad, 0);
    EXPECT_GT(tiers[1].load_latency.num_blocks, 0);
  }
}

// ---- layer by layer

TEST(HostTier, GivesItBackLayerByLayerToo) {
  for (const std::string& folder : {std::string(), testing::TempDir()}) {
    for (const char* recipe : kRecipes) {
      SCOPED_TRACE(std::string(recipe) + (folder.empty() ? " in memory" : " in files"));
      const auto whole = tiered_cache(recipe, 1, 4 << 20, folder);
      const auto by_layer = tiered_cache(recipe, 1, 4 << 20, folder);
      for (int seed : {1, 2, 3}) {
        for (KvCache* const cache : {whole.get(), by_layer.get()}) {
          write_and_leave(*cache, seed, kNumTokens);
          give_files_time(*cache, folder);
        }
      }
      for (int seed : {1, 3, 2}) {
        int64_t num_whole = 0, num_by_layer = 0;
        const auto expected = continue_cached(*whole, seed, num_whole);
        EXPECT_EQ(continue_cached(*by_layer, seed, num_by_layer, tier::LoadOrder::kLayerByLayer),
                  expected);
        EXPECT_EQ(num_by_layer, num_whole);
        EXPECT_GT(num_by_layer, 0);
        for (KvCache* const cache : {whole.get(), by_layer.get()}) {
          give_files_time(*cache, folder);
        }
      }
      const tier::HostTierSnapshot host = by_layer->snapshot().tiers[0];
      EXPECT_EQ(host.num_loaded, whole->snapshot().tiers[0].num_loaded);
      EXPECT_EQ(host.num_bad, 0);
    }
  }
}

TEST(HostTier, ASequenceThatLoadsTakesPartInStepsAlone) {
  const auto cache = tiered_cache("int8", 1, 4 << 20);
  for (int seed : {1, 2}) write_and_leave(*cache, seed, kNumTokens);
  const auto tokens = token_ids(kNumTokens, 1000);
  const auto order = tier::LoadOrder::kLayerByLayer;
  const int sequence = cache->create_sequence_from({}, tokens, "", order).value();
  const Status refused = cache->truncate_sequence(sequence, 16);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message, HasSubstr("still loading layer by layer"));
  EXPECT_TRUE(cache->wait_for_layer(sequence, 0).ok());
  EXPECT_FALSE(cache->wait_for_layer(sequence, kNumLayers).ok());
  ASSERT_TRUE(cache->end_loading(sequence).ok());
  EXPECT_EQ(cache->num_tokens(sequence), kNumTokens - kBlockSize);
  EXPECT_TRUE(cache->truncate_sequence(sequence, 16).ok());
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  EXPECT_EQ(cache->snapshot().classes[0].num_active, 0);
  EXPECT_FALSE(cache->end_loading(sequence).ok());

  write_and_leave(*cache, 2, kNumTokens);
  const int dropped = cache->create_sequence_from({}, tokens, "", order).value();
  ASSERT_TRUE(cache->free_sequence(dropped).ok()) << "waits for what is under way";
  EXPECT_EQ(cache->snapshot().classes[0].num_active, 0);
}

// The last layer of the third block changes in the host tier.
TEST(HostTier, WhatDoesNotComeWholeEndsTheStepAndTheSequenceKeepsTheRest) {
  const auto cache = tiered_cache("int8", 1, 4 << 20);
  const auto roomy = tiered_cache("int8", 2, 0);
  write_and_leave(*roomy, 1, kNumTokens);
  for (int seed : {1, 2}) write_and_leave(*cache, seed, kNumTokens);
  cache->wait_for_tiers();
  const auto tokens = token_ids(kNumTokens, 1000);
  {
    tier::HostTier& host = cache->table().tiers->tier(0);
    const int32_t scope = host.nodes().pin_scope({}).value();
    const cache::PrefixMatch match = host.nodes().match(scope, tokens, 3);
    ASSERT_EQ(match.num_blocks(), 3);
    const int32_t id = host.nodes().block_of(match.nodes[2], 0, cache::BlockKind::kPacked);
    const int64_t bytes = cache->table().storage.pool->block_bytes(0);
    host.block_bytes(0, id)[bytes - bytes / kNumLayers] ^= 1;
    host.nodes().unpin(scope);
  }
  const int sequence =
      cache->create_sequence_from({}, tokens, "", tier::LoadOrder::kLayerByLayer).value();
  EXPECT_EQ(cache->num_tokens(sequence), kNumTokens - kBlockSize);
  const Stream stream(kNumTokens, 1);
  KvStep step(*cache);
  const StepEntry entry{sequence, 4};
  ASSERT_TRUE(step.begin({&entry, 1}).ok());
  std::vector<float> out(static_cast<size_t>(4) * kNumQHeads * kHeadDim);
  Status status;
  for (int layer = 0; layer < kNumLayers && status.ok(); ++layer) {
    status = append_and_attend(
        *cache, step, 4, layer, params(), stream.rows(stream.q, kNumQHeads, 96),
        stream.rows(stream.k, kNumKvHeads, 96), stream.rows(stream.v, kNumKvHeads, 96),
        dense_rows(out.data(), DType::kF32, kNumQHeads, kHeadDim));
  }
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kInternal);
  EXPECT_THAT(status.error().message, HasSubstr("has another checksum than when it came"));
  ASSERT_TRUE(step.cancel().ok());
  ASSERT_TRUE(cache->end_loading(sequence).ok());
  EXPECT_EQ(cache->num_tokens(sequence), 2 * kBlockSize) << "what came before the bad block";
  EXPECT_EQ(cache->recorded_tokens(sequence).size(), size_t{2} * kBlockSize);

  const auto rest = feed(*cache, sequence, stream, 2 * kBlockSize, kNumTokens, 1000);
  const int other = roomy->create_sequence_from({}, tokens).value();
  ASSERT_TRUE(roomy->truncate_sequence(other, 2 * kBlockSize).ok());
  EXPECT_EQ(rest, feed(*roomy, other, stream, 2 * kBlockSize, kNumTokens, 1000));
  EXPECT_EQ(cache->snapshot().tiers[0].num_bad, 1);
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  EXPECT_EQ(cache->snapshot().classes[0].num_active, 0);
}

TEST(HostTier, AFolderThatMayNotBeWrittenIsRefused) {
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.prefix.is_on = true;
  config.tiers = {tier_of(4 << 20, "/proc/self/none")};
  const auto refused = KvCache::create(config, context());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("'/proc/self/none' takes no files"));
}

TEST(HostTier, PrefetchBringsBlocksBackBeforeTheyAreWanted) {
  const auto cache = tiered_cache("int8", 1, 4 << 20);
  for (int seed : {1, 2}) write_and_leave(*cache, seed, kNumTokens);
  cache->wait_for_tiers();
  constexpr int64_t kNumLost = kNumTokens / kBlockSize - 2;  // one found room beside the second
  {
    const Prefetch hint = cache->prefetch({}, token_ids(kNumTokens, 1000)).value();
    EXPECT_EQ(hint.num_blocks(), kNumLost);
    hint.wait();
    EXPECT_TRUE(hint.is_done());
  }
  EXPECT_EQ(cache->snapshot().tiers[0].num_loaded, kNumLost);
  int64_t num_cached = 0;
  continue_cached(*cache, 1, num_cached);
  EXPECT_EQ(num_cached, kNumTokens - kBlockSize);
  EXPECT_EQ(cache->snapshot().tiers[0].num_loaded, kNumLost);
}

TEST(HostTier, APrefetchThatIsDroppedLeavesNothingInUse) {
  const auto cache = tiered_cache("int8", 1, 4 << 20);
  for (int seed : {1, 2}) write_and_leave(*cache, seed, kNumTokens);
  { const auto dropped = cache->prefetch({}, token_ids(kNumTokens, 1000)); }
  cache->wait_for_tiers();
  EXPECT_EQ(cache->snapshot().classes[0].num_active, 0);
}

TEST(HostTier, ClearingForgetsItsBlocksToo) {
  const auto cache = tiered_cache("int8", 1, 4 << 20);
  write_and_leave(*cache, 1, kNumTokens);
  ASSERT_TRUE(cache->clear_prefixes().ok());
  EXPECT_EQ(cache->snapshot().tiers[0].held_bytes, 0);
  int64_t num_cached = -1;
  continue_cached(*cache, 1, num_cached);
  EXPECT_EQ(num_cached, 0);
}

TEST(HostTier, KeepsToItsBudgetByItsPolicy) {
  const auto cache = tiered_cache("int8", 1, 0);
  const int64_t sequence_bytes = cache->account().allocated.total();
  const auto tiered = tiered_cache("int8", 1, 2 * sequence_bytes);
  for (int seed : {1, 2, 3, 4}) write_and_leave(*tiered, seed, kNumTokens);
  tiered->wait_for_tiers();
  const tier::HostTierSnapshot host = tiered->snapshot().tiers[0];
  EXPECT_LE(host.allocated_bytes, 2 * sequence_bytes);
  EXPECT_GT(host.classes[0].num_evicted, 0);
  int64_t num_cached = -1;
  continue_cached(*tiered, 1, num_cached);
  EXPECT_EQ(num_cached, 0) << "the oldest is gone";
  continue_cached(*tiered, 3, num_cached);
  EXPECT_GT(num_cached, 0);
}

TEST(HostTier, ABudgetSmallerThanABlockIsRefused) {
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.prefix.is_on = true;
  config.tiers = {tier_of(100)};
  const auto refused = KvCache::create(config, context());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  EXPECT_THAT(refused.error().message,
              HasSubstr("host tier is 100; one block of each class needs"));
}

TEST(HostTier, NeedsPrefixes) {
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.tiers = {tier_of(1 << 20)};
  EXPECT_FALSE(KvCache::create(config, context()).ok());
  const auto without = tiered_cache("int8", 1, 0);
  EXPECT_EQ(without->prefetch({}, {}).error().code, ErrorCode::kUnsupported);
}

TEST(HostTier, ItsEventsNameIt) {
  const auto cache = tiered_cache("int8", 1, 4 << 20);
  int64_t num_first = 0, num_host = 0;
  cache->set_prefix_listener([&](const cache::PrefixEvent& event) {
    ++(event.tier == cache::Tier::kHost ? num_host : num_first);
  });
  write_and_leave(*cache, 1, kNumTokens);
  cache->wait_for_tiers();
  EXPECT_EQ(num_first, kNumTokens / kBlockSize);
  EXPECT_EQ(num_host, kNumTokens / kBlockSize);
}

// Sequences of a tenant are found under its name alone, in both tiers.
TEST(HostTier, ATenantNeverSeesAnothersBlocks) {
  KvCacheConfig config = config_of("int8", kBlockSize);
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kNumTokens;
  config.prefix = {true, cache::HashAlgorithm::kSha256, ""};
  config.tiers = {tier_of(4 << 20)};
  const auto cache = created(config);
  const auto ids = token_ids(kNumTokens, 0);
  const Stream stream(kNumTokens);
  const int one = cache->create_sequence_from({"", "", "one"}, ids).value();
  feed(*cache, one, stream, 0, kNumTokens, 1000);
  ASSERT_TRUE(cache->record_tokens(one, ids).ok());
  ASSERT_TRUE(cache->free_sequence(one).ok());
  cache->wait_for_tiers();
  const int two = cache->create_sequence_from({"", "", "two"}, ids).value();
  EXPECT_EQ(cache->num_tokens(two), 0);
  feed(*cache, two, stream, 0, kNumTokens, 1000);  // evicts the first one's
  ASSERT_TRUE(cache->free_sequence(two).ok());
  const int again = cache->create_sequence_from({"", "", "one"}, ids).value();
  EXPECT_EQ(cache->num_tokens(again), kNumTokens - kBlockSize);
  EXPECT_GT(cache->snapshot().tiers[0].num_loaded, 0);
}

}  // namespace
}  // namespace kvx::kv::host_tier_test

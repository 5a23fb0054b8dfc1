// How long blocks stay in the assembled cache: priorities, pins, deadlines, sessions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/kv/stream.hpp"

namespace kvx::kv::kv_cache_retention_test {
namespace {

using testing::HasSubstr;

constexpr int kBlockSize = 16;

KvCacheConfig retaining_config(std::string_view recipe = "int8") {
  KvCacheConfig config = config_of(recipe, kBlockSize);
  config.prefix.is_on = true;
  config.max_sequences = 4;
  config.max_tokens_per_sequence = 6 * kBlockSize;
  return config;
}

std::vector<int32_t> ids_of(int32_t first, int count) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

// A sequence of these tokens, from what is cached of them, recorded and ended.
int open(KvCache& cache, const std::vector<int32_t>& tokens, std::string_view session = {},
         std::span<const RetentionRange> ranges = {}) {
  const int sequence = cache.create_sequence_from({}, tokens, session).value();
  EXPECT_TRUE(cache.retain(sequence, ranges).ok());
  const auto first = static_cast<int>(cache.num_tokens(sequence));
  const auto count = static_cast<int>(tokens.size());
  const Stream stream(count, static_cast<uint32_t>(tokens.front()) + 1);
  feed(cache, sequence, stream, first, count, 1000);
  const Status recorded =
      cache.record_tokens(sequence, std::span(tokens).subspan(static_cast<size_t>(first)));
  EXPECT_TRUE(recorded.ok()) << recorded.error().message;
  return sequence;
}

void use(KvCache& cache, const std::vector<int32_t>& tokens, std::string_view session = {},
         std::span<const RetentionRange> ranges = {}) {
  EXPECT_TRUE(cache.free_sequence(open(cache, tokens, session, ranges)).ok());
}

// How many tokens of a prompt are cached.
int64_t cached(KvCache& cache, std::vector<int32_t> tokens) {
  tokens.push_back(-1);  // the last token is never found
  const int sequence = cache.create_sequence_from({}, tokens).value();
  const int64_t count = cache.num_tokens(sequence);
  EXPECT_TRUE(cache.free_sequence(sequence).ok());
  return count;
}

// Prompts of other tokens until every block but the retained ones has been wanted.
void fill(KvCache& cache) {
  for (int i = 1; i < 12; ++i) use(cache, ids_of(10000 * i, 3 * kBlockSize));
}

TEST(Retention, AHighPriorityOutlivesOthersAndALowOneGoesFirst) {
  auto cache = created(retaining_config());
  const RetentionRange high{0, 0, 90, false, 0};
  use(*cache, ids_of(0, 2 * kBlockSize), {}, {&high, 1});
  fill(*cache);
  EXPECT_EQ(cached(*cache, ids_of(0, 2 * kBlockSize)), 2 * kBlockSize);

  ASSERT_TRUE(cache->clear_prefixes().ok());
  const RetentionRange low{kBlockSize, 0, 0, false, 0};
  use(*cache, ids_of(500, kBlockSize));
  use(*cache, ids_of(0, 3 * kBlockSize), {}, {&low, 1});
  ASSERT_EQ(cache->evict_blocks(2).value(), 2);
  EXPECT_EQ(cached(*cache, ids_of(0, 3 * kBlockSize)), kBlockSize) << "the range begins there";
  EXPECT_EQ(cached(*cache, ids_of(500, kBlockSize)), kBlockSize) << "though it is older";
}

TEST(Retention, APinHoldsWhatComesBeforeItUntilItIsTakenBack) {
  auto cache = created(retaining_config());
  const RetentionRange pin{kBlockSize, kBlockSize, 0, true, 0};
  use(*cache, ids_of(0, 4 * kBlockSize), {}, {&pin, 1});
  fill(*cache);
  ASSERT_TRUE(cache->evict_blocks(1000).ok());
  const int sequence = cache->create_sequence_from({}, ids_of(0, 4 * kBlockSize)).value();
  EXPECT_EQ(cache->num_tokens(sequence), 2 * kBlockSize);
  const RetentionRange nothing{};
  ASSERT_TRUE(cache->retain(sequence, {&nothing, 1}).ok());
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  ASSERT_TRUE(cache->evict_blocks(1000).ok());
  EXPECT_EQ(cached(*cache, ids_of(0, 4 * kBlockSize)), 0);
}

TEST(Retention, HoldsForPackedBlocksOfAFullPrecisionWindowToo) {
  auto cache = created(retaining_config("int4:sink=16,recent=16,full_precision=f16"));
  const RetentionRange high{0, 0, 90, false, 0};
  use(*cache, ids_of(0, 5 * kBlockSize), {}, {&high, 1});
  const int64_t before = cached(*cache, ids_of(0, 5 * kBlockSize));
  EXPECT_GT(before, 2 * kBlockSize);
  for (int i = 1; i < 12; ++i) use(*cache, ids_of(10000 * i, 5 * kBlockSize));
  EXPECT_EQ(cached(*cache, ids_of(0, 5 * kBlockSize)), before);
}

TEST(Retention, RefusesRangesThatCannotBe) {
  auto cache = created(retaining_config());
  const int sequence = cache->create_sequence().value();
  const auto message = [&](RetentionRange range) {
    const Status status = cache->retain(sequence, {&range, 1});
    return status.ok() ? "" : status.error().message;
  };
  EXPECT_THAT(message({-1, 0, 35, false, 0}), HasSubstr("first_token is -1"));
  EXPECT_THAT(message({0, -1, 35, false, 0}), HasSubstr("num_tokens is -1"));
  EXPECT_THAT(message({90, 10, 35, false, 0}), HasSubstr("num_tokens is 10"));
  EXPECT_THAT(message({0, 0, 101, false, 0}), HasSubstr("priority is 101"));
  EXPECT_THAT(message({0, 0, 35, false, -5}), HasSubstr("duration_ms is -5"));
  EXPECT_FALSE(cache->retain(sequence + 1, {}).ok());
  auto without = created(config_of("int8"));
  EXPECT_EQ(without->retain(0, {}).error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(without->delete_session("a").error().code, ErrorCode::kUnsupported);
  EXPECT_FALSE(cache->delete_session("").ok());
}

// ---- sessions

TEST(Session, WhatItAloneUsedGoesFirstWhenItEnds) {
  KvCacheConfig config = retaining_config();
  config.eviction = cache::EvictionKind::kAgents;
  auto cache = created(std::move(config));
  const std::vector<int32_t> shared = ids_of(0, 2 * kBlockSize);
  std::vector<int32_t> one = shared;
  std::vector<int32_t> two = shared;
  for (int i = 0; i < kBlockSize; ++i) {
    one.push_back(100 + i);
    two.push_back(200 + i);
  }
  use(*cache, ids_of(500, kBlockSize), "old");
  use(*cache, one, "one");
  use(*cache, two, "two");
  EXPECT_EQ(cache->end_session("two").value(), 1);
  ASSERT_EQ(cache->evict_blocks(1).value(), 1);
  EXPECT_EQ(cached(*cache, two), 2 * kBlockSize);
  ASSERT_EQ(cache->evict_blocks(2).value(), 2) << "of old and one";
  EXPECT_EQ(cached(*cache, one), 2 * kBlockSize) << "what several sessions use goes last";
  EXPECT_EQ(cache->end_session("never was").value(), 0);
}

// Bytes that are somewhere in the cache's pool or host tier.
bool holds(KvCache& cache, std::span<const uint8_t> bytes) {
  const auto is_in = [&](std::span<const uint8_t> memory) {
    return std::search(memory.begin(), memory.end(), bytes.begin(), bytes.end()) != memory.end();
  };
  const SequenceTable& table = cache.table();
  const cache::BlockPool& pool = *table.storage.pool;
  const auto size = static_cast<size_t>(pool.block_bytes(0) * pool.num_blocks(0));
  if (is_in({pool.region(0), size})) return true;
  tier::HostTier& host = table.tiers->tier(0);
  const int64_t num_host_blocks = host.snapshot().allocated_bytes / pool.block_bytes(0);
  return is_in(
      {host.block_bytes(0, 0), static_cast<size_t>(num_host_blocks * pool.block_bytes(0))});
}

TEST(Session, NothingOfItsBytesIsLeftInAnyTierWhenItIsDeleted) {
  if (is_on_gpu()) return;  // the host cannot look there
  KvCacheConfig config = retaining_config();
  config.tiers = {{tier::TierKind::kHost, 1 << 20}};
  auto cache = created(std::move(config));
  const std::vector<int32_t> shared = ids_of(0, 2 * kBlockSize);
  std::vector<int32_t> secret = shared;
  for (int i = 0; i < 2 * kBlockSize; ++i) secret.push_back(100 + i);
  use(*cache, shared, "other");
  const int sequence = open(*cache, secret, "secret");
  const auto bytes_of = [&](int64_t block) {
    const int32_t id = cache->table().sequences[sequence].table(0)[block];
    const auto found = cache->table().storage.block_bytes(0, id);
    return std::vector<uint8_t>(found.begin() + 100, found.begin() + 164);
  };
  const std::vector<uint8_t> own = bytes_of(3);
  const std::vector<uint8_t> common = bytes_of(0);
  cache->wait_for_tiers();
  const Result<int64_t> too_early = cache->delete_session("secret");
  ASSERT_FALSE(too_early.ok());
  EXPECT_THAT(too_early.error().message, HasSubstr("1 sequences in use"));
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  EXPECT_TRUE(holds(*cache, own));
  EXPECT_EQ(cache->delete_session("secret").value(), 2);
  EXPECT_FALSE(holds(*cache, own));
  EXPECT_TRUE(holds(*cache, common));
  EXPECT_EQ(cached(*cache, secret), 2 * kBlockSize);
  EXPECT_EQ(cache->delete_session("secret").value(), 0) << "it is not known any more";
}

TEST(Session, AForkBelongsToIt) {
  auto cache = created(retaining_config());
  const int sequence = open(*cache, ids_of(0, 2 * kBlockSize), "a");
  const int fork = cache->fork_sequence(sequence).value();
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  EXPECT_FALSE(cache->end_session("a").ok());
  ASSERT_TRUE(cache->free_sequence(fork).ok());
  EXPECT_EQ(cache->delete_session("a").value(), 2);
  EXPECT_EQ(cached(*cache, ids_of(0, 2 * kBlockSize)), 0);
}

}  // namespace
}  // namespace kvx::kv::kv_cache_retention_test

// Owned caches through the ABI: prefixes, forks, cuts, partial acceptance, eviction, events, facts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;

TEST(OwnedSharing, BeginsWithWhatIsCached) {
  api::Cache cache = sharing_cache("int8");
  const int32_t first = *cache.create_sequence();
  feed(cache, first, 0, 20);
  int32_t second = 0;
  int64_t num_found = 0;
  const std::vector<int32_t> tokens = token_ids(0, 20);
  ASSERT_EQ(
      kvx_sequence_create_from(cache.handle(), nullptr, tokens.data(), 20, &second, &num_found),
      KVX_STATUS_OK)
      << kvx_last_error();
  EXPECT_EQ(num_found, 16) << "two blocks of 8 tokens, not the open one";
  EXPECT_EQ(rows_of(cache, second), rows_of(cache, first, 16));
  feed(cache, second, 16, 20);
  EXPECT_EQ(rows_of(cache, second), rows_of(cache, first));

  const int32_t others[] = {5, 4, 3, 2, 1, 0, 9, 8, 7};
  const int32_t third = *cache.create_sequence_from(others);
  EXPECT_EQ(*cache.num_tokens(third), 0);
}

TEST(OwnedSharing, KeepsTenantsApart) {
  auto options = sharing_options();
  options.prefix_hash = KVX_PREFIX_HASH_SHA256;
  api::Cache cache = sharing_cache("int8", options);
  auto keys = sized<kvx_prefix_keys_t>();
  keys.tenant = "a";
  const std::vector<int32_t> tokens = token_ids(0, 20);
  const int32_t first = *cache.create_sequence_from(tokens, &keys);
  feed(cache, first, 0, 20);
  EXPECT_EQ(*cache.num_tokens(*cache.create_sequence_from(tokens, &keys)), 16);
  keys.tenant = "b";
  EXPECT_EQ(*cache.num_tokens(*cache.create_sequence_from(tokens, &keys)), 0);

  api::Cache fast = sharing_cache("int8");
  const auto refused = fast.create_sequence_from(tokens, &keys);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.failure().status, KVX_STATUS_UNSUPPORTED);
  EXPECT_THAT(refused.failure().text, HasSubstr("sha256"));
}

TEST(OwnedSharing, ForksGoTheirOwnWays) {
  for (const char* recipe : {"bf16", "int4:sink=8,recent=16"}) {
    api::Cache cache = sharing_cache(recipe);
    const int32_t first = *cache.create_sequence();
    feed(cache, first, 0, 21);
    const int32_t fork = *cache.fork_sequence(first);
    const std::vector<float> before = rows_of(cache, first);
    EXPECT_EQ(rows_of(cache, fork), before);
    feed(cache, fork, 100, 103);
    EXPECT_EQ(rows_of(cache, first), before) << recipe;
    EXPECT_EQ(rows_of(cache, fork, 21), before) << recipe;
    EXPECT_TRUE(cache.free_sequence(first).ok());
    EXPECT_EQ(rows_of(cache, fork, 21), before) << recipe;
  }
}

TEST(OwnedSharing, CutsAndKeepsWhatAVerificationAccepts) {
  api::Cache cache = sharing_cache("int8");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 10);
  const std::vector<float> before = rows_of(cache, sequence);
  begin(cache, sequence, 4);
  append(cache, 50, 4);
  const int32_t two[] = {2};
  ASSERT_TRUE(cache.end_step(two).ok()) << kvx_last_error();
  EXPECT_EQ(*cache.num_tokens(sequence), 12);
  ASSERT_TRUE(cache.truncate_sequence(sequence, 10).ok());
  EXPECT_EQ(rows_of(cache, sequence), before);

  begin(cache, sequence, 4);
  append(cache, 50, 4);
  ASSERT_TRUE(cache.cancel_step().ok());
  EXPECT_EQ(rows_of(cache, sequence), before);

  begin(cache, sequence, 4);
  const int32_t none[] = {0};
  EXPECT_FALSE(cache.end_step(none).ok());
  EXPECT_THAT(kvx_last_error(), HasSubstr("layer 0 has no rows of this step"));
  append(cache, 50, 4);
  const int32_t five[] = {5};
  EXPECT_FALSE(cache.end_step(five).ok());
  EXPECT_THAT(kvx_last_error(), HasSubstr("kept_tokens[0] is 5"));
  EXPECT_FALSE(cache.end_step(std::span<const int32_t>()).ok()) << "a count an entry";
  ASSERT_TRUE(cache.cancel_step().ok());
  EXPECT_FALSE(cache.truncate_sequence(sequence, 11).ok());
  EXPECT_THAT(kvx_last_error(), HasSubstr("num_tokens is 11"));
}

TEST(OwnedSharing, RemembersTheTokensThatWereRecorded) {
  api::Cache cache = sharing_cache("int8");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 3, 9);
  int32_t tokens[4] = {};
  int64_t num_tokens = 0;
  ASSERT_EQ(kvx_sequence_recorded(cache.handle(), sequence, tokens, 4, &num_tokens), KVX_STATUS_OK);
  EXPECT_EQ(num_tokens, 6);
  EXPECT_THAT(tokens, testing::ElementsAre(3, 4, 5, 6));
  EXPECT_EQ(*cache.recorded_tokens(sequence), token_ids(3, 9));
  EXPECT_FALSE(cache.recorded_tokens(sequence + 1).ok());
  const int32_t more[] = {1};
  EXPECT_FALSE(cache.record_tokens(sequence, more).ok()) << "the sequence has no seventh token";
}

TEST(OwnedSharing, TellsWhatHappensToItsBlocks) {
  struct Log {
    kvx_cache_t cache;
    std::vector<uint32_t> kinds;
    std::vector<int32_t> tokens;
    std::vector<kvx_status_t> calls_inside;
  } log;
  api::Cache cache = sharing_cache("int8");
  log.cache = cache.handle();
  auto listener = sized<kvx_cache_listener_t>();
  listener.user = &log;
  listener.on_event = [](void* user, const kvx_cache_event_t* event) {
    Log& seen = *static_cast<Log*>(user);
    seen.kinds.push_back(event->kind);
    seen.tokens.insert(seen.tokens.end(), event->tokens, event->tokens + event->num_tokens);
    seen.calls_inside.push_back(kvx_cache_clear_prefixes(seen.cache));
    kvx_cache_free(seen.cache);  // ignored
  };
  ASSERT_TRUE(cache.set_listener(&listener).ok()) << kvx_last_error();
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 20);
  EXPECT_THAT(log.kinds, testing::ElementsAre(KVX_CACHE_EVENT_STORED, KVX_CACHE_EVENT_STORED));
  EXPECT_EQ(log.tokens, token_ids(0, 16));
  EXPECT_THAT(log.calls_inside, testing::Each(KVX_STATUS_INVALID_ARGUMENT));

  ASSERT_TRUE(cache.free_sequence(sequence).ok());
  EXPECT_EQ(*cache.evict(1), 1);
  EXPECT_EQ(log.kinds.back(), uint32_t{KVX_CACHE_EVENT_REMOVED});
  ASSERT_TRUE(cache.clear_prefixes().ok());
  EXPECT_EQ(log.kinds.back(), uint32_t{KVX_CACHE_EVENT_ALL_CLEARED});
  const size_t num_told = log.kinds.size();
  ASSERT_TRUE(cache.set_listener(nullptr).ok());
  ASSERT_TRUE(cache.clear_prefixes().ok());
  EXPECT_EQ(log.kinds.size(), num_told);
}

TEST(OwnedSharing, CountsBlocksByTheirState) {
  api::Cache cache = sharing_cache("int4:sink=8,recent=16");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 40);
  const kvx_cache_snapshot_t seen = *cache.snapshot();
  EXPECT_EQ(seen.num_sequences, 1);
  EXPECT_EQ(seen.num_classes, 2u);
  EXPECT_EQ(seen.prefix_stored, 5);
  const kvx_block_class_t packed = *cache.block_class(0);
  const kvx_block_class_t full_precision = *cache.block_class(1);
  EXPECT_STREQ(packed.name, "group 0 packed");
  EXPECT_EQ(packed.is_full_precision, 0u);
  EXPECT_EQ(full_precision.is_full_precision, 1u);
  EXPECT_EQ(packed.block_size, 8u);
  EXPECT_EQ(packed.num_active, 1);
  EXPECT_EQ(full_precision.num_active, 4);  // the sink, 16 recent tokens and the open block
  EXPECT_EQ(packed.num_blocks, packed.num_active + packed.num_cached + packed.num_free);
  EXPECT_EQ(seen.allocated_bytes, packed.num_blocks * packed.block_bytes +
                                      full_precision.num_blocks * full_precision.block_bytes);
  ASSERT_TRUE(cache.free_sequence(sequence).ok());
  EXPECT_EQ(cache.block_class(0)->num_active, 0);
  EXPECT_EQ(cache.block_class(0)->num_cached, 1);
  const auto third = cache.block_class(2);
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.failure().status, KVX_STATUS_OUT_OF_RANGE);

  kvx_cache_snapshot_t shorter = seen;
  shorter.size = 16;
  shorter.allocated_bytes = -1;
  ASSERT_EQ(kvx_cache_snapshot(cache.handle(), &shorter), KVX_STATUS_OK);
  EXPECT_EQ(shorter.allocated_bytes, -1) << "no more than the caller's size is written";
  EXPECT_EQ(shorter.num_sequences, 0);
}

TEST(OwnedSharing, CountsByHeadWhatAStaticScaleClips) {
  auto made = api::Cache::create(owned_config("fp8_e4m3"));  // a scale of 1: up to 448
  ASSERT_TRUE(made.ok());
  api::Cache& cache = *made;
  EXPECT_EQ(cache.snapshot()->saturated_inputs, 0);
  const std::vector<float> q(kQHeads * kOwnedDim, 1.0f);
  std::vector<float> k(kOwnedHeads * kOwnedDim, 1.0f);
  const std::vector<float> v = k;
  k[kOwnedDim + 3] = 1000.0f;
  begin(cache, *cache.create_sequence(), 1);
  step_layers(cache, q, k, v);
  ASSERT_TRUE(cache.end_step().ok());
  EXPECT_EQ(cache.snapshot()->saturated_inputs, kOwnedLayers);
  const kvx_head_counts_t counts = *cache.head_counts(1, 1);
  EXPECT_EQ(counts.size, sizeof counts);
  EXPECT_EQ(counts.k_saturated, 1);
  EXPECT_EQ(counts.v_saturated, 0);
  EXPECT_EQ(cache.head_counts(1, 0)->k_saturated, 0);
  const auto layer = cache.head_counts(99, 0);
  ASSERT_FALSE(layer.ok());
  EXPECT_EQ(layer.failure().status, KVX_STATUS_OUT_OF_RANGE);
  EXPECT_THAT(layer.failure().text, HasSubstr("layer is 99; the cache has layers 0 to"));
  const auto head = cache.head_counts(0, 99);
  ASSERT_FALSE(head.ok());
  EXPECT_THAT(head.failure().text, HasSubstr("kv_head is 99; the cache has KV heads 0 to"));
  EXPECT_EQ(kvx_cache_head_counts(nullptr, 0, 0, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_cache_head_counts(cache.handle(), 0, 0, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(OwnedSharing, RefusesOptionsThatCannotBe) {
  const kvx_cache_config_t config = owned_config("int8");
  const auto refused = [&config](auto change, kvx_status_t status) {
    auto options = sized<kvx_cache_options_t>();
    change(options);
    kvx_cache_t cache = nullptr;
    EXPECT_EQ(kvx_cache_create_with(&config, &options, &cache), status) << kvx_last_error();
    EXPECT_THAT(kvx_last_error(), HasSubstr("options."));
  };
  refused([](auto& o) { o.flags = 1u << 31; }, KVX_STATUS_INCOMPATIBLE);
  refused([](auto& o) { o.prefix_hash = 3; }, KVX_STATUS_INVALID_ARGUMENT);
  refused([](auto& o) { o.eviction = 5; }, KVX_STATUS_INVALID_ARGUMENT);
  refused([](auto& o) { o.size = 4; }, KVX_STATUS_INVALID_ARGUMENT);
}

TEST(OwnedSharing, RefusesHandlesThatAreStale) {
  api::Cache cache = sharing_cache("int8");
  const int32_t stale = *cache.create_sequence();
  feed(cache, stale, 0, 10);
  ASSERT_TRUE(cache.free_sequence(stale).ok());
  const int32_t living = *cache.create_sequence();
  ASSERT_NE(stale, living);
  const kvx_cache_t handle = cache.handle();
  int32_t number = 0;
  int64_t count = 0;
  std::vector<float> row(64);
  const kvx_rows_t rows = api::rows(row.data(), KVX_DTYPE_F32);
  const int32_t one[] = {1};
  for (const int32_t sequence : {stale, -1, INT32_MIN, INT32_MAX, 3, living + 1}) {
    EXPECT_EQ(kvx_sequence_tokens(handle, sequence, &count, nullptr), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_free(handle, sequence), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_fork(handle, sequence, &number), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_truncate(handle, sequence, 0), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_record(handle, sequence, one, 1), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_recorded(handle, sequence, &number, 1, &count),
              KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_save(handle, sequence, "never", nullptr), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_sequence_gather(handle, sequence, 0, 0, 1, &rows, nullptr),
              KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(kvx_step_begin(handle, 1, &sequence, one), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr(std::to_string(sequence)));
  }
}

TEST(OwnedSharing, RefusesCachesThatWereFreed) {
  kvx_cache_t handle = nullptr;
  const kvx_cache_config_t config = owned_config("int8");
  ASSERT_EQ(kvx_cache_create(&config, &handle), KVX_STATUS_OK);
  kvx_cache_free(handle);
  int32_t number = 0;
  EXPECT_EQ(kvx_sequence_create(handle, &number), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("freed"));
  kvx_cache_free(handle);
  kvx_cache_t other = nullptr;
  ASSERT_EQ(kvx_cache_create(&config, &other), KVX_STATUS_OK);
  EXPECT_NE(other, handle);
  EXPECT_EQ(kvx_sequence_create(handle, &number), KVX_STATUS_INVALID_ARGUMENT);
  kvx_cache_free(other);
}

TEST(OwnedSharing, RefusesNullPointers) {
  api::Cache cache = sharing_cache("int8");
  const kvx_cache_t h = cache.handle();
  const int32_t s = *cache.create_sequence();
  int32_t number = 0;
  int64_t count = 0;
  uint64_t bytes = 0;
  auto snapshot = sized<kvx_cache_snapshot_t>();
  auto facts = sized<kvx_block_class_t>();
  auto listener = sized<kvx_cache_listener_t>();
  const kvx_status_t statuses[] = {
      kvx_sequence_create_from(nullptr, nullptr, nullptr, 0, &number, &count),
      kvx_sequence_create_from(h, nullptr, nullptr, 1, &number, &count),
      kvx_sequence_create_from(h, nullptr, &number, -1, &number, &count),
      kvx_sequence_create_from(h, nullptr, nullptr, 0, nullptr, &count),
      kvx_sequence_record(nullptr, s, &number, 1),
      kvx_sequence_record(h, s, nullptr, 1),
      kvx_sequence_recorded(nullptr, s, &number, 1, &count),
      kvx_sequence_recorded(h, s, nullptr, 1, &count),
      kvx_sequence_recorded(h, s, &number, -1, &count),
      kvx_sequence_recorded(h, s, &number, 1, nullptr),
      kvx_sequence_fork(nullptr, s, &number),
      kvx_sequence_fork(h, s, nullptr),
      kvx_sequence_truncate(nullptr, s, 0),
      kvx_step_end_kept(nullptr, 1, &number),
      kvx_step_end_kept(h, 1, nullptr),
      kvx_step_cancel(nullptr),
      kvx_step_cancel(h),
      kvx_cache_evict(nullptr, 1, &count),
      kvx_cache_evict(h, -1, &count),
      kvx_cache_clear_prefixes(nullptr),
      kvx_sequence_save(nullptr, s, "a", nullptr),
      kvx_sequence_save(h, s, nullptr, nullptr),
      kvx_cache_save_prefixes(nullptr, "a", nullptr),
      kvx_cache_save_prefixes(h, nullptr, nullptr),
      kvx_sequence_load(nullptr, "a", nullptr, &number),
      kvx_sequence_load(h, nullptr, nullptr, &number),
      kvx_sequence_load(h, "a", nullptr, nullptr),
      kvx_sequence_load(h, "", nullptr, &number),
      kvx_cache_load_prefixes(nullptr, "a", nullptr, nullptr),
      kvx_cache_load_prefixes(h, nullptr, nullptr, nullptr),
      kvx_file_inspect("a", nullptr),
      kvx_file_verify(nullptr),
      kvx_file_fingerprint(nullptr, nullptr, 0, &bytes),
      kvx_cache_fingerprint(nullptr, nullptr, 0, &bytes),
      kvx_cache_fingerprint(h, nullptr, 0, nullptr),
      kvx_cache_fingerprint(h, nullptr, 1, &bytes),
      kvx_cache_snapshot(nullptr, &snapshot),
      kvx_cache_snapshot(h, nullptr),
      kvx_cache_block_class(nullptr, 0, &facts),
      kvx_cache_block_class(h, 0, nullptr),
      kvx_cache_set_listener(nullptr, nullptr),
      kvx_cache_set_listener(h, &listener),
  };
  for (size_t i = 0; i < std::size(statuses); ++i) {
    EXPECT_EQ(statuses[i], KVX_STATUS_INVALID_ARGUMENT) << i;
  }
}

TEST(OwnedSharing, RetainsAndDeletesWhatItIsTold) {
  api::Cache cache = sharing_cache("int8");
  auto keys = sized<kvx_prefix_keys_t>();
  keys.session = "a session";
  const int32_t sequence = *cache.create_sequence_from(token_ids(0, 1), &keys);
  feed(cache, sequence, 0, 20);
  auto range = sized<kvx_retention_range_t>();
  range.flags = KVX_RETENTION_PIN;
  range.num_tokens = 8;
  EXPECT_TRUE(cache.retain(sequence, {&range, 1}).ok()) << kvx_last_error();
  EXPECT_FALSE(cache.delete_session("a session").ok()) << "a sequence of it is in use";
  ASSERT_TRUE(cache.free_sequence(sequence).ok());
  EXPECT_EQ(*cache.evict(10), 1) << "the other one is pinned";
  EXPECT_EQ(*cache.end_session("a session"), 1);
  EXPECT_EQ(*cache.evict(10), 1) << "the end took the pin back";
  EXPECT_EQ(*cache.delete_session("a session"), 0);

  const kvx_cache_t h = cache.handle();
  const int32_t other = *cache.create_sequence();
  range.flags = 2;
  EXPECT_EQ(kvx_sequence_retain(h, other, &range, 1), KVX_STATUS_INVALID_ARGUMENT);
  range.flags = 0;
  range.priority = 101;
  EXPECT_EQ(kvx_sequence_retain(h, other, &range, 1), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("ranges[0].priority is 101"));
  EXPECT_EQ(kvx_sequence_retain(h, other, nullptr, 1), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_retain(h, other, &range, UINT32_MAX), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_retain(h, sequence, nullptr, 0), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_sequence_retain(nullptr, other, nullptr, 0), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_session_end(h, nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_session_delete(nullptr, "a", nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(OwnedSharing, WorksWithoutPrefixesButForFindingThem) {
  const kvx_cache_config_t config = owned_config("int8");
  auto made = api::Cache::create(config);
  ASSERT_TRUE(made.ok());
  api::Cache& cache = *made;
  const int32_t first = *cache.create_sequence();
  feed(cache, first, 0, 12);
  const int32_t fork = *cache.fork_sequence(first);
  feed(cache, fork, 90, 91);
  EXPECT_EQ(rows_of(cache, fork, 12), rows_of(cache, first));
  const auto found = cache.create_sequence_from(token_ids(0, 12));
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.failure().status, KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(cache.snapshot()->prefix_queries, 0);
}

}  // namespace
}  // namespace kvx::api_test

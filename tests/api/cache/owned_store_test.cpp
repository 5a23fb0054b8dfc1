// A caller's store through the C ABI and its C++ face: registration, the five calls, the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <kvx/store.hpp>

#include <cstring>
#include <map>
#include <mutex>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test::owned_store_test {
namespace {

using testing::HasSubstr;

constexpr int32_t kTokens = 40;  // five blocks of 8

// A map behind the C ABI, as a C program would write it.
struct CStore {
  std::mutex mutex;
  std::map<std::string, std::string> values;
  kvx_status_t answer = KVX_STATUS_OK;
  int num_releases = 0;
};

CStore& of(void* user) {
  return *static_cast<CStore*>(user);
}

kvx_status_t put(void* user, uint64_t num_items, const char* const* keys,
                 const uint8_t* const* values, const uint64_t* value_bytes, uint8_t* is_stored) {
  const std::lock_guard lock(of(user).mutex);
  for (uint64_t i = 0; i < num_items; ++i) {
    of(user).values[keys[i]].assign(reinterpret_cast<const char*>(values[i]), value_bytes[i]);
    is_stored[i] = 1;
  }
  return of(user).answer;
}

kvx_status_t get(void* user, uint64_t num_items, const char* const* keys, uint8_t* const* buffers,
                 const uint64_t* buffer_bytes, int64_t* value_bytes) {
  const std::lock_guard lock(of(user).mutex);
  for (uint64_t i = 0; i < num_items; ++i) {
    EXPECT_EQ(value_bytes[i], -1);
    const auto found = of(user).values.find(keys[i]);
    if (found == of(user).values.end() || found->second.size() > buffer_bytes[i]) continue;
    std::memcpy(buffers[i], found->second.data(), found->second.size());
    value_bytes[i] = static_cast<int64_t>(found->second.size());
  }
  return of(user).answer;
}

kvx_status_t exists(void* user, uint64_t num_items, const char* const* keys, uint8_t* has) {
  const std::lock_guard lock(of(user).mutex);
  for (uint64_t i = 0; i < num_items; ++i) has[i] = of(user).values.count(keys[i]) ? 1 : 0;
  return of(user).answer;
}

kvx_status_t remove_some(void* user, uint64_t num_items, const char* const* keys) {
  const std::lock_guard lock(of(user).mutex);
  for (uint64_t i = 0; i < num_items; ++i) of(user).values.erase(keys[i]);
  return of(user).answer;
}

kvx_status_t remove_all(void* user, const char* parts) {
  const std::lock_guard lock(of(user).mutex);
  const std::string begin = std::string(parts) + "/";
  std::erase_if(of(user).values, [&](const auto& one) { return one.first.starts_with(begin); });
  return of(user).answer;
}

kvx_store_t hook_of(CStore& store) {
  auto hook = sized<kvx_store_t>();
  hook.user = &store;
  hook.put = put;
  hook.get = get;
  hook.exists = exists;
  hook.remove = remove_some;
  hook.remove_all = remove_all;
  hook.release = [](void* user) { ++of(user).num_releases; };
  return hook;
}

api::Result<api::Cache> cache_behind(const char* tiers) {
  auto config = owned_config("int8");
  config.max_sequences = 1;
  config.max_tokens_per_sequence = kTokens;
  auto options = sharing_options();
  options.prefix_hash = KVX_PREFIX_HASH_SHA256;
  options.tiers = tiers;
  return api::Cache::create(config, &options);
}

void compute(api::Cache& cache, const kvx_prefix_keys_t* keys = nullptr) {
  const int32_t sequence = *cache.create_sequence_from(token_ids(0, kTokens), keys);
  feed(cache, sequence, static_cast<int32_t>(*cache.num_tokens(sequence)), kTokens);
  ASSERT_TRUE(cache.free_sequence(sequence).ok());
  ASSERT_TRUE(cache.wait_for_tiers().ok());
}

int64_t num_found(api::Cache& cache, const kvx_prefix_keys_t* keys = nullptr) {
  const int32_t sequence = *cache.create_sequence_from(token_ids(0, kTokens), keys);
  const int64_t found = *cache.num_tokens(sequence);
  EXPECT_TRUE(cache.free_sequence(sequence).ok());
  return found;
}

TEST(OwnedStore, IsATierOfAnyCacheAndReleasedByTheLast) {
  CStore store;
  const kvx_store_t hook = hook_of(store);
  ASSERT_EQ(kvx_store_register("c-store", &hook), KVX_STATUS_OK) << kvx_last_error();
  {
    api::Cache writer = std::move(*cache_behind("store(c-store, timeout=60s)"));
    compute(writer);
    EXPECT_EQ(store.values.size(), 5u);
    api::Cache reader = std::move(*cache_behind("host(1MiB), store(c-store, timeout=60s)"));
    EXPECT_EQ(num_found(reader), 32);
    const kvx_cache_tier_facts_t facts = *reader.tier_facts(1);
    EXPECT_EQ(facts.tier, static_cast<uint32_t>(KVX_CACHE_TIER_STORE));
    EXPECT_EQ(facts.num_loaded, 4);
    EXPECT_EQ(facts.num_bad + facts.num_failed_calls, 0);
    ASSERT_EQ(kvx_store_unregister("c-store"), KVX_STATUS_OK) << kvx_last_error();
    EXPECT_EQ(store.num_releases, 0) << "two caches have it";
    EXPECT_FALSE(cache_behind("store(c-store, timeout=60s)").ok());
  }
  EXPECT_EQ(store.num_releases, 1);
}

TEST(OwnedStore, WhatReturnsAnErrorHasFailed) {
  CStore store;
  store.answer = KVX_STATUS_UNSUPPORTED;
  const kvx_store_t hook = hook_of(store);
  ASSERT_EQ(kvx_store_register("failing", &hook), KVX_STATUS_OK);
  {
    api::Cache cache = std::move(*cache_behind("store(failing, timeout=60s)"));
    compute(cache);
    const kvx_cache_tier_facts_t facts = *cache.tier_facts(0);
    EXPECT_GT(facts.num_failed_calls, 0);
    EXPECT_EQ(facts.num_stored, 0);
  }
  ASSERT_EQ(kvx_store_unregister("failing"), KVX_STATUS_OK);
}

TEST(OwnedStore, RefusesWhatIsNoStore) {
  CStore store;
  const auto expect_refused = [](const char* name, const kvx_store_t* hook, const char* text) {
    EXPECT_EQ(kvx_store_register(name, hook), KVX_STATUS_INVALID_ARGUMENT);
    EXPECT_THAT(kvx_last_error(), HasSubstr(text));
  };
  const kvx_store_t whole = hook_of(store);
  expect_refused(nullptr, &whole, "name is null");
  expect_refused("no name", &whole, "name is 'no name'; expected 1 to 64 letters");
  expect_refused("one", nullptr, "store is null");
  kvx_store_t hook = whole;
  hook.reserved = 1;
  expect_refused("one", &hook, "store.reserved is 1; expected 0");
  hook = whole;
  hook.put = nullptr;
  expect_refused("one", &hook, "store.put is null; expected a function");
  hook = whole;
  hook.get = nullptr;
  expect_refused("one", &hook, "store.get is null");
  hook = whole;
  hook.exists = nullptr;
  expect_refused("one", &hook, "store.exists is null");
  hook = whole;
  hook.remove = nullptr;
  expect_refused("one", &hook, "store.remove is null");
  hook = whole;
  hook.remove_all = nullptr;
  expect_refused("one", &hook, "store.remove_all is null");
  EXPECT_EQ(store.num_releases, 0) << "what is refused is still the caller's";
  EXPECT_EQ(kvx_store_unregister(nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_store_unregister("one"), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("name is 'one', under which no store is registered"));
}

TEST(OwnedStore, NeedsNoRelease) {
  CStore store;
  kvx_store_t hook = hook_of(store);
  hook.release = nullptr;
  ASSERT_EQ(kvx_store_register("kept", &hook), KVX_STATUS_OK);
  ASSERT_EQ(kvx_store_register("kept", &hook), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("name is 'kept', which is registered"));
  ASSERT_EQ(kvx_store_unregister("kept"), KVX_STATUS_OK);
}

// ---- the C++ face

class CppStore final : public api::Store {
 public:
  void put(api::Span<Put> items) override {
    const std::lock_guard lock(mutex_);
    for (Put& item : items) {
      values_[item.key].assign(item.value.begin(), item.value.end());
      item.is_stored = true;
    }
  }
  void get(api::Span<Get> items) override {
    const std::lock_guard lock(mutex_);
    if (throws_) throw std::runtime_error("no wires");
    for (Get& item : items) {
      const std::vector<uint8_t>& value = values_.at(item.key);
      std::memcpy(item.buffer.data(), value.data(), value.size());
      item.value_bytes = static_cast<int64_t>(value.size());
    }
  }
  void exists(api::Span<const char* const> keys, api::Span<uint8_t> has) override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) has[i] = values_.count(keys[i]) ? 1 : 0;
  }
  void remove(api::Span<const char* const> keys) override {
    const std::lock_guard lock(mutex_);
    for (const char* key : keys) values_.erase(key);
  }
  void remove_all(const char*) override { throw std::runtime_error("not today"); }

  bool throws_ = false;
  std::mutex mutex_;
  std::map<std::string, std::vector<uint8_t>> values_;
};

TEST(OwnedStore, IsAClassInCpp) {
  const auto store = std::make_shared<CppStore>();
  ASSERT_TRUE(api::register_store("cpp", store).ok());
  EXPECT_FALSE(api::register_store("cpp", store).ok());
  EXPECT_FALSE(api::register_store("null", nullptr).ok());
  {
    api::Cache writer = std::move(*cache_behind("store(cpp, timeout=60s)"));
    compute(writer);
    api::Cache reader = std::move(*cache_behind("store(cpp, timeout=60s)"));
    EXPECT_EQ(num_found(reader), 32);
    store->throws_ = true;
    api::Cache other = std::move(*cache_behind("store(cpp, timeout=60s)"));
    EXPECT_EQ(num_found(other), 0);
    EXPECT_EQ(other.tier_facts(0)->num_failed_calls, 1);
  }
  ASSERT_TRUE(api::unregister_store("cpp").ok());
  EXPECT_FALSE(api::unregister_store("cpp").ok());
  EXPECT_EQ(store.use_count(), 1);
}

// ---- erasure

TEST(OwnedErase, TakesATenantsBlocksAndNobodyElses) {
  CStore store;
  const kvx_store_t hook = hook_of(store);
  ASSERT_EQ(kvx_store_register("c-store", &hook), KVX_STATUS_OK);
  {
    api::Cache cache = std::move(*cache_behind("host(1MiB), store(c-store, timeout=60s)"));
    auto mine = sized<kvx_prefix_keys_t>();
    mine.tenant = "me";
    auto yours = sized<kvx_prefix_keys_t>();
    yours.tenant = "you";
    compute(cache, &mine);
    compute(cache, &yours);
    EXPECT_EQ(store.values.size(), 10u);
    EXPECT_GE(*cache.erase_tenant("me"), 5);
    EXPECT_EQ(store.values.size(), 5u);
    EXPECT_EQ(num_found(cache, &mine), 0);
    EXPECT_EQ(num_found(cache, &yours), 32);
    EXPECT_GE(*cache.erase_session(token_ids(0, kTokens), 16, &yours), 3);
    EXPECT_EQ(store.values.size(), 2u);
    EXPECT_EQ(num_found(cache, &yours), 16);
    store.answer = KVX_STATUS_INTERNAL_ERROR;
    const auto kept = cache.erase_tenant("you");
    ASSERT_FALSE(kept.ok());
    EXPECT_EQ(kept.failure().status, KVX_STATUS_INTERNAL_ERROR);
    EXPECT_THAT(kept.failure().text, HasSubstr("a store has kept its records: the store's "
                                               "remove_all returned"));
    store.answer = KVX_STATUS_OK;
    EXPECT_EQ(*cache.erase_tenant("you"), 0) << "the rest was done before";
    EXPECT_TRUE(store.values.empty());
  }
  ASSERT_EQ(kvx_store_unregister("c-store"), KVX_STATUS_OK);
}

TEST(OwnedErase, RefusesWhatItCannotDo) {
  api::Cache cache = std::move(*cache_behind("host(1MiB)"));
  EXPECT_THAT(cache.erase_tenant("").failure().text, HasSubstr("tenant is ''; expected"));
  EXPECT_EQ(kvx_cache_erase_tenant(cache.handle(), nullptr, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_cache_erase_tenant(nullptr, "me", nullptr), KVX_STATUS_INVALID_ARGUMENT);
  for (const int64_t first : {-1, kTokens + 1}) {
    const auto beyond = cache.erase_session(token_ids(0, kTokens), first);
    EXPECT_EQ(beyond.failure().status, KVX_STATUS_OUT_OF_RANGE);
    EXPECT_THAT(beyond.failure().text, HasSubstr("expected 0 to num_tokens, 40"));
  }
  auto keys = sized<kvx_prefix_keys_t>();
  keys.tenant = "me";
  const int32_t sequence = *cache.create_sequence_from(token_ids(0, kTokens), &keys);
  feed(cache, sequence, 0, kTokens);
  EXPECT_THAT(cache.erase_tenant("me").failure().text, HasSubstr("who has sequence"));
  EXPECT_THAT(cache.erase_session(token_ids(0, kTokens), 0, &keys).failure().text,
              HasSubstr("a sequence or a prefetch uses it"));
  EXPECT_TRUE(cache.free_sequence(sequence).ok());
  EXPECT_GT(*cache.erase_tenant("me"), 0);
  api::Cache without = std::move(*api::Cache::create(owned_config("int8")));
  EXPECT_EQ(without.erase_tenant("me").failure().status, KVX_STATUS_UNSUPPORTED);
}

}  // namespace
}  // namespace kvx::api_test::owned_store_test

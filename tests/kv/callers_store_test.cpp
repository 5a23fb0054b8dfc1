// Assembled caches behind a store of the caller's: it works like any other, and whatever it does,
// steps go on and nothing wrong is served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/cache/random_history.hpp"
#include "tests/kv/stored_caches.hpp"
#include "tests/tier/hostile_store.hpp"
#include "tier/store/store_registry.hpp"

namespace kvx::kv {
namespace {

using testing::HasSubstr;

// Registered as "test" as long as it lives.
template <class Store>
class Registered {
 public:
  template <class... Arguments>
  explicit Registered(const Arguments&... arguments)
      : store_(std::make_shared<Store>(arguments...)) {
    EXPECT_TRUE(tier::register_store("test", store_).ok());
  }
  ~Registered() { EXPECT_TRUE(tier::unregister_store("test").ok()); }
  Store* operator->() const { return store_.get(); }

 private:
  std::shared_ptr<Store> store_;
};

TEST(CallersStore, AnotherCacheBeginsWithWhatOneComputed) {
  const Registered<tier::MapStore> store;
  const auto writer = cache_of({"store(test)"});
  const auto reader = cache_of({"host(1MiB), store(test)"});
  int64_t found = 0;
  come_and_go(*writer, 1, found);
  const auto expected = come_and_go(*writer, 1, found);
  writer->wait_for_tiers();
  EXPECT_EQ(store->num_values(), static_cast<size_t>(kNumTokens / kBlockSize));
  const auto loaded = come_and_go(*reader, 1, found);
  EXPECT_EQ(found, kNumFound);
  EXPECT_EQ(loaded, expected);
  const tier::HostTierSnapshot seen = reader->snapshot().tiers.back();
  EXPECT_EQ(seen.tier, cache::Tier::kStore);
  EXPECT_GT(seen.num_loaded, 0);
  EXPECT_EQ(seen.num_bad + seen.num_failed_calls, 0) << seen.last_problem;
}

TEST(CallersStore, ANameThatNobodyRegisteredIsRefused) {
  const auto refused = try_cache({"store(nobody)"});
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message, HasSubstr("tiers has store(nobody); expected a registered"));
}

TEST(CallersStore, AStoreThatNeverReturnsHoldsNobodyUp) {
  const Registered<tier::HangingStore> store;
  const auto begin = std::chrono::steady_clock::now();
  {
    const auto cache = cache_of({"store(test, timeout=20ms)"});
    for (int seed = 1; seed <= 3; ++seed) EXPECT_EQ(num_found(*cache, seed), 0);
    EXPECT_EQ(num_found(*cache, 3), kNumFound) << "the pool has it";
    cache->wait_for_tiers();
    const tier::HostTierSnapshot seen = cache->snapshot().tiers[0];
    EXPECT_GT(seen.num_failed_calls, 0);
    EXPECT_GT(seen.num_dropped, 0);
    EXPECT_THAT(seen.last_problem, testing::AnyOf(HasSubstr("has not returned from"),
                                                  HasSubstr("calls that have not returned")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60)) << "it ended";
  store->let_go();
}

// The pool has room for one sequence: what a late load holds is what the step needs.
TEST(CallersStore, LoadsThatAreLateLeaveTheirBlocksToTheStep) {
  const Registered<tier::HangingStore> store;
  store->let_only_gets_hang();
  for (int i = 0; i < 5; ++i) {
    const auto writer = cache_of({"store(test, timeout=20ms)"});
    num_found(*writer, 1);
    writer->wait_for_tiers();
    const auto reader = cache_of({"store(test, timeout=20ms)"});
    EXPECT_EQ(num_found(*reader, 1), 0) << "and its step had the blocks";
    reader->wait_for_tiers();
    EXPECT_EQ(reader->snapshot().classes[0].num_active, 0);
  }
  store->let_go();
}

// Every way to misbehave, by chance, beside a cache without a store. On a machine that stalls all
// answers may be late: there are more rounds then, with more time each.
TEST(CallersStore, AHostileStoreServesNothingWrong) {
  const int num_rounds = static_cast<int>(cache::num_operations(15, 1000));
  int64_t num_failed = 0, num_bad = 0, num_loaded = 0;
  const auto has_seen_all = [&] { return num_failed > 0 && num_bad > 0 && num_loaded > 0; };
  for (int round = 0; round < num_rounds || (round < 10 * num_rounds && !has_seen_all()); ++round) {
    const Registered<tier::RandomlyHostileStore> store(static_cast<uint32_t>(round));
    const std::string tiers = fmt::format("store(test, timeout={}ms)", 10 << (round / num_rounds));
    const auto writer = cache_of({tiers});
    int64_t found = 0;
    come_and_go(*writer, 1 + round, found);
    const auto expected = come_and_go(*writer, 1 + round, found);
    ASSERT_EQ(found, kNumFound);
    writer->wait_for_tiers();
    for (int i = 0; i < 3; ++i) {
      const auto reader = cache_of({tiers});
      EXPECT_EQ(come_and_go(*reader, 1 + round, found), expected) << "round " << round;
      reader->wait_for_tiers();
      EXPECT_EQ(reader->snapshot().classes[0].num_active, 0) << "no block was lost";
      const tier::HostTierSnapshot seen = reader->snapshot().tiers[0];
      num_failed += seen.num_failed_calls;
      num_bad += seen.num_bad;
      num_loaded += seen.num_loaded;
    }
  }
  EXPECT_GT(num_failed, 0);
  EXPECT_GT(num_bad, 0);
  EXPECT_GT(num_loaded, 0) << "and what was right was served";
}

}  // namespace
}  // namespace kvx::kv

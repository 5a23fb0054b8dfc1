// Stores behind assembled caches: what one cache computed another one begins with, byte for byte,
// and whatever becomes of the store, steps go on and nothing wrong is served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/cache/random_history.hpp"
#include "tests/kv/stored_caches.hpp"
#include "tests/support/temporary_path.hpp"
#include "tests/tier/redis_server.hpp"

namespace kvx::kv::store_tier_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr const char* kRecipes[] = {"bf16", "int8/int4", "nvfp4:auto",
                                    "int4:sink=10,recent=40,full_precision=f16"};

class StoreTier : public testing::Test {
 protected:
  StoreTier() : folder_(tests::temporary_path("kvx_store_tier")) { fs::remove_all(folder_); }
  ~StoreTier() override { fs::remove_all(folder_); }

  std::string folder_tier(const std::string& options = "") const {
    return fmt::format("folder(\"{}\"{})", folder_, options);
  }
  // Cached by another cache, which then ends.
  void fill(const CacheFacts& facts, int seed, const cache::PrefixKeys& keys = {}) {
    const auto writer = cache_of(facts);
    num_found(*writer, seed, keys);
    writer->wait_for_tiers();
    EXPECT_GT(writer->snapshot().tiers.back().num_stored, 0);
    EXPECT_EQ(writer->snapshot().tiers.back().num_failed_calls, 0);
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& one : fs::recursive_directory_iterator(folder_)) {
      if (one.is_regular_file()) found.push_back(one.path());
    }
    return found;
  }
  std::string all_bytes() const {
    std::string all;
    for (const fs::path& path : files()) {
      std::ifstream file(path, std::ios::binary);
      all.append(std::istreambuf_iterator<char>(file), {});
    }
    return all;
  }

  std::string folder_;
};

void expect_shared(const std::string& tiers, const std::string& reader_tiers) {
  for (const char* recipe : kRecipes) {
    SCOPED_TRACE(recipe);
    const auto writer = cache_of({tiers, recipe});
    const auto reader = cache_of({reader_tiers, recipe});
    int64_t found = 0;
    const auto computed = come_and_go(*writer, 1, found);
    EXPECT_EQ(found, 0);
    const auto expected = come_and_go(*writer, 1, found);  // from its own pool
    EXPECT_EQ(found, kNumFound);
    writer->wait_for_tiers();
    const auto loaded = come_and_go(*reader, 1, found);
    EXPECT_EQ(found, kNumFound);
    EXPECT_EQ(loaded, expected);
    reader->wait_for_tiers();
    const tier::HostTierSnapshot store = reader->snapshot().tiers.back();
    EXPECT_EQ(store.tier, cache::Tier::kStore);
    EXPECT_GT(store.num_loaded, 0);
    EXPECT_EQ(store.num_bad + store.num_dropped + store.num_failed_calls, 0) << store.last_problem;
    EXPECT_EQ(reader->snapshot().classes[0].num_active, 0);
  }
}

TEST_F(StoreTier, AnotherCacheBeginsWithWhatOneComputed) {
  expect_shared(folder_tier(), folder_tier());
}

TEST_F(StoreTier, BehindATierOfHostMemoryToo) {
  expect_shared("host(1MiB), " + folder_tier(), "host(1MiB), " + folder_tier());
}

TEST_F(StoreTier, AlsoThroughRedis) {
  tier::RedisServer server;
  const std::string tiers = fmt::format("redis({}, ttl=1h)", server.url());
  expect_shared(tiers, tiers);
}

TEST_F(StoreTier, PrefetchBringsBlocksBeforeTheyAreWanted) {
  fill({folder_tier()}, 1);
  const auto reader = cache_of({folder_tier()});
  {
    const Prefetch hint = reader->prefetch({}, token_ids(1000)).value();
    hint.wait();
    EXPECT_TRUE(hint.is_done());
    EXPECT_EQ(hint.num_blocks(), kNumFound / kBlockSize);
  }
  const int64_t num_loaded = reader->snapshot().tiers[0].num_loaded;
  EXPECT_EQ(num_loaded, kNumFound / kBlockSize);
  EXPECT_EQ(num_found(*reader, 1), kNumFound);
  EXPECT_EQ(reader->snapshot().tiers[0].num_loaded, num_loaded);
}

TEST_F(StoreTier, FindsNothingOfAnotherModelRecipeOrTenant) {
  fill({folder_tier()}, 1);
  EXPECT_EQ(num_found(*cache_of({folder_tier(), "int8", "another model"}), 1), 0);
  EXPECT_EQ(num_found(*cache_of({folder_tier(), "int4"}), 1), 0);
  EXPECT_EQ(num_found(*cache_of({folder_tier()}), 1, {"", "", "a tenant"}), 0);
  EXPECT_EQ(num_found(*cache_of({folder_tier()}), 1, {"an adapter", "", ""}), 0);
  EXPECT_EQ(num_found(*cache_of({folder_tier()}), 1), kNumFound);
}

TEST_F(StoreTier, ADamagedRecordIsACountedMissAndNeverData) {
  fill({folder_tier()}, 1);
  for (const fs::path& path : files()) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(fs::file_size(path) / 2));
    file.put('\x5a');
    file.put('\xa5');
  }
  const auto reader = cache_of({folder_tier()});
  EXPECT_EQ(num_found(*reader, 1), 0);
  EXPECT_GT(reader->snapshot().tiers[0].num_bad, 0);
  EXPECT_THAT(reader->snapshot().tiers[0].last_problem, HasSubstr("damaged"));
}

// As if a store had mixed its values up.
TEST_F(StoreTier, ARecordUnderAnotherKeyIsRefused) {
  fill({folder_tier()}, 1);
  const std::vector<fs::path> all = files();
  for (size_t i = 1; i < all.size(); ++i) {
    fs::copy_file(all[0], all[i], fs::copy_options::overwrite_existing);
  }
  const auto reader = cache_of({folder_tier()});
  EXPECT_LE(num_found(*reader, 1), kBlockSize);
  EXPECT_GE(reader->snapshot().tiers[0].num_bad, 5);
  EXPECT_THAT(reader->snapshot().tiers[0].last_problem, HasSubstr("another block's"));
}

TEST_F(StoreTier, GarbageIsRefused) {
  fill({folder_tier()}, 1);
  for (const fs::path& path : files()) std::ofstream(path, std::ios::binary) << "no record";
  const auto reader = cache_of({folder_tier()});
  EXPECT_EQ(num_found(*reader, 1), 0);
  EXPECT_GT(reader->snapshot().tiers[0].num_bad, 0);
}

TEST_F(StoreTier, EnciphersWithTheCallersKey) {
  setenv("KVX_TEST_STORE_KEY", std::string(64, 'c').c_str(), 1);
  setenv("KVX_TEST_OTHER_KEY", std::string(64, 'd').c_str(), 1);
  const std::vector<int32_t> ids = token_ids(1000);
  const std::string tokens(reinterpret_cast<const char*>(ids.data()), kBlockSize * sizeof(int32_t));
  fill({folder_tier()}, 1);
  EXPECT_NE(all_bytes().find(tokens), std::string::npos) << "plain records have their tokens";
  fs::remove_all(folder_);
  const std::string with_key = folder_tier(", key_env=KVX_TEST_STORE_KEY");
  fill({with_key}, 1);
  EXPECT_EQ(all_bytes().find(tokens), std::string::npos);
  EXPECT_EQ(num_found(*cache_of({with_key}), 1), kNumFound);
  const auto other = cache_of({folder_tier(", key_env=KVX_TEST_OTHER_KEY")});
  EXPECT_EQ(num_found(*other, 1), 0);
  EXPECT_THAT(other->snapshot().tiers[0].last_problem, HasSubstr("another key"));
  EXPECT_EQ(num_found(*cache_of({folder_tier()}), 1), 0) << "a cache without a key reads none";
}

TEST_F(StoreTier, RefusesAKeyThatIsNotThere) {
  const auto refused = try_cache({folder_tier(", key_env=KVX_TEST_NO_SUCH_VARIABLE")});
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message,
              HasSubstr("tiers has key_env=KVX_TEST_NO_SUCH_VARIABLE, a variable that is not set"));
}

// ---- faults

TEST_F(StoreTier, StepsGoOnWithoutAServer) {
  const tier::ReservedPort nobodys;
  const auto cache = cache_of({fmt::format("redis(redis://127.0.0.1:{})", nobodys.number())});
  for (int seed = 1; seed <= 3; ++seed) EXPECT_EQ(num_found(*cache, seed), 0);
  cache->wait_for_tiers();
  EXPECT_EQ(num_found(*cache, 3), kNumFound) << "the pool has it";
  const tier::HostTierSnapshot store = cache->snapshot().tiers[0];
  EXPECT_GT(store.num_failed_calls, 0);
  EXPECT_GT(store.num_dropped, 0);
  EXPECT_THAT(store.last_problem, HasSubstr("no connection"));
}

TEST_F(StoreTier, StepsGoOnWhileTheServerHangs) {
  tier::RedisServer server;
  const std::string tiers = fmt::format("redis({}, timeout=50ms)", server.url());
  const auto cache = cache_of({tiers});
  EXPECT_EQ(num_found(*cache, 1), 0);
  cache->wait_for_tiers();
  server.stop();
  for (int seed = 2; seed <= 6; ++seed) EXPECT_EQ(num_found(*cache, seed), 0);
  // A step need not have waited for the call that has failed.
  EXPECT_TRUE(tests::waits_until([&] { return cache->snapshot().tiers[0].num_failed_calls > 0; }));
  server.go_on();
}

// The server is killed again and again, between and during calls.
TEST_F(StoreTier, AServerThatIsKilledLosesBlocksAndNothingElse) {
  tier::RedisServer server;
  const std::string tiers = fmt::format("redis({}, timeout=200ms)", server.url());
  const auto roomy = cache_of({""});
  const int num_kills = static_cast<int>(cache::num_operations(10, 300));
  for (int round = 0; round < num_kills; ++round) {
    const auto writer = cache_of({tiers});
    const auto reader = cache_of({tiers});
    std::vector<float> expected, loaded;
    int64_t found = 0;
    std::thread killer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(round % 20));
      server.kill();
      server.start();
    });
    come_and_go(*writer, 1 + round, found);
    expected = come_and_go(*writer, 1 + round, found);
    writer->wait_for_tiers();
    loaded = come_and_go(*reader, 1 + round, found);
    killer.join();
    EXPECT_EQ(loaded, expected) << "round " << round << ", " << found << " tokens found";
    EXPECT_EQ(reader->snapshot().tiers[0].num_bad, 0);
  }
}

}  // namespace
}  // namespace kvx::kv::store_tier_test

// Erasure, proven by looking for the bytes: of a block, everywhere in this process's memory, in the
// folder's files, and in what a Redis server still has.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cache/prefix/erasure.hpp"
#include "tests/kv/stored_caches.hpp"
#include "tests/support/sanitized.hpp"
#include "tests/support/temporary_path.hpp"
#include "tests/tier/redis_server.hpp"

namespace kvx::kv {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

// How often a block has its first bytes: all layers store the same rows.
constexpr int64_t kInABlock = kNumLayers;

const cache::PrefixKeys kMine = {"", "", "my tenant"};
const cache::PrefixKeys kYours = {"", "", "your tenant"};

// What blocks look like, kept inverted: what searches for bytes must not be found itself.
class Traces {
 public:
  // Every block of the pool that the erasure means. Requires: the pool is in host memory.
  Traces(KvCache& cache, const cache::Erasure& erasure) {
    SequenceTable& table = cache.table();
    const cache::PrefixIndex& index = table.prefixes->index();
    for (const int32_t node : cache::nodes_of(index, erasure)) {
      const cache::LayerGroup& group = table.prefixes->shape().groups[0];
      const int32_t id = index.block_of(node, 0, cache::BlockKind::kPacked);
      if (id == cache::kNoBlock) continue;
      const cache::BlockPool& pool = *table.storage.pool;
      const uint8_t* block =
          pool.region(group.packed_class) + id * pool.block_bytes(group.packed_class);
      Trace& trace = traces_.emplace_back();
      for (uint64_t& word : trace) {
        std::memcpy(&word, block, sizeof word);
        word = ~word;
        block += sizeof word;
      }
    }
  }
  size_t size() const { return traces_.size(); }
  // How often one of them begins at a multiple of 8.
  int64_t count_in(std::span<const uint8_t> bytes) const {
    int64_t count = 0;
    for (size_t at = 0; at + sizeof(Trace) <= bytes.size(); at += sizeof(uint64_t)) {
      uint64_t first;
      std::memcpy(&first, bytes.data() + at, sizeof first);
      for (const Trace& one : traces_) {
        if (first == ~one[0] && is_at(one, bytes.data() + at)) ++count;
      }
    }
    return count;
  }
  // In all memory of this process that can be written, files' mappings included.
  int64_t count_in_memory() const {
    std::ifstream maps("/proc/self/maps");
    int64_t count = 0;
    for (std::string line; std::getline(maps, line);) {
      uint64_t begin = 0, end = 0;
      char rights[5] = {};
      if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, rights) != 3) continue;
      if (rights[0] != 'r' || rights[1] != 'w' || line.find("[v") != std::string::npos) continue;
      count += count_in({reinterpret_cast<const uint8_t*>(begin), end - begin});
    }
    return count;
  }
  int64_t count_in_folder(const std::string& folder) const {
    int64_t count = 0;
    for (const auto& one : fs::recursive_directory_iterator(folder)) {
      if (one.is_regular_file()) count += count_in_file(one.path());
    }
    return count;
  }

 private:
  using Trace = std::array<uint64_t, 12>;
  static bool is_at(const Trace& trace, const uint8_t* bytes) {
    for (const uint64_t inverted : trace) {
      uint64_t word;
      std::memcpy(&word, bytes, sizeof word);
      if (word != ~inverted) return false;
      bytes += sizeof word;
    }
    return true;
  }
  // Leaves nothing in this process's memory.
  int64_t count_in_file(const fs::path& path) const {
    std::vector<uint8_t> bytes(fs::file_size(path));
    const int file = open(path.c_str(), O_RDONLY);
    EXPECT_EQ(read(file, bytes.data(), bytes.size()), std::ssize(bytes));
    close(file);
    const int64_t count = count_in(bytes);
    std::ranges::fill(bytes, uint8_t{0});
    return count;
  }

  std::vector<Trace> traces_;
};

class Erase : public testing::Test {
 protected:
  Erase() : folder_(tests::temporary_path("kvx_erase")) { fs::remove_all(folder_); }
  void SetUp() override {
    if (is_on_gpu()) GTEST_SKIP() << "looks for blocks in the host's memory";
    fs::create_directories(folder_);
  }
  ~Erase() override { fs::remove_all(folder_); }

  static void expect_in_memory(const Traces& traces, const testing::Matcher<int64_t>& count) {
    if (tests::kIsSanitized) return;  // its shadow memory alone is terabytes
    EXPECT_THAT(traces.count_in_memory(), count);
  }
  static std::unique_ptr<KvCache> cache_with(const std::string& tiers) {
    return cache_of({tiers, "nvfp4"});
  }
  static void compute(KvCache& cache, int seed, const cache::PrefixKeys& keys) {
    num_found(cache, seed, keys);
    cache.wait_for_tiers();
  }

  std::string folder_;
};

TEST_F(Erase, ATenantsBlocksLeaveMemoryDiskFolderAndRedis) {
  tier::RedisServer server;
  const auto cache =
      cache_with(fmt::format("host(8KiB), disk(\"{0}\", 4MiB), folder(\"{0}/f\"), "
                             "redis({1})",
                             folder_, server.url()));
  compute(*cache, 1, kMine);
  const cache::Erasure all_mine{kMine, true, {}, 0};
  const Traces traces(*cache, all_mine);
  ASSERT_EQ(traces.size(), 7u);
  compute(*cache, 2, kYours);  // mine go down, and are evicted from the pool
  compute(*cache, 1, kMine);   // and come back, as yours go

  expect_in_memory(traces, testing::Gt(7 * kInABlock));  // pool, host tier and disk have them
  EXPECT_EQ(traces.count_in_folder(folder_ + "/f"), 7 * kInABlock);
  EXPECT_EQ(server.keys_under("kvx1").size(), 14u);

  EXPECT_GT(cache->erase_tenant(kMine.tenant).value(), 7);

  expect_in_memory(traces, 0);
  EXPECT_EQ(traces.count_in_folder(folder_), 0);
  const std::vector<std::string> left = server.keys_under("kvx1");
  EXPECT_EQ(left.size(), 7u) << "yours";
  for (const std::string& key : left) {
    const std::string value = server.value_of(key);
    EXPECT_EQ(traces.count_in({reinterpret_cast<const uint8_t*>(value.data()), value.size()}), 0);
  }
  EXPECT_EQ(num_found(*cache, 1, kMine), 0);
  EXPECT_EQ(num_found(*cache, 2, kYours), kNumFound);
}

TEST_F(Erase, ASessionsBlocksGoFromAToken) {
  const auto cache = cache_with(fmt::format("host(1MiB), folder(\"{}/f\")", folder_));
  compute(*cache, 1, kMine);
  const std::vector<int32_t> ids = token_ids(1000);
  const Traces gone(*cache, {kMine, false, ids, 2});
  ASSERT_EQ(gone.size(), 5u);
  EXPECT_EQ(gone.count_in_folder(folder_), 5 * kInABlock);
  expect_in_memory(gone, testing::Ge(2 * 5 * kInABlock));
  // From inside the third block on, by a text that ends there.
  EXPECT_EQ(cache->erase_session(kMine, std::span(ids).first(40), 40).value(), 2 * 5);
  expect_in_memory(gone, 0);
  EXPECT_EQ(gone.count_in_folder(folder_), 0) << "also blocks that the text does not reach";
  EXPECT_EQ(num_found(*cache, 1, kMine), 32);
  EXPECT_EQ(num_found(*cache, 1, kYours), 0);
}

// Blocks that no tier of this process remembers.
TEST_F(Erase, ASessionsRecordsGoFromAStoreThatAnotherCacheFilled) {
  const std::string tiers = fmt::format("folder(\"{}/f\")", folder_);
  compute(*cache_with(tiers), 1, {});
  compute(*cache_with(tiers), 2, {});
  const auto cache = cache_with(tiers);
  EXPECT_EQ(cache->erase_session({}, token_ids(1000), 0).value(), 0);
  EXPECT_EQ(num_found(*cache_with(tiers), 1), 0);
  EXPECT_EQ(num_found(*cache_with(tiers), 2), kNumFound);
}

TEST_F(Erase, AnotherTextsBlocksStay) {
  const auto cache = cache_with("host(1MiB)");
  compute(*cache, 1, {});
  std::vector<int32_t> other = token_ids(1000);
  other[20] = -7;
  EXPECT_EQ(cache->erase_session({}, other, 16).value(), 0) << "another second block";
  EXPECT_EQ(cache->erase_session({"an adapter", "", ""}, token_ids(1000), 0).value(), 0);
  EXPECT_EQ(num_found(*cache, 1), kNumFound);
}

TEST_F(Erase, WhatIsInUseIsRefusedAndNothingIsErased) {
  const auto cache = cache_with(fmt::format("host(1MiB), folder(\"{}/f\")", folder_));
  compute(*cache, 1, kMine);
  const int sequence = cache->create_sequence_from(kMine, token_ids(1000)).value();
  EXPECT_THAT(cache->erase_tenant(kMine.tenant).error().message,
              HasSubstr("tenant is 'my tenant', who has sequence 0; free it first"));
  EXPECT_THAT(cache->erase_session(kMine, token_ids(1000), 0).error().message,
              HasSubstr("a sequence or a prefetch uses it; free it first"));
  ASSERT_TRUE(cache->free_sequence(sequence).ok());
  {
    const Prefetch hint = cache->prefetch(kMine, token_ids(1000)).value();
    hint.wait();
    EXPECT_THAT(cache->erase_tenant(kMine.tenant).error().message, HasSubstr("a prefetch uses it"));
  }
  EXPECT_EQ(num_found(*cache, 1, kMine), kNumFound);
  EXPECT_GT(cache->erase_tenant(kMine.tenant).value(), 0);
}

TEST_F(Erase, AStoreThatCannotBeReachedIsAnErrorAfterTheRest) {
  tier::RedisServer server;
  const auto cache = cache_with(fmt::format("host(1MiB), redis({})", server.url()));
  compute(*cache, 1, kMine);
  const Traces traces(*cache, {kMine, true, {}, 0});
  server.kill();
  EXPECT_THAT(cache->erase_tenant(kMine.tenant).error().message,
              HasSubstr("blocks are erased here, and a store has kept its records"));
  expect_in_memory(traces, 0);
  server.start();
  EXPECT_TRUE(cache->erase_tenant(kMine.tenant).ok());
}

}  // namespace
}  // namespace kvx::kv

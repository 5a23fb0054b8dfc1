// FileMemory: bytes in files without names, and what a disk refuses.
#include "tier/file_memory.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "tests/support/temporary_path.hpp"
#include "tests/tier/file_size_limit.hpp"
#include "tier/block_checksum.hpp"
#include "tier/block_copier.hpp"
#include "tier/host_tier.hpp"

namespace kvx::tier {
namespace {

using testing::HasSubstr;

namespace fs = std::filesystem;

// A folder of its own, which goes at the end.
class FileMemoryTest : public testing::Test {
 protected:
  FileMemoryTest() : folder_(tests::temporary_path("kvx-file-memory")) {
    fs::create_directory(folder_);
  }
  ~FileMemoryTest() override { fs::remove_all(folder_); }

  // Ends the files of this process that lie in the folder, as a broken disk might.
  void end_files() const {
    int num_ended = 0;
    for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const fs::path target = fs::read_symlink(entry.path(), gone);
      if (gone || !target.string().starts_with(folder_)) continue;
      ASSERT_EQ(truncate(entry.path().c_str(), 0), 0);
      ++num_ended;
    }
    ASSERT_GT(num_ended, 0);
  }

  const std::string folder_;
};

TEST_F(FileMemoryTest, KeepsBytesWithoutAName) {
  const auto memory = FileMemory::create(folder_).value();
  const cache::Region one = memory->allocate(100'000, "one").value();
  const cache::Region two = memory->allocate(50, "two").value();
  std::vector<uint8_t> bytes(1000), back(1000, 9);
  ASSERT_TRUE(memory->read(one.data() + 99'000, back).ok());
  EXPECT_EQ(back, bytes) << "zeros when it is handed out";
  std::iota(bytes.begin(), bytes.end(), uint8_t{1});
  ASSERT_TRUE(memory->write(one.data() + 99'000, bytes).ok());
  ASSERT_TRUE(memory->read(one.data() + 99'000, back).ok());
  EXPECT_EQ(back, bytes);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), one.data() + 99'000)) << "at its address too";
  EXPECT_EQ(two.data()[49], 0);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(FileMemoryTest, ClearsWhatItIsTold) {
  const auto memory = FileMemory::create(folder_).value();
  constexpr int64_t kBytes = 200'000;  // no multiple of what is written at once
  const cache::Region region = memory->allocate(kBytes, "region").value();
  const std::vector<uint8_t> bytes(kBytes, 7);
  ASSERT_TRUE(memory->write(region.data(), bytes).ok());
  memory->clear(region.data() + 1, kBytes - 2);
  EXPECT_EQ(region.data()[0], 7);
  EXPECT_EQ(std::count(region.data(), region.data() + kBytes, 0), kBytes - 2);
  EXPECT_EQ(region.data()[kBytes - 1], 7);
}

TEST_F(FileMemoryTest, RefusesAFolderThatIsNone) {
  for (const std::string& folder : {folder_ + "/none", std::string("/dev/null"), std::string()}) {
    const auto refused = FileMemory::create(folder);
    ASSERT_FALSE(refused.ok()) << folder;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("expected a folder that may be written"));
  }
}

TEST_F(FileMemoryTest, ARegionThatTheDiskHasNoRoomForIsRefusedByItsBytes) {
  const auto memory = FileMemory::create(folder_).value();
  const FileSizeLimit limit(1 << 20);
  const auto refused = memory->allocate(2 << 20, "blocks");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  EXPECT_THAT(refused.error().message, HasSubstr("has no room for 2097152 bytes: File too large"));
}

// A host tier of four blocks in files behind a pool of two.
struct TierInFiles : cache::EvictionListener {
  static constexpr int64_t kBlockBytes = 8192;
  cache::SequenceShape shape{1, 64, {{0, 0, {}, 0}}};
  cache::BlockPool pool = make_pool();
  cache::PrefixIndex index =
      cache::PrefixIndex::create(pool, shape, "", cache::HashAlgorithm::kXxh3).value();
  std::unique_ptr<HostTier> host;
  int32_t scope = index.pin_scope({}).value();
  int32_t host_scope;

  explicit TierInFiles(const std::string& folder)
      : host(HostTier::create(pool, index, shape, "", cache::HashAlgorithm::kXxh3,
                              {TierKind::kDisk, 4 * kBlockBytes, folder})
                 .value()),
        host_scope(host->nodes().pin_scope({}).value()) {
    pool.set_eviction_listener(this);
  }
  static cache::BlockPool make_pool() {
    const cache::BlockClassSpec spec{"blocks", 2, {kBlockBytes}};
    return cache::BlockPool::create(cache::host_memory(), std::span(&spec, 1)).value();
  }
  void on_evict(int block_class, int32_t id) override { index.on_evict(block_class, id); }

  // The block of one token, stored and let go of.
  void store(int32_t token) {
    int32_t id = 0;
    ASSERT_TRUE(pool.allocate(0, std::span(&id, 1)).ok());
    const std::span<const int32_t> tokens(&token, 1);
    const int32_t node = index.insert(scope, tokens);
    ASSERT_TRUE(index.attach(node, 0, cache::BlockKind::kPacked, id).ok());
    host->store(host->nodes().insert(host_scope, tokens), 0, cache::BlockKind::kPacked, id);
    host->wait_for_all();
    host->collect();
    ASSERT_TRUE(pool.release(0, id).ok());
  }
  int64_t num_brought_back(int32_t token) {
    const FirstTier first{&pool, &index, &shape};
    const TierScope from{host.get(), host_scope};
    Promotion promotion = promote(first, scope, std::span(&from, 1), std::span(&token, 1), 1);
    wait(promotion);
    host->collect();
    const int64_t num_found = index.match(scope, std::span(&token, 1), 1).num_blocks();
    release_promotion(first, promotion);
    return num_found;
  }
};

TEST_F(FileMemoryTest, ABlockThatTheDiskDoesNotTakeIsDroppedAndCounted) {
  TierInFiles tiers(folder_);
  {
    const FileSizeLimit limit(0);
    tiers.store(1);
  }
  EXPECT_EQ(tiers.host->snapshot().num_dropped, 1);
  EXPECT_EQ(tiers.host->snapshot().num_stored, 0);
  for (int32_t token : {2, 3}) tiers.store(token);  // evicts the first
  EXPECT_EQ(tiers.host->snapshot().num_stored, 2);
  EXPECT_EQ(tiers.num_brought_back(1), 0);
}

TEST_F(FileMemoryTest, ABlockThatCannotBeReadIsAMissAndCounted) {
  TierInFiles tiers(folder_);
  for (int32_t token : {1, 2, 3}) tiers.store(token);
  end_files();
  EXPECT_EQ(tiers.num_brought_back(1), 0);
  const HostTierSnapshot seen = tiers.host->snapshot();
  EXPECT_EQ(seen.num_bad, 1);
  EXPECT_EQ(seen.num_loaded, 0);
  EXPECT_THAT(seen.last_problem, HasSubstr("could not be copied back"));
}

// Blocks of several pieces of a checksum, as many as keep all threads busy.
TEST_F(FileMemoryTest, BlocksPassBetweenMemoryAndFilesWithTheChecksumOfWhatTheyAre) {
  constexpr int64_t kBytes = 2 * kChecksumPieceBytes + 1000;
  constexpr int kNumBlocks = 9;
  const auto one = FileMemory::create(folder_).value();
  const auto other = FileMemory::create(folder_).value();
  const cache::Region first = one->allocate(kNumBlocks * kBytes, "first").value();
  const cache::Region second = other->allocate(kNumBlocks * kBytes, "second").value();
  std::vector<uint8_t> bytes(kNumBlocks * kBytes), back(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7919 >> 8);
  struct Way {
    FileMemory* near;
    FileMemory* far;
    Direction direction;
    uint8_t* from;
    uint8_t* to;
  };
  const Way ways[] = {
      {nullptr, one.get(), Direction::kStore, bytes.data(), first.data()},
      {one.get(), other.get(), Direction::kStore, first.data(), second.data()},
      {nullptr, other.get(), Direction::kLoad, second.data(), back.data()},
  };
  for (const Way& way : ways) {
    std::vector<BlockTransfer> transfers;
    for (int i = 0; i < kNumBlocks; ++i) {
      transfers.push_back({way.from + i * kBytes, way.to + i * kBytes, kBytes});
    }
    std::vector<CopiedBlock> copied(kNumBlocks);
    const auto copier = make_host_copier(way.near, way.far);
    copier->start(way.direction, transfers);
    copier->finish(way.direction, transfers, copied);
    for (int i = 0; i < kNumBlocks; ++i) {
      EXPECT_TRUE(copied[i].is_copied);
      EXPECT_EQ(copied[i].checksum,
                block_checksum(std::span(bytes).subspan(static_cast<size_t>(i * kBytes), kBytes)))
          << i;
    }
  }
  EXPECT_EQ(back, bytes);
}

}  // namespace
}  // namespace kvx::tier

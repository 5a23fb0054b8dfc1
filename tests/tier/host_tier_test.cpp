// HostTier: bytes go and come back whole, or they are a miss.
#include "tier/host_tier.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>

namespace kvx::tier::tier_host_tier_test {
namespace {

using cache::BlockKind;
using cache::kNoBlock;

constexpr int64_t kBlockBytes =
    4096 + 64;  // no multiple of the block copies that are copied at once
constexpr int kBlockSize = 2;

TierConfig config_of(const std::string& folder, int64_t budget_bytes) {
  return {folder.empty() ? TierKind::kHost : TierKind::kDisk, budget_bytes, folder};
}

// A first tier of some blocks and a host tier behind it.
struct Tiers : cache::EvictionListener {
  cache::SequenceShape shape{kBlockSize, 64, {{0, 0, {}, 0}}};
  cache::BlockPool pool;
  cache::PrefixIndex index;
  std::unique_ptr<HostTier> host;
  int32_t scope;
  int32_t host_scope;

  // The host tier lies in files where there is a folder.
  Tiers(const std::string& folder, int64_t num_blocks, int64_t num_host_blocks,
        TierLink link = host_link(), const BlockParts& block_parts = {})
      : pool(make_pool(num_blocks)),
        index(cache::PrefixIndex::create(pool, shape, "", cache::HashAlgorithm::kXxh3).value()),
        host(HostTier::create(pool, index, shape, "", cache::HashAlgorithm::kXxh3,
                              config_of(folder, num_host_blocks * kBlockBytes), std::move(link),
                              block_parts)
                 .value()),
        scope(index.pin_scope({}).value()),
        host_scope(host->nodes().pin_scope({}).value()) {
    pool.set_eviction_listener(this);
  }
  static cache::BlockPool make_pool(int64_t num_blocks) {
    const cache::BlockClassSpec spec{"blocks", num_blocks, {kBlockBytes}};
    return cache::BlockPool::create(cache::host_memory(), std::span(&spec, 1)).value();
  }
  void on_evict(int block_class, int32_t id) override { index.on_evict(block_class, id); }

  std::span<uint8_t> bytes(int32_t id) {
    return {pool.region(0) + id * kBlockBytes, static_cast<size_t>(kBlockBytes)};
  }
  static std::vector<int32_t> tokens(int chain, int num_blocks) {
    std::vector<int32_t> tokens(num_blocks * kBlockSize);
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = 1000 * chain + static_cast<int32_t>(i);
    }
    return tokens;
  }
  static uint8_t value_of(int chain, int block, int64_t at) {
    return static_cast<uint8_t>(31 * chain + 7 * block + at % 251);
  }

  // A chain of blocks is computed, copied to the host and let go of.
  void add_chain(int chain, int num_blocks) {
    const std::vector<int32_t> all = tokens(chain, num_blocks);
    std::vector<int32_t> ids(num_blocks);
    ASSERT_TRUE(pool.allocate(0, ids).ok());
    int32_t node = scope;
    int32_t host_node = host_scope;
    for (int b = 0; b < num_blocks; ++b) {
      for (int64_t at = 0; at < kBlockBytes; ++at) bytes(ids[b])[at] = value_of(chain, b, at);
      const auto one = std::span(all).subspan(b * kBlockSize, kBlockSize);
      node = index.insert(node, one);
      ASSERT_TRUE(index.attach(node, 0, BlockKind::kPacked, ids[b]).ok());
      host_node = host->nodes().insert(host_node, one);
      host->store(host_node, 0, BlockKind::kPacked, ids[b]);
    }
    drain();
    for (int b = num_blocks; b-- > 0;) ASSERT_TRUE(pool.release(0, ids[b]).ok());
  }
  void drain() {
    host->wait_for_all();
    host->collect();
  }
  // Brings a chain back; returns how many of its blocks the first tier has then.
  int64_t bring_back(int chain, int num_blocks) {
    const std::vector<int32_t> all = tokens(chain, num_blocks);
    const TierScope from{host.get(), host_scope};
    Promotion promotion =
        promote({&pool, &index, &shape}, scope, std::span(&from, 1), all, num_blocks);
    wait(promotion);
    host->collect();
    const cache::PrefixMatch match = index.match(scope, all, num_blocks);
    for (int64_t b = 0; b < match.num_blocks(); ++b) {
      const int32_t id = index.block_of(match.nodes[b], 0, BlockKind::kPacked);
      for (int64_t at = 0; at < kBlockBytes; ++at) {
        EXPECT_EQ(bytes(id)[at], value_of(chain, static_cast<int>(b), at));
        if (testing::Test::HasFailure()) return -1;
      }
    }
    const int64_t num_found = match.num_blocks();
    release_promotion({&pool, &index, &shape}, promotion);
    return num_found;
  }
  // The host's copy of a block of a chain.
  uint8_t* host_bytes(int chain, int block) {
    const auto all = tokens(chain, block + 1);
    const cache::PrefixMatch match = host->nodes().match(host_scope, all, block + 1);
    EXPECT_EQ(match.num_blocks(), block + 1);
    return host->block_bytes(0, host->nodes().block_of(match.nodes[block], 0, BlockKind::kPacked));
  }
};

class HostTierBlocks : public testing::TestWithParam<std::string> {};  // the folder, or none
INSTANTIATE_TEST_SUITE_P(InMemoryAndFiles, HostTierBlocks,
                         testing::Values(std::string(), testing::TempDir()),
                         [](const auto& one) { return one.param.empty() ? "Memory" : "Files"; });

TEST_P(HostTierBlocks, ComeBackAsTheyWent) {
  Tiers tiers(GetParam(), 6, 20);
  tiers.add_chain(1, 5);
  tiers.add_chain(2, 6);  // evicts the first
  EXPECT_EQ(tiers.index.match(tiers.scope, Tiers::tokens(1, 5), 5).num_blocks(), 0);
  EXPECT_EQ(tiers.bring_back(1, 5), 5);
  EXPECT_EQ(tiers.host->snapshot().num_loaded, 5);
  EXPECT_EQ(tiers.pool.snapshot(0).num_active, 0);
}

TEST_P(HostTierBlocks, AFlippedBitAnywhereIsAMissAndNeverData) {
  for (int64_t at : {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{4096}, kBlockBytes - 1}) {
    for (int bit : {0, 7}) {
      Tiers tiers(GetParam(), 6, 20);
      tiers.add_chain(1, 5);
      tiers.add_chain(2, 6);
      tiers.host_bytes(1, 2)[at] ^= static_cast<uint8_t>(1 << bit);
      EXPECT_EQ(tiers.bring_back(1, 5), 2) << "byte " << at;
      const HostTierSnapshot seen = tiers.host->snapshot();
      EXPECT_EQ(seen.num_bad, 1);
      EXPECT_EQ(seen.num_loaded, 4) << "those behind it came back whole";
      EXPECT_NE(seen.last_problem.find("checksum"), std::string::npos) << seen.last_problem;
      EXPECT_EQ(tiers.pool.snapshot(0).num_active, 0);
      // It is gone, not asked for again.
      EXPECT_EQ(tiers.bring_back(1, 5), 2);
      EXPECT_EQ(tiers.host->snapshot().num_bad, 1);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_P(HostTierBlocks, OnlyAsManyComeBackAsThereIsRoomFor) {
  Tiers tiers(GetParam(), 6, 20);
  tiers.add_chain(1, 6);
  tiers.add_chain(2, 6);
  std::vector<int32_t> in_use(4);
  ASSERT_TRUE(tiers.pool.allocate(0, in_use).ok());
  EXPECT_EQ(tiers.bring_back(1, 6), 2);
  EXPECT_EQ(tiers.pool.snapshot(0).num_active, 4);
}

TEST_P(HostTierBlocks, WhatIsThereAlreadyIsNotEvictedForTheRest) {
  Tiers tiers(GetParam(), 6, 20);
  tiers.add_chain(1, 6);
  std::vector<int32_t> ids(3);
  ASSERT_TRUE(tiers.pool.allocate(0, ids).ok());  // the chain's last three go
  for (int32_t id : ids) ASSERT_TRUE(tiers.pool.release(0, id).ok());
  EXPECT_EQ(tiers.bring_back(1, 6), 6);
  EXPECT_EQ(tiers.host->snapshot().num_loaded, 3);
}

TEST_P(HostTierBlocks, AFullTierEvictsAndAnswersWithWhatItHas) {
  Tiers tiers(GetParam(), 6, 8);
  tiers.add_chain(1, 6);
  tiers.add_chain(2, 6);
  tiers.add_chain(3, 6);
  EXPECT_LE(tiers.host->snapshot().held_bytes, 8 * kBlockBytes);
  EXPECT_EQ(tiers.bring_back(1, 6), 0);
  EXPECT_EQ(tiers.bring_back(2, 6), 2) << "chains go from their ends";
}

TEST_P(HostTierBlocks, ATierOfOneBlockDropsWhatDoesNotFit) {
  Tiers tiers(GetParam(), 6, 1);
  tiers.add_chain(1, 6);
  EXPECT_GT(tiers.host->snapshot().num_dropped + tiers.host->snapshot().classes[0].num_evicted, 0);
  tiers.add_chain(2, 6);
  EXPECT_LE(tiers.bring_back(1, 6), 1);
}

TEST_P(HostTierBlocks, ABudgetSmallerThanABlockIsRefused) {
  Tiers tiers(GetParam(), 2, 1);
  const auto refused =
      HostTier::create(tiers.pool, tiers.index, tiers.shape, "", cache::HashAlgorithm::kXxh3,
                       config_of(GetParam(), kBlockBytes - 1));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
}

TEST_P(HostTierBlocks, AreUnderWayWhileTheQueueHasThem) {
  Tiers tiers(GetParam(), 6, 20);
  tiers.add_chain(1, 4);
  EXPECT_TRUE(tiers.host->is_idle());
  const HostTierSnapshot seen = tiers.host->snapshot();
  EXPECT_EQ(seen.stores_queued + seen.loads_queued, 0);
  EXPECT_EQ(seen.num_stored, 4);
  EXPECT_EQ(seen.held_bytes, 4 * kBlockBytes);
}

// ---- layer by layer

// Lets through as many transfers as it is told to.
class Gate {
 public:
  void let_through(int count) {
    {
      const std::lock_guard lock(mutex_);
      num_allowed_ += count;
    }
    opened_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return num_allowed_ > 0; });
    --num_allowed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  int num_allowed_ = 0;
};

class GatedCopier final : public BlockCopier {
 public:
  explicit GatedCopier(Gate& gate) : gate_(gate), inner_(host_link().copier) {}
  int64_t batch_bytes() const override { return 1; }  // one transfer
  int max_started() const override { return 1; }
  void start(Direction, std::span<const BlockTransfer>) override {}
  void finish(Direction direction, std::span<const BlockTransfer> transfers,
              std::span<CopiedBlock> results) override {
    gate_.pass();
    inner_->finish(direction, transfers, results);
  }

 private:
  Gate& gate_;
  std::unique_ptr<BlockCopier> inner_;
};

// Two layers, and a chain of three blocks that only the host tier has.
struct TiersByLayer {
  static constexpr int64_t kFirstLayerBytes = 1000;
  static constexpr int kNumBlocks = 3;
  BlockParts parts{{{kFirstLayerBytes, kBlockBytes}}, {{0, 0}, {0, 1}}};
  Gate gate;
  Tiers tiers;
  std::vector<int32_t> tokens = Tiers::tokens(1, kNumBlocks);
  Promotion promotion;

  explicit TiersByLayer(const std::string& folder)
      : tiers(folder, kNumBlocks, 20, {&cache::host_memory(), std::make_unique<GatedCopier>(gate)},
              parts) {
    gate.let_through(2 * kNumBlocks);
    for (int chain : {1, 2}) tiers.add_chain(chain, kNumBlocks);
  }
  FirstTier first() { return {&tiers.pool, &tiers.index, &tiers.shape, &parts}; }
  void start() {
    const TierScope from{tiers.host.get(), tiers.host_scope};
    promotion = promote(first(), tiers.scope, std::span(&from, 1), tokens, kNumBlocks, {},
                        LoadOrder::kLayerByLayer);
  }
  int64_t num_found(const cache::ComingBlocks& coming = {}) {
    return tiers.index.match(tiers.scope, tokens, kNumBlocks, coming).num_blocks();
  }
  // Bytes [begin, end) of every block of the chain that are not there.
  int64_t num_missing(int64_t begin, int64_t end) {
    const cache::PrefixMatch match =
        tiers.index.match(tiers.scope, tokens, kNumBlocks, promotion.coming);
    int64_t count = 0;
    for (int b = 0; b < kNumBlocks; ++b) {
      const int32_t id = promotion.coming.find(match.nodes[b], 0, BlockKind::kPacked);
      for (int64_t at = begin; at < end; ++at) {
        count += tiers.bytes(id)[at] == Tiers::value_of(1, b, at) ? 0 : 1;
      }
    }
    return count;
  }
};

TEST_P(HostTierBlocks, AreThereLayerByLayer) {
  TiersByLayer by_layer(GetParam());
  by_layer.start();
  EXPECT_EQ(num_layers(by_layer.promotion), 2);
  EXPECT_FALSE(is_layer_there(by_layer.promotion, 0));
  by_layer.gate.let_through(TiersByLayer::kNumBlocks);  // the first layer of each
  wait_for_layer(by_layer.promotion, 0);
  EXPECT_TRUE(is_layer_there(by_layer.promotion, 0));
  EXPECT_FALSE(is_layer_there(by_layer.promotion, 1));
  by_layer.tiers.host->collect();
  EXPECT_EQ(by_layer.num_missing(0, TiersByLayer::kFirstLayerBytes), 0);
  EXPECT_EQ(by_layer.num_found(), 0) << "nobody else finds a block that is not whole";
  EXPECT_EQ(by_layer.num_found(by_layer.promotion.coming), 3);

  by_layer.gate.let_through(TiersByLayer::kNumBlocks);
  wait_for_layer(by_layer.promotion, 1);
  by_layer.tiers.host->collect();
  EXPECT_EQ(by_layer.num_missing(0, kBlockBytes), 0);
  EXPECT_EQ(by_layer.num_found(), 3);
  EXPECT_EQ(*by_layer.promotion.problem, "");
  EXPECT_EQ(by_layer.tiers.host->snapshot().num_loaded, 3) << "blocks, not their parts";
  release_promotion(by_layer.first(), by_layer.promotion);
  EXPECT_TRUE(by_layer.tiers.host->is_idle());
}

TEST(HostTierByLayer, ALayerThatHasChangedIsAMissOfItsBlock) {
  TiersByLayer by_layer("");
  by_layer.tiers.host_bytes(1, 1)[TiersByLayer::kFirstLayerBytes + 5] ^= 1;
  by_layer.start();
  by_layer.gate.let_through(2 * TiersByLayer::kNumBlocks);
  wait_for_layer(by_layer.promotion, 1);
  by_layer.tiers.host->collect();
  EXPECT_THAT(*by_layer.promotion.problem, testing::HasSubstr("has another checksum"));
  EXPECT_EQ(by_layer.num_found(), 1);
  const HostTierSnapshot seen = by_layer.tiers.host->snapshot();
  EXPECT_EQ(seen.num_bad, 1);
  EXPECT_EQ(seen.num_loaded, 2);
  release_promotion(by_layer.first(), by_layer.promotion);
}

// Blocks that came in parts move down, and come back whole, with the checksums of their parts.
TEST(HostTierByLayer, WholeBlocksHaveTheChecksumOfTheirParts) {
  TiersByLayer by_layer("");
  by_layer.gate.let_through(2 * TiersByLayer::kNumBlocks);
  EXPECT_EQ(by_layer.tiers.bring_back(1, TiersByLayer::kNumBlocks), 3);
  EXPECT_EQ(by_layer.tiers.host->snapshot().num_bad, 0);
}

TEST(TransferQueue, CopiesWithTheChecksumOfWhatItCopied) {
  TransferQueue queue(host_link().copier);
  std::vector<uint8_t> from(100'000), to(100'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * i);
  const auto group = std::make_shared<TransferGroup>();
  queue.push(
      {Direction::kLoad, {from.data(), to.data(), static_cast<int64_t>(from.size())}, 7, group});
  queue.wait(*group);
  EXPECT_TRUE(queue.is_done(*group));
  std::vector<FinishedTransfer> finished;
  queue.drain_finished(finished);
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0].tag, 7);
  EXPECT_TRUE(finished[0].block.is_copied);
  EXPECT_EQ(finished[0].block.checksum, cache::checksum(from));
  EXPECT_EQ(to, from);
}

// A copier that takes three blocks of 64 bytes at once and two batches, and refuses what it is told
// to.
class BatchingCopier final : public BlockCopier {
 public:
  BatchingCopier(std::vector<const BlockTransfer*>& order, bool refuses)
      : order_(order), refuses_(refuses) {}
  int64_t batch_bytes() const override { return 3 * 64; }
  int max_started() const override { return 2; }
  void start(Direction, std::span<const BlockTransfer> transfers) override {
    const std::lock_guard lock(mutex_);
    EXPECT_LE(transfers.size(), 3u);
    EXPECT_LT(started_.size(), 2u);
    started_.push_back(transfers.data());
  }
  void finish(Direction, std::span<const BlockTransfer> transfers,
              std::span<CopiedBlock> results) override {
    const std::lock_guard lock(mutex_);
    ASSERT_FALSE(started_.empty());
    EXPECT_EQ(transfers.data(), started_.front()) << "in the order in which they started";
    started_.erase(started_.begin());
    order_.push_back(transfers.data());
    for (CopiedBlock& result : results) result.is_copied = !refuses_;
  }

 private:
  std::mutex mutex_;  // one thread starts, another one finishes
  std::vector<const BlockTransfer*>& order_;
  std::vector<const BlockTransfer*> started_;
  bool refuses_;
};

TEST(TransferQueue, ACopyThatIsRefusedIsReported) {
  std::vector<const BlockTransfer*> order;
  TransferQueue queue(std::make_unique<BatchingCopier>(order, true));
  queue.push({Direction::kLoad, {nullptr, nullptr, 64}, 1, nullptr});
  queue.wait_for_all();
  std::vector<FinishedTransfer> finished;
  queue.drain_finished(finished);
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_FALSE(finished[0].block.is_copied);
}

TEST(TransferQueue, GivesACopierAsManyBlocksAsItLikesAndFinishesEachOnce) {
  std::vector<const BlockTransfer*> order;
  TransferQueue queue(std::make_unique<BatchingCopier>(order, false));
  const auto group = std::make_shared<TransferGroup>();
  constexpr int kNumBlocks = 100;
  for (int tag = 0; tag < kNumBlocks; ++tag) {
    queue.push(
        {tag % 2 == 0 ? Direction::kStore : Direction::kLoad, {nullptr, nullptr, 64}, tag, group});
  }
  queue.wait(*group);
  std::vector<FinishedTransfer> finished;
  queue.drain_finished(finished);
  std::set<int64_t> tags;
  for (const FinishedTransfer& one : finished) {
    EXPECT_EQ(one.direction, one.tag % 2 == 0 ? Direction::kStore : Direction::kLoad);
    tags.insert(one.tag);
  }
  EXPECT_EQ(finished.size(), static_cast<size_t>(kNumBlocks));
  EXPECT_EQ(tags.size(), finished.size());
  EXPECT_GE(order.size(), static_cast<size_t>(kNumBlocks) / 3);
}

}  // namespace
}  // namespace kvx::tier::tier_host_tier_test

// Tiers against a model: sequences of a small language come and go in a pool that is too small,
// with tiers that are too small behind it, whose bytes are flipped now and then. What a sequence
// begins with is always what its tokens say, whatever was evicted, copied or damaged.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/cache/random_history.hpp"
#include "tier/chain/tier_chain.hpp"

namespace kvx::tier::tier_model_test {
namespace {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;
using cache::RandomHistory;

constexpr int64_t kBlockBytes = 64;
constexpr int64_t kMaxBlocks = 12;

// A block of one token holds the stamp of all tokens up to it, again and again.
uint64_t stamp_of(std::span<const int32_t> tokens) {
  uint64_t stamp = 14695981039346656037u;
  for (int32_t token : tokens) stamp = (stamp ^ static_cast<uint64_t>(token)) * 1099511628211u;
  return stamp;
}

class SwapHistory : public cache::EvictionListener {
 public:
  SwapHistory(cache::EvictionKind kind, uint64_t seed, std::span<const TierConfig> tiers)
      : random_(seed),
        pool_(make_pool(kind)),
        index_(cache::PrefixIndex::create(pool_, shape_, "", cache::HashAlgorithm::kXxh3).value()),
        chain_(TierChain::create({&pool_, &index_, &shape_}, "", cache::HashAlgorithm::kXxh3, tiers,
                                 [] { return Result<TierLink>(host_link()); })
                   .value()),
        scope_(index_.pin_scope({}).value()) {
    EXPECT_TRUE(chain_->begin(way_, {}).ok());
    pool_.set_eviction_listener(this);
  }

  void on_evict(int block_class, int32_t id) override { index_.on_evict(block_class, id); }

  // One sequence: its beginning from the tiers, the rest computed, all of it copied out.
  void run() {
    std::vector<int32_t> tokens(random_.between(1, kMaxBlocks));
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_.between(0, 2) / 2);
    const auto num_wanted = static_cast<int64_t>(tokens.size());
    Promotion promotion = chain_->promote(scope_, way_, tokens, num_wanted);
    wait(promotion);
    chain_->collect();
    cache::Sequence sequence = cache::Sequence::create(shape_).value();
    int32_t node = adopt(sequence, tokens);
    num_hits += sequence.num_tokens();
    chain_->release(promotion);
    Way way;
    ASSERT_TRUE(chain_->begin(way, {}).ok());
    const int64_t num_cached = sequence.num_tokens();
    if (num_cached < num_wanted) {
      wait_for_all();  // blocks on their way out are free when they are there
      ASSERT_TRUE(sequence.append(pool_, num_wanted - num_cached).ok());
    }
    for (int64_t b = 0; b < num_wanted; ++b) {
      const auto one = std::span<const int32_t>(tokens).subspan(b, 1);
      const int32_t id = sequence.table(0)[b];
      if (b >= num_cached) {
        write(id, stamp_of(std::span(tokens).first(b + 1)));
        node = index_.insert(node, one);
        ASSERT_NE(node, kNoNode);
        ASSERT_TRUE(index_.attach(node, 0, BlockKind::kPacked, id).ok());
      }
      chain_->follow(way, tokens, b + 1);
      ASSERT_EQ(std::ssize(way.tiers.front().nodes), b + 1);
      chain_->store(way, b, 0, BlockKind::kPacked, id);
    }
    ASSERT_TRUE(sequence.clear(pool_).ok());
    chain_->end(way);
  }

  // A bit of a block that a tier holds: of this one's checksum it is the end.
  void damage() {
    wait_for_all();
    HostTier& tier = chain_->tier(static_cast<int>(random_.between(0, chain_->num_tiers() - 1)));
    std::vector<int32_t> held;
    tier.nodes().for_each_node([&](int32_t node) {
      const int32_t id = tier.nodes().block_of(node, 0, BlockKind::kPacked);
      if (id != kNoBlock) held.push_back(id);
    });
    if (held.empty()) return;
    const int32_t id = held[random_.between(0, static_cast<int64_t>(held.size()) - 1)];
    tier.block_bytes(0, id)[random_.between(0, kBlockBytes - 1)] ^=
        static_cast<uint8_t>(1 << random_.between(0, 7));
  }

  // Nothing is in use, and every block of every pool is in one place.
  void check() {
    wait_for_all();
    ASSERT_EQ(pool_.snapshot(0).num_active, 0);
    for (const HostTierSnapshot& tier : chain_->snapshot()) {
      ASSERT_EQ(tier.classes[0].num_active, 0) << tier.classes[0].name;
    }
    ASSERT_EQ(pool_.num_free(0) + pool_.num_cached(0), pool_.num_blocks(0));
    ASSERT_TRUE(chain_->is_idle());
  }

  HostTierSnapshot tier(size_t i) const { return chain_->snapshot()[i]; }
  int64_t num_hits = 0;

 private:
  // What finishes may send more on its way.
  void wait_for_all() {
    do {
      chain_->wait_for_all();
      chain_->collect();
    } while (!chain_->is_idle());
  }
  static cache::BlockPool make_pool(cache::EvictionKind kind) {
    const cache::BlockClassSpec spec{"blocks", 2 * kMaxBlocks, {kBlockBytes}};
    return cache::BlockPool::create(cache::host_memory(), std::span(&spec, 1), {kind, true})
        .value();
  }
  uint8_t* place(int32_t id) { return pool_.region(0) + id * kBlockBytes; }
  void write(int32_t id, uint64_t stamp) {
    for (int64_t at = 0; at < kBlockBytes; at += 8) std::memcpy(place(id) + at, &stamp, 8);
  }

  // Begins with what is cached, whose bytes must be right; returns its last node.
  int32_t adopt(cache::Sequence& sequence, std::span<const int32_t> tokens) {
    const cache::PrefixMatch match = index_.match(scope_, tokens, kMaxBlocks);
    std::vector<int32_t> ids;
    for (int32_t node : match.nodes) ids.push_back(index_.block_of(node, 0, BlockKind::kPacked));
    for (size_t b = 0; b < ids.size(); ++b) {
      const uint64_t stamp = stamp_of(tokens.first(b + 1));
      for (int64_t at = 0; at < kBlockBytes; at += 8) {
        EXPECT_EQ(std::memcmp(place(ids[b]) + at, &stamp, 8), 0) << "block " << b;
      }
    }
    const cache::GroupPrefix prefix{ids, 0, match.num_blocks()};
    EXPECT_TRUE(sequence.adopt(pool_, match.num_blocks(), std::span(&prefix, 1)).ok());
    return match.nodes.empty() ? scope_ : match.nodes.back();
  }

  RandomHistory random_;
  cache::SequenceShape shape_{1, kMaxBlocks, {{0, 0, {}, 0}}};
  cache::BlockPool pool_;
  cache::PrefixIndex index_;
  std::unique_ptr<TierChain> chain_;
  int32_t scope_;
  Way way_;
};

// A chain of tiers, each with room for fewer blocks than the language has.
void run_history(cache::EvictionKind kind, std::span<const TierConfig> tiers, int64_t num_steps) {
  SwapHistory history(kind, 1, tiers);
  for (int64_t i = 0; i < num_steps; ++i) {
    history.run();
    if (i % 20 == 0) history.damage();
    if (i % 10 == 0) history.check();
    if (testing::Test::HasFailure()) FAIL() << "sequence " << i;
  }
  EXPECT_GT(history.num_hits, num_steps);
  if (tiers.size() == 1) {
    EXPECT_GT(history.tier(0).num_loaded, num_steps / 20);
  }
  int64_t num_bad = 0;
  for (size_t i = 0; i < tiers.size(); ++i) {  // what goes where depends on the threads' speed
    num_bad += history.tier(i).num_bad;
    EXPECT_GT(history.tier(i).num_loaded, 0);
  }
  EXPECT_GT(num_bad, num_steps / 400);
  for (size_t i = 1; i < tiers.size(); ++i) {
    EXPECT_GT(history.tier(i - 1).num_moved_down, 0);
  }
}

TEST(TierModel, ServesWhatTheTokensSayWhateverHappens) {
  using enum cache::EvictionKind;
  const std::string folder = testing::TempDir();
  const int64_t num_steps = cache::num_operations(1500, 500'000);
  for (const cache::EvictionKind kind : {kLru, kLfu, k2Q}) {
    SCOPED_TRACE(name_of(kind));
    const TierConfig host{TierKind::kHost, 60 * kBlockBytes, "", kind};
    const TierConfig small{TierKind::kHost, 20 * kBlockBytes, "", kind};
    const TierConfig files{TierKind::kDisk, 60 * kBlockBytes, folder, kind};
    for (const std::vector<TierConfig>& tiers :
         {std::vector{host}, {files}, {small, files}, {small, small, files}, {files, small}}) {
      SCOPED_TRACE(fmt::format("{} tiers", tiers.size()));
      run_history(kind, tiers, num_steps);
      if (testing::Test::HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace kvx::tier::tier_model_test

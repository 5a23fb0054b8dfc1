// A host tier behind a pool in a GPU's memory: bytes pass the bus and come back whole, or they are
// a miss.
#include "tier/host_tier.hpp"

#include "tests/gpu/gpu.hpp"

namespace kvx::tests {
namespace {

using cache::BlockKind;
using tier::HostTier;

constexpr int kNumBlocks = 5;

// A chain of blocks of one token, computed, copied to the host and evicted.
struct Tiers : cache::EvictionListener {
  int64_t block_bytes;
  std::unique_ptr<cache::Memory> pinned = cache::pinned_memory(0).value();
  cache::SequenceShape shape{1, kNumBlocks, {{0, 0, {}, 0}}};
  cache::BlockPool pool;
  cache::PrefixIndex index;
  std::unique_ptr<HostTier> host;
  int32_t scope;
  int32_t host_scope;
  std::vector<int32_t> tokens = {0, 1, 2, 3, 4};

  Tiers(cache::Memory& memory, device::CudaStream stream, int64_t bytes, int64_t num_host_blocks)
      : block_bytes(bytes),
        pool(make_pool(memory, bytes)),
        index(cache::PrefixIndex::create(pool, shape, "", cache::HashAlgorithm::kXxh3).value()),
        host(HostTier::create(pool, index, shape, "", cache::HashAlgorithm::kXxh3,
                              {.budget_bytes = num_host_blocks * bytes},
                              tier::cuda_link(0, stream, *pinned).value())
                 .value()),
        scope(index.pin_scope({}).value()),
        host_scope(host->nodes().pin_scope({}).value()) {
    pool.set_eviction_listener(this);
    std::vector<int32_t> ids(kNumBlocks);
    EXPECT_TRUE(pool.allocate(0, ids).ok());
    int32_t node = scope;
    int32_t host_node = host_scope;
    for (int b = 0; b < kNumBlocks; ++b) {
      const std::vector<uint8_t> block = bytes_of_block(b);
      EXPECT_TRUE(device::cuda_copy(on_device(ids[b]), block.data(), block_bytes).ok());
      node = index.insert(node, std::span(tokens).subspan(b, 1));
      EXPECT_TRUE(index.attach(node, 0, BlockKind::kPacked, ids[b]).ok());
      host_node = host->nodes().insert(host_node, std::span(tokens).subspan(b, 1));
      host->store(host_node, 0, BlockKind::kPacked, ids[b]);
    }
    host->wait_for_all();
    host->collect();
    for (int b = kNumBlocks; b-- > 0;) EXPECT_TRUE(pool.release(0, ids[b]).ok());
    EXPECT_EQ(pool.evict(0, kNumBlocks), kNumBlocks);
    EXPECT_TRUE(device::cuda_fill(pool.region(0), 0xee, kNumBlocks * block_bytes).ok());
  }
  static cache::BlockPool make_pool(cache::Memory& memory, int64_t bytes) {
    const cache::BlockClassSpec spec{"blocks", kNumBlocks, {bytes}};
    return cache::BlockPool::create(memory, std::span(&spec, 1)).value();
  }
  void on_evict(int block_class, int32_t id) override { index.on_evict(block_class, id); }

  uint8_t* on_device(int32_t id) const { return pool.region(0) + id * block_bytes; }
  std::vector<uint8_t> bytes_of_block(int block) const {
    std::vector<uint8_t> bytes(static_cast<size_t>(block_bytes));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(i * 37 + i / 251 + static_cast<size_t>(block) * 11);
    }
    return bytes;
  }
  uint8_t* on_host(int block) const {
    const cache::PrefixMatch match = host->nodes().match(host_scope, tokens, block + 1);
    EXPECT_EQ(match.num_blocks(), block + 1);
    return host->block_bytes(0, host->nodes().block_of(match.nodes[block], 0, BlockKind::kPacked));
  }
  // How many blocks of the chain the device has then; all of them are right.
  int64_t bring_back() {
    const tier::TierScope from{host.get(), host_scope};
    tier::Promotion promotion =
        tier::promote({&pool, &index, &shape}, scope, std::span(&from, 1), tokens, kNumBlocks);
    tier::wait(promotion);
    host->collect();
    const cache::PrefixMatch match = index.match(scope, tokens, kNumBlocks);
    std::vector<uint8_t> found(static_cast<size_t>(block_bytes));
    for (int64_t b = 0; b < match.num_blocks(); ++b) {
      const int32_t id = index.block_of(match.nodes[b], 0, BlockKind::kPacked);
      EXPECT_TRUE(device::cuda_copy(found.data(), on_device(id), block_bytes).ok());
      EXPECT_EQ(found, bytes_of_block(static_cast<int>(b))) << "block " << b;
    }
    tier::release_promotion({&pool, &index, &shape}, promotion);
    return match.num_blocks();
  }
};

class GpuHostTier : public GpuTest {};

// Larger blocks are hashed in block copies of 256 KiB.
constexpr int64_t kSizes[] = {64, 4096 + 16, 256 << 10, (600 << 10) + 48};

TEST_F(GpuHostTier, BlocksComeBackAsTheyWent) {
  for (const int64_t block_bytes : kSizes) {
    SCOPED_TRACE(block_bytes);
    Tiers one{memory(), context().stream, block_bytes, 2 * kNumBlocks};
    EXPECT_EQ(one.bring_back(), kNumBlocks);
    EXPECT_EQ(one.host->snapshot().num_loaded, kNumBlocks);
    EXPECT_EQ(one.host->snapshot().num_bad, 0);
  }
}

TEST_F(GpuHostTier, AByteThatFlippedInPinnedMemoryIsACountedMissAndNeverData) {
  for (const int64_t block_bytes : kSizes) {
    for (const int64_t at : {int64_t{0}, block_bytes / 2, block_bytes - 1}) {
      SCOPED_TRACE(fmt::format("byte {} of {}", at, block_bytes));
      Tiers one{memory(), context().stream, block_bytes, 2 * kNumBlocks};
      one.on_host(2)[at] ^= 0x10;
      EXPECT_EQ(one.bring_back(), 2) << "the chain ends before it";
      const tier::HostTierSnapshot seen = one.host->snapshot();
      EXPECT_EQ(seen.num_bad, 1);
      EXPECT_EQ(seen.num_loaded, kNumBlocks - 1);
      EXPECT_NE(seen.last_problem.find("checksum"), std::string::npos) << seen.last_problem;
      EXPECT_EQ(one.bring_back(), 2) << "it is gone, not asked for again";
      EXPECT_EQ(one.host->snapshot().num_bad, 1);
    }
  }
}

TEST_F(GpuHostTier, OfOneBlockKeepsOne) {
  Tiers one{memory(), context().stream, 4096, 1};
  EXPECT_EQ(one.host->snapshot().allocated_bytes, 4096);
  EXPECT_LE(one.bring_back(), 1);
  EXPECT_EQ(one.host->snapshot().num_bad, 0);
}

TEST_F(GpuHostTier, SmallerThanABlockIsRefused) {
  Tiers one{memory(), context().stream, 4096, 1};
  const auto refused = HostTier::create(one.pool, one.index, one.shape, "",
                                        cache::HashAlgorithm::kXxh3, {.budget_bytes = 4095},
                                        tier::cuda_link(0, context().stream, *one.pinned).value());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kOutOfRange);
  EXPECT_NE(refused.error().message.find("host tier is 4095"), std::string::npos);
}

}  // namespace
}  // namespace kvx::tests

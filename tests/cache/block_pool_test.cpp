// BlockPool: one id, one block, one count.
#include "cache/pool/block_pool.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <limits>

namespace kvx::cache::block_pool_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kPacked = 0;
constexpr int kFullPrecision = 1;

// Four packed blocks in two regions (codes, scales), two full-precision ones in one.
BlockPool small_pool() {
  const std::array<BlockClassSpec, 2> classes = {BlockClassSpec{"packed", 4, {256, 64}},
                                                 BlockClassSpec{"full_precision", 2, {1024}}};
  Result<BlockPool> pool = BlockPool::create(host_memory(), classes);
  EXPECT_TRUE(pool.ok());
  return std::move(pool).value();
}

int32_t allocate_one(BlockPool& pool, int block_class) {
  int32_t id = kNoBlock;
  const Status status = pool.allocate(block_class, std::span(&id, 1));
  EXPECT_TRUE(status.ok());
  return id;
}

std::string refusal_of(const BlockClassSpec& spec) {
  const auto pool = BlockPool::create(host_memory(), std::span(&spec, 1));
  return pool.ok() ? "accepted" : pool.error().message;
}

TEST(BlockPool, HandsOutDenseIdsOfEachClassFromZero) {
  BlockPool pool = small_pool();
  std::array<int32_t, 4> packed;
  std::array<int32_t, 2> full_precision;
  ASSERT_TRUE(pool.allocate(kPacked, packed).ok());
  ASSERT_TRUE(pool.allocate(kFullPrecision, full_precision).ok());
  EXPECT_THAT(packed, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(full_precision, ElementsAre(0, 1));
}

TEST(BlockPool, OneIdNamesTheBlockInEveryRegionOfItsClass) {
  const BlockPool pool = small_pool();
  ASSERT_EQ(pool.num_regions(kPacked), 2);
  EXPECT_EQ(pool.block_bytes(kPacked, 0), 256);
  EXPECT_EQ(pool.block_bytes(kPacked, 1), 64);
  EXPECT_EQ(pool.block_bytes(kFullPrecision), 1024);
  // The last byte of the last block of every region is there, and zero.
  EXPECT_EQ(pool.region(kPacked, 0)[4 * 256 - 1], 0);
  EXPECT_EQ(pool.region(kPacked, 1)[4 * 64 - 1], 0);
  EXPECT_EQ(pool.region(kFullPrecision)[2 * 1024 - 1], 0);
}

TEST(BlockPool, CountsTheBytesOfEveryRegion) {
  EXPECT_EQ(small_pool().allocated_bytes(), 4 * (256 + 64) + 2 * 1024);
}

TEST(BlockPool, TakesAllBlocksOrNone) {
  BlockPool pool = small_pool();
  allocate_one(pool, kPacked);
  std::array<int32_t, 4> ids;
  ids.fill(99);
  const Status status = pool.allocate(kPacked, ids);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
  EXPECT_EQ(status.error().message, "class 'packed' has 3 free blocks of 4; 4 are wanted");
  EXPECT_THAT(ids, ElementsAre(99, 99, 99, 99));
  EXPECT_EQ(pool.num_free(kPacked), 3);
}

TEST(BlockPool, AllocatingNothingAlwaysWorks) {
  BlockPool pool = small_pool();
  EXPECT_TRUE(pool.allocate(kPacked, {}).ok());
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(BlockPool, ReturnsABlockWhenItsLastUserLeaves) {
  BlockPool pool = small_pool();
  const int32_t id = allocate_one(pool, kPacked);
  ASSERT_TRUE(pool.retain(kPacked, id).ok());
  ASSERT_TRUE(pool.release(kPacked, id).ok());
  EXPECT_EQ(pool.use_count(kPacked, id), 1);
  EXPECT_EQ(pool.num_used(kPacked), 1);
  ASSERT_TRUE(pool.release(kPacked, id).ok());
  EXPECT_EQ(pool.use_count(kPacked, id), 0);
  EXPECT_EQ(pool.num_used(kPacked), 0);
}

TEST(BlockPool, TakesTheBlockThatWasFreedLastFirst) {
  BlockPool pool = small_pool();
  std::array<int32_t, 3> ids;
  ASSERT_TRUE(pool.allocate(kPacked, ids).ok());
  ASSERT_TRUE(pool.release(kPacked, ids[0]).ok());
  ASSERT_TRUE(pool.release(kPacked, ids[2]).ok());
  EXPECT_EQ(allocate_one(pool, kPacked), ids[2]);
  EXPECT_EQ(allocate_one(pool, kPacked), ids[0]);
}

TEST(BlockPool, CountsAGenerationUpOnlyWhenTheBlockIsFreed) {
  BlockPool pool = small_pool();
  const int32_t id = allocate_one(pool, kFullPrecision);
  const uint32_t before = pool.generation(kFullPrecision, id);
  ASSERT_TRUE(pool.retain(kFullPrecision, id).ok());
  ASSERT_TRUE(pool.release(kFullPrecision, id).ok());
  EXPECT_EQ(pool.generation(kFullPrecision, id), before);
  ASSERT_TRUE(pool.release(kFullPrecision, id).ok());
  EXPECT_EQ(pool.generation(kFullPrecision, id), before + 1);
  EXPECT_EQ(allocate_one(pool, kFullPrecision), id);
  EXPECT_EQ(pool.generation(kFullPrecision, id), before + 1);
}

TEST(BlockPool, RefusesToFreeOrShareAFreeBlock) {
  BlockPool pool = small_pool();
  const int32_t id = allocate_one(pool, kPacked);
  ASSERT_TRUE(pool.release(kPacked, id).ok());
  const Status released = pool.release(kPacked, id);
  ASSERT_FALSE(released.ok());
  EXPECT_EQ(released.error().message, "block 0 of class 'packed' is free; expected a block in use");
  const Status retained = pool.retain(kPacked, id);
  ASSERT_FALSE(retained.ok());
  EXPECT_EQ(retained.error().message,
            "block 0 of class 'packed' is free; expected one in use or cached");
  EXPECT_EQ(pool.num_free(kPacked), 4);
}

TEST(BlockPool, RefusesIdsThatItDoesNotHave) {
  BlockPool pool = small_pool();
  for (int32_t id : {-1, 4, std::numeric_limits<int32_t>::max()}) {
    const Status status = pool.release(kPacked, id);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, ErrorCode::kOutOfRange);
    EXPECT_EQ(status.error().message,
              fmt::format("block {} of class 'packed'; expected 0 to 3", id));
  }
}

TEST(BlockPool, AClassMayHaveNoBlocks) {
  const BlockClassSpec spec{"full_precision", 0, {64}};
  auto pool = BlockPool::create(host_memory(), std::span(&spec, 1));
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool.value().region(0), nullptr);
  int32_t id;
  EXPECT_FALSE(pool.value().allocate(0, std::span(&id, 1)).ok());
}

TEST(BlockPool, NamesTheClassAndFieldThatAreWrong) {
  EXPECT_EQ(refusal_of({"packed", -1, {64}}),
            "num_blocks of class 'packed' is -1; expected 0 to 2147483647");
  EXPECT_EQ(refusal_of({"packed", int64_t{1} << 31, {64}}),
            "num_blocks of class 'packed' is 2147483648; expected 0 to 2147483647");
  EXPECT_EQ(refusal_of({"packed", 1, {}}), "class 'packed' has 0 regions; expected 1 or more");
  EXPECT_EQ(refusal_of({"packed", 1, {64, 0}}),
            "block_bytes of class 'packed' is 0; expected 1 or more");
  EXPECT_EQ(refusal_of({"packed", 2, {int64_t{1} << 62}}),
            "block_bytes of class 'packed' is 4611686018427387904; expected 2 blocks of it to fit "
            "in 63 bits");
  EXPECT_EQ(refusal_of({"packed", 1, {int64_t{1} << 60}}),
            "blocks of class 'packed': no memory for 1152921504606846976 bytes");
  const auto none = BlockPool::create(host_memory(), {});
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.error().message, HasSubstr("0 classes"));
}

// Writes down what was evicted, and what its first byte was at that moment.
class EvictionLog : public EvictionListener {
 public:
  explicit EvictionLog(const BlockPool& pool) : pool_(pool) {}
  void on_evict(int block_class, int32_t id) override {
    ids.push_back(id);
    first_bytes.push_back(pool_.region(block_class)[id * pool_.block_bytes(block_class)]);
  }
  std::vector<int32_t> ids;
  std::vector<int> first_bytes;

 private:
  const BlockPool& pool_;
};

TEST(BlockPool, TellsOfAnEvictionWhileTheBytesAreStillThere) {
  const BlockClassSpec spec{"blocks", 2, {64}};
  BlockPool pool = BlockPool::create(host_memory(), std::span(&spec, 1)).value();
  EvictionLog log(pool);
  pool.set_eviction_listener(&log);
  int32_t ids[2];
  ASSERT_TRUE(pool.allocate(0, ids).ok());
  for (int32_t id : ids) {
    pool.region(0)[id * 64] = static_cast<uint8_t>(7 + id);
    ASSERT_TRUE(pool.keep(0, id, 0).ok());
    ASSERT_TRUE(pool.release(0, id).ok());
  }
  EXPECT_EQ(pool.snapshot(0).num_cached, 2);
  int32_t taken;
  ASSERT_TRUE(pool.allocate(0, std::span(&taken, 1)).ok());
  EXPECT_EQ(log.ids, std::vector<int32_t>{ids[0]});
  EXPECT_EQ(log.first_bytes, std::vector<int>{7 + ids[0]});
}

TEST(BlockPool, ZeroesABlockInAllRegionsWhenItIsFreedIfAsked) {
  const BlockClassSpec spec{"blocks", 1, {8, 4}};
  BlockPool pool =
      BlockPool::create(host_memory(), std::span(&spec, 1), {EvictionKind::kLru, true}).value();
  int32_t id;
  ASSERT_TRUE(pool.allocate(0, std::span(&id, 1)).ok());
  pool.region(0, 0)[7] = pool.region(0, 1)[3] = 1;
  ASSERT_TRUE(pool.keep(0, id, 0).ok());
  ASSERT_TRUE(pool.release(0, id).ok());
  EXPECT_EQ(pool.region(0, 0)[7], 1);  // cached, not free
  EXPECT_EQ(pool.evict(0, 5), 1);
  EXPECT_EQ(pool.region(0, 0)[7], 0);
  EXPECT_EQ(pool.region(0, 1)[3], 0);
}

// Memory that the host cannot write by itself, as a device's.
class DeviceLikeMemory final : public Memory {
 public:
  MemoryKind kind() const override { return MemoryKind::kCuda; }
  void clear(uint8_t* data, int64_t bytes) override { cleared.emplace_back(data, bytes); }

  std::vector<std::pair<uint8_t*, int64_t>> cleared;

 protected:
  Result<uint8_t*> allocate_zeroed(int64_t bytes) override {
    return static_cast<uint8_t*>(std::calloc(1, static_cast<size_t>(bytes)));
  }
  void free(uint8_t* data, int64_t) override { std::free(data); }
};

TEST(BlockPool, LeavesZeroingToTheMemoryThatItsBlocksLieIn) {
  DeviceLikeMemory device;
  const BlockClassSpec spec{"packed", 4, {256}};
  auto pool = BlockPool::create(device, std::span(&spec, 1), {EvictionKind::kLru, true}).value();
  EXPECT_EQ(pool.memory_kind(), MemoryKind::kCuda);
  int32_t ids[2];
  ASSERT_TRUE(pool.allocate(0, ids).ok());
  EXPECT_TRUE(device.cleared.empty());
  ASSERT_TRUE(pool.release(0, ids[1]).ok());
  ASSERT_EQ(device.cleared.size(), 1u);
  EXPECT_EQ(device.cleared[0], std::pair(pool.region(0) + ids[1] * 256, int64_t{256}));
}

TEST(BlockPool, AForgottenBlockIsNoLongerKeptAndItsListenerHearsOfIt) {
  struct Listener final : EvictionListener {
    std::vector<int32_t> forgotten;
    void on_evict(int, int32_t id) override { forgotten.push_back(id); }
  } listener;
  BlockPool pool = small_pool();
  pool.set_eviction_listener(&listener);
  const int32_t kept = allocate_one(pool, kFullPrecision);
  ASSERT_TRUE(pool.keep(kFullPrecision, kept, 1).ok());
  pool.forget(kFullPrecision, kept);
  EXPECT_EQ(listener.forgotten, std::vector<int32_t>{kept});
  EXPECT_FALSE(pool.is_kept(kFullPrecision, kept));
  EXPECT_EQ(pool.use_count(kFullPrecision, kept), 1);
  ASSERT_TRUE(pool.release(kFullPrecision, kept).ok());
  EXPECT_EQ(pool.num_cached(kFullPrecision), 0);
}

}  // namespace
}  // namespace kvx::cache::block_pool_test

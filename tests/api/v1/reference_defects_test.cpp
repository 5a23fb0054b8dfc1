// What the public reference implementation of KVX v1 gets wrong or leaves out, one test each: a
// library with that defect fails it.
#include <gtest/gtest.h>

#include "tests/api/v1_gather.hpp"

namespace kvx::api_test {
namespace {

kvx_status_t write_slots(Cache& cache, const std::vector<int64_t>& slots) {
  const Io io(cache.shape(), std::ssize(slots), cache.desc.k.dtype, cache.desc.v.dtype);
  const kvx_write_desc_t write = write_desc(io, slots);
  return kvx_write_kv(&cache.desc, &write, nullptr);
}

kvx_status_t gather_one(Cache& cache, int32_t block, int64_t length) {
  Gather gather(cache, 1, length);
  gather.set_packed({block}, 1);
  gather.set_lengths({length});
  return kvx_gather_kv(&cache.desc, &gather.desc, nullptr);
}

TEST(ReferenceDefect, TheHostCallsOnlyValidateAndMoveNoData) {
  Cache cache;
  const Memory before = cache.k_memory;
  ASSERT_EQ(write_slots(cache, {3}), KVX_STATUS_OK);
  EXPECT_FALSE(cache.k_memory == before);
  Gather gather(cache, 1, 4);
  gather.set_packed({0}, 1);
  gather.set_lengths({4});
  const Memory out_before = gather.io.k_memory;
  ASSERT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK);
  EXPECT_FALSE(gather.io.k_memory == out_before);
}

TEST(ReferenceDefect, OnlyCanonicalStridesAreTaken) {
  Cache fused({}, {.block_gap = 4 * 2 * 16});  // kv[:, 0] of a tensor [blocks, 2, ...]
  EXPECT_EQ(kvx_validate_cache_desc(&fused.desc), KVX_STATUS_OK) << kvx_last_error();
}

TEST(ReferenceDefect, APermutedViewOfAnotherOrderIsRefused) {
  // vLLM's HND: a tensor whose logical shape is NHD's and whose memory is HND's.
  Cache cache;
  for (kvx_tensor_desc_t* tensor : {&cache.desc.k, &cache.desc.v}) {
    tensor->stride[1] = 16;
    tensor->stride[2] = 4 * 16;
  }
  ASSERT_EQ(write_slots(cache, {1}), KVX_STATUS_OK) << kvx_last_error();
  const Io io(cache.shape(), 1);
  EXPECT_EQ(memcmp(cache.k_memory.data() + (4 * 16 + 16) * 2, io.k_memory.data() + 32, 32), 0);
}

TEST(ReferenceDefect, KAndVOfOneCacheMustHaveOnePackAndOneType) {
  Cache packs({}, {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 1});
  EXPECT_EQ(write_slots(packs, {1}), KVX_STATUS_OK) << kvx_last_error();
  Cache types({}, {}, KVX_DTYPE_F16, KVX_DTYPE_F32);
  EXPECT_EQ(write_slots(types, {1}), KVX_STATUS_OK) << kvx_last_error();
}

TEST(ReferenceDefect, TheValueOfInvalidSlotIsIgnored) {
  Cache cache;
  const Memory before = cache.k_memory;
  const Io io(cache.shape(), 1);
  const std::vector<int64_t> slots = {7};
  kvx_write_desc_t write = write_desc(io, slots);
  write.slots.invalid_slot = 7;
  ASSERT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK);
  EXPECT_TRUE(cache.k_memory == before);
}

TEST(ReferenceDefect, ASlotBeyondTheCacheIsSkippedInSilence) {
  Cache cache;
  EXPECT_EQ(write_slots(cache, {20}), KVX_STATUS_OUT_OF_RANGE);
}

TEST(ReferenceDefect, ABlockBeyondTheCacheIsReadByGather) {
  Cache cache;
  EXPECT_EQ(gather_one(cache, 5, 1), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(gather_one(cache, 4, 1), KVX_STATUS_OK);
}

TEST(ReferenceDefect, EightBitFloatsAreOnlyPlanned) {
  Cache cache({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2);
  const Io io(cache.shape(), 1, KVX_DTYPE_F16, KVX_DTYPE_F16);
  const std::vector<int64_t> slots = {0};
  const kvx_write_desc_t write = write_desc(io, slots);
  EXPECT_EQ(kvx_write_kv(&cache.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
}

TEST(ReferenceDefect, CustomLayoutsAreUnsupported) {
  Cache cache({}, {.layout = KVX_LAYOUT_BLOCK_CUSTOM});
  EXPECT_EQ(write_slots(cache, {0}), KVX_STATUS_OK) << kvx_last_error();
}

TEST(ReferenceDefect, RaggedTablesAreUnsupportedAndTheirIndicesCountIsNotLookedAt) {
  const Cache cache;
  Gather gather(cache, 1, 2);
  gather.set_ragged({1, 1}, {0, 2}, 0);
  gather.set_lengths({2});
  EXPECT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
  gather.desc.block_table.indices_count = 1;
  EXPECT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(ReferenceDefect, TheSizeOfThePoolIsNotLookedAt) {
  Cache cache;
  cache.desc.pool.size = 4;
  EXPECT_EQ(kvx_validate_cache_desc(&cache.desc), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(ReferenceDefect, LaunchCallsSkipTheValidator) {
  Cache cache;
  const Io io(cache.shape(), 1);
  const std::vector<int64_t> slots = {0};
  kvx_write_desc_t write = write_desc(io, slots);
  write.slots.slots = nullptr;
  EXPECT_EQ(kvx_launch_write_kv_f16(&cache.desc, &write, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  write = write_desc(io, slots);
  write.io.key.data = nullptr;
  EXPECT_EQ(kvx_launch_write_kv_f16(&cache.desc, &write, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  write = write_desc(io, slots);
  cache.desc.k.data = nullptr;
  EXPECT_EQ(kvx_launch_write_kv_f16(&cache.desc, &write, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(ReferenceDefect, DenseOutputIsRefusedByGather) {
  const Cache cache;
  Gather gather(cache, 2, 2, true);
  gather.set_packed({0, 1}, 1);
  gather.set_lengths({1, 2});
  EXPECT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
}

TEST(ReferenceDefect, TablesAndLengthsMustShareOneType) {
  const Cache cache;
  Gather gather(cache, 1, 1);
  gather.set_packed({0}, 1);  // S32
  gather.set_lengths({1});    // S64
  EXPECT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
}

TEST(ReferenceDefect, AnyNumberIsAMemoryKind) {
  Cache cache;
  const uint32_t number = 12345;
  memcpy(&cache.desc.k.memory, &number, sizeof number);
  EXPECT_EQ(kvx_validate_cache_desc(&cache.desc), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(ReferenceDefect, ProductsOfCountsWrapIn32Bits) {
  const Cache cache;
  Gather gather(cache, 1, 1);
  gather.set_packed({0}, 1);
  gather.set_lengths({1});
  gather.desc.block_table.seq_count = 1u << 16;
  gather.desc.block_table.max_blocks_per_seq = (1u << 16);
  gather.desc.block_table.indices_count = 0;
  gather.desc.seq_lens.seq_count = 1u << 16;
  EXPECT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(ReferenceDefect, TheVersionIsWrittenWhateverRoomTheCallerHas) {
  uint32_t room[4] = {8, 1, 2, 3};
  EXPECT_EQ(kvx_get_version(reinterpret_cast<kvx_version_t*>(room)), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(room[2], 2u);
  EXPECT_EQ(room[3], 3u);
}

}  // namespace
}  // namespace kvx::api_test

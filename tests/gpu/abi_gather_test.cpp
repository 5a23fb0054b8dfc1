// kvx_gather_kv with device memory: the host's bytes from tables of every format, and what a table
// gets wrong is skipped.
#include "tests/gpu/device_v1.hpp"

namespace kvx::tests {
namespace {

using api_test::Cache;
using api_test::Gather;
using api_test::Layout;
using api_test::Memory;
using api_test::Shape;

class GpuAbiGather : public GpuTest {
 protected:
  // The call with everything on the device; the output comes back into gather.io.
  void gather_on_device(Cache& cache, Gather& gather) {
    DeviceV1 there(memory());
    there.add(cache);
    there.add(gather.io);
    kvx_cache_desc_t desc = there.carried(cache.desc);
    if (!primary.empty()) {
      desc.pool.memory = KVX_MEMORY_DEVICE;
      desc.pool.primary = there.add(primary);
      desc.pool.secondary = there.add(secondary);
    }
    kvx_gather_desc_t call = gather.desc;
    call.io = there.carried(gather.io.desc);
    call.block_table.indices = there.add(gather.indices);
    call.block_table.indptr = there.add(gather.indptr);
    call.seq_lens.lengths = there.add(gather.lengths);
    ASSERT_EQ(kvx_gather_kv(&desc, &call, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
    there.fetch();
  }

  // The same on both; `setup` fills in the table and the lengths.
  template <class Setup>
  void compare(Cache& cache, const Setup& setup, int64_t rows, int64_t most, bool is_dense = false,
               int64_t gap = 0, kvx_dtype_t type = KVX_DTYPE_INVALID) {
    Gather host(cache, rows, most, is_dense, gap, type, type);
    Gather device(cache, rows, most, is_dense, gap, type, type);
    setup(host);
    setup(device);
    ASSERT_EQ(kvx_gather_kv(&cache.desc, &host.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
    gather_on_device(cache, device);
    EXPECT_TRUE(host.io.k_memory == device.io.k_memory) << "K differs";
    EXPECT_TRUE(host.io.v_memory == device.io.v_memory) << "V differs";
  }

  // The device gives what the host gives for the table and lengths of `known`.
  template <class Setup, class Known>
  void expect_as_host(Cache& cache, int64_t rows, int64_t most, const Setup& setup,
                      const Known& known) {
    Gather host(cache, rows, most);
    Gather device(cache, rows, most);
    setup(device);
    known(host);
    ASSERT_EQ(kvx_gather_kv(&cache.desc, &host.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
    gather_on_device(cache, device);
    EXPECT_TRUE(host.io.k_memory == device.io.k_memory) << "K differs";
    EXPECT_TRUE(host.io.v_memory == device.io.v_memory) << "V differs";
  }

  std::vector<uint8_t> primary;  // pools of KV_OFFSETS, empty for none
  std::vector<uint8_t> secondary;
};

void packed(Gather& gather) {
  gather.set_packed({4, 1, -1, 3}, 2);
  gather.set_lengths({6, 7});
}

TEST_F(GpuAbiGather, FetchesTheHostsBytesFromWhereEachLayoutSays) {
  for (const Layout& layout : api_test::all_layouts()) {
    for (const kvx_dtype_t dtype : {KVX_DTYPE_F16, KVX_DTYPE_F32, KVX_DTYPE_F8_E5M2}) {
      SCOPED_TRACE(layout.name + ", dtype " + std::to_string(dtype));
      Cache cache({}, layout, dtype, dtype);
      compare(cache, packed, 2, 7);
      compare(cache, packed, 2, 7, true);
      compare(cache, packed, 2, 7, false, 16);
    }
  }
}

TEST_F(GpuAbiGather, TakesShapesThatAreNoMultipleOfAnything) {
  for (const uint32_t head_dim : {1u, 5u, 80u, 128u, 264u}) {
    for (const uint32_t heads : {1u, 3u, 8u}) {
      SCOPED_TRACE(std::to_string(heads) + " heads of " + std::to_string(head_dim));
      const Shape shape = {.num_heads = heads, .head_dim = head_dim};
      Cache nhd(shape);
      compare(nhd, packed, 2, 7);
      Cache turned(shape, {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 1, .v_pack = 1});
      compare(turned, packed, 2, 7);
    }
  }
}

TEST_F(GpuAbiGather, ConvertsBetweenTheFloatTypes) {
  for (const kvx_dtype_t from : {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}) {
    for (const kvx_dtype_t to : {KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_F32}) {
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
      Cache cache({}, {}, from, from);
      // No NaN: which one comes of another is nobody's promise.
      for (Memory* memory : {&cache.k_memory, &cache.v_memory}) {
        for (uint8_t& byte : memory->bytes()) byte &= 0x3B;
      }
      compare(cache, packed, 2, 7, false, 0, to);
    }
  }
}

TEST_F(GpuAbiGather, ReadsRaggedTablesByTokenAndByPage) {
  Cache cache;
  compare(
      cache,
      [](Gather& gather) {
        gather.set_ragged({3, 3, 3, 3, 0, 2, -1}, {0, 5, 7}, 0);
        gather.set_lengths({5, 2});
      },
      2, 5);
  compare(
      cache,
      [](Gather& gather) {
        gather.set_ragged({3, 0, 2}, {0, 2, 3}, KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES);
        gather.set_lengths({5, 2});
      },
      2, 5);
}

TEST_F(GpuAbiGather, ReadsBothPoolsOfKvOffsetsWithBeams) {
  Cache cache({}, {.layout = KVX_LAYOUT_BLOCK_HND});
  const int64_t block_bytes = 4 * 2 * 16 * 2;
  cache.desc.pool.size = sizeof cache.desc.pool;
  cache.desc.pool.memory = KVX_MEMORY_HOST;
  cache.desc.pool.bytes_per_block = static_cast<uint32_t>(block_bytes);
  primary = Memory(8 * block_bytes, 21).bytes();
  secondary = Memory(8 * block_bytes, 22).bytes();
  cache.desc.pool.primary = primary.data();
  cache.desc.pool.secondary = secondary.data();
  const auto other = [](int32_t index) { return index | INT32_MIN; };
  compare(
      cache,
      [&](Gather& gather) {
        // [2 sequences, 2 beams, K and V, 2 blocks]
        gather.set_kv_offsets({0, 1, 2, other(3), 4, -1, other(6), 7,  //
                               7, 6, 5, 4, other(0), 2, -1, 3},
                              2, 2);
        gather.set_lengths({7, 3});
      },
      4, 7);
}

TEST_F(GpuAbiGather, SkipsEntriesBeyondTheCache) {
  Cache cache;
  expect_as_host(
      cache, 2, 7,
      [](Gather& gather) {
        gather.set_packed({4, 5, INT32_MAX, 3}, 2);
        gather.set_lengths({6, 7});
      },
      [](Gather& gather) {
        gather.set_packed({4, -1, -1, 3}, 2);
        gather.set_lengths({6, 7});
      });
}

TEST_F(GpuAbiGather, SkipsTokensThatTheTableHasNoEntryFor) {
  Cache cache;
  expect_as_host(
      cache, 3, 12,
      [](Gather& gather) {
        gather.set_packed({4, 1, 0, 2, 3, 3}, 2);
        gather.set_lengths({INT64_MAX, -5, INT64_MIN});
      },
      [](Gather& gather) {
        gather.set_packed({4, 1, 0, 2, 3, 3}, 2);
        gather.set_lengths({8, 0, 0});
      });
}

TEST_F(GpuAbiGather, SkipsSequencesWhosePrefixSumsAreNone) {
  for (const std::vector<int64_t>& sums :
       {std::vector<int64_t>{0, INT64_MAX, 3}, {-1, 2, 1}, {5, 2, INT64_MIN}}) {
    Cache cache;
    Gather device(cache, 2, 5);
    device.set_ragged({3, 0, 2}, sums, KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES);
    device.set_lengths({5, 2});
    const Memory before = device.io.k_memory;
    gather_on_device(cache, device);
    EXPECT_TRUE(before == device.io.k_memory);
  }
}

TEST_F(GpuAbiGather, FetchesManyTokensWithLengthsThatDiffer) {
  const Shape shape = {.num_blocks = 600, .block_size = 16, .num_heads = 8, .head_dim = 128};
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 600; ++i) ids.push_back(i * 7 % 600);
  for (const Layout& layout :
       {Layout{}, Layout{.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 1}}) {
    SCOPED_TRACE(layout.name);
    Cache cache(shape, layout);
    compare(
        cache,
        [&](Gather& gather) {
          gather.set_packed(ids, 100);
          gather.set_lengths({1600, 1, 0, 1599, 17, 800});
        },
        6, 1600);
  }
}

TEST_F(GpuAbiGather, NamesTheArrayThatTheGpuCannotRead) {
  Cache cache;
  Gather gather(cache, 2, 7);
  packed(gather);
  DeviceV1 there(memory());
  there.add(cache);
  there.add(gather.io);
  const kvx_cache_desc_t desc = there.carried(cache.desc);
  kvx_gather_desc_t call = gather.desc;
  call.io = there.carried(gather.io.desc);
  call.block_table.indices = there.add(gather.indices);
  EXPECT_EQ(kvx_gather_kv(&desc, &call, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kvx_last_error()).find("seq_lens.lengths"), std::string::npos)
      << kvx_last_error();
}

}  // namespace
}  // namespace kvx::tests

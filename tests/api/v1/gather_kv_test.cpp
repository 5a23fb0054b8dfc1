// kvx_gather_kv: the tokens that a table names come out, and no other byte of the output changes.
#include <gtest/gtest.h>

#include "tests/api/v1_gather.hpp"

namespace kvx::api_test::gather_kv_test {
namespace {

// A row of the output and where it comes from.
struct Move {
  int64_t out_token;
  int64_t block;
  int64_t offset;
};

void expect_side(const Shape& shape, const kvx_tensor_desc_t& from, const Memory& cache,
                 const kvx_tensor_desc_t& to, const Memory& before, const Memory& after,
                 const std::vector<Move>& moves) {
  Memory expected = before;
  const int bytes = bytes_of(from.dtype);
  for (const Move& move : moves) {
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const int64_t place = Io::token_place(to, move.out_token) + h * shape.head_dim + d;
        memcpy(expected.data() + place * bytes,
               cache.data() + place_of(from, move.block, move.offset, h, d) * bytes, bytes);
      }
    }
  }
  EXPECT_TRUE(after == expected);
}

void gather_and_expect(const Cache& cache, const Gather& gather, const std::vector<Move>& moves) {
  const Memory k_before = gather.io.k_memory;
  const Memory v_before = gather.io.v_memory;
  const Memory k_cache = cache.k_memory;
  ASSERT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
  expect_side(cache.shape(), cache.desc.k, cache.k_memory, gather.io.desc.key, k_before,
              gather.io.k_memory, moves);
  expect_side(cache.shape(), cache.desc.v, cache.v_memory, gather.io.desc.value, v_before,
              gather.io.v_memory, moves);
  EXPECT_TRUE(cache.k_memory == k_cache);
}

void expect_refused(const Cache& cache, const Gather& gather, kvx_status_t status) {
  const Memory k_before = gather.io.k_memory;
  EXPECT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), status) << kvx_last_error();
  EXPECT_TRUE(gather.io.k_memory == k_before);
}

TEST(GatherKv, FetchesEveryByteFromWhereEachLayoutSays) {
  for (const Layout& layout : all_layouts()) {
    for (const kvx_dtype_t dtype : {KVX_DTYPE_F16, KVX_DTYPE_F32, KVX_DTYPE_F8_E5M2}) {
      SCOPED_TRACE(layout.name + ", dtype " + std::to_string(dtype));
      const Cache cache({}, layout, dtype, dtype);
      Gather gather(cache, 2, 7);
      gather.set_packed({4, 1, 0, 3}, 2);
      gather.set_lengths({6, 1});
      gather_and_expect(
          cache, gather,
          {{0, 4, 0}, {1, 4, 1}, {2, 4, 2}, {3, 4, 3}, {4, 1, 0}, {5, 1, 1}, {7, 0, 0}});
    }
  }
}

TEST(GatherKv, FillsDenseAndGappedOutputs) {
  for (const auto& [is_dense, gap] : {std::pair{true, 0}, {true, 16}, {false, 32}}) {
    const Cache cache;
    Gather gather(cache, 2, 3, is_dense, gap);
    gather.set_packed({2, 1}, 1);
    gather.set_lengths({2, 3});
    gather_and_expect(cache, gather, {{0, 2, 0}, {1, 2, 1}, {3, 1, 0}, {4, 1, 1}, {5, 1, 2}});
  }
}

TEST(GatherKv, GivesNoSequenceMoreThanMaxSeqLen) {
  const Cache cache;
  Gather gather(cache, 1, 2);
  gather.set_packed({3}, 1);
  gather.set_lengths({1000});  // more than its table holds, but only two tokens are wanted
  gather_and_expect(cache, gather, {{0, 3, 0}, {1, 3, 1}});
}

TEST(GatherKv, LeavesTokensOfUnmappedBlocksAsTheyAre) {
  const Cache cache;
  Gather gather(cache, 1, 6);
  gather.set_packed({-1, 2}, 2);
  gather.set_lengths({6});
  gather_and_expect(cache, gather, {{4, 2, 0}, {5, 2, 1}});
}

TEST(GatherKv, IgnoresTableEntriesBeyondASequencesLength) {
  const Cache cache;
  Gather gather(cache, 1, 4);
  gather.set_packed({1, 1000000, INT32_MIN}, 3);
  gather.set_lengths({4});
  gather_and_expect(cache, gather, {{0, 1, 0}, {1, 1, 1}, {2, 1, 2}, {3, 1, 3}});
}

TEST(GatherKv, ReadsRaggedTablesTokenByToken) {
  const Cache cache;
  Gather gather(cache, 2, 5);
  // The offset is the token's place in its sequence, whatever block it names.
  gather.set_ragged({3, 3, 3, 3, 0, 2, 4}, {0, 5, 7}, 0);
  gather.set_lengths({5, 2});
  gather_and_expect(cache, gather,
                    {{0, 3, 0}, {1, 3, 1}, {2, 3, 2}, {3, 3, 3}, {4, 0, 0}, {5, 2, 0}, {6, 4, 1}});
}

TEST(GatherKv, ReadsRaggedTablesPageByPageWhenTheFlagSaysSo) {
  const Cache cache;
  Gather gather(cache, 2, 5);
  gather.set_ragged({3, 0, 2}, {0, 2, 3}, KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES);
  gather.set_lengths({5, 2});
  gather_and_expect(cache, gather,
                    {{0, 3, 0}, {1, 3, 1}, {2, 3, 2}, {3, 3, 3}, {4, 0, 0}, {5, 2, 0}, {6, 2, 1}});
}

TEST(GatherKv, TakesIndicesAndLengthsOfEveryMixture) {
  const Cache cache;
  const std::vector<int64_t> indices_in_64_bits = {4, 1};
  const std::vector<int32_t> lengths_in_32_bits = {6};
  Gather gather(cache, 1, 6);
  gather.set_packed({4, 1}, 2);
  gather.set_lengths({6});
  gather.desc.block_table.index_dtype = KVX_DTYPE_S64;
  gather.desc.block_table.indices = indices_in_64_bits.data();
  gather.desc.seq_lens.dtype = KVX_DTYPE_S32;
  gather.desc.seq_lens.lengths = lengths_in_32_bits.data();
  gather_and_expect(cache, gather,
                    {{0, 4, 0}, {1, 4, 1}, {2, 4, 2}, {3, 4, 3}, {4, 1, 0}, {5, 1, 1}});
}

TEST(GatherKv, RefusesBlocksBeyondTheCacheAndWritesNothing) {
  for (const int32_t bad : {5, 6, INT32_MAX}) {
    const Cache cache;
    Gather gather(cache, 1, 8);
    gather.set_packed({0, bad}, 2);
    gather.set_lengths({5});
    expect_refused(cache, gather, KVX_STATUS_OUT_OF_RANGE);
  }
}

TEST(GatherKv, RefusesLengthsBeyondTheTableAndNegativeOnes) {
  const Cache cache;
  Gather gather(cache, 1, 9);
  gather.set_packed({0, 1}, 2);
  gather.set_lengths({9});
  expect_refused(cache, gather, KVX_STATUS_OUT_OF_RANGE);
  gather.set_lengths({-1});
  expect_refused(cache, gather, KVX_STATUS_INVALID_ARGUMENT);
}

TEST(GatherKv, RefusesPrefixSumsThatAreNone) {
  for (const std::vector<int64_t>& sums : std::vector<std::vector<int64_t>>{
           {1, 2, 3}, {0, 2, 1}, {0, 2, 4}, {0, 4, 3}, {0, -1, 3}, {0, INT64_MAX, 3}}) {
    const Cache cache;
    Gather gather(cache, 2, 3);
    gather.set_ragged({0, 0, 1}, sums, 0);
    gather.set_lengths({2, 1});
    expect_refused(cache, gather, KVX_STATUS_INVALID_ARGUMENT);
  }
}

TEST(GatherKv, RefusesRaggedSequencesOfAnotherLength) {
  const Cache cache;
  Gather gather(cache, 2, 4);
  gather.set_ragged({0, 0, 1}, {0, 2, 3}, 0);
  gather.set_lengths({3, 1});
  expect_refused(cache, gather, KVX_STATUS_INVALID_ARGUMENT);
}

TEST(GatherKv, OfNoTokensIsANoOp) {
  const Cache cache;
  Gather gather(cache, 1, 0);
  gather.set_packed({0}, 1);
  gather.set_lengths({0});
  gather_and_expect(cache, gather, {});
}

TEST(GatherKv, ConvertsBetweenFloatsButLeavesDequantisationToKvxGather) {
  const Cache floats({}, {}, KVX_DTYPE_F16, KVX_DTYPE_F16);
  Gather converted(floats, 1, 1, false, 0, KVX_DTYPE_F32, KVX_DTYPE_F32);
  converted.set_packed({0}, 1);
  converted.set_lengths({1});
  EXPECT_EQ(kvx_gather_kv(&floats.desc, &converted.desc, nullptr), KVX_STATUS_OK);

  const Cache codes({}, {}, KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E4M3);
  Gather decoded(codes, 1, 1, false, 0, KVX_DTYPE_F32, KVX_DTYPE_F32);
  decoded.set_packed({0}, 1);
  decoded.set_lengths({1});
  expect_refused(codes, decoded, KVX_STATUS_UNSUPPORTED);
  EXPECT_NE(std::string(kvx_last_error()).find("kvx_gather"), std::string::npos);
}

// --- KV_OFFSETS ---

// Two pools of blocks that lie as one block of a canonical HND cache.
struct Pools {
  explicit Pools(Cache& cache)
      : block_bytes(cache.shape().block_size * cache.shape().row_elements() * 2),
        primary(8 * block_bytes, 21),
        secondary(8 * block_bytes, 22) {
    cache.desc.pool = {sizeof(kvx_pool_desc_t), KVX_MEMORY_HOST, static_cast<uint32_t>(block_bytes),
                       primary.data(), secondary.data()};
  }
  // The element of a block, in bytes from the pool's beginning.
  int64_t place(const Shape& shape, int64_t block, int64_t token, int64_t head, int64_t dim) const {
    return block * block_bytes + ((head * shape.block_size + token) * shape.head_dim + dim) * 2;
  }
  int64_t block_bytes;
  Memory primary;
  Memory secondary;
};

constexpr int32_t secondary(int32_t index) {
  return static_cast<int32_t>(static_cast<uint32_t>(index) | 0x80000000u);
}

TEST(GatherKv, ReadsBothPoolsOfEveryBeamOfKvOffsets) {
  Cache cache({}, {.layout = KVX_LAYOUT_BLOCK_HND});
  const Pools pools(cache);
  Gather gather(cache, 2, 5);  // one sequence, two beams
  // [1, 2 beams, K and V, 2 blocks]; block 7 is beyond num_blocks and no error.
  gather.set_kv_offsets({0, 7, 1, secondary(3), secondary(0), 2, -1, 6}, 2, 2);
  gather.set_lengths({5});
  const Memory k_before = gather.io.k_memory;
  ASSERT_EQ(kvx_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
  const Shape& shape = cache.shape();
  const struct {
    const Memory& out;
    const kvx_tensor_desc_t& tensor;
    int64_t token;
    const Memory* pool;  // null: left as it was
    int64_t block;
    int64_t offset;
  } expected[] = {
      {gather.io.k_memory, gather.io.desc.key, 3, &pools.primary, 0, 3},
      {gather.io.k_memory, gather.io.desc.key, 4, &pools.primary, 7, 0},
      {gather.io.v_memory, gather.io.desc.value, 1, &pools.primary, 1, 1},
      {gather.io.v_memory, gather.io.desc.value, 4, &pools.secondary, 3, 0},
      {gather.io.k_memory, gather.io.desc.key, 5, &pools.secondary, 0, 0},
      {gather.io.k_memory, gather.io.desc.key, 9, &pools.primary, 2, 0},
      {gather.io.v_memory, gather.io.desc.value, 9, &pools.primary, 6, 0},
  };
  for (const auto& row : expected) {
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const int64_t at = (Io::token_place(row.tensor, row.token) + h * shape.head_dim + d) * 2;
        ASSERT_EQ(memcmp(row.out.data() + at,
                         row.pool->data() + pools.place(shape, row.block, row.offset, h, d), 2),
                  0)
            << "token " << row.token << ", head " << h << ", dim " << d;
      }
    }
  }
}

TEST(GatherKv, LeavesTokensOfNullEntriesAsTheyAre) {
  Cache cache({}, {.layout = KVX_LAYOUT_BLOCK_HND});
  const Pools pools(cache);
  Gather gather(cache, 1, 4);
  gather.set_kv_offsets({-1, -1}, 1, 1);
  gather.set_lengths({4});
  gather_and_expect(cache, gather, {});
}

TEST(GatherKv, RefusesKvOffsetsThatItCannotFollow) {
  Cache cache({}, {.layout = KVX_LAYOUT_BLOCK_HND});
  const Pools pools(cache);
  Cache other({}, {.layout = KVX_LAYOUT_BLOCK_HND});
  const auto refuse = [&](auto change) {
    other.desc.pool = cache.desc.pool;
    Gather changed = {other, 1, 4};
    changed.set_kv_offsets({0, secondary(1)}, 1, 1);
    changed.set_lengths({4});
    change(other.desc, changed.desc);
    EXPECT_EQ(kvx_gather_kv(&other.desc, &changed.desc, nullptr), KVX_STATUS_INVALID_ARGUMENT);
  };
  refuse([](auto& desc, auto&) { desc.pool.secondary = nullptr; });
  refuse([](auto& desc, auto&) { desc.pool.primary = nullptr; });
  refuse([](auto& desc, auto&) { desc.pool.bytes_per_block = 0; });
  refuse([](auto& desc, auto&) { desc.pool.bytes_per_block = 254; });
  refuse([](auto& desc, auto&) { desc.pool.size = 24; });
  refuse([](auto&, auto& gather) { gather.block_table.flags = 0; });
  refuse([](auto&, auto& gather) { gather.block_table.index_dtype = KVX_DTYPE_S64; });
  refuse([](auto&, auto& gather) { gather.block_table.beam_width = 0; });
  refuse([](auto&, auto& gather) { gather.block_table.indices_count = 1; });
}

TEST(LaunchGather, GathersHostMemoryOfItsOwnType) {
  const Cache cache;
  Gather gather(cache, 1, 1);
  gather.set_packed({2}, 1);
  gather.set_lengths({1});
  EXPECT_EQ(kvx_launch_gather_kv(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK);
  EXPECT_EQ(kvx_launch_gather_kv_f16(&cache.desc, &gather.desc, nullptr), KVX_STATUS_OK);
  EXPECT_EQ(kvx_launch_gather_kv_f32(&cache.desc, &gather.desc, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(kvx_launch_gather_kv_bf16(&cache.desc, &gather.desc, nullptr), KVX_STATUS_UNSUPPORTED);
  EXPECT_EQ(memcmp(gather.io.k_memory.data(),
                   cache.k_memory.data() + place_of(cache.desc.k, 2, 0, 0, 0) * 2, 32),
            0);
}

}  // namespace
}  // namespace kvx::api_test::gather_kv_test

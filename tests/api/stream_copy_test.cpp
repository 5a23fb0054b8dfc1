// Copies past the caches move the same bytes as plain ones, at any alignment and length.
#include "ops/copy_rows/stream_copy.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "tests/api/v1_gather.hpp"

namespace kvx::api_test {
namespace {

TEST(StreamCopy, MovesJustItsBytesAtAnyAlignment) {
  const ops::copy_rows::StreamCopy copy = ops::copy_rows::stream_copy();
  if (copy == nullptr) return;  // a processor without such stores has no such copy
  std::vector<uint8_t> source(1024);
  std::iota(source.begin(), source.end(), uint8_t{1});
  for (int64_t to = 0; to < 70; to += 3) {
    for (const int64_t bytes : {0, 1, 63, 64, 65, 127, 128, 200, 600}) {
      std::vector<uint8_t> target(1024, 0xEE);
      std::vector<uint8_t> expected = target;
      memcpy(expected.data() + to, source.data() + 5, static_cast<size_t>(bytes));
      copy(target.data() + to, source.data() + 5, bytes);
      ops::copy_rows::finish_streams();
      ASSERT_EQ(target, expected) << to << " " << bytes;
    }
  }
}

TEST(StreamCopy, IsWhatALargeWriteUsesAndItsBytesAreThoseOfSmallOnes) {
  const Shape shape = {.num_blocks = 300, .block_size = 16, .num_heads = 4, .head_dim = 128};
  for (const kvx_layout_t layout : {KVX_LAYOUT_BLOCK_NHD, KVX_LAYOUT_BLOCK_HND}) {
    Cache whole(shape, {.layout = layout});
    Cache pieces(shape, {.layout = layout});
    const int64_t num_tokens = 4700;
    const Io io(shape, num_tokens);
    std::vector<int64_t> slots(static_cast<size_t>(num_tokens));
    for (int64_t t = 0; t < num_tokens; ++t) slots[static_cast<size_t>(t)] = (t * 7) % 4800;
    slots[4000] = slots[12];  // the later one stays
    const kvx_write_desc_t write = write_desc(io, slots);
    ASSERT_EQ(kvx_write_kv(&whole.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
    for (int64_t first = 0; first < num_tokens; first += 100) {
      kvx_write_desc_t piece = write;
      piece.io.num_tokens = piece.slots.token_count = 100;
      piece.slots.slots = slots.data() + first;
      for (kvx_tensor_desc_t* tensor : {&piece.io.key, &piece.io.value}) {
        tensor->shape[0] = 100;
        tensor->data = static_cast<uint8_t*>(tensor->data) + first * tensor->stride[0] * 2;
      }
      ASSERT_EQ(kvx_write_kv(&pieces.desc, &piece, nullptr), KVX_STATUS_OK);
    }
    EXPECT_TRUE(whole.k_memory == pieces.k_memory && whole.v_memory == pieces.v_memory);
  }
}

// Whole blocks of packs go past the caches unit by unit, to aligned places and to others.
TEST(StreamCopy, OfPacksLeavesTheBytesOfSmallCalls) {
  const Shape shape = {.num_blocks = 300, .block_size = 16, .num_heads = 4, .head_dim = 128};
  Cache whole(shape, {.layout = KVX_LAYOUT_BLOCK_HND_PACKED, .k_pack = 8, .v_pack = 8});
  const int64_t num_tokens = shape.num_slots();
  const Io io(shape, num_tokens);
  for (const int64_t first : {0, 5}) {
    std::vector<int64_t> slots(static_cast<size_t>(num_tokens), -1);
    for (int64_t t = 0; t < num_tokens - first; ++t) slots[static_cast<size_t>(t)] = t + first;
    const kvx_write_desc_t write = write_desc(io, slots);
    ASSERT_EQ(kvx_write_kv(&whole.desc, &write, nullptr), KVX_STATUS_OK) << kvx_last_error();
    for (int64_t t = 0; t < num_tokens - first; t += 13) {
      for (int64_t h = 0; h < shape.num_heads; ++h) {
        for (int64_t d = 0; d < shape.head_dim; d += 8) {
          const int64_t slot = t + first;
          const int64_t place =
              place_of(whole.desc.k, slot / shape.block_size, slot % shape.block_size, h, d);
          const int64_t source = (t * shape.num_heads + h) * shape.head_dim + d;
          ASSERT_EQ(memcmp(whole.k_memory.data() + place * 2, io.k_memory.data() + source * 2, 16),
                    0)
              << "token " << t << ", head " << h << ", dim " << d;
        }
      }
    }
  }
  Gather back(whole, 1, num_tokens);
  std::vector<int32_t> blocks(shape.num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  back.set_packed(blocks, shape.num_blocks);
  back.set_lengths({num_tokens});
  ASSERT_EQ(kvx_gather_kv(&whole.desc, &back.desc, nullptr), KVX_STATUS_OK) << kvx_last_error();
  const size_t bytes = static_cast<size_t>((num_tokens - 5) * shape.row_elements() * 2);
  EXPECT_EQ(
      memcmp(back.io.k_memory.data() + 5 * shape.row_elements() * 2, io.k_memory.data(), bytes), 0);
}

}  // namespace
}  // namespace kvx::api_test

// The memory account, against exact bytes worked out by hand.
#include "cache/account.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>

namespace kvx::cache {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

// head_dim 128: codes, scales of one row.
constexpr SideBytes kF16{256, 0, 0};
constexpr SideBytes kFp8{128, 0, 0};
constexpr SideBytes kFp4Row{64, 2, 0};       // one fp16 scale a row
constexpr SideBytes kMxfp4G16{64, 8, 0};     // E8M0 in groups of 16
constexpr SideBytes kMxfp4{64, 4, 0};        // in groups of 32
constexpr SideBytes kInt8Affine{128, 4, 0};  // fp16 scale and zero a row
constexpr SideBytes kInt4Affine{64, 4, 0};
constexpr SideBytes kInt8G64{128, 4, 0};  // fp16 in groups of 64
constexpr SideBytes kInt4G64{64, 4, 0};
constexpr SideBytes kInt8G32{128, 8, 0};
constexpr SideBytes kInt4G32{64, 8, 0};

BlockLayout layout_of(SideBytes side, int num_layers, int num_heads, int64_t block_size) {
  GroupBytes group{block_size, {}};
  group.layers.assign(num_layers, LayerBytes{{{num_heads, side, side}}});
  return layout_block(group).value();
}

// 32 layers, 8 KV heads, blocks of 64.
BlockLayout llama_layout(SideBytes side) {
  return layout_of(side, 32, 8, 64);
}

int64_t llama_bytes(SideBytes side, int64_t num_tokens) {
  const BlockLayout layout = llama_layout(side);
  const GroupSizes group{&layout, nullptr, {}, 0};
  return sequence_bytes(std::span(&group, 1), num_tokens).total();
}

double bits_per_value(SideBytes side) {
  const BlockLayout layout = llama_layout(side);
  const GroupSizes group{&layout, nullptr, {}, 0};
  return 8 * bytes_per_token(std::span(&group, 1)) / (32 * 8 * 2 * 128);
}

TEST(Account, CountsC04sBytesExactly) {
  EXPECT_EQ(llama_bytes(kF16, 4096), 536'870'912);
  EXPECT_EQ(llama_bytes(kFp4Row, 4096), 138'412'032);
  EXPECT_EQ(llama_bytes(kF16, 32768), 4 * kGiB);
  EXPECT_EQ(llama_bytes(kFp4Row, 32768), 1'107'296'256);  // 1.03125 GiB
}

TEST(Account, CountsTheScalesOfEveryFormatInBitsPerValue) {
  EXPECT_EQ(bits_per_value(kF16), 16);
  EXPECT_EQ(bits_per_value(kFp8), 8);
  EXPECT_EQ(bits_per_value(kMxfp4G16), 4.5);  // 1.778 times less than fp8
  EXPECT_EQ(bits_per_value(kMxfp4), 4.25);
  EXPECT_EQ(bits_per_value(kInt8Affine), 8.25);  // TurboMind's int8
  EXPECT_EQ(bits_per_value(kInt4Affine), 4.25);  // smaller than FP4 in groups of 16
  EXPECT_EQ(bits_per_value(kFp4Row), 4.125);     // 3.1 % over 4 bits
  EXPECT_EQ(bits_per_value(kInt8G64), 8.25);
  EXPECT_EQ(bits_per_value(kInt4G64), 4.25);
  EXPECT_EQ(bits_per_value(kInt8G32), 8.5);
  EXPECT_EQ(bits_per_value(kInt4G32), 4.5);
}

TEST(Account, StatesC01sAndC02sFactorsFromBytes) {
  const auto factor = [](SideBytes from, SideBytes to) {
    return static_cast<double>(llama_bytes(from, 4096)) /
           static_cast<double>(llama_bytes(to, 4096));
  };
  EXPECT_DOUBLE_EQ(factor(kFp8, kMxfp4G16), 128.0 / 72);  // 1.778
  EXPECT_DOUBLE_EQ(factor(kInt8Affine, kMxfp4G16), 132.0 / 72);
  EXPECT_DOUBLE_EQ(factor(kF16, kMxfp4G16), 256.0 / 72);  // 3.556
  EXPECT_DOUBLE_EQ(factor(kF16, kMxfp4), 256.0 / 68);
  EXPECT_DOUBLE_EQ(factor(kF16, kFp4Row), 256.0 / 66);  // 3.879
}

TEST(Account, ADecodeStepReadsEveryTokenOnce) {
  const BlockLayout f16 = llama_layout(kF16);
  const BlockLayout fp4 = llama_layout(kFp4Row);
  const GroupSizes f16_group{&f16, nullptr, {}, 0};
  const GroupSizes fp4_group{&fp4, nullptr, {}, 0};
  // 1.34 ms and 0.346 ms at 400 GB/s.
  EXPECT_EQ(bytes_read_per_step(std::span(&f16_group, 1), 4096), 536'870'912);
  EXPECT_EQ(bytes_read_per_step(std::span(&fp4_group, 1), 4096), 138'412'032);
  // One token in a new block: its own bytes, not the block's.
  EXPECT_EQ(bytes_read_per_step(std::span(&f16_group, 1), 1), 32 * 8 * 2 * 256);
}

TEST(Account, ADecodeStepReadsNoMoreThanTheWindow) {
  const BlockLayout layout = layout_of(kFp8, 1, 1, 16);
  const GroupSizes group{&layout, nullptr, {}, 100};
  EXPECT_EQ(bytes_read_per_step(std::span(&group, 1), 50), 50 * 256);
  EXPECT_EQ(bytes_read_per_step(std::span(&group, 1), 1000), 100 * 256);
}

TEST(Account, CountsAPageScaleOnceABlock) {
  const BlockLayout layout = layout_of({64, 0, 4}, 1, 1, 16);
  const GroupSizes group{&layout, nullptr, {}, 0};
  const ByteCount bytes = sequence_bytes(std::span(&group, 1), 17);
  EXPECT_EQ(bytes.codes, 17 * 128);
  EXPECT_EQ(bytes.scales, 2 * 8);
  EXPECT_EQ(bytes.total(), 2 * layout.block_bytes);
  EXPECT_EQ(bytes_read_per_step(std::span(&group, 1), 17), 17 * 128 + 2 * 8);
}

TEST(Account, CountsFullPrecisionWindowAtTheContextInQuestion) {
  const BlockLayout packed = layout_of(kMxfp4, 1, 1, 64);
  const BlockLayout full_precision = layout_of(kF16, 1, 1, 64);
  const GroupSizes group{&packed, &full_precision, make_full_precision_window(16, 64, 64).value(),
                         0};
  // 32 blocks: the sink's, the open one and the one before it in 16 bits, 29 packed.
  const ByteCount bytes = sequence_bytes(std::span(&group, 1), 2048);
  EXPECT_EQ(bytes.codes, 29 * 64 * 128 + 3 * 64 * 512);
  EXPECT_EQ(bytes.scales, 29 * 64 * 8);
  EXPECT_EQ(bytes.padding, 0);
  EXPECT_EQ(bytes_read_per_step(std::span(&group, 1), 2048), bytes.total());
  // A short sequence is all full precision.
  EXPECT_EQ(sequence_bytes(std::span(&group, 1), 100).total(), 2 * 64 * 512);
  EXPECT_EQ(bytes_read_per_step(std::span(&group, 1), 100), 100 * 512);
}

TEST(Account, SaysHowManyTokensFit) {
  const BlockLayout layout = llama_layout(kF16);
  const GroupSizes group{&layout, nullptr, {}, 0};
  EXPECT_EQ(tokens_that_fit(std::span(&group, 1), kGiB, 4096), 8192);
  EXPECT_EQ(tokens_that_fit(std::span(&group, 1), kGiB, 0), 0);
  // A sequence of one token holds a whole block of 64.
  EXPECT_EQ(tokens_that_fit(std::span(&group, 1), kGiB, 1), 128);
}

TEST(Account, SeparatesWhatIsUsedFromWhatIsAllocated) {
  const std::array<BlockLayout, 2> layouts = {layout_of({33, 0, 2}, 1, 1, 1),
                                              layout_of(kF16, 1, 1, 1)};
  const std::array<BlockClassSpec, 2> classes = {
      BlockClassSpec{"packed", 5, {layouts[0].block_bytes}},
      BlockClassSpec{"full_precision", 2, {layouts[1].block_bytes}}};
  BlockPool pool = BlockPool::create(host_memory(), classes).value();
  std::array<int32_t, 3> ids;
  ASSERT_TRUE(pool.allocate(0, ids).ok());

  const PoolAccount account = account_pool(pool, layouts);
  ASSERT_EQ(account.classes.size(), 2u);
  EXPECT_EQ(account.classes[0].name, "packed");
  EXPECT_EQ(account.classes[0].used.codes, 3 * 66);
  EXPECT_EQ(account.classes[0].used.scales, 3 * 4);
  EXPECT_EQ(account.classes[0].used.padding, 3 * (128 - 70));
  EXPECT_EQ(account.classes[1].used.total(), 0);
  EXPECT_EQ(account.allocated.total(), pool.allocated_bytes());
  EXPECT_EQ(account.used.total(), 3 * 128);
}

// What a step reads, token by token: packed bytes in the packed blocks, full-precision ones in the
// others.
TEST(Account, ReadsWhatTheDefinitionSays) {
  EXPECT_TRUE(rc::check([] {
    const int64_t block_size = *rc::gen::inRange<int64_t>(1, 9);
    const BlockLayout packed = layout_of({10, 3, 0}, 1, 1, block_size);
    const BlockLayout full_precision = layout_of({32, 0, 0}, 1, 1, block_size);
    const FullPrecisionWindow ends =
        *rc::gen::element(FullPrecisionWindow{}, FullPrecisionWindow{0, 1},
                          FullPrecisionWindow{1, 1}, FullPrecisionWindow{2, 3});
    const int64_t window = *rc::gen::inRange<int64_t>(0, 40);
    const int64_t num_tokens = *rc::gen::inRange<int64_t>(0, 80);
    const GroupSizes group{&packed, &full_precision, ends, window};

    const int64_t tail = first_recent_block_of(ends, num_tokens, block_size);
    const auto is_full_precision = [&](int64_t token) {
      const int64_t block = token / block_size;
      return ends.is_on() && (block < ends.sink_blocks || block >= tail);
    };
    int64_t read = 0;
    int64_t held = 0;
    const int64_t first_held = expired_blocks(num_tokens, window, block_size) * block_size;
    for (int64_t token = 0; token < num_tokens; ++token) {
      const int64_t bytes = is_full_precision(token) ? 64 : 26;
      if (window == 0 || num_tokens - 1 - token < window) read += bytes;
      if (token >= first_held) held += bytes;
    }
    RC_ASSERT(bytes_read_per_step(std::span(&group, 1), num_tokens) == read);
    const ByteCount bytes = sequence_bytes(std::span(&group, 1), num_tokens);
    RC_ASSERT(bytes.codes + bytes.scales == held);
    const BlockCounts blocks = count_blocks(ends, num_tokens, block_size, first_held / block_size);
    RC_ASSERT(bytes.total() == blocks.packed * packed.block_bytes +
                                   blocks.full_precision * full_precision.block_bytes);
  }));
}

}  // namespace
}  // namespace kvx::cache

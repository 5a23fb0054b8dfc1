// Block records: every byte has one owner, and nonsense is refused by name.
#include "cache/block_layout.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <limits>
#include <numeric>

namespace kvx::cache::block_layout_test {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

GroupBytes group_of(int64_t block_size, HeadRunBytes run) {
  return {block_size, {LayerBytes{{run}}}};
}

BlockLayout laid_out(const GroupBytes& group) {
  Result<BlockLayout> layout = layout_block(group);
  if (layout.ok()) return layout.value();
  ADD_FAILURE() << layout.error().message;
  return {};
}

std::string refusal(const Result<BlockLayout>& layout) {
  if (layout.ok()) return "accepted";
  EXPECT_EQ(layout.error().code, ErrorCode::kInvalidArgument);
  return layout.error().message;
}

TEST(BlockLayout, PutsCodesThenScalesOfKThenOfVForEachHead) {
  // Two heads of int8 K in groups of 64 (128 + 2 x 2 bytes) and int4 V (64 + 2 x 2), 16 tokens.
  const BlockLayout layout = laid_out(group_of(16, {2, {128, 4, 0}, {64, 4, 0}}));
  const RunPlace& run = layout.layers[0].runs[0];
  EXPECT_EQ(run.k.codes_offset, 0);
  EXPECT_EQ(run.k.code_token_stride, 128);
  EXPECT_EQ(run.k.scales_offset, 16 * 128);
  EXPECT_EQ(run.k.scale_token_stride, 4);
  EXPECT_EQ(run.v.codes_offset, 16 * 132);
  EXPECT_EQ(run.v.scales_offset, 16 * 132 + 16 * 64);
  EXPECT_EQ(run.head_stride, 16 * 132 + 16 * 68);
  EXPECT_EQ(layout.block_bytes, 2 * 16 * 200);
  EXPECT_EQ(layout.code_bytes(), 2 * 16 * 192);
  EXPECT_EQ(layout.scale_bytes(), 2 * 16 * 8);
  EXPECT_EQ(layout.padding_bytes(), 0);
}

TEST(BlockLayout, PutsOnePageScaleWhereRowScalesWouldLie) {
  const BlockLayout layout = laid_out(group_of(16, {1, {64, 0, 2}, {64, 0, 2}}));
  const RunPlace& run = layout.layers[0].runs[0];
  EXPECT_TRUE(run.k.has_scales);
  EXPECT_EQ(run.k.scale_token_stride, 0);
  EXPECT_EQ(run.k.scales_offset, 1024);
  EXPECT_EQ(run.v.codes_offset, 1028);  // the next multiple of 4
  EXPECT_EQ(run.v.scales_offset, 2052);
  EXPECT_EQ(layout.page_scale_bytes, 4);
  EXPECT_EQ(layout.scale_bytes(), 4);
  EXPECT_EQ(layout.block_bytes, 2112);  // 2056 rounded up to 64
}

TEST(BlockLayout, LeavesNoRoomForGivenScalesOrForASideThatIsNotStored) {
  const BlockLayout layout = laid_out(group_of(4, {1, {128, 0, 0}, {}}));
  const RunPlace& run = layout.layers[0].runs[0];
  EXPECT_TRUE(run.k.is_stored);
  EXPECT_FALSE(run.k.has_scales);
  EXPECT_FALSE(run.v.is_stored);
  EXPECT_EQ(layout.block_bytes, 512);
}

TEST(BlockLayout, TurbomindsOrderPutsDataBeforeZerosAndOtherScalesBehindTheDataBlock) {
  // Two layers of two heads, 8 tokens: K of 16 bytes with a scale and zero of 4, V of 8 bytes with
  // 2 scale bytes in the scale block.
  SideBytes k{16, 4, 0};
  k.has_zeros = true;
  const SideBytes v{8, 2, 0};
  GroupBytes group{8, {LayerBytes{{{2, k, v}}}, LayerBytes{{{2, k, v}}}}};
  group.order = BlockOrder::kTurbomind;
  const BlockLayout layout = laid_out(group);
  constexpr int64_t kHead = 8 * (16 + 8);
  constexpr int64_t kLayer = 2 * kHead + 2 * 8 * 4;
  const RunPlace& run = layout.layers[1].runs[0];
  EXPECT_EQ(layout.layers[1].offset, kLayer);
  EXPECT_EQ(run.head_stride, kHead);
  EXPECT_EQ(run.k.codes_offset, kLayer);
  EXPECT_EQ(run.v.codes_offset, kLayer + 8 * 16);
  EXPECT_EQ(run.k.scales_offset, kLayer + 2 * kHead);
  EXPECT_EQ(run.k.scale_token_stride, 4);
  EXPECT_EQ(run.k.scale_head_stride, 8 * 4);
  EXPECT_EQ(layout.scale_block_offset, 896);  // 2 * 448 is a multiple of 64
  EXPECT_EQ(layout.scale_block_bytes, 2 * 2 * 8 * 2);
  EXPECT_EQ(run.v.scales_offset, 896 + 2 * 8 * 2);  // the layer before
  EXPECT_EQ(run.v.scale_token_stride, 2);
  EXPECT_EQ(run.v.scale_head_stride, 8 * 2);
  EXPECT_EQ(layout.block_bytes, 960);
  EXPECT_EQ(layout.code_bytes() + layout.scale_bytes() + layout.padding_bytes(), 960);
}

TEST(BlockLayout, TurbomindsOrderRefusesWhatItHasNoPlaceFor) {
  const auto refused = [](HeadRunBytes run) {
    GroupBytes group = group_of(3, run);
    group.order = BlockOrder::kTurbomind;
    return refusal(layout_block(group));
  };
  EXPECT_EQ(
      refused({1, {16, 0, 2}, {16, 0, 0}}),
      "page_scale_bytes of layer 0, run 0, k is 2; order=turbomind has no place for scales of "
      "a page");
  EXPECT_EQ(refused({1, {16, 0, 0}, {5, 0, 0}}),
            "row_code_bytes of layer 0, run 0, v is 5; order=turbomind needs rows that take a "
            "multiple of 4 bytes in a block of 3 tokens");
  EXPECT_EQ(refused({1, {kHuge / 2, 0, 0}, {16, 0, 0}}).substr(0, 14), "block_bytes of");
  GroupBytes two = group_of(4, {1, {16, 0, 0}, {16, 0, 0}});
  two.layers[0].runs.push_back({1, {8, 0, 0}, {8, 0, 0}});
  two.order = BlockOrder::kTurbomind;
  EXPECT_EQ(refusal(layout_block(two)),
            "layer 0 has 2 runs of heads; order=turbomind stores all heads of a layer alike");
}

TEST(BlockLayout, NumbersTheHeadsOfALayerRunAfterRun) {
  const GroupBytes group{8,
                         {LayerBytes{{{3, {64, 4, 0}, {64, 4, 0}}, {1, {256, 0, 0}, {256, 0, 0}}}},
                          LayerBytes{{{4, {64, 4, 0}, {64, 4, 0}}}}}};
  const BlockLayout layout = laid_out(group);
  EXPECT_EQ(layout.layers[0].num_heads, 4);
  EXPECT_EQ(layout.layers[0].runs[1].first_head, 3);
  EXPECT_EQ(layout.layers[0].runs[1].k.codes_offset, 3 * 8 * 136);
  EXPECT_EQ(layout.layers[1].offset, 3 * 8 * 136 + 8 * 512);
  EXPECT_EQ(layout.layers[1].runs[0].k.codes_offset, layout.layers[1].offset);
}

TEST(BlockLayout, RefusesBlockSizesOutsideOneTo1024) {
  for (int64_t block_size : {int64_t{0}, int64_t{-1}, int64_t{1025}, kHuge}) {
    EXPECT_EQ(refusal(layout_block(group_of(block_size, {1, {64, 0, 0}, {64, 0, 0}}))),
              fmt::format("block_size is {}; expected 1 to 1024", block_size));
  }
  EXPECT_TRUE(layout_block(group_of(1, {1, {64, 0, 0}, {64, 0, 0}})).ok());
  EXPECT_TRUE(layout_block(group_of(1024, {1, {64, 0, 0}, {64, 0, 0}})).ok());
}

TEST(BlockLayout, AWholeSequenceMayBeOneBlock) {
  const auto layout = layout_whole_sequence(group_of(131072, {8, {256, 0, 0}, {256, 0, 0}}));
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout.value().block_bytes, int64_t{131072} * 8 * 512);
}

TEST(BlockLayout, NamesTheFieldThatIsWrong) {
  const auto with = [](HeadRunBytes run) { return refusal(layout_block(group_of(16, run))); };
  EXPECT_EQ(with({0, {64, 0, 0}, {}}), "num_heads of layer 0, run 0 is 0; expected 1 or more");
  EXPECT_EQ(with({1, {-64, 0, 0}, {64, 0, 0}}),
            "row_code_bytes of layer 0, run 0, k is -64; expected 0 or more");
  EXPECT_EQ(with({1, {64, 0, 0}, {64, -1, 0}}),
            "row_scale_bytes of layer 0, run 0, v is -1; expected 0 or more");
  EXPECT_EQ(with({1, {64, 0, -1}, {64, 0, 0}}),
            "page_scale_bytes of layer 0, run 0, k is -1; expected 0 or more");
  EXPECT_EQ(with({1, {}, {}}),
            "row_code_bytes of layer 0, run 0 is 0 for both k and v; expected one to be stored");
  EXPECT_EQ(with({1, {64, 0, 0}, {0, 2, 0}}),
            "row_code_bytes of layer 0, run 0, v is 0 with scales; expected codes");
  EXPECT_EQ(with({1, {64, 2, 2}, {}}),
            "layer 0, run 0, k has row_scale_bytes 2 and page_scale_bytes 2; expected one of them "
            "to be 0");
  EXPECT_EQ(refusal(layout_block({16, {}})), "num_layers is 0; expected 1 or more");
  EXPECT_EQ(refusal(layout_block({16, {LayerBytes{}}})),
            "layer 0 has 0 runs of heads; expected 1 or more");
}

TEST(BlockLayout, RefusesSizesThatOverflow) {
  const std::string too_large =
      "block_bytes of 1 layers with block_size 16 does not fit in 63 bits; expected smaller rows";
  const auto with = [](HeadRunBytes run) { return refusal(layout_block(group_of(16, run))); };
  EXPECT_EQ(with({1, {kHuge, 0, 0}, {}}), too_large);
  EXPECT_EQ(with({1, {1, kHuge, 0}, {}}), too_large);
  EXPECT_EQ(with({1, {1, 0, kHuge}, {}}), too_large);
  EXPECT_EQ(with({1, {kHuge / 32, 0, 0}, {kHuge / 16, 4, 0}}), too_large);
  EXPECT_EQ(with({std::numeric_limits<int>::max(), {kHuge >> 30, 0, 0}, {}}), too_large);
}

TEST(BlockLayout, RefusesMoreHeadsThanAnIntCounts) {
  constexpr int kMost = std::numeric_limits<int>::max();
  const HeadRunBytes run{kMost, {1, 0, 0}, {}};
  EXPECT_EQ(
      refusal(layout_block({1, {LayerBytes{{run, run}}}})),
      fmt::format("num_heads of layer 0 is {}; expected at most 2^31 - 1", 2 * int64_t{kMost}));
}

// Marks [begin, begin + bytes); a byte that is marked already has two owners.
void paint(std::vector<bool>& record, int64_t begin, int64_t bytes) {
  RC_ASSERT(begin >= 0 && begin + bytes <= static_cast<int64_t>(record.size()));
  for (int64_t i = begin; i < begin + bytes; ++i) {
    RC_ASSERT(!record[i]);
    record[i] = true;
  }
}

void paint_side(std::vector<bool>& record, const SidePlace& place, const SideBytes& side,
                int64_t head_offset, int64_t block_size) {
  RC_ASSERT(place.is_stored == (side.row_code_bytes > 0));
  if (!place.is_stored) return;
  RC_ASSERT(place.codes_offset % kSectionAlignment == 0);
  RC_ASSERT(place.scales_offset % kSectionAlignment == 0);
  for (int64_t token = 0; token < block_size; ++token) {
    paint(record, place.codes_offset + head_offset + token * place.code_token_stride,
          side.row_code_bytes);
    paint(record, place.scales_offset + head_offset + token * place.scale_token_stride,
          side.row_scale_bytes);
  }
  paint(record, place.scales_offset + head_offset, side.page_scale_bytes);
}

SideBytes any_side(bool is_stored) {
  if (!is_stored) return {};
  SideBytes side;
  side.row_code_bytes = *rc::gen::inRange<int64_t>(1, 40);
  const int scales = *rc::gen::inRange(0, 3);
  if (scales == 1) side.row_scale_bytes = *rc::gen::inRange<int64_t>(1, 9);
  if (scales == 2) side.page_scale_bytes = *rc::gen::inRange<int64_t>(1, 9);
  return side;
}

HeadRunBytes any_run() {
  const int stored = *rc::gen::inRange(1, 4);  // K, V or both
  return {*rc::gen::inRange(1, 4), any_side(stored & 1), any_side(stored & 2)};
}

GroupBytes any_group() {
  GroupBytes group{*rc::gen::inRange<int64_t>(1, 20), {}};
  group.layers.resize(*rc::gen::inRange<size_t>(1, 4));
  for (LayerBytes& layer : group.layers) {
    const int num_runs = *rc::gen::inRange(1, 4);
    for (int i = 0; i < num_runs; ++i) layer.runs.push_back(any_run());
  }
  return group;
}

TEST(BlockLayout, GivesEveryByteOneOwner) {
  EXPECT_TRUE(rc::check([] {
    const GroupBytes group = any_group();
    const auto layout = layout_block(group);
    RC_ASSERT(layout.ok());
    const BlockLayout& record = layout.value();
    RC_ASSERT(record.block_bytes % kBlockAlignment == 0);
    std::vector<bool> bytes(static_cast<size_t>(record.block_bytes));
    for (size_t layer = 0; layer < group.layers.size(); ++layer) {
      for (size_t i = 0; i < group.layers[layer].runs.size(); ++i) {
        const HeadRunBytes& run = group.layers[layer].runs[i];
        const RunPlace& place = record.layers[layer].runs[i];
        for (int head = 0; head < run.num_heads; ++head) {
          const int64_t head_offset = head * place.head_stride;
          paint_side(bytes, place.k, run.k, head_offset, group.block_size);
          paint_side(bytes, place.v, run.v, head_offset, group.block_size);
        }
      }
    }
    const int64_t owned = std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    RC_ASSERT(owned == record.code_bytes() + record.scale_bytes());
    RC_ASSERT(owned + record.padding_bytes() == record.block_bytes);
  }));
}

}  // namespace
}  // namespace kvx::cache::block_layout_test

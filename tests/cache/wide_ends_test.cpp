// Wide ends and windows: against their definitions, token by token.
#include "cache/wide_ends.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <vector>

namespace kvx::cache {
namespace {

WideEnds wide_ends(int64_t sink, int64_t recent, int64_t block_size) {
  const auto ends = make_wide_ends(sink, recent, block_size);
  return ends.ok() ? ends.value() : WideEnds{-1, -1};
}

std::string refusal(int64_t sink, int64_t recent, int64_t block_size) {
  const auto ends = make_wide_ends(sink, recent, block_size);
  return ends.ok() ? "accepted" : ends.error().message;
}

TEST(WideEnds, RoundUpToWholeBlocks) {
  const WideEnds ends = wide_ends(17, 64, 16);
  EXPECT_EQ(ends.head_blocks, 2);
  EXPECT_EQ(ends.recent_blocks, 4);
  EXPECT_EQ(wide_ends(0, 65, 64).recent_blocks, 2);
}

TEST(WideEnds, AlwaysKeepTheOpenBlockWide) {
  EXPECT_EQ(wide_ends(16, 0, 64).recent_blocks, 1);
  EXPECT_TRUE(wide_ends(0, 0, 64).is_on());
  EXPECT_FALSE(WideEnds{}.is_on());
}

TEST(WideEnds, RefuseNegativeNumbers) {
  EXPECT_EQ(refusal(-1, 0, 16), "sink is -1; expected 0 or more");
  EXPECT_EQ(refusal(0, -64, 16), "recent is -64; expected 0 or more");
  EXPECT_EQ(refusal(0, 64, 0), "block_size is 0; expected 1 or more");
}

TEST(WideEnds, PackABlockWhenTheWindowHasMovedPastIt) {
  const WideEnds ends = wide_ends(/*sink=*/4, /*recent=*/8, /*block_size=*/4);
  // Block 0 is the sink, blocks 1 and 2 fill the window; token 12 opens block 3.
  EXPECT_EQ(wide_tail_block(ends, 12, 4), 1);
  EXPECT_EQ(block_leaving_window(ends, 11, 4), std::nullopt);
  EXPECT_EQ(block_leaving_window(ends, 12, 4), 1);
  EXPECT_EQ(wide_tail_block(ends, 13, 4), 2);
  EXPECT_EQ(block_leaving_window(ends, 13, 4), std::nullopt);
}

TEST(WideEnds, KeepAShortSequenceWide) {
  const WideEnds ends = wide_ends(128, 64, 16);
  const BlockCounts blocks = count_blocks(ends, 100, 16);
  EXPECT_EQ(blocks.packed, 0);
  EXPECT_EQ(blocks.wide, 7);
}

TEST(WideEnds, PackEveryBlockWhenTheyAreOff) {
  const BlockCounts blocks = count_blocks(WideEnds{}, 100, 16);
  EXPECT_EQ(blocks.packed, 7);
  EXPECT_EQ(blocks.wide, 0);
  EXPECT_EQ(block_leaving_window(WideEnds{}, 16, 16), std::nullopt);
}

// Blocks that are packed after tokens came one by one, by the rule's own words.
TEST(WideEnds, FollowTheirDefinitionTokenByToken) {
  EXPECT_TRUE(rc::check([] {
    const int64_t block_size = *rc::gen::inRange<int64_t>(1, 9);
    const WideEnds ends{*rc::gen::inRange<int64_t>(0, 4), *rc::gen::inRange<int64_t>(1, 4)};
    std::vector<bool> is_packed;
    for (int64_t position = 0; position < 80; ++position) {
      const auto leaving = block_leaving_window(ends, position, block_size);
      if (position % block_size == 0) is_packed.push_back(false);
      const auto end = static_cast<int64_t>(is_packed.size());
      const int64_t oldest = end - 1 - ends.recent_blocks;  // just outside of the window
      const bool leaves = position % block_size == 0 && oldest >= ends.head_blocks;
      RC_ASSERT(leaving.has_value() == leaves);
      if (leaves) {
        RC_ASSERT(*leaving == oldest);
        is_packed[oldest] = true;
      }
      const BlockCounts blocks = count_blocks(ends, position + 1, block_size);
      RC_ASSERT(blocks.packed == std::count(is_packed.begin(), is_packed.end(), true));
      RC_ASSERT(blocks.packed + blocks.wide == end);
      const int64_t first = *rc::gen::inRange<int64_t>(0, end + 1);
      const BlockCounts held = count_blocks(ends, position + 1, block_size, first);
      RC_ASSERT(held.packed == std::count(is_packed.begin() + first, is_packed.end(), true));
      RC_ASSERT(held.packed + held.wide == end - first);
    }
  }));
}

TEST(Window, ABlockExpiresWhenItsLastTokenIsOutOfSight) {
  // Window 8: the query at 11 sees 4..11, the query at 10 sees 3..10.
  EXPECT_EQ(expired_blocks(10, 8, 4), 0);
  EXPECT_EQ(expired_blocks(11, 8, 4), 1);
  EXPECT_EQ(expired_blocks(1000, 0, 4), 0);
}

TEST(Window, ExpiresWhatNoLaterQueryReads) {
  EXPECT_TRUE(rc::check([] {
    const int64_t block_size = *rc::gen::inRange<int64_t>(1, 9);
    const int64_t window = *rc::gen::inRange<int64_t>(1, 30);
    const int64_t query = *rc::gen::inRange<int64_t>(0, 100);
    int64_t expired = 0;
    // Block b's last token, (b + 1) * block_size - 1, is seen by the query when query - token <
    // window.
    while (query - ((expired + 1) * block_size - 1) >= window) ++expired;
    RC_ASSERT(expired_blocks(query, window, block_size) == expired);
  }));
}

TEST(Window, NeverHoldsMoreBlocksThanPlanned) {
  EXPECT_TRUE(rc::check([] {
    const int64_t block_size = *rc::gen::inRange<int64_t>(1, 9);
    const int64_t window = *rc::gen::inRange<int64_t>(1, 30);
    const int64_t at_once = *rc::gen::inRange<int64_t>(1, 30);
    const int64_t planned = most_window_blocks(window, at_once, block_size);
    int64_t most = 0;
    int64_t num_tokens = *rc::gen::inRange<int64_t>(0, 9);
    // All alignments are met: steps of 1, then at_once, for several windows and blocks.
    for (int i = 0; i < 400; ++i) {
      const int64_t step = i % 2 == 0 ? at_once : 1;
      const int64_t first = expired_blocks(num_tokens, window, block_size);
      num_tokens += step;
      most = std::max(most, blocks_for(num_tokens, block_size) - first);
    }
    RC_ASSERT(most <= planned);
    RC_ASSERT(most >= planned - 1);
  }));
}

}  // namespace
}  // namespace kvx::cache

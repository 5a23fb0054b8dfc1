// Full-precision window and windows: against their definitions, token by token.
#include "cache/full_precision_window.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <vector>

namespace kvx::cache::full_precision_window_test {
namespace {

FullPrecisionWindow full_precision_window(int64_t sink, int64_t recent, int64_t block_size) {
  const auto ends = make_full_precision_window(sink, recent, block_size);
  return ends.ok() ? ends.value() : FullPrecisionWindow{-1, -1};
}

std::string refusal(int64_t sink, int64_t recent, int64_t block_size) {
  const auto ends = make_full_precision_window(sink, recent, block_size);
  return ends.ok() ? "accepted" : ends.error().message;
}

TEST(FullPrecisionWindow, RoundUpToWholeBlocks) {
  const FullPrecisionWindow ends = full_precision_window(17, 64, 16);
  EXPECT_EQ(ends.sink_blocks, 2);
  EXPECT_EQ(ends.recent_blocks, 5);  // 64 tokens and the open block
  EXPECT_EQ(full_precision_window(0, 65, 64).recent_blocks, 3);
}

TEST(FullPrecisionWindow, AlwaysKeepTheOpenBlockFullPrecision) {
  EXPECT_EQ(full_precision_window(16, 0, 64).recent_blocks, 1);
  EXPECT_TRUE(full_precision_window(0, 0, 64).is_on());
  EXPECT_FALSE(FullPrecisionWindow{}.is_on());
}

TEST(FullPrecisionWindow, RefuseNegativeNumbers) {
  EXPECT_EQ(refusal(-1, 0, 16), "sink is -1; expected 0 or more");
  EXPECT_EQ(refusal(0, -64, 16), "recent is -64; expected 0 or more");
  EXPECT_EQ(refusal(0, 64, 0), "block_size is 0; expected 1 or more");
}

TEST(FullPrecisionWindow, PackABlockWhenTheWindowHasMovedPastIt) {
  const FullPrecisionWindow ends =
      full_precision_window(/*sink=*/4, /*recent=*/8, /*block_size=*/4);
  // Block 0 is the sink, blocks 1 to 3 fill the window; token 16 opens block 4.
  EXPECT_EQ(first_recent_block_of(ends, 16, 4), 1);
  EXPECT_EQ(block_leaving_window(ends, 15, 4), std::nullopt);
  EXPECT_EQ(block_leaving_window(ends, 16, 4), 1);
  EXPECT_EQ(first_recent_block_of(ends, 17, 4), 2);
  EXPECT_EQ(block_leaving_window(ends, 17, 4), std::nullopt);
}

TEST(FullPrecisionWindow, HoldTheTokensBeforeEveryQueryAndAtMostABlockMore) {
  EXPECT_TRUE(rc::check([] {
    const int64_t block_size = *rc::gen::inRange<int64_t>(1, 70);
    const int64_t recent = *rc::gen::inRange<int64_t>(0, 200);
    const int64_t query = *rc::gen::inRange<int64_t>(0, 1000);
    const FullPrecisionWindow ends = full_precision_window(0, recent, block_size);
    const int64_t first = first_recent_block_of(ends, query + 1, block_size) * block_size;
    RC_ASSERT(first <= std::max<int64_t>(query - recent, 0));
    const int64_t in_blocks = blocks_for(recent, block_size) * block_size;
    RC_ASSERT(first == 0 || query - first < in_blocks + block_size);
  }));
}

TEST(FullPrecisionWindow, KeepAShortSequenceFullPrecision) {
  const FullPrecisionWindow ends = full_precision_window(128, 64, 16);
  const BlockCounts blocks = count_blocks(ends, 100, 16);
  EXPECT_EQ(blocks.packed, 0);
  EXPECT_EQ(blocks.full_precision, 7);
}

TEST(FullPrecisionWindow, PackEveryBlockWhenTheyAreOff) {
  const BlockCounts blocks = count_blocks(FullPrecisionWindow{}, 100, 16);
  EXPECT_EQ(blocks.packed, 7);
  EXPECT_EQ(blocks.full_precision, 0);
  EXPECT_EQ(block_leaving_window(FullPrecisionWindow{}, 16, 16), std::nullopt);
}

// Blocks that are packed after tokens came one by one, by the rule's own words.
TEST(FullPrecisionWindow, FollowTheirDefinitionTokenByToken) {
  EXPECT_TRUE(rc::check([] {
    const int64_t block_size = *rc::gen::inRange<int64_t>(1, 9);
    const FullPrecisionWindow ends{*rc::gen::inRange<int64_t>(0, 4),
                                   *rc::gen::inRange<int64_t>(1, 4)};
    std::vector<bool> is_packed;
    for (int64_t position = 0; position < 80; ++position) {
      const auto leaving = block_leaving_window(ends, position, block_size);
      if (position % block_size == 0) is_packed.push_back(false);
      const auto end = static_cast<int64_t>(is_packed.size());
      const int64_t oldest = end - 1 - ends.recent_blocks;  // just outside of the window
      const bool leaves = position % block_size == 0 && oldest >= ends.sink_blocks;
      RC_ASSERT(leaving.has_value() == leaves);
      if (leaves) {
        RC_ASSERT(*leaving == oldest);
        is_packed[oldest] = true;
      }
      const BlockCounts blocks = count_blocks(ends, position + 1, block_size);
      RC_ASSERT(blocks.packed == std::count(is_packed.begin(), is_packed.end(), true));
      RC_ASSERT(blocks.packed + blocks.full_precision == end);
      const int64_t first = *rc::gen::inRange<int64_t>(0, end + 1);
      const BlockCounts held = count_blocks(ends, position + 1, block_size, first);
      RC_ASSERT(held.packed == std::count(is_packed.begin() + first, is_packed.end(), true));
      RC_ASSERT(held.packed + held.full_precision == end - first);
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
}  // namespace kvx::cache::full_precision_window_test

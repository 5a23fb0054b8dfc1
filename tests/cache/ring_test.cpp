// Ring: against a ring that is written token by token.
#include "cache/ring.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <vector>

namespace kvx::cache {
namespace {

TEST(Ring, PutsAPositionIntoItsRemainder) {
  EXPECT_EQ(ring_slot(0, 4), 0);
  EXPECT_EQ(ring_slot(7, 4), 3);
  EXPECT_EQ(ring_slot(8, 4), 0);
}

TEST(Ring, KeepsTheLastWindowOfALongWrite) {
  const RingWrite write = ring_write(/*first_position=*/2, /*num_tokens=*/10, /*window=*/4);
  EXPECT_EQ(write.num_dropped, 6);  // positions 2..7; 8..11 stay in slots 0..3
  EXPECT_EQ(write.runs[0].first_token, 6);
  EXPECT_EQ(write.runs[0].first_slot, 0);
  EXPECT_EQ(write.runs[0].num_tokens, 4);
  EXPECT_EQ(write.runs[1].num_tokens, 0);
}

TEST(Ring, SplitsAWriteAtItsEnd) {
  const RingWrite write = ring_write(/*first_position=*/3, /*num_tokens=*/3, /*window=*/4);
  EXPECT_EQ(write.num_dropped, 0);
  EXPECT_EQ(write.runs[0].first_slot, 3);
  EXPECT_EQ(write.runs[0].num_tokens, 1);
  EXPECT_EQ(write.runs[1].first_token, 1);
  EXPECT_EQ(write.runs[1].first_slot, 0);
  EXPECT_EQ(write.runs[1].num_tokens, 2);
}

TEST(Ring, HoldsWhatTokenByTokenWritingHolds) {
  EXPECT_TRUE(rc::check([] {
    const int64_t window = *rc::gen::inRange<int64_t>(1, 12);
    std::vector<int64_t> plain(window, -1);  // the position in each slot, written one by one
    std::vector<int64_t> ring(window, -1);   // the same, written by runs
    int64_t num_tokens = 0;
    for (int64_t count :
         *rc::gen::container<std::vector<int64_t>>(rc::gen::inRange<int64_t>(0, 30))) {
      for (int64_t t = 0; t < count; ++t) plain[(num_tokens + t) % window] = num_tokens + t;
      const RingWrite write = ring_write(num_tokens, count, window);
      for (const RingRun& run : write.runs) {
        for (int64_t t = 0; t < run.num_tokens; ++t) {
          ring[run.first_slot + t] = num_tokens + run.first_token + t;
        }
      }
      RC_ASSERT(write.num_dropped + write.runs[0].num_tokens + write.runs[1].num_tokens == count);
      num_tokens += count;
      RC_ASSERT(ring == plain);
      for (int64_t slot = 0; slot < window; ++slot) {
        RC_ASSERT(ring_position(slot, num_tokens, window) == plain[slot]);
      }
      RC_ASSERT(ring_size(num_tokens, window) ==
                window - std::count(plain.begin(), plain.end(), -1));
    }
  }));
}

}  // namespace
}  // namespace kvx::cache

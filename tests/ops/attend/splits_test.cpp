// How attention on a GPU is cut, tested without one.
#include "ops/attend/splits.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace kvx::tests {
namespace {

using ops::SplitShape;

TEST(Splits, OneLongSequenceFillsTheDevice) {
  const int splits = ops::plan_splits({8, 131072, 528, 128}).num_splits;
  EXPECT_GE(8 * splits, 500);
  EXPECT_LE(8 * splits, 528);
}

TEST(Splits, AreAsManyAsTheCallerTakes) {
  SplitShape shape = {8, 131072, 528, 128};
  shape.most_splits = 16;
  EXPECT_EQ(ops::plan_splits(shape).num_splits, 16);
}

TEST(Splits, AreAsManyAsTheCallerCanHave) {
  const SplitShape shape = {8, 131072, 528, 128};
  const auto some = [](int splits) { return splits % 8 == 4; };
  EXPECT_EQ(ops::plan_splits(shape, some).num_splits, 60);
  EXPECT_EQ(ops::plan_splits(shape, [](int) { return false; }).num_splits, 0);
}

TEST(Splits, AreWorthTheirMerge) {
  SplitShape shape = {128, 1024, 132, 128};
  EXPECT_EQ(ops::plan_splits(shape).num_splits, 1);
  shape.num_work_tiles = 8;
  EXPECT_GT(ops::plan_splits(shape).num_splits, 1);
  shape.merge = 8;  // all of a sequence's granules
  EXPECT_EQ(ops::plan_splits(shape).num_splits, 1);
}

// Two work tiles of half a multiprocessor each come to different ones where there are.
TEST(Splits, SpreadOverPlacesThatAreEmpty) {
  SplitShape shape = {4, 1024, 16, 128};
  shape.slots_at_a_place = 2;
  shape.crowding = 1;
  const auto cost = [&](int splits) {
    return ops::plan_splits(shape, [&](int n) { return n == splits; }).cost;
  };
  EXPECT_NEAR(cost(2), 4 * 1.5 + 2, 0.1) << "8 work_tiles, one at a place";
  EXPECT_NEAR(cost(4), 2 * 2.0 + 2, 0.1) << "16 work_tiles, two at a place";
}

TEST(Splits, ABatchThatFillsTheDeviceIsNotSplit) {
  EXPECT_EQ(ops::plan_splits({512, 8192, 528, 128}).num_splits, 1);
  EXPECT_EQ(ops::plan_splits({2048, 1024, 528, 128}).num_splits, 1);
}

TEST(Splits, ShortSequencesAreNotSplitBelowAGranule) {
  EXPECT_EQ(ops::plan_splits({8, 100, 528, 128}).num_splits, 1);
  EXPECT_LE(ops::plan_splits({8, 1024, 528, 128}).num_splits, 8);
  EXPECT_EQ(ops::plan_splits({8, 0, 528, 128}).num_splits, 1);
}

TEST(Splits, CoverEveryTokenOnce) {
  for (const int num_splits : {1, 2, 3, 7, 64}) {
    for (const ops::TokenRange tokens : {ops::TokenRange{0, 1}, {0, 1000}, {77, 1000}, {33, 34}}) {
      int next = tokens.begin;
      for (int split = 0; split < num_splits; ++split) {
        const ops::TokenRange part = ops::split_of(tokens, num_splits, split, 32);
        ASSERT_LE(part.begin, part.end);
        if (part.begin == part.end) continue;
        EXPECT_EQ(part.begin, next);
        EXPECT_TRUE(part.begin == tokens.begin || part.begin % 32 == 0);
        next = part.end;
      }
      EXPECT_EQ(next, tokens.end);
    }
  }
}

// What the device does with a batch's lengths, in granules.
struct BalancedBatch {
  std::vector<int> granules;
  int most(int budget) const {
    return ops::balanced_granules(static_cast<int>(granules.size()), budget,
                                  [&](const auto& value) { return sum(value); });
  }
  int work_tiles(int most_of_work_tile) const {
    return sum([&](int g) { return ops::num_work_tiles(g, most_of_work_tile); });
  }
  template <class Value>
  int sum(const Value& value) const {
    int total = 0;
    for (const int g : granules) total += value(g);
    return total;
  }
};

TEST(BalancedWorkTiles, AreAsShortAsTheBudgetAllows) {
  std::mt19937 random(3);
  for (int i = 0; i < 2000; ++i) {
    BalancedBatch batch;
    const int num_sequences = 1 + static_cast<int>(random() % 70);
    for (int s = 0; s < num_sequences; ++s) {
      batch.granules.push_back(static_cast<int>(random() % (random() % 2 ? 600 : 6)));
    }
    const int budget = num_sequences + static_cast<int>(random() % 300);
    const int most = batch.most(budget);
    ASSERT_GE(most, 1);
    ASSERT_LE(batch.work_tiles(most), budget) << "case " << i;
    if (most == 1) continue;
    ASSERT_GT(batch.work_tiles(most - 1), budget) << "case " << i;
  }
}

TEST(BalancedWorkTiles, OfEqualSequencesAreEqual) {
  const BalancedBatch batch = {std::vector<int>(16, 128)};
  EXPECT_EQ(batch.most(33), 64);
  EXPECT_EQ(batch.work_tiles(64), 32);
}

TEST(BalancedWorkTiles, ALongSequenceAmongShortOnesIsCut) {
  BalancedBatch batch = {std::vector<int>(63, 2)};
  batch.granules.push_back(512);
  EXPECT_LE(batch.most(264), 3);
}

}  // namespace
}  // namespace kvx::tests

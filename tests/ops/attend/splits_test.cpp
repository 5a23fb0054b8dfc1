// How attention on a GPU is cut, tested without one.
#include "ops/attend/splits.hpp"

#include <gtest/gtest.h>

namespace kvx::tests {
namespace {

using ops::SplitShape;

TEST(Splits, OneLongSequenceFillsTheDevice) {
  const int splits = ops::plan_splits({8, 131072, 528, 128}).num_splits;
  EXPECT_GE(8 * splits, 500);
  EXPECT_LE(8 * splits, 528);
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

}  // namespace
}  // namespace kvx::tests

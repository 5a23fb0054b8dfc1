// Mistyped words and what they were meant to be.
#include "tools/kvx/nearest_word.hpp"

#include <gtest/gtest.h>

namespace kvx::tool {
namespace {

TEST(EditDistance, CountsLettersThatDiffer) {
  EXPECT_EQ(edit_distance("cache", "cache"), 0);
  EXPECT_EQ(edit_distance("cach", "cache"), 1);
  EXPECT_EQ(edit_distance("cacche", "cache"), 1);
  EXPECT_EQ(edit_distance("cadhe", "cache"), 1);
  EXPECT_EQ(edit_distance("", "cache"), 5);
}

TEST(EditDistance, CountsASwapOfNeighboursOnce) {
  EXPECT_EQ(edit_distance("cahce", "cache"), 1);
}

TEST(NearestWord, IsTheOneThatWasMeant) {
  EXPECT_EQ(nearest_word("--cahce", {"--ctx", "--cache", "--chunks"}), "--cache");
  EXPECT_EQ(nearest_word("comapre", {"run", "compare", "bench"}), "compare");
  EXPECT_EQ(nearest_word("rn", {"bench", "run"}), "run");
}

TEST(NearestWord, IsNoneWhereNoWordIsNear) {
  EXPECT_EQ(nearest_word("fly", {"run", "compare", "bench"}), std::nullopt);
  EXPECT_EQ(nearest_word("--colour", {"--status", "--markdown"}), std::nullopt);
  EXPECT_EQ(nearest_word("x", {}), std::nullopt);
}

}  // namespace
}  // namespace kvx::tool

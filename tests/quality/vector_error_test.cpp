// VectorError against small vectors worked out by hand.
#include "quality/vector_error.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace kvx::quality {
namespace {

TEST(VectorError, MeasuresAngleAndRelativeLength) {
  // r = (3, 4), o = (4, 3): cosine 24 / 25, |o - r| / |r| = sqrt(2) / 5.
  VectorError error;
  error.add(std::vector<float>{3, 4}, std::vector<float>{4, 3});
  EXPECT_DOUBLE_EQ(error.cosine_similarity(), 0.96);
  EXPECT_DOUBLE_EQ(error.relative_error(), std::sqrt(2.0) / 5);
}

TEST(VectorError, IsTheSameInPieces) {
  VectorError whole;
  whole.add(std::vector<float>{1, -2, 3}, std::vector<float>{1, 2, 2});
  VectorError pieces;
  pieces.add(std::vector<float>{1}, std::vector<float>{1});
  pieces.add(std::vector<float>{-2, 3}, std::vector<float>{2, 2});
  EXPECT_EQ(whole.cosine_similarity(), pieces.cosine_similarity());
  EXPECT_EQ(whole.relative_error(), pieces.relative_error());
}

TEST(VectorError, SeesAScaleThatTheAngleDoesNot) {
  VectorError error;
  error.add(std::vector<float>{1, 2}, std::vector<float>{2, 4});
  EXPECT_DOUBLE_EQ(error.cosine_similarity(), 1);
  EXPECT_DOUBLE_EQ(error.relative_error(), 1);
}

TEST(VectorError, HasNoAngleToZero) {
  VectorError error;
  error.add(std::vector<float>{0, 0}, std::vector<float>{1, 0});
  EXPECT_TRUE(std::isnan(error.cosine_similarity()));
  EXPECT_FALSE(std::isfinite(error.relative_error()));
}

}  // namespace
}  // namespace kvx::quality

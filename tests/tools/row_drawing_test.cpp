// Row pictures say what the bytes are.
#include "tools/kvx/row_drawing.hpp"

#include <gtest/gtest.h>

#include "format/list.hpp"

namespace kvx::tool {
namespace {

TEST(RowDrawing, ShowsCodesScalesAndTheirOffsets) {
  const auto spec = format::make_spec(format::FormatId::kNvfp4).value();
  EXPECT_EQ(draw_row(spec, 64),
            "+------------+----------------+\n"
            "| 64 x E2M1  | 4 x scale e4m3 |\n"
            "+------------+----------------+\n"
            "0            32               36 bytes\n"
            "byte 0: e0 | e1 << 4   byte 1: e2 | e3 << 4   ...\n");
}

TEST(RowDrawing, ShowsTheZeroOfAffineRowsAndTurboMindsOrder) {
  const auto spec = format::make_spec(format::FormatId::kInt4Affine).value();
  EXPECT_EQ(draw_row(spec, 64),
            "+------------+------------+------------+\n"
            "| 64 x UINT4 | scale f16  | zero f16   |\n"
            "+------------+------------+------------+\n"
            "0            32           34           36 bytes\n"
            "byte 0: e0 | e2 << 4   byte 1: e4 | e6 << 4   byte 2: e1 | e3 << 4   "
            "byte 3: e5 | e7 << 4   ...\n");
}

TEST(RowDrawing, LeavesOutScalesThatLieElsewhere) {
  const auto spec = format::make_spec(format::FormatId::kFp8E4M3).value();
  EXPECT_EQ(draw_row(spec, 64),
            "+------------+\n"
            "| 64 x E4M3  |\n"
            "+------------+\n"
            "0            64 bytes\n");
}

}  // namespace
}  // namespace kvx::tool

// The progress line and the table, as text.
#include "tools/kvx/terminal.hpp"

#include <gtest/gtest.h>

#include "tools/kvx/table.hpp"

namespace kvx::tool {
namespace {

TEST(Progress, SaysHowMuchIsDoneAndHowLongTheRestTakes) {
  EXPECT_EQ(progress_line(0.25, 10, "window 1 of 4"),
            "[#####...............]  25 %  window 1 of 4  30 s left");
}

TEST(Progress, GuessesNoTimeBeforeAnythingIsDone) {
  EXPECT_EQ(progress_line(0, 0, "loading"), "[....................]   0 %  loading");
}

TEST(Progress, WritesMinutesWithTwoDigitsOfSeconds) {
  EXPECT_EQ(duration_text(59.4), "59 s");
  EXPECT_EQ(duration_text(59.6), "1 m 00 s");
  EXPECT_EQ(duration_text(125), "2 m 05 s");
}

TEST(Table, AlignsItsColumns) {
  Table table({{"name"}, {"bits", Align::kRight}});
  table.add_row({"bf16", "16"});
  table.add_row({"fp8_e4m3", "8"});
  EXPECT_EQ(table.text(false),
            "name      bits\n"
            "bf16        16\n"
            "fp8_e4m3     8\n");
}

TEST(Table, IsAlsoMarkdown) {
  Table table({{"name"}, {"bits", Align::kRight}});
  table.add_row({"bf16", "16"});
  EXPECT_EQ(table.markdown(), "| name | bits |\n|---|---:|\n| bf16 | 16 |\n");
}

}  // namespace
}  // namespace kvx::tool

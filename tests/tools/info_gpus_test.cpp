// What kvx info says of a build's GPU architectures.
#include "tools/kvx/info_gpus.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvx::tool {
namespace {

using testing::HasSubstr;

TEST(InfoGpus, NamesWhatRunsEachTargetAndWhereItHasRun) {
  const std::string lines = gpu_lines("90a;100f", "  ");
  EXPECT_EQ(lines,
            "90a: compute capability 9.0; has run on H100 and H200\n"
            "  100f: compute capability 10.0, 10.3; compiled, has run nowhere\n");
  EXPECT_EQ(gpu_lines("90a 100f", "  "), lines);
  EXPECT_THAT(gpu_lines("80", ""), HasSubstr("8.0, 8.6, 8.7, 8.9"));
  EXPECT_THAT(gpu_lines("80-virtual", ""), HasSubstr("8.0 and later"));
}

TEST(InfoGpus, SayThatABuildWithoutThemHasNone) {
  EXPECT_THAT(gpu_lines("", ""), HasSubstr("none"));
}

TEST(InfoGpus, ThePageTellsCompiledFromRun) {
  const std::string page = gpu_markdown();
  EXPECT_THAT(page, HasSubstr("| 90a | 9.0 | all presets | H100 and H200 |"));
  EXPECT_THAT(page, HasSubstr("| 120f | 12.0, 12.1 | release-all | nothing |"));
}

}  // namespace
}  // namespace kvx::tool

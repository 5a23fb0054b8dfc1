// Every include of the tree is allowed, and the checker finds those that are not.
#include "tests/layers/layers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace kvx::layers {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A tree of files in a temporary folder, which is removed when the test ends.
class Tree : public ::testing::Test {
 protected:
  Tree() : root_(fs::temp_directory_path() / ("kvx_layers_" + std::to_string(getpid()))) {
    fs::remove_all(root_);
  }
  ~Tree() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  fs::path root_;
};

TEST(Layers, TheSourceTreeHasNoForbiddenInclude) {
  EXPECT_THAT(find_violations(KVX_SOURCE_DIR, allowed_edges()), IsEmpty());
}

TEST(Layers, EveryAllowedEdgeEndsInAFolderOfTheTable) {
  for (const auto& [folder, targets] : allowed_edges()) {
    for (const std::string& target : targets) {
      EXPECT_TRUE(target == "kvx" || allowed_edges().contains(target))
          << folder << " -> " << target;
    }
  }
}

TEST(Layers, NothingMayIncludeTheApiBoundary) {
  for (const auto& [folder, targets] : allowed_edges()) {
    EXPECT_FALSE(targets.contains("api")) << folder;
  }
}

TEST_F(Tree, AnAllowedIncludeIsNoViolation) {
  write("src/format/e2m1.hpp", "#include \"core/result.hpp\"\n#include <vector>\n");
  write("tools/kvx/main.cpp", "#include \"tools/kvx/args.hpp\"\n#include \"runner/model.hpp\"\n");
  EXPECT_THAT(find_violations(root_, allowed_edges()), IsEmpty());
}

TEST_F(Tree, AnIncludeAgainstTheLayersIsNamedWithItsLine) {
  write("src/core/bad.hpp", "// text\n#include \"cache/block_pool.hpp\"\n");
  EXPECT_THAT(find_violations(root_, allowed_edges()),
              ElementsAre("src/core/bad.hpp:2: core must not include cache/block_pool.hpp"));
}

TEST_F(Tree, BlanksAroundTheHashHideNothing) {
  write("src/format/bad.cpp", " #  include  \"cache/block_pool.hpp\"\n");
  EXPECT_THAT(find_violations(root_, allowed_edges()),
              ElementsAre("src/format/bad.cpp:1: format must not include cache/block_pool.hpp"));
}

TEST_F(Tree, NothingIncludesTheApiBoundary) {
  write("src/ops/bad.cpp", "#include \"api/check.hpp\"\n");
  write("src/tier/bad.cpp", "#include \"kvx/kvx_abi.h\"\n");
  EXPECT_THAT(
      find_violations(root_, allowed_edges()),
      ::testing::UnorderedElementsAre("src/ops/bad.cpp:1: ops must not include api/check.hpp",
                                      "src/tier/bad.cpp:1: tier must not include kvx/kvx_abi.h"));
}

TEST_F(Tree, AFolderThatIsNotInTheTableIsNamed) {
  write("src/misc/helper.cpp", "");
  EXPECT_THAT(find_violations(root_, allowed_edges()),
              ElementsAre("src/misc/helper.cpp: misc is no folder of the table of allowed edges"));
}

TEST_F(Tree, ARelativeIncludeIsRefusedBecauseItHidesItsFolder) {
  write("src/core/a.cpp", "#include \"../tier/disk.hpp\"\n");
  write("src/core/b.cpp", "#include \"b.hpp\"\n");
  EXPECT_THAT(find_violations(root_, allowed_edges()),
              ::testing::UnorderedElementsAre(
                  "src/core/a.cpp:1: \"../tier/disk.hpp\" must be written from the include root",
                  "src/core/b.cpp:1: \"b.hpp\" must be written from the include root"));
}

}  // namespace
}  // namespace kvx::layers

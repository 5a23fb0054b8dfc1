// No folder of src/ is too large, tests/README.md agrees with the tree, and the checker finds what
// does not.
#include "tests/layers/test_map.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace kvx::layers {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(Folders, OfTheSourceTreeHoldAtMost25Files) {
  EXPECT_THAT(find_large_folders(KVX_SOURCE_DIR, 25), IsEmpty());
}

TEST(TestMap, AgreesWithTheSourceTree) {
  EXPECT_THAT(find_map_errors(KVX_SOURCE_DIR), IsEmpty());
}

// A tree of files in a temporary folder, which is removed when the test ends.
class MapOfTree : public ::testing::Test {
 protected:
  MapOfTree() : root_(fs::temp_directory_path() / ("kvx_test_map_" + std::to_string(getpid()))) {
    fs::remove_all(root_);
    write("src/cache/pool/pool.cpp");
    write("tests/cache/pool_test.cpp");
  }
  ~MapOfTree() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text = "") {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void write_page(const std::string& rows) {
    write("tests/README.md", "| `src/cache/pool/` | `cache/` |\n" + rows);
  }

  fs::path root_;
};

TEST_F(MapOfTree, AcceptsATestOfTheSameNameInAFolderAbove) {
  write_page("");
  EXPECT_THAT(find_map_errors(root_), IsEmpty());
}

TEST_F(MapOfTree, NamesASourceFileWithoutATestOrALine) {
  write("src/cache/pool/memory.cpp");
  write_page("");
  EXPECT_THAT(find_map_errors(root_),
              ElementsAre("src/cache/pool/memory.cpp has no test of its name and no line in "
                          "tests/README.md"));
  write_page("| `src/cache/pool/memory.cpp` | `cache/pool_test.cpp` |\n");
  EXPECT_THAT(find_map_errors(root_), IsEmpty());
}

TEST_F(MapOfTree, DoesNotTakeATestOfAnotherFolder) {
  write("src/tier/pool.cpp");
  write_page("| `src/tier/` | `cache/` |\n");
  EXPECT_THAT(
      find_map_errors(root_),
      ElementsAre("src/tier/pool.cpp has no test of its name and no line in tests/README.md"));
}

TEST_F(MapOfTree, NamesAFolderThatIsNotListed) {
  write("src/tier/tier.hpp");
  write_page("");
  EXPECT_THAT(find_map_errors(root_), ElementsAre("src/tier/ is not listed in tests/README.md"));
}

TEST_F(MapOfTree, NamesPathsThatDoNotExist) {
  write_page(
      "| `src/cache/gone.cpp` | `cache/pool_test.cpp` |\n"
      "| `src/cache/pool/pool.cpp` | `cache/gone_test.cpp` |\n");
  EXPECT_THAT(find_map_errors(root_),
              ElementsAre("src/cache/gone.cpp does not exist",
                          "src/cache/pool/pool.cpp: tests/cache/gone_test.cpp does not exist"));
}

TEST_F(MapOfTree, NamesLinesOutOfOrder) {
  write("src/cache/pool/memory.cpp");
  write_page(
      "| `src/cache/pool/pool.cpp` | `cache/pool_test.cpp` |\n"
      "| `src/cache/pool/memory.cpp` | `cache/pool_test.cpp` |\n");
  EXPECT_THAT(find_map_errors(root_),
              ElementsAre("src/cache/pool/memory.cpp follows src/cache/pool/pool.cpp; expected "
                          "alphabetical order"));
}

TEST_F(MapOfTree, CountsTheFilesOfAFolderWithoutThoseOfItsFolders) {
  write("src/cache/a.hpp");
  write("src/cache/b.hpp");
  EXPECT_THAT(find_large_folders(root_, 2), IsEmpty());
  EXPECT_THAT(find_large_folders(root_, 1),
              ElementsAre("src/cache/ holds 2 files; expected at most 1"));
}

}  // namespace
}  // namespace kvx::layers

// Files appear whole or not at all.
#include "tools/kvx/files.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/temporary_path.hpp"

namespace kvx::tool {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// A folder of its own for each test.
class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = tests::temporary_path(std::string("kvx_files_") + test->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const char* name) const { return (folder_ / name).string(); }
  int num_files() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

TEST_F(Files, ComeBackAsTheyWereWrittenAndLeaveNothingBeside) {
  const std::string content("a\0b\n", 4);
  ASSERT_TRUE(write_file("--json", path("a"), content).ok());
  EXPECT_EQ(read_file("--text", path("a")).value(), content);
  EXPECT_EQ(num_files(), 1);
}

TEST_F(Files, ReplaceAnOlderFile) {
  ASSERT_TRUE(write_file("--json", path("a"), "old and longer").ok());
  ASSERT_TRUE(write_file("--json", path("a"), "new").ok());
  EXPECT_EQ(read_file("--text", path("a")).value(), "new");
}

TEST_F(Files, LeaveNothingWhereTheyCannotBeWritten) {
  const Status status = write_file("--json", folder_.string(), "content");
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.error().message, HasSubstr("--json is"));
  EXPECT_EQ(num_files(), 0);
  EXPECT_FALSE(write_file("--json", path("missing/a"), "content").ok());
}

TEST_F(Files, LeaveLinksAsTheyAre) {
  ASSERT_TRUE(write_file("--json", path("a"), "old").ok());
  std::filesystem::create_symlink("a", path("link"));
  ASSERT_TRUE(write_file("--json", path("link"), "new").ok());
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(read_file("--text", path("a")).value(), "new");
  EXPECT_EQ(num_files(), 2);
}

TEST_F(Files, AreWrittenToDevicesThatStayDevices) {
  std::filesystem::create_symlink("/dev/null", path("null"));
  EXPECT_TRUE(check_can_write("--json", path("null")).ok());
  EXPECT_TRUE(write_file("--json", path("null"), "content").ok());
  EXPECT_TRUE(std::filesystem::is_character_file(path("null")));
  std::filesystem::create_symlink("/dev/full", path("full"));
  const Status full = write_file("--json", path("full"), "content");
  ASSERT_FALSE(full.ok());
  EXPECT_THAT(full.error().message, HasSubstr("it cannot be written (No space left on device)"));
  EXPECT_TRUE(std::filesystem::is_character_file(path("full")));
  const Status replaced = check_can_replace("--out", path("null"));
  ASSERT_FALSE(replaced.ok());
  EXPECT_THAT(replaced.error().message, HasSubstr("expected a regular file"));
}

TEST_F(Files, AreRefusedBeforeTheWorkBegins) {
  EXPECT_TRUE(check_can_write("--json", path("a")).ok());
  EXPECT_FALSE(check_can_write("--json", "").ok());
  EXPECT_FALSE(check_can_write("--json", folder_.string()).ok());
  const Status status = check_can_write("--html", path("missing/a"));
  ASSERT_FALSE(status.ok());
  EXPECT_THAT(status.error().message, HasSubstr("expected a file in an existing folder"));
}

TEST_F(Files, NameTheOptionWhenTheyAreMissing) {
  const auto content = read_file("--text", path("missing"));
  ASSERT_FALSE(content.ok());
  EXPECT_THAT(content.error().message, HasSubstr("--text is"));
  EXPECT_FALSE(read_file("--text", folder_.string()).ok());
}

}  // namespace
}  // namespace kvx::tool

// Temporary files: who left them, and when they may go.
#include "tier/temporary_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_path.hpp"
#include "tier/cache_file.hpp"

namespace kvx::tier {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TemporaryFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        tests::temporary_path(std::string("kvx_temporary_") +
                              ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // What a writer that was killed leaves of a file; its name.
  std::string left_by_killed(const std::string& name) {
    const pid_t child = fork();
    if (child == 0) {
      auto writer = CacheFileWriter::create(path(name), 0);
      const std::vector<uint8_t> block(1000, 7);
      if (writer.ok()) (void)writer.value().add_block_copy(0, block);
      _exit(0);  // no destructor
    }
    EXPECT_EQ(waitpid(child, nullptr, 0), child);
    for (int number = 0; number < 100; ++number) {
      const std::string left = path(fmt::format("{}.{}.{}.tmp", name, child, number));
      if (fs::exists(left)) return left;
    }
    ADD_FAILURE() << "nothing was left";
    return {};
  }
  int num_files() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

TEST_F(TemporaryFiles, AreRemovedWhenTheirWriterIsGone) {
  const std::string left = left_by_killed("a.kvx");
  left_by_killed("b.kvx");
  const auto of_one_file = prune_temporaries(path("a.kvx"));
  ASSERT_TRUE(of_one_file.ok());
  EXPECT_THAT(of_one_file.value().removed, ElementsAre(left));
  EXPECT_EQ(of_one_file.value().bytes, kHeaderBytes + 1000);
  EXPECT_EQ(num_files(), 1);
  EXPECT_EQ(prune_temporaries(folder_.string()).value().removed.size(), 1u);
  EXPECT_EQ(num_files(), 0);
}

TEST_F(TemporaryFiles, StayWhileTheirWriterLives) {
  auto writer = CacheFileWriter::create(path("a.kvx"), 0);
  ASSERT_TRUE(writer.ok());
  EXPECT_THAT(prune_temporaries(folder_.string()).value().removed, IsEmpty());
  EXPECT_EQ(num_files(), 1);
}

// As a writer in another container, whose process number means nothing here.
TEST_F(TemporaryFiles, StayWhileTheyAreLocked) {
  const std::string left = left_by_killed("a.kvx");
  auto writer = CacheFileWriter::create(path("other.kvx"), 0);
  ASSERT_TRUE(writer.ok());
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (entry.path().string() != left) fs::rename(entry.path(), left);
  }
  EXPECT_THAT(prune_temporaries(folder_.string()).value().removed, IsEmpty());
  EXPECT_TRUE(fs::exists(left));
}

TEST_F(TemporaryFiles, OfOtherProgramsStay) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  ASSERT_EQ(waitpid(gone, nullptr, 0), gone);
  const auto write = [&](const std::string& name) { std::ofstream(path(name)) << "some text"; };
  write(fmt::format("notes.{}.0.tmp", gone));
  write(fmt::format("notes.{}.tmp", gone));
  write("notes.tmp");
  write("notes.x.0.tmp");
  EXPECT_THAT(prune_temporaries(folder_.string()).value().removed, IsEmpty());
  EXPECT_EQ(num_files(), 4);
}

TEST_F(TemporaryFiles, AreTakenOverByTheNextWriter) {
  const std::string left = left_by_killed("a.kvx");
  left_by_killed("b.kvx");
  const auto inode_of = [](const std::string& name) {
    struct stat facts = {};
    EXPECT_EQ(stat(name.c_str(), &facts), 0);
    return facts.st_ino;
  };
  const auto inode = inode_of(left);
  const auto taken = create_temporary(path("a.kvx"));
  ASSERT_TRUE(taken.ok());
  EXPECT_EQ(inode_of(taken.value().path), inode);
  EXPECT_EQ(fs::file_size(taken.value().path), 0u);
  EXPECT_THAT(taken.value().path, HasSubstr(fmt::format("a.kvx.{}.", getpid())));
  close(taken.value().descriptor);
  EXPECT_EQ(num_files(), 2);  // and what was left of b.kvx
}

TEST_F(TemporaryFiles, OfAFolderThatIsMissingAreAnError) {
  const auto pruned = prune_temporaries(path("missing/a.kvx"));
  ASSERT_FALSE(pruned.ok());
  EXPECT_THAT(pruned.error().message, HasSubstr("cannot be read"));
}

}  // namespace
}  // namespace kvx::tier

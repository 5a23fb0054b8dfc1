// os: the same laws hold for POSIX's calls and for Windows'.
#include "core/os/os.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <string_view>
#include <vector>

#include "core/random_id.hpp"
#include "core/result.hpp"

namespace kvx::os {
namespace {

namespace fs = std::filesystem;

std::span<const uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

class OsFiles : public testing::Test {
 protected:
  OsFiles() : folder_(fs::temp_directory_path() / fmt::format("kvx-os-{:016x}", random_id())) {
    fs::create_directories(folder_);
  }
  ~OsFiles() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  std::string path(const char* name) const { return (folder_ / name).string(); }

  // A new file with these bytes.
  std::string write(const char* name, std::string_view text) const {
    const int file = open_file(path(name), Open::kNew);
    EXPECT_GE(file, 0);
    EXPECT_EQ(write_at(file, bytes_of(text), 0), std::ssize(text));
    close_file(file);
    return path(name);
  }

  static std::string read(const std::string& path) {
    const int file = open_file(path, Open::kRead);
    EXPECT_GE(file, 0);
    std::vector<uint8_t> bytes(64);
    const int64_t count = read_at(file, bytes, 0);
    close_file(file);
    return {bytes.begin(), bytes.begin() + count};
  }

  const fs::path folder_;
};

TEST_F(OsFiles, AreMadeOnceAndOpenedWhereTheyAre) {
  EXPECT_LT(open_file(path("a"), Open::kRead), 0);
  EXPECT_EQ(errno, ENOENT);
  EXPECT_LT(open_file(path("a"), Open::kWrite), 0);
  write("a", "bytes\r\n\x1A of any kind");
  EXPECT_LT(open_file(path("a"), Open::kNew), 0);
  EXPECT_EQ(errno, EEXIST);
  EXPECT_EQ(read(path("a")), "bytes\r\n\x1A of any kind");
  const int file = open_file(path("b"), Open::kAny);
  ASSERT_GE(file, 0);
  close_file(file);
  EXPECT_EQ(facts_of(path("b"))->bytes, 0);
  EXPECT_FALSE(facts_of(path("c")));
  EXPECT_FALSE(facts_of(folder_.string())->is_regular);
}

TEST_F(OsFiles, AreReadAndWrittenAtOffsets) {
  const int file = open_file(write("a", "0123456789"), Open::kReadWrite);
  ASSERT_GE(file, 0);
  EXPECT_EQ(write_at(file, bytes_of("ab"), 3), 2);
  EXPECT_EQ(write_at(file, bytes_of("end"), 5'000'000'000), 3);  // beyond 32 bits
  EXPECT_EQ(facts_of(file)->bytes, 5'000'000'003);
  std::vector<uint8_t> bytes(4);
  EXPECT_EQ(read_at(file, bytes, 2), 4);
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "2ab5");
  EXPECT_EQ(read_at(file, bytes, 5'000'000'001), 2);
  EXPECT_EQ(read_at(file, bytes, 5'000'000'003), 0);
  EXPECT_TRUE(resize_file(file, 4));
  EXPECT_EQ(facts_of(file)->bytes, 4);
  EXPECT_TRUE(reserve_file(file, 8192));
  EXPECT_EQ(facts_of(file)->bytes, 8192);
  EXPECT_EQ(read_at(file, bytes, 8000), 4);
  EXPECT_EQ(bytes, std::vector<uint8_t>(4));
  EXPECT_TRUE(sync_file(file));
  EXPECT_TRUE(sync_folder(folder_.string()));
  close_file(file);
}

TEST_F(OsFiles, ReplaceOthersByTheirNamesWhileTheyAreOpen) {
  const std::string old_path = write("old", "old");
  const std::string new_path = write("new", "new bytes");
  const int writer = open_file(new_path, Open::kReadWrite);
  EXPECT_TRUE(rename_file(new_path, old_path)) << errno;
  EXPECT_EQ(read(old_path), "new bytes");
  EXPECT_FALSE(facts_of(new_path));
  close_file(writer);
  EXPECT_FALSE(rename_file(new_path, old_path));
  EXPECT_EQ(errno, ENOENT);
  EXPECT_TRUE(remove_file(old_path));
  EXPECT_FALSE(remove_file(old_path));
  EXPECT_EQ(errno, ENOENT);
}

#ifdef _WIN32
TEST_F(OsFiles, AreNotReplacedWhileTheyAreRead) {
#else
TEST_F(OsFiles, AreReplacedWhileTheyAreRead) {
#endif
  const std::string old_path = write("old", "old");
  const std::string new_path = write("new", "new bytes");
  const int reader = open_file(old_path, Open::kRead);
#ifdef _WIN32
  EXPECT_FALSE(rename_file(new_path, old_path));
  EXPECT_EQ(errno, EACCES);
#else
  EXPECT_TRUE(rename_file(new_path, old_path));
#endif
  std::vector<uint8_t> bytes(3);
  EXPECT_EQ(read_at(reader, bytes, 0), 3);
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "old");
  close_file(reader);
}

TEST_F(OsFiles, AreLockedByOneDescriptor) {
  const std::string name = write("a", "locked bytes can be read");
  const int first = open_file(name, Open::kReadWrite);
  const int second = open_file(name, Open::kReadWrite);
  EXPECT_TRUE(try_lock_file(first));
  EXPECT_FALSE(try_lock_file(second));
  EXPECT_EQ(read(name), "locked bytes can be read");
  close_file(first);
  EXPECT_TRUE(try_lock_file(second));
  close_file(second);
}

TEST_F(OsFiles, OfAFolderHaveNoNameOnceTheyAreClosed) {
  const int file = open_unnamed(folder_.string());
  ASSERT_GE(file, 0);
  EXPECT_EQ(write_at(file, bytes_of("bytes"), 0), 5);
  close_file(file);
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_LT(open_unnamed(path("no folder")), 0);
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(OsFiles, HaveAnotherIdentityWhenTheyAreReplaced) {
  const std::string name = write("a", "bytes");
  const auto before = identity_of(name);
  ASSERT_TRUE(before);
  EXPECT_EQ(*before, *identity_of(name));
  const std::string other = write("b", "bytes");
  ASSERT_TRUE(rename_file(other, name));
  EXPECT_NE(*before, *identity_of(name));
  EXPECT_FALSE(identity_of(other));
}

TEST_F(OsFiles, AreMapped) {
  const int file = open_unnamed(folder_.string());
  ASSERT_TRUE(reserve_file(file, 200'000));
  uint8_t* const mapped = map_file(file, 200'000);
  ASSERT_NE(mapped, nullptr);
  mapped[199'999] = 7;
  std::vector<uint8_t> bytes(2);
  EXPECT_EQ(read_at(file, bytes, 199'998), 2);
  EXPECT_EQ(bytes, (std::vector<uint8_t>{0, 7}));
  EXPECT_EQ(write_at(file, bytes_of("x"), 100), 1);
  EXPECT_EQ(mapped[100], 'x');
  unmap_file(mapped, 200'000);
  close_file(file);
}

TEST(OsMemory, IsZeroedAndCanBeWritten) {
  for (const int64_t bytes : {int64_t{5000}, int64_t{5} << 20}) {
    uint8_t* const data = map_zeroed(bytes);
    ASSERT_NE(data, nullptr);
    for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(data[i], 0) << i;
    data[0] = data[bytes - 1] = 1;
    unmap(data, bytes);
  }
  EXPECT_EQ(map_zeroed(int64_t{1} << 61), nullptr);
  EXPECT_GT(main_memory_bytes(), int64_t{64} << 20);
}

TEST(OsProcess, IsThereOrGone) {
  EXPECT_GT(process_id(), 0);
  EXPECT_FALSE(is_process_gone(process_id()));
  EXPECT_TRUE(is_process_gone(0x7FFFFFF0));
}

TEST(OsLibrary, SaysWhyItCannotBeOpened) {
  EXPECT_EQ(open_library(component_file("no_such_component")), nullptr);
  EXPECT_FALSE(library_problem().empty());
}

TEST(OsErrors, TellWantOfRoom) {
  EXPECT_TRUE(is_no_room(ENOSPC));
  EXPECT_FALSE(is_no_room(ENOENT));
}

}  // namespace
}  // namespace kvx::os

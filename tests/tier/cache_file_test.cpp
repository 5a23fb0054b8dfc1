// Cache files: what was written comes back, whatever is damaged is refused with the reason, and a
// save that does not finish leaves the old file as it was.
#include "tier/cache_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/tier/file_size_limit.hpp"

namespace kvx::tier::cache_file_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int64_t kBlockBytes[] = {96, 200};

// Bytes that compress, different for each block_copy.
std::vector<uint8_t> block_of(int kind, int number) {
  std::vector<uint8_t> bytes(kBlockBytes[kind]);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(number * 31 + kind * 7 + static_cast<int>(i / 8));
  }
  return bytes;
}

// Two scopes; a chain of three blocks, the last one open, and a branch.
FileIndex small_index() {
  FileIndex index;
  index.fingerprint = "order layer\nblock_size 4\n";
  index.block_size = 4;
  index.scopes = {{"", "", ""}, {"adapter", "image", "tenant"}};
  index.kinds = {{0, false, kBlockBytes[0]}, {0, true, kBlockBytes[1]}};
  index.blocks = {
      {-1, {1, 2, 3, 4}, {}}, {0, {5, 6, 7, 8}, {}}, {1, {9, 10}, {}}, {-2, {1, 2, 3, -4}, {}}};
  index.sequences = {2};
  return index;
}

class CacheFile : public testing::Test {
 protected:
  CacheFile() : folder_(fs::temp_directory_path() / ("kvx_file_" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~CacheFile() override { fs::remove_all(folder_); }

  std::string path(const char* name = "cache.kvx") const { return (folder_ / name).string(); }

  // Every block gets a block copy of each kind.
  static FileIndex write_block_copies(CacheFileWriter& writer) {
    FileIndex index = small_index();
    for (size_t b = 0; b < index.blocks.size(); ++b) {
      for (int kind = 0; kind < 2; ++kind) {
        index.blocks[b].block_copies.push_back(
            writer.add_block_copy(kind, block_of(kind, static_cast<int>(b))).value());
      }
    }
    return index;
  }
  void write_small_file(int zstd_level = 0) const {
    CacheFileWriter writer = CacheFileWriter::create(path(), zstd_level).value();
    const Status finished = writer.finish(write_block_copies(writer));
    ASSERT_TRUE(finished.ok()) << finished.error().message;
  }

  std::vector<uint8_t> bytes_of(const std::string& name) const {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void put(std::span<const uint8_t> bytes) const {
    std::ofstream file(path(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  // The error of opening and of reading every block copy; empty when all is well.
  static std::string problem_of(const std::string& name) {
    auto reader = CacheFileReader::open(name);
    if (!reader.ok()) return reader.error().message;
    for (const FileBlock& block : reader.value().index().blocks) {
      for (const StoredBlockCopy& block_copy : block.block_copies) {
        std::vector<uint8_t> out(reader.value().index().kinds[block_copy.kind].bytes);
        const Status read = reader.value().read_block_copy(block_copy, out);
        if (!read.ok()) return read.error().message;
      }
    }
    return "";
  }
  // The same in memory: the reader's own steps, without a disk.
  static std::string problem_of_bytes(std::span<const uint8_t> bytes) {
    const auto header = parse_header(bytes.first(std::min<size_t>(bytes.size(), kHeaderBytes)),
                                     static_cast<int64_t>(bytes.size()));
    if (!header.ok()) return header.error().message;
    const auto part = [bytes](int64_t offset, int64_t count) {
      return bytes.subspan(static_cast<size_t>(offset), static_cast<size_t>(count));
    };
    const FileHeader& at = header.value();
    const auto index = parse_index(part(at.index_offset, at.index_bytes), at);
    if (!index.ok()) return index.error().message;
    for (size_t b = 0; b < index.value().blocks.size(); ++b) {
      for (const StoredBlockCopy& block_copy : index.value().blocks[b].block_copies) {
        std::vector<uint8_t> out(index.value().kinds[block_copy.kind].bytes);
        const Status decoded =
            decode_block_copy(block_copy, part(block_copy.offset, block_copy.stored_bytes), out);
        if (!decoded.ok()) return decoded.error().message;
        EXPECT_EQ(out, block_of(block_copy.kind, static_cast<int>(b))) << "wrong data served";
      }
    }
    return "";
  }
  int num_files() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

void expect_small_file(const std::string& name) {
  auto reader = CacheFileReader::open(name);
  ASSERT_TRUE(reader.ok()) << reader.error().message;
  const FileIndex& index = reader.value().index();
  const FileIndex expected = small_index();
  EXPECT_EQ(index.fingerprint, expected.fingerprint);
  EXPECT_EQ(index.block_size, 4);
  EXPECT_EQ(index.scopes, expected.scopes);
  EXPECT_EQ(index.kinds, expected.kinds);
  EXPECT_EQ(index.sequences, expected.sequences);
  ASSERT_EQ(index.blocks.size(), expected.blocks.size());
  for (size_t b = 0; b < index.blocks.size(); ++b) {
    EXPECT_EQ(index.blocks[b].parent, expected.blocks[b].parent);
    EXPECT_EQ(index.blocks[b].tokens, expected.blocks[b].tokens);
    ASSERT_EQ(index.blocks[b].block_copies.size(), 2u);
    for (const StoredBlockCopy& block_copy : index.blocks[b].block_copies) {
      std::vector<uint8_t> out(kBlockBytes[block_copy.kind]);
      const Status read = reader.value().read_block_copy(block_copy, out);
      ASSERT_TRUE(read.ok()) << read.error().message;
      EXPECT_EQ(out, block_of(block_copy.kind, static_cast<int>(b)));
    }
  }
}

TEST_F(CacheFile, GivesBackWhatWasWritten) {
  write_small_file();
  expect_small_file(path());
  EXPECT_EQ(num_files(), 1);
}

TEST_F(CacheFile, GivesBackWhatWasCompressed) {
  write_small_file();
  const size_t raw_bytes = bytes_of(path()).size();
  write_small_file(3);
  EXPECT_LT(bytes_of(path()).size(), raw_bytes);
  expect_small_file(path());
}

TEST_F(CacheFile, ReadsTheGoldenFilesAndWritesTheRawOneAgain) {
  const std::string golden = KVX_SOURCE_DIR "/tests/golden/cache_v1.kvx";
  expect_small_file(golden);
  expect_small_file(KVX_SOURCE_DIR "/tests/golden/cache_v1_zstd.kvx");
  write_small_file();
  EXPECT_EQ(bytes_of(path()), bytes_of(golden));
}

// ---- damage

TEST_F(CacheFile, RefusesEveryFlippedBit) {
  for (int level : {0, 3}) {
    write_small_file(level);
    const std::vector<uint8_t> whole = bytes_of(path());
    const FileHeader header = parse_header(whole, static_cast<int64_t>(whole.size())).value();
    auto reader = CacheFileReader::open(path());
    std::vector<bool> counts(whole.size(), false);  // not the zeros between block copies
    std::fill(counts.begin(), counts.begin() + kHeaderBytes, true);
    std::fill(counts.begin() + header.index_offset, counts.end(), true);
    for (const FileBlock& block : reader.value().index().blocks) {
      for (const StoredBlockCopy& block_copy : block.block_copies) {
        std::fill_n(counts.begin() + block_copy.offset, block_copy.stored_bytes, true);
      }
    }
    for (size_t at = 0; at < whole.size(); ++at) {
      std::vector<uint8_t> damaged = whole;
      damaged[at] ^= static_cast<uint8_t>(1 << (at % 8));
      const bool is_refused = !problem_of_bytes(damaged).empty();
      EXPECT_TRUE(counts[at] || !is_refused) << "byte " << at;
      EXPECT_TRUE(!counts[at] || is_refused || level > 0) << "byte " << at;  // zstd has idle bits
    }
  }
}

TEST_F(CacheFile, RefusesEveryTruncation) {
  write_small_file();
  const std::vector<uint8_t> whole = bytes_of(path());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(problem_of_bytes(std::span(whole).first(length)), "") << length << " bytes";
  }
}

TEST_F(CacheFile, SaysWhyItRefusesAFile) {
  write_small_file();
  const std::vector<uint8_t> whole = bytes_of(path());
  const auto problem_with = [&](size_t at, std::vector<uint8_t> bytes) {
    std::vector<uint8_t> changed = whole;
    std::copy(bytes.begin(), bytes.end(), changed.begin() + static_cast<int64_t>(at));
    put(changed);
    return problem_of(path());
  };
  EXPECT_THAT(problem_with(0, {'G'}), HasSubstr("it is no cache file"));
  EXPECT_THAT(problem_with(8, {2}), HasSubstr("its version is 2; this kvx reads up to 1"));
  EXPECT_THAT(problem_with(12, {1, 2, 3, 4}), HasSubstr("the other byte order"));
  EXPECT_THAT(problem_with(20, {1}), HasSubstr("its header is damaged"));
  EXPECT_THAT(problem_with(70, {0xFF, 0xFF}), HasSubstr("checksum is"));
  put(std::span(whole).first(whole.size() - 1));
  EXPECT_THAT(problem_of(path()), HasSubstr("it is cut short"));
  EXPECT_THAT(problem_of(path("none.kvx")), HasSubstr("No such file"));
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(problem_of(path("pipe")), HasSubstr("is no regular file"));
}

// An index whose checksum is right and whose content is not: as a liar would write it.
TEST_F(CacheFile, BelievesNoIndex) {
  const auto problem_of_index = [&](const std::function<void(FileIndex&)>& change) {
    {
      CacheFileWriter writer = CacheFileWriter::create(path(), 0).value();
      FileIndex index = write_block_copies(writer);
      change(index);
      EXPECT_TRUE(writer.finish(index).ok());
    }
    return problem_of(path());
  };
  EXPECT_EQ(problem_of_index([](FileIndex&) {}), "");
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.block_size = 0; }), HasSubstr("block_size"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.kinds[0].bytes = -1; }), HasSubstr("kind"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.kinds[0].bytes = 95; }), HasSubstr("raw"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[1].parent = 1; }), HasSubstr("parent"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[1].parent = -3; }), HasSubstr("parent"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[3].parent = 2; }),
              HasSubstr("not full"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[0].tokens.clear(); }),
              HasSubstr("tokens"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[0].tokens.resize(5); }),
              HasSubstr("tokens"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[0].block_copies[0].kind = 2; }),
              HasSubstr("kind"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[0].block_copies[0].offset = 65; }),
              HasSubstr("lies at"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[0].block_copies[0].offset = 1 << 20; }),
              HasSubstr("lies at"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.blocks[0].block_copies[0].codec = Codec{7}; }),
              HasSubstr("codec"));
  EXPECT_THAT(problem_of_index([](FileIndex& i) { i.sequences = {4}; }), HasSubstr("sequence"));
}

// ---- saves that do not finish

TEST_F(CacheFile, AFullDiskLeavesTheOldFileWhole) {
  write_small_file();
  {
    const FileSizeLimit limit(4096);
    CacheFileWriter writer = CacheFileWriter::create(path(), 0).value();
    Status status;
    for (int i = 0; i < 100 && status.ok(); ++i) {
      const auto block_copy = writer.add_block_copy(0, block_of(0, i));
      if (!block_copy.ok()) status = block_copy.error();
    }
    ASSERT_FALSE(status.ok());
    EXPECT_THAT(status.error().message, HasSubstr("File too large"));
  }
  expect_small_file(path());
  EXPECT_EQ(num_files(), 1);
}

TEST_F(CacheFile, ALinkToItStaysALink) {
  write_small_file();
  fs::create_symlink(path(), path("link"));
  {
    CacheFileWriter writer = CacheFileWriter::create(path("link"), 0).value();
    ASSERT_TRUE(writer.finish(write_block_copies(writer)).ok());
  }
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_FALSE(fs::is_symlink(path()));
  expect_small_file(path("link"));
  EXPECT_EQ(num_files(), 2);
}

TEST_F(CacheFile, ALinkToAFileThatIsMissingStaysALink) {
  fs::create_symlink("target", path("second"));
  fs::create_symlink("second", path("link"));  // relative, one after the other
  {
    CacheFileWriter writer = CacheFileWriter::create(path("link"), 0).value();
    ASSERT_TRUE(writer.finish(write_block_copies(writer)).ok());
  }
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_TRUE(fs::is_symlink(path("second")));
  EXPECT_FALSE(fs::is_symlink(path("target")));
  expect_small_file(path("target"));
  EXPECT_EQ(num_files(), 3);
}

TEST_F(CacheFile, ACircleOfLinksIsRefused) {
  fs::create_symlink("one", path("other"));
  fs::create_symlink("other", path("one"));
  EXPECT_FALSE(CacheFileWriter::create(path("one"), 0).ok());
  EXPECT_TRUE(fs::is_symlink(path("one")));
}

TEST_F(CacheFile, TakesNoDevicesPlace) {
  fs::create_symlink("/dev/null", path("null"));
  for (const std::string& place : {path("null"), folder_.string()}) {
    const auto refused = CacheFileWriter::create(place, 0);
    ASSERT_FALSE(refused.ok()) << place;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(refused.error().message, HasSubstr("is no regular file"));
  }
  EXPECT_TRUE(fs::is_character_file(path("null")));
}

TEST_F(CacheFile, AKilledSaveLeavesTheOldFileWhole) {
  write_small_file();
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    CacheFileWriter writer = CacheFileWriter::create(path(), 0).value();
    for (int i = 0;; ++i) {
      (void)writer.add_block_copy(0, block_of(0, i));
      if (i == 100) (void)!write(pipe_ends[1], "x", 1);
    }
  }
  char told;
  ASSERT_EQ(read(pipe_ends[0], &told, 1), 1);  // it is in the middle of writing
  ASSERT_EQ(kill(child, SIGKILL), 0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  expect_small_file(path());
}

TEST_F(CacheFile, TwoWritersOfOneNameDoNotMeet) {
  CacheFileWriter first = CacheFileWriter::create(path(), 0).value();
  CacheFileWriter second = CacheFileWriter::create(path(), 0).value();
  const std::vector<uint8_t> other(kBlockBytes[0], 0xEE);
  ASSERT_TRUE(second.add_block_copy(0, other).ok());
  ASSERT_TRUE(first.finish(write_block_copies(first)).ok());
  ASSERT_TRUE(second.add_block_copy(0, other).ok());
  expect_small_file(path());
  EXPECT_TRUE(second.finish(small_index()).ok());
  EXPECT_EQ(num_files(), 1);
}

TEST_F(CacheFile, AWriterThatIsDroppedLeavesNothing) {
  { CacheFileWriter writer = CacheFileWriter::create(path(), 0).value(); }
  EXPECT_EQ(num_files(), 0);
  EXPECT_FALSE(CacheFileWriter::create(path("no/such/folder"), 0).ok());
  EXPECT_FALSE(CacheFileWriter::create(path(), 99).ok());
}

RC_GTEST_PROP(CacheFileIndex, ComesBackAsItWas, ()) {
  FileIndex index;
  index.fingerprint = *rc::gen::arbitrary<std::string>();
  index.block_size = 3;
  const auto texts = rc::gen::arbitrary<std::string>();
  for (int i = *rc::gen::inRange(1, 4); i > 0; --i)
    index.scopes.push_back({*texts, *texts, *texts});
  index.kinds = {{0, false, 10}};
  for (int32_t i = 0; i < *rc::gen::inRange(0, 9); ++i) {
    const auto scopes = static_cast<int32_t>(index.scopes.size());
    FileBlock block;
    block.parent = *rc::gen::inRange<int32_t>(-scopes, i);
    block.tokens = *rc::gen::container<std::vector<int32_t>>(3, rc::gen::arbitrary<int32_t>());
    index.blocks.push_back(block);
  }
  const std::vector<uint8_t> bytes = encode_index(index);
  const FileHeader header{64, static_cast<int64_t>(bytes.size()), cache::checksum(bytes)};
  const auto back = parse_index(bytes, header);
  RC_ASSERT(back.ok());
  RC_ASSERT(encode_index(back.value()) == bytes);
}

}  // namespace
}  // namespace kvx::tier::cache_file_test

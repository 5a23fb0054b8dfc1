// Owned caches through the ABI: sequences and prefixes in files, and facts about a file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class OwnedFiles : public testing::Test {
 protected:
  OwnedFiles()
      : path_((fs::temp_directory_path() / ("kvx_abi_" + std::to_string(getpid()))).string()) {}
  ~OwnedFiles() override { fs::remove(path_); }

  // Changes the byte in the middle of the file's first block_copy.
  void damage() const {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(64 + 100);
    const auto byte = static_cast<char>(file.get() ^ 1);
    file.seekp(64 + 100);
    file.put(byte);
  }

  const std::string path_;
};

TEST_F(OwnedFiles, BringASequenceBack) {
  for (const char* recipe : {"int8", "nvfp4:auto", "int4:sink=8,recent=16",
                             "mxfp4_g16:order=turbomind", "int8_affine:order=turbomind"}) {
    api::Cache cache = sharing_cache(recipe);
    const int32_t sequence = *cache.create_sequence();
    feed(cache, sequence, 0, 29);
    auto options = sized<kvx_save_options_t>();
    options.zstd_level = 3;
    ASSERT_TRUE(cache.save_sequence(sequence, path_, &options).ok()) << kvx_last_error();
    api::Cache other = sharing_cache(recipe);
    const auto loaded = other.load_sequence(path_);
    ASSERT_TRUE(loaded.ok()) << loaded.failure().text;
    EXPECT_EQ(*other.num_tokens(*loaded), 29);
    EXPECT_EQ(rows_of(other, *loaded), rows_of(cache, sequence)) << recipe;
    feed(other, *loaded, 29, 40);
    feed(cache, sequence, 29, 40);
    EXPECT_EQ(rows_of(other, *loaded), rows_of(cache, sequence)) << recipe;
  }
}

TEST_F(OwnedFiles, OfAnotherOrderAreTranscoded) {
  api::Cache cache = sharing_cache("f32:order=turbomind");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 29);
  ASSERT_TRUE(cache.save_sequence(sequence, path_).ok()) << kvx_last_error();
  api::Cache other = sharing_cache("f32");
  const auto refused = other.load_sequence(path_);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.failure().text, HasSubstr("order is turbomind; expected layer,head"));
  auto options = sized<kvx_load_options_t>();
  options.flags = KVX_LOAD_TRANSCODE;
  const auto loaded = other.load_sequence(path_, &options);
  ASSERT_TRUE(loaded.ok()) << loaded.failure().text;
  EXPECT_EQ(rows_of(other, *loaded), rows_of(cache, sequence));
}

TEST_F(OwnedFiles, BringPrefixesBack) {
  api::Cache cache = sharing_cache("int8");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 20);
  ASSERT_TRUE(cache.free_sequence(sequence).ok());
  ASSERT_TRUE(cache.save_prefixes(path_).ok()) << kvx_last_error();
  api::Cache other = sharing_cache("int8");
  const auto report = other.load_prefixes(path_);
  ASSERT_TRUE(report.ok()) << kvx_last_error();
  EXPECT_EQ(report->num_blocks, 2);
  EXPECT_EQ(report->num_loaded, 2);
  EXPECT_EQ(other.load_prefixes(path_)->num_known, 2);
  EXPECT_EQ(*other.num_tokens(*other.create_sequence_from(token_ids(0, 20))), 16);

  damage();
  api::Cache third = sharing_cache("int8");
  EXPECT_EQ(third.load_prefixes(path_)->num_bad, 1);
  EXPECT_EQ(third.load_prefixes(path_)->num_loaded, 0);
}

TEST_F(OwnedFiles, AreRefusedWithTheReason) {
  api::Cache cache = sharing_cache("int8");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 20);
  ASSERT_TRUE(cache.save_sequence(sequence, path_).ok());
  const auto elsewhere = sharing_cache("int4").load_sequence(path_);
  ASSERT_FALSE(elsewhere.ok());
  EXPECT_EQ(elsewhere.failure().status, KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(elsewhere.failure().text, HasSubstr("layers_from_0 is"));
  auto transcode = sized<kvx_load_options_t>();
  transcode.flags = KVX_LOAD_TRANSCODE;
  api::Cache other = sharing_cache("int4");
  const auto transcoded = other.load_sequence(path_, &transcode);
  ASSERT_TRUE(transcoded.ok()) << transcoded.failure().text;
  EXPECT_EQ(*other.num_tokens(*transcoded), 20);
  EXPECT_EQ(sharing_cache("bf16").load_prefixes(path_, &transcode)->num_loaded, 2);
  EXPECT_FALSE(cache.load_sequence("/no/such/file").ok());

  EXPECT_EQ(kvx_file_verify(path_.c_str()), KVX_STATUS_OK) << kvx_last_error();
  damage();
  EXPECT_FALSE(cache.load_sequence(path_).ok());
  EXPECT_EQ(kvx_file_verify(path_.c_str()), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("1 of 3 block copies are bad; block 0"));

  begin(cache, sequence, 1);
  append(cache, 1, 1);
  ASSERT_TRUE(cache.end_step().ok());
  EXPECT_FALSE(cache.save_sequence(sequence, path_).ok()) << "its last token is not recorded";
  auto options = sized<kvx_save_options_t>();
  options.zstd_level = 23;
  EXPECT_FALSE(cache.save_prefixes(path_, &options).ok());
  auto flags = sized<kvx_load_options_t>();
  flags.flags = 1u << 31;
  const auto unknown = cache.load_sequence(path_, &flags);
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.failure().status, KVX_STATUS_INCOMPATIBLE);
}

TEST_F(OwnedFiles, SayWhatTheyHold) {
  api::Cache cache = sharing_cache("int4:sink=8,recent=16");
  const int32_t sequence = *cache.create_sequence();
  feed(cache, sequence, 0, 37);
  ASSERT_TRUE(cache.save_sequence(sequence, path_).ok());
  const auto inspected = api::inspect_file(path_);
  ASSERT_TRUE(inspected.ok()) << inspected.failure().text;
  const kvx_file_info_t& info = *inspected;
  EXPECT_EQ(info.version, 1u);
  EXPECT_EQ(info.block_size, 8u);
  EXPECT_EQ(info.num_scopes, 1u);
  EXPECT_EQ(info.num_sequences, 1u);
  EXPECT_EQ(info.num_blocks, 5);
  EXPECT_EQ(info.num_tokens, 37);
  EXPECT_EQ(info.num_block_copies, 5);
  EXPECT_EQ(info.file_bytes, static_cast<int64_t>(fs::file_size(path_)));
  EXPECT_EQ(info.memory_bytes, info.stored_bytes);
  EXPECT_EQ(info.memory_bytes,
            cache.block_class(0)->block_bytes + 4 * cache.block_class(1)->block_bytes);

  uint64_t bytes = 0;
  ASSERT_EQ(kvx_file_fingerprint(path_.c_str(), nullptr, 0, &bytes), KVX_STATUS_OK);
  std::string of_file(bytes, 'x');
  ASSERT_EQ(kvx_file_fingerprint(path_.c_str(), of_file.data(), bytes, &bytes), KVX_STATUS_OK);
  std::string of_cache(bytes, 'y');
  ASSERT_EQ(kvx_cache_fingerprint(cache.handle(), of_cache.data(), bytes, &bytes), KVX_STATUS_OK);
  EXPECT_EQ(of_file, of_cache);
  EXPECT_THAT(of_file, HasSubstr("model a model"));
  EXPECT_EQ(*api::file_fingerprint(path_), of_file.c_str());
  EXPECT_EQ(*cache.fingerprint(), of_file.c_str());
  EXPECT_FALSE(api::file_fingerprint(path_ + ".missing").ok());
  EXPECT_TRUE(api::verify_file(path_).ok());
  char part[6] = "aaaaa";
  ASSERT_EQ(kvx_cache_fingerprint(cache.handle(), part, 6, &bytes), KVX_STATUS_OK);
  EXPECT_EQ(std::string(part), of_file.substr(0, 5));
}

}  // namespace
}  // namespace kvx::api_test

// Sequences and prefixes in files: a loaded one goes on bit for bit, a damaged or foreign file is
// refused with the reason, and never a wrong block is served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "kv/files/transcode.hpp"
#include "tests/kv/lying_file.hpp"
#include "tests/kv/stream.hpp"

namespace kvx::kv::kv_cache_file_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

KvCacheConfig saved_config(std::string_view recipe, std::vector<int> windows = {}) {
  KvCacheConfig config = config_of(recipe, 16);
  config.geometry.layer_windows = std::move(windows);
  config.max_sequences = 3;
  config.prefix = {true, cache::HashAlgorithm::kXxh3, "a model"};
  return config;
}

std::vector<int32_t> token_ids(int count) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(i);
  return ids;
}

class KvCacheFile : public testing::Test {
 protected:
  KvCacheFile()
      : path_((fs::temp_directory_path() / ("kvx_kv_" + std::to_string(getpid()))).string()) {}
  ~KvCacheFile() override { fs::remove(path_); }

  // A sequence of num_tokens in a cache, saved.
  void save(const KvCacheConfig& config, const Stream& stream, int num_tokens,
            const SaveOptions& options = {}) {
    auto cache = created(config);
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, num_tokens, 1000);
    ASSERT_TRUE(cache->record_tokens(sequence, token_ids(num_tokens)).ok());
    const Status saved = cache->save_sequence(sequence, path_, options);
    ASSERT_TRUE(saved.ok()) << saved.error().message;
  }
  std::string load_error(const KvCacheConfig& config) const {
    auto cache = created(config);
    const auto loaded = cache->load_sequence(path_);
    EXPECT_FALSE(loaded.ok());
    // Nothing has changed: no block is in use, no sequence taken.
    const KvCacheSnapshot seen = cache->snapshot();
    EXPECT_EQ(seen.num_sequences, 0);
    for (const auto& one : seen.classes) EXPECT_EQ(one.num_active, 0);
    return loaded.ok() ? "" : loaded.error().message;
  }
  std::vector<uint8_t> file_bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void flip(int64_t at) const {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 4);
    file.seekp(at);
    file.put(byte);
  }

  std::string path_;
};

TEST_F(KvCacheFile, ALoadedSequenceGoesOnBitForBit) {
  const Stream stream(150);
  struct Case {
    const char* recipe;
    std::vector<int> windows;
  };
  for (const Case& one : {Case{"bf16", {}}, Case{"int8/int4", {}}, Case{"nvfp4:auto", {}},
                          Case{"int4:sink=10,recent=40", {0, 30}}, Case{"int8", {20, 0}},
                          Case{"int8:source=page,immediate", {}}}) {
    if (is_on_gpu() &&
        parse_recipe(one.recipe).value().k.spec.scale_source == format::ScaleSource::kPageShared) {
      continue;  // refused there
    }
    for (int num_tokens : {5, 96, 107}) {
      const KvCacheConfig config = saved_config(one.recipe, one.windows);
      save(config, stream, num_tokens, {num_tokens == 96 ? 3 : 0});
      auto cache = created(config);
      const auto loaded = cache->load_sequence(path_);
      ASSERT_TRUE(loaded.ok()) << loaded.error().message;
      ASSERT_EQ(cache->num_tokens(loaded.value()), num_tokens);
      auto own = created(config);
      const int sequence = own->create_sequence().value();
      feed(*own, sequence, stream, 0, num_tokens, 1000);
      EXPECT_EQ(feed(*cache, loaded.value(), stream, num_tokens, 150, 1000),
                feed(*own, sequence, stream, num_tokens, 150, 1000))
          << one.recipe << ", " << num_tokens;
    }
  }
}

TEST_F(KvCacheFile, TheSameCacheGivesTheSameFile) {
  const Stream stream(100);
  save(saved_config("nvfp4:auto"), stream, 90);
  const std::vector<uint8_t> first = file_bytes();
  save(saved_config("nvfp4:auto"), stream, 90);
  EXPECT_EQ(file_bytes(), first);
}

TEST_F(KvCacheFile, RefusesAnotherCacheAndSaysInWhatItDiffers) {
  const Stream stream(100);
  const KvCacheConfig config = saved_config("int8");
  save(config, stream, 100);
  const auto error_of = [&](const std::function<void(KvCacheConfig&)>& change) {
    KvCacheConfig other = config;
    change(other);
    return load_error(other);
  };
  EXPECT_THAT(error_of([](auto& c) { c.recipe = parse_recipe("int4").value(); }),
              HasSubstr("layers_from_0 is window 0, 2 heads K int8"));
  EXPECT_THAT(error_of([](auto& c) { c.geometry.num_layers = 3; }),
              HasSubstr("num_layers is 2; expected 3"));
  EXPECT_THAT(error_of([](auto& c) { c.block_size = 32; }),
              HasSubstr("block_size is 16; expected 32"));
  EXPECT_THAT(error_of([](auto& c) { c.prefix.model = "another"; }),
              HasSubstr("model is a model; expected another"));
  EXPECT_THAT(error_of([](auto& c) { c.recipe = parse_recipe("int8:sink=1,recent=1").value(); }),
              HasSubstr("head_blocks is 0; expected 1"));
  EXPECT_THAT(error_of([](auto& c) { c.calibration.resize(2); }), HasSubstr("calibration is none"));
  EXPECT_THAT(error_of([](auto& c) { c.max_tokens_per_sequence = 99; }),
              HasSubstr("holds 100 tokens; max_tokens_per_sequence is 99"));
}

// Blocks lie alike whatever the window: a sequence with fewer of them in full precision is as one
// that was cut back to where it was saved. recent=0 writes what recent=16 wrote in blocks of 16 as
// long as recent=N counted the open block.
TEST_F(KvCacheFile, AShorterFullPrecisionWindowIsLoadedAsItLies) {
  const Stream stream(160);
  for (const int num_tokens : {96, 90}) {
    save(saved_config("nvfp4:k.hadamard,search,sink=16,recent=0"), stream, num_tokens);
    const auto reader = tier::CacheFileReader::open(path_);
    EXPECT_THAT(reader.value().index().fingerprint, HasSubstr("\nrecent_blocks 1\n"));
    const KvCacheConfig config = saved_config("nvfp4:k.hadamard,search,sink=16,recent=32");
    auto cut = created(config);
    const int expected = cut->create_sequence().value();
    feed(*cut, expected, stream, 0, 114, 1000);  // blocks 1 to 4 have left the window
    ASSERT_TRUE(cut->truncate_sequence(expected, num_tokens).ok());
    const auto expected_rows = feed(*cut, expected, stream, num_tokens, 160, 1000);
    for (const bool transcodes : {false, true}) {
      auto cache = created(config);
      const auto loaded =
          transcodes ? transcode_sequence(*cache, path_) : cache->load_sequence(path_);
      ASSERT_TRUE(loaded.ok()) << loaded.error().message;
      EXPECT_EQ(feed(*cache, loaded.value(), stream, num_tokens, 160, 1000), expected_rows)
          << num_tokens << (transcodes ? ", transcoded" : "");
    }
  }
}

TEST_F(KvCacheFile, PrefixesOfAShorterFullPrecisionWindowAreLoadedAsTheyLie) {
  const Stream stream(112);
  auto cache = created(saved_config("int8:sink=16,recent=0"));
  const int one = cache->create_sequence().value();
  feed(*cache, one, stream, 0, 112, 1000);
  ASSERT_TRUE(cache->record_tokens(one, token_ids(112)).ok());
  ASSERT_TRUE(cache->save_prefixes(path_).ok());
  auto other = created(saved_config("int8:sink=16,recent=32"));
  const auto report = other->load_prefixes(path_);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_bad + report.value().num_no_room, 0);
  const int begun = other->create_sequence_from({}, token_ids(113)).value();
  EXPECT_EQ(other->num_tokens(begun), 112);
}

TEST_F(KvCacheFile, ALongerFullPrecisionWindowIsAnothersCache) {
  save(saved_config("int8:recent=48"), Stream(100), 100);
  EXPECT_THAT(load_error(saved_config("int8:recent=32")),
              HasSubstr("recent_blocks is 4; expected 1 to 3"));
  EXPECT_THAT(load_error(saved_config("int8:recent=0")),
              HasSubstr("recent_blocks is 4; expected 1"));
  EXPECT_THAT(load_error(saved_config("int8")), HasSubstr("recent_blocks is 4; expected 0"));
  save(saved_config("int8"), Stream(100), 100);
  EXPECT_THAT(load_error(saved_config("int8:recent=32")),
              HasSubstr("recent_blocks is 0; expected 1 to 3"));
}

TEST_F(KvCacheFile, BelievesNoBlockSizeBesideTheFingerprints) {
  const KvCacheConfig config = saved_config("int8");
  save(config, Stream(32), 32);
  lie_about_block_size(path_);
  const auto reason = HasSubstr("its blocks are of 1024 tokens; its fingerprint has 16");
  EXPECT_THAT(load_error(config), reason);
  const auto loaded = created(config)->load_prefixes(path_);
  ASSERT_FALSE(loaded.ok());
  EXPECT_THAT(loaded.error().message, reason);
}

TEST_F(KvCacheFile, ADamagedBlockIsRefusedWithItsSequence) {
  const Stream stream(100);
  const KvCacheConfig config = saved_config("int8");
  save(config, stream, 100);
  auto reader = tier::CacheFileReader::open(path_);
  for (const tier::FileBlock& block : reader.value().index().blocks) {
    const int64_t at = block.block_copies[0].offset + block.block_copies[0].stored_bytes / 2;
    flip(at);
    EXPECT_THAT(load_error(config), HasSubstr("checksum"));
    flip(at);
  }
  auto cache = created(config);
  EXPECT_TRUE(cache->load_sequence(path_).ok());
}

TEST_F(KvCacheFile, ADamagedBlockIsAMissAmongPrefixes) {
  const Stream stream(112);
  const KvCacheConfig config = saved_config("int8");
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 112, 1000);
  ASSERT_TRUE(cache->record_tokens(sequence, token_ids(112)).ok());
  ASSERT_TRUE(cache->save_prefixes(path_).ok());
  auto reader = tier::CacheFileReader::open(path_);
  ASSERT_EQ(reader.value().index().blocks.size(), 7u);
  flip(reader.value().index().blocks[3].block_copies[0].offset + 9);

  auto other = created(config);
  const auto report = other->load_prefixes(path_);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_loaded, 6);
  EXPECT_EQ(report.value().num_bad, 1);
  EXPECT_THAT(report.value().first_problem, HasSubstr("checksum"));
  const int begun = other->create_sequence_from({}, token_ids(112)).value();
  EXPECT_EQ(other->num_tokens(begun), 48);  // up to the bad block
  auto own = created(config);
  const int plain = own->create_sequence().value();
  feed(*own, plain, stream, 0, 48, 1000);
  EXPECT_EQ(feed(*other, begun, stream, 48, 112, 1000), feed(*own, plain, stream, 48, 112, 1000));
}

TEST_F(KvCacheFile, PrefixesOfAllSequencesComeBack) {
  const Stream stream(112);
  for (const char* recipe : {"bf16", "nvfp4:auto"}) {
    const KvCacheConfig config = saved_config(recipe, {0, 40});
    auto cache = created(config);
    const int one = cache->create_sequence().value();
    feed(*cache, one, stream, 0, 112, 1000);
    ASSERT_TRUE(cache->record_tokens(one, token_ids(112)).ok());
    ASSERT_TRUE(cache->free_sequence(one).ok());
    ASSERT_TRUE(cache->save_prefixes(path_, {1}).ok());
    auto other = created(config);
    ASSERT_TRUE(other->load_prefixes(path_).ok());
    const LoadReport again = other->load_prefixes(path_).value();
    EXPECT_EQ(again.num_loaded, 0);
    EXPECT_GT(again.num_known, 0);
    const int begun = other->create_sequence_from({}, token_ids(112)).value();
    const int here = cache->create_sequence_from({}, token_ids(112)).value();
    ASSERT_EQ(other->num_tokens(begun), cache->num_tokens(here)) << recipe;
    EXPECT_GT(other->num_tokens(begun), 0) << recipe;
    const int at = static_cast<int>(other->num_tokens(begun));
    EXPECT_EQ(feed(*other, begun, stream, at, 112, 1000), feed(*cache, here, stream, at, 112, 1000))
        << recipe;
  }
}

TEST_F(KvCacheFile, LoadsAsManyPrefixesAsThereIsRoomFor) {
  const Stream stream(112);
  KvCacheConfig config = saved_config("int8");
  auto cache = created(config);
  const int one = cache->create_sequence().value();
  feed(*cache, one, stream, 0, 112, 1000);
  ASSERT_TRUE(cache->record_tokens(one, token_ids(112)).ok());
  ASSERT_TRUE(cache->save_prefixes(path_).ok());
  config.max_tokens_per_sequence = 48;
  config.max_sequences = 1;  // four blocks, the spare one with them
  auto small = created(config);
  const LoadReport report = small->load_prefixes(path_).value();
  EXPECT_EQ(report.num_loaded, 4);
  EXPECT_EQ(report.num_no_room, 3);
  EXPECT_EQ(small->num_tokens(small->create_sequence_from({}, token_ids(64)).value()), 48);
}

TEST_F(KvCacheFile, RefusesToSaveWhatItDoesNotKnow) {
  const Stream stream(40);
  auto cache = created(saved_config("int8"));
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 40, 1000);
  ASSERT_TRUE(cache->record_tokens(sequence, token_ids(39)).ok());
  const Status refused = cache->save_sequence(sequence, path_);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().message,
            "sequence 0 has 40 tokens of which 39 are recorded; expected all");
  KvCacheConfig off = config_of("int8");
  EXPECT_EQ(created(off)->load_sequence(path_).error().code, ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace kvx::kv::kv_cache_file_test

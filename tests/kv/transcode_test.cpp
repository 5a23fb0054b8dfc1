// Files of another format, block size or other full-precision window, loaded on request: what comes
// out is what the decoded rows give when they are appended; and fingerprints can be read back.
#include "kv/files/transcode.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "kv/files/fingerprint.hpp"
#include "tests/kv/lying_file.hpp"
#include "tests/kv/stream.hpp"
#include "tier/cache_file.hpp"

namespace kvx::kv::kv_transcode_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int kTokens = 107;

KvCacheConfig transcode_config(std::string_view recipe, int block_size,
                               std::vector<int> windows = {}) {
  KvCacheConfig config = config_of(recipe, block_size);
  config.geometry.layer_windows = std::move(windows);
  config.max_sequences = 3;
  config.prefix = {true, cache::HashAlgorithm::kXxh3, "a model"};
  return config;
}

// Where files come from: any cache's is the host's, byte for byte.
std::unique_ptr<KvCache> created_on_host(KvCacheConfig config) {
  config.cuda.reset();
  return created(std::move(config));
}

std::vector<int32_t> token_ids(int count, int32_t first = 0) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(first + i);
  return ids;
}

int fed_sequence(KvCache& cache, const Stream& stream, int num_tokens) {
  const int sequence = cache.create_sequence().value();
  feed(cache, sequence, stream, 0, num_tokens, 1000);
  EXPECT_TRUE(cache.record_tokens(sequence, token_ids(num_tokens)).ok());
  return sequence;
}

// K, then V, of tokens [first, last) of a layer.
std::vector<float> rows_of(const KvCache& cache, int sequence, int layer, int first, int last) {
  const size_t side = static_cast<size_t>(last - first) * kNumKvHeads * kHeadDim;
  std::vector<float> rows(2 * side);
  const auto of = [](float* data) {
    return dense_rows(static_cast<void*>(data), DType::kF32, kNumKvHeads, kHeadDim);
  };
  const Status done =
      gather(cache, sequence, layer, first, last - first, of(rows.data()), of(rows.data() + side));
  EXPECT_TRUE(done.ok()) << done.error().message;
  return rows;
}

// A stream that begins with what the cache gives back for layer 0's first tokens.
Stream as_stored(const KvCache& cache, int sequence, const Stream& stream, int num_tokens) {
  Stream stored = stream;
  const std::vector<float> rows = rows_of(cache, sequence, 0, 0, num_tokens);
  const auto middle = rows.begin() + static_cast<int64_t>(rows.size() / 2);
  std::copy(rows.begin(), middle, stored.k.begin());
  std::copy(middle, rows.end(), stored.v.begin());
  return stored;
}

class Transcode : public testing::Test {
 protected:
  Transcode()
      : path_(
            (fs::temp_directory_path() / ("kvx_transcode_" + std::to_string(getpid()))).string()) {}
  ~Transcode() override { fs::remove(path_); }
  const std::string path_;
};

struct Change {
  const char* from;
  int from_block;
  const char* to;
  int to_block;
  std::vector<int> windows = {};
};

TEST_F(Transcode, GivesWhatAppendingTheDecodedRowsGives) {
  const Stream stream(150);
  for (const Change& one :
       {Change{"bf16", 16, "int8", 16}, Change{"int8/int4", 16, "bf16", 32},
        Change{"nvfp4:auto", 16, "int4:sink=10,recent=40", 16},
        Change{"int4:sink=10,recent=40", 32, "nvfp4:auto", 16},
        Change{"int8", 32, "int4:auto", 16, {0, 30}}, Change{"int4:auto", 16, "int8", 16, {0, 30}},
        Change{"int8:source=page,immediate", 16, "mxfp4:hadamard", 64},
        Change{"nvfp4:auto", 16, "nvfp4:auto", 64},
        Change{"int4:recent=48", 16, "int4:recent=16", 16}}) {
    SCOPED_TRACE(
        fmt::format("{} in {} to {} in {}", one.from, one.from_block, one.to, one.to_block));
    auto source = created_on_host(transcode_config(one.from, one.from_block, one.windows));
    const int original = fed_sequence(*source, stream, kTokens);
    ASSERT_TRUE(source->save_sequence(original, path_).ok());
    const KvCacheConfig config = transcode_config(one.to, one.to_block, one.windows);
    auto cache = created(config);
    EXPECT_FALSE(cache->load_sequence(path_).ok()) << "not without the request";
    const auto loaded = transcode_sequence(*cache, path_);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    ASSERT_EQ(cache->num_tokens(loaded.value()), kTokens);
    EXPECT_EQ(cache->recorded_tokens(loaded.value()).size(), size_t{kTokens});

    const Stream stored = as_stored(*source, original, stream, kTokens);
    auto own = created(config);
    const int expected = own->create_sequence().value();
    feed(*own, expected, stored, 0, kTokens, 1000);
    for (int layer = 0; layer < kNumLayers; ++layer) {
      const int first = one.windows.empty() || one.windows[layer] == 0 ? 0 : kTokens - 29;
      EXPECT_EQ(rows_of(*cache, loaded.value(), layer, first, kTokens),
                rows_of(*own, expected, layer, first, kTokens));
    }
    EXPECT_EQ(feed(*cache, loaded.value(), stored, kTokens, 150, 1000),
              feed(*own, expected, stored, kTokens, 150, 1000));
  }
}

TEST_F(Transcode, LoadsAFileOfItsOwnCacheAsItIs) {
  const Stream stream(kTokens);
  auto source = created_on_host(transcode_config("nvfp4:auto", 16));
  const int original = fed_sequence(*source, stream, kTokens);
  ASSERT_TRUE(source->save_sequence(original, path_).ok());
  auto cache = created(transcode_config("nvfp4:auto", 16));
  const int loaded = transcode_sequence(*cache, path_).value();
  EXPECT_EQ(rows_of(*cache, loaded, 1, 0, kTokens), rows_of(*source, original, 1, 0, kTokens));
}

TEST_F(Transcode, RefusesWhatItCannotBridge) {
  const Stream stream(kTokens);
  auto source = created_on_host(transcode_config("int8", 16, {0, 30}));
  const int original = source->create_sequence().value();
  feed(*source, original, stream, 0, kTokens, 8);  // so that the window leaves blocks behind
  ASSERT_TRUE(source->record_tokens(original, token_ids(kTokens)).ok());
  ASSERT_TRUE(source->save_sequence(original, path_).ok());
  const auto error_of = [&](const std::function<void(KvCacheConfig&)>& change) {
    KvCacheConfig other = transcode_config("int4", 16, {0, 30});
    change(other);
    auto cache = created(other);
    const auto loaded = transcode_sequence(*cache, path_);
    EXPECT_FALSE(loaded.ok());
    EXPECT_EQ(cache->snapshot().num_sequences, 0);
    for (const auto& one : cache->snapshot().classes) EXPECT_EQ(one.num_active, 0);
    return loaded.ok() ? "" : loaded.error().message;
  };
  EXPECT_THAT(error_of([](auto& c) { c.prefix.model = "another"; }),
              HasSubstr("model is a model; expected another, which no transcoding changes"));
  EXPECT_THAT(error_of([](auto& c) {
                c.geometry.num_layers = 3;
                c.geometry.layer_windows = {0, 30, 0};
              }),
              HasSubstr("num_layers is 2; expected 3"));
  EXPECT_THAT(error_of([](auto& c) { c.geometry.layer_windows[1] = 20; }),
              HasSubstr("the window of layer 1 is 30; expected 20"));
  EXPECT_THAT(error_of([](auto& c) { c.block_size = 128; }),
              HasSubstr("its window begins with token 0"));
  EXPECT_THAT(error_of([](auto& c) { c.max_tokens_per_sequence = kTokens - 1; }),
              HasSubstr("holds 107 tokens; max_tokens_per_sequence is 106"));
}

TEST_F(Transcode, BelievesNoBlockSizeBesideTheFingerprints) {
  const auto from = created_on_host(transcode_config("int8", 16));
  const int sequence = fed_sequence(*from, Stream(32), 32);
  ASSERT_TRUE(from->save_sequence(sequence, path_, {}).ok());
  lie_about_block_size(path_);
  const auto reason = HasSubstr("its blocks are of 1024 tokens; its fingerprint has 16");
  const auto to = created(transcode_config("int4", 16));
  const auto loaded = transcode_sequence(*to, path_);
  ASSERT_FALSE(loaded.ok());
  EXPECT_THAT(loaded.error().message, reason);
  const auto prefixes = transcode_prefixes(*to, path_);
  ASSERT_FALSE(prefixes.ok());
  EXPECT_THAT(prefixes.error().message, reason);
}

TEST_F(Transcode, RefusesADamagedBlock) {
  const Stream stream(kTokens);
  auto source = created_on_host(transcode_config("int8", 16));
  ASSERT_TRUE(source->save_sequence(fed_sequence(*source, stream, kTokens), path_).ok());
  const auto reader = tier::CacheFileReader::open(path_);
  const int64_t at = reader.value().index().blocks[4].block_copies[0].offset + 7;
  std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(at);
  file.put('\x55');
  file.seekp(at + 1);
  file.put('\x55');
  file.close();
  auto cache = created(transcode_config("bf16", 16));
  const auto loaded = transcode_sequence(*cache, path_);
  ASSERT_FALSE(loaded.ok());
  EXPECT_THAT(loaded.error().message, HasSubstr("block 4: "));

  auto prefixes = created(transcode_config("bf16", 16));
  const auto report = transcode_prefixes(*prefixes, path_);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_loaded, 4);
  EXPECT_EQ(report.value().num_bad, 2) << "the damaged block and the full one after it";
  EXPECT_THAT(report.value().first_problem, HasSubstr("block 4: "));
  const int begun = prefixes->create_sequence_from({}, token_ids(kTokens)).value();
  EXPECT_EQ(prefixes->num_tokens(begun), 64);
}

TEST_F(Transcode, MakesPrefixesFindableInTheNewFormat) {
  const Stream stream(112);
  for (const Change& one : {Change{"bf16", 16, "int8", 16}, Change{"int8", 16, "nvfp4:auto", 32},
                            Change{"int4:auto", 16, "int8", 16, {0, 40}}}) {
    SCOPED_TRACE(one.to);
    auto source = created_on_host(transcode_config(one.from, one.from_block, one.windows));
    const int original = fed_sequence(*source, stream, 112);
    const int branch = source->create_sequence_from({}, token_ids(60)).value();
    const int at = static_cast<int>(source->num_tokens(branch));
    feed(*source, branch, stream, at, 80, 1000);
    ASSERT_TRUE(source->record_tokens(branch, token_ids(80 - at, 1000)).ok());
    ASSERT_TRUE(source->save_prefixes(path_).ok());

    const KvCacheConfig config = transcode_config(one.to, one.to_block, one.windows);
    auto cache = created(config);
    const auto report = transcode_prefixes(*cache, path_);
    ASSERT_TRUE(report.ok()) << report.error().message;
    EXPECT_EQ(report.value().first_problem, "");
    EXPECT_GT(report.value().num_loaded, 6);
    EXPECT_EQ(cache->snapshot().num_sequences, 0);

    const int begun = cache->create_sequence_from({}, token_ids(113)).value();
    const int found = static_cast<int>(cache->num_tokens(begun));
    EXPECT_EQ(found, 112 / one.to_block * one.to_block);
    const Stream stored = as_stored(*source, original, stream, 112);
    auto own = created(config);
    const int expected = own->create_sequence().value();
    feed(*own, expected, stored, 0, found, 1000);
    EXPECT_EQ(rows_of(*cache, begun, 0, 0, found - 64), rows_of(*own, expected, 0, 0, found - 64));
  }
}

TEST_F(Transcode, SaysWhenThereIsNoRoom) {
  const Stream stream(112);
  auto source = created_on_host(transcode_config("bf16", 16));
  fed_sequence(*source, stream, 112);
  ASSERT_TRUE(source->save_prefixes(path_).ok());
  KvCacheConfig config = transcode_config("int8", 16);
  config.max_tokens_per_sequence = 48;
  config.max_sequences = 1;
  auto cache = created(config);
  const LoadReport report = transcode_prefixes(*cache, path_).value();
  EXPECT_EQ(report.num_loaded, 3) << "a sequence of 48 tokens";
  EXPECT_EQ(cache->num_tokens(cache->create_sequence_from({}, token_ids(49)).value()), 48);
}

TEST_F(Transcode, ReadsBlocksThatManyChainsShareButOnce) {
  const Stream stream(112);
  auto source = created_on_host(transcode_config("bf16", 16));
  for (const int32_t branch : {1000, 2000}) {  // they part behind what one sequence can hold
    const int sequence = source->create_sequence().value();
    feed(*source, sequence, stream, 0, 80, 1000);
    std::vector<int32_t> ids = token_ids(64);
    for (const int32_t id : token_ids(16, branch)) ids.push_back(id);
    ASSERT_TRUE(source->record_tokens(sequence, ids).ok());
  }
  ASSERT_TRUE(source->save_prefixes(path_).ok());
  KvCacheConfig config = transcode_config("int8", 16);
  config.max_tokens_per_sequence = 48;
  auto cache = created(config);
  const LoadReport report = transcode_prefixes(*cache, path_).value();
  EXPECT_EQ(report.num_blocks, 6);
  EXPECT_EQ(report.num_loaded, 3);
  EXPECT_EQ(report.num_known, 0);
}

// ---- fingerprints

TEST(Fingerprint, IsReadBackAsItWasWritten) {
  for (const char* recipe :
       {"bf16", "int8/int4", "nvfp4:auto", "int4:sink=10,recent=40,full_precision=f16", "fp8_e4m3",
        "mxfp4:rule=floor", "int8:g32,scale=f32,source=page"}) {
    KvCacheConfig config = transcode_config(recipe, 32, {0, 30});
    config.overrides.push_back(parse_layer_override("1=bf16").value());
    config.overrides.push_back(parse_head_override("0:1=int8").value());
    const auto cache = created(config);
    const auto stored = parse_fingerprint(cache->fingerprint());
    ASSERT_TRUE(stored.ok()) << stored.error().message;
    const StoredCache& s = stored.value();
    EXPECT_EQ(s.calibration, "none");
    EXPECT_EQ(s.model, "a model");
    EXPECT_EQ(fingerprint_of({&s.geometry,
                              s.layers,
                              {},
                              s.full_precision_window,
                              &s.full_precision_spec,
                              s.block_size,
                              s.model}),
              cache->fingerprint());
  }
}

TEST(Fingerprint, OfMoreRunsOfHeadsThanAnyCacheHasIsRefused) {
  const auto cache = created(transcode_config("int8", 32));
  std::string text(cache->fingerprint());
  const auto replace = [&text](std::string_view from, std::string_view to) {
    text.replace(text.find(from), from.size(), to);
  };
  replace("num_layers 2", "num_layers 10000");
  replace("num_kv_heads 2", "num_kv_heads 1000");
  const size_t begin = text.find("2 heads K ");
  const std::string run = text.substr(begin, text.find('\n', begin) - begin);
  std::string runs = "1" + run.substr(1);
  const std::string one = ", " + runs;
  for (int i = 1; i < 1000; ++i) runs += one;
  replace(run, runs);
  const auto stored = parse_fingerprint(text);
  ASSERT_FALSE(stored.ok());
  EXPECT_THAT(stored.error().message, HasSubstr("10000 layers of 1000 runs of heads"));
}

TEST(Fingerprint, OfAnotherMakeIsRefused) {
  const auto cache = created(transcode_config("int8", 32));
  const std::string text(cache->fingerprint());
  const auto error_of = [&text](std::string_view from, std::string_view to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    const auto stored = parse_fingerprint(changed);
    EXPECT_FALSE(stored.ok()) << changed;
    return stored.ok() ? "" : stored.error().message;
  };
  EXPECT_THAT(error_of("layer,head", "head,layer"), HasSubstr("order is 'head,layer"));
  EXPECT_THAT(error_of("block_size 32", "block_size x"), HasSubstr("block_size is 'x'"));
  EXPECT_THAT(error_of("block_size 32\n", ""), HasSubstr("next fact is 'num_layers'"));
  EXPECT_THAT(error_of("num_layers 2", "num_layers 0"), HasSubstr("num_layers is 0"));
  EXPECT_THAT(error_of("head_blocks 0", "head_blocks 3"), HasSubstr("full-precision window has 3"));
  EXPECT_THAT(error_of("K int8", "K int9"), HasSubstr("format is 'int9'"));
  EXPECT_THAT(error_of(":g64", ":g63"), HasSubstr("group size"));
  EXPECT_THAT(error_of("2 heads", "3 heads"), HasSubstr("heads is '3'"));
  EXPECT_THAT(error_of("layers_from_0", "layers_from_1"), HasSubstr("layer is '1'"));
  EXPECT_THAT(error_of("calibration none\n", ""), HasSubstr("calibration"));
  EXPECT_THAT(error_of("model a model\n", ""), HasSubstr("model"));
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(parse_fingerprint(std::string_view(text).substr(0, length)).ok()) << length;
  }
}

}  // namespace
}  // namespace kvx::kv::kv_transcode_test

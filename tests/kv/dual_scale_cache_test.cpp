// Caches of dual-scale formats: blocks are quantised whole as they leave the window, whatever the
// steps; files, forks and cuts treat them as any other block; what cannot be is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "format/spec.hpp"
#include "kv/files/transcode.hpp"
#include "tests/kv/stream.hpp"

namespace kvx::kv::dual_scale_cache_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int kBlockSize = 64;
constexpr int kTokens = 330;  // 4 blocks leave a window of one block and the open one

class DualScaleCache : public testing::TestWithParam<const char*> {
 protected:
  KvCacheConfig config(std::string_view options = "hadamard,recent=64") const {
    return config_of(fmt::format("{}:{}", GetParam(), options), kBlockSize);
  }
};

// By which results of other step sizes may differ: sums have another order, and on a GPU queries
// and weights are rounded to 16 bits, by another kernel for prompts.
double order_of_sums() {
  return is_on_gpu() ? 5e-3 : 1e-4;
}

std::vector<float> gathered(const KvCache& cache, int sequence, int64_t num_tokens) {
  std::vector<float> k(static_cast<size_t>(num_tokens) * kNumKvHeads * kHeadDim);
  const Status done = gather(cache, sequence, 1, 0, num_tokens,
                             dense_rows(k.data(), DType::kF32, kNumKvHeads, kHeadDim), {});
  EXPECT_TRUE(done.ok()) << done.error().message;
  return k;
}

// Sums of attention may be added in another order; what is stored is the same.
TEST_P(DualScaleCache, StoresTheSameBitsHoweverTheTokensAreCutIntoSteps) {
  const Stream stream(kTokens);
  std::vector<float> outputs[2], keys[2];
  const int step_tokens[] = {1, 150};
  for (int i = 0; i < 2; ++i) {
    auto cache = created(config());
    ASSERT_NE(cache, nullptr);
    const int sequence = cache->create_sequence().value();
    outputs[i] = feed(*cache, sequence, stream, 0, kTokens, step_tokens[i]);
    keys[i] = gathered(*cache, sequence, kTokens);
  }
  EXPECT_LT(relative_rms(outputs[0], outputs[1]), order_of_sums());
  EXPECT_EQ(keys[0], keys[1]);
}

// A uniform grid's error for normal numbers, and exact rows within the window.
TEST_P(DualScaleCache, KeepsOldKeysCloseAndRecentOnesExactly) {
  const Stream stream(kTokens);
  auto cache = created(config("recent=64,full_precision=f32"));
  ASSERT_NE(cache, nullptr);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, kTokens, 1000);
  const std::vector<float> keys = gathered(*cache, sequence, kTokens);
  const auto old_end = static_cast<std::ptrdiff_t>(192) * kNumKvHeads * kHeadDim;
  const std::vector<float> old_keys(keys.begin(), keys.begin() + old_end);
  const std::vector<float> old_stream(stream.k.begin(), stream.k.begin() + old_end);
  const int bits = parse_recipe(GetParam()).value().k.spec.facts->element_bits;
  const double most = bits == 2 ? 0.45 : bits == 3 ? 0.22 : 0.11;
  EXPECT_LT(relative_rms(old_keys, old_stream), most);
  EXPECT_GT(relative_rms(old_keys, old_stream), most / 4);
  EXPECT_TRUE(std::equal(keys.end() - 64 * kNumKvHeads * kHeadDim, keys.end(),
                         stream.k.end() - 64 * kNumKvHeads * kHeadDim));
}

TEST_P(DualScaleCache, TakesTheBytesOfItsBits) {
  const auto cache = created(config());
  ASSERT_NE(cache, nullptr);
  const Recipe recipe = parse_recipe(GetParam()).value();
  const int bits = recipe.k.spec.facts->element_bits + recipe.v.spec.facts->element_bits;
  const int head_bytes = kBlockSize * kHeadDim * bits / 8 + 2 * (kBlockSize + 2 * kHeadDim);
  const KvCacheSnapshot seen = cache->snapshot();
  EXPECT_EQ(seen.classes.front().block_bytes, kNumLayers * kNumKvHeads * head_bytes);
}

TEST_P(DualScaleCache, ForksAndCutsWithinTheWindowGoOn) {
  constexpr int kEnd = 318;  // in the block of token 300: none leaves the window
  const Stream stream(kTokens);
  auto cache = created(config());
  ASSERT_NE(cache, nullptr);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 300, 7);
  const int fork = cache->fork_sequence(sequence).value();
  const std::vector<float> expected = feed(*cache, sequence, stream, 300, kEnd, 7);
  EXPECT_EQ(feed(*cache, fork, stream, 300, kEnd, 7), expected);
  ASSERT_TRUE(cache->truncate_sequence(fork, 300).ok());
  EXPECT_LT(relative_rms(feed(*cache, fork, stream, 300, kEnd, 1), expected), order_of_sums());
  EXPECT_EQ(cache->truncate_sequence(fork, 130).error().code, ErrorCode::kUnsupported);
}

TEST_P(DualScaleCache, GoesOnFromAFileAndIsTranscodedIntoOthers) {
  const std::string path =
      (fs::temp_directory_path() / ("kvx_dual_" + std::to_string(getpid()))).string();
  const Stream stream(kTokens);
  KvCacheConfig saved = config();
  saved.prefix = {true, cache::HashAlgorithm::kXxh3, "a model"};
  std::vector<int32_t> tokens(300);
  for (int i = 0; i < 300; ++i) tokens[i] = i;
  std::vector<float> expected, keys;
  {
    auto cache = created(saved);
    ASSERT_NE(cache, nullptr);
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 300, 1000);
    ASSERT_TRUE(cache->record_tokens(sequence, tokens).ok());
    const Status done = cache->save_sequence(sequence, path);
    ASSERT_TRUE(done.ok()) << done.error().message;
    keys = gathered(*cache, sequence, 300);
    expected = feed(*cache, sequence, stream, 300, kTokens, 1000);
  }
  auto cache = created(saved);
  const auto loaded = cache->load_sequence(path);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(feed(*cache, loaded.value(), stream, 300, kTokens, 1000), expected);

  // Into wider rows, and back into blocks of another size.
  for (const auto& [recipe, block_size] : {std::pair("bf16", 16), {"int2_dual:recent=64", 128}}) {
    KvCacheConfig other = config_of(recipe, block_size);
    other.prefix = saved.prefix;
    auto target = created(other);
    ASSERT_NE(target, nullptr);
    const auto transcoded = transcode_sequence(*target, path);
    ASSERT_TRUE(transcoded.ok()) << transcoded.error().message;
    const std::vector<float> found = gathered(*target, transcoded.value(), 300);
    EXPECT_LT(relative_rms(found, keys), block_size == 16 ? 0.01 : 0.45) << recipe;
  }
  fs::remove(path);
}

// Heads of a layer are stored apart: each reads as it would in a cache of its own format.
TEST_P(DualScaleCache, LiesBesideHeadsOfOtherFormats) {
  const Stream stream(kTokens);
  const auto keys_of = [&](KvCacheConfig of_cache) {
    auto cache = created(std::move(of_cache));
    if (cache == nullptr) return std::vector<float>();
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, kTokens, 100);
    return gathered(*cache, sequence, kTokens);  // of layer 1
  };
  KvCacheConfig mixed = config();
  mixed.overrides = {parse_head_override("1:1=int4").value()};
  const std::vector<float> found = keys_of(mixed);
  const std::vector<float> of_dual = keys_of(config());
  const std::vector<float> of_int4 = keys_of(config_of("int4:hadamard,recent=64", kBlockSize));
  ASSERT_EQ(found.size(), of_dual.size());
  ASSERT_EQ(found.size(), of_int4.size());
  EXPECT_NE(of_dual, of_int4);
  for (size_t row = 0; row < found.size() / kHeadDim; ++row) {
    const std::vector<float>& expected = row % kNumKvHeads == 1 ? of_int4 : of_dual;
    const auto first = static_cast<std::ptrdiff_t>(row * kHeadDim);
    ASSERT_TRUE(std::equal(found.begin() + first, found.begin() + first + kHeadDim,
                           expected.begin() + first))
        << "token " << row / kNumKvHeads << ", head " << row % kNumKvHeads;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, DualScaleCache,
                         testing::Values("int4_dual", "int3_dual", "int2_dual",
                                         "int3_dual/int2_dual"),
                         [](const auto& formats) {
                           std::string name = formats.param;
                           std::replace(name.begin(), name.end(), '/', '_');
                           return name;
                         });

std::string refusal(std::string_view recipe, int block_size, int head_dim = kHeadDim) {
  KvCacheConfig config = config_of(recipe, block_size);
  config.geometry.k_head_dim = config.geometry.v_head_dim = head_dim;
  config.cuda.reset();
  const auto cache = KvCache::create(std::move(config), context());
  return cache.ok() ? "" : cache.error().message;
}

TEST(DualScaleRefusals, NameTheBlockSizeTheWindowOrTheHeadDim) {
  EXPECT_EQ(refusal("int2_dual:auto", 16),
            "block_size is 16; int2_dual quantises blocks of 64 or 128 tokens");
  EXPECT_EQ(refusal("bf16/int3_dual:auto", 256),
            "block_size is 256; int3_dual quantises blocks of 64 or 128 tokens");
  EXPECT_EQ(refusal("int2_dual", 64),
            "recipe is 'int2_dual'; int2_dual quantises blocks as they leave a full-precision "
            "window: add recent=N, or auto");
  EXPECT_EQ(refusal("int2_dual:auto,immediate", 64),
            "recipe is 'int2_dual:auto,immediate'; int2_dual quantises blocks as they leave a "
            "full-precision window: add recent=N, or auto");
  EXPECT_EQ(refusal("int2_dual:auto", 64, 80), "head_dim is 80; int2_dual needs a multiple of 64");
}

TEST(DualScaleRefusals, NameTheLatentCache) {
  KvCacheConfig config = config_of("int4_dual:recent=64", 64);
  config.cuda.reset();
  config.geometry.is_latent = true;
  const auto cache = KvCache::create(std::move(config), context());
  ASSERT_FALSE(cache.ok());
  EXPECT_EQ(
      cache.error().message,
      "recipe is 'int4_dual:recent=64'; a latent cache reads parts of rows, and int4_dual only "
      "whole ones");
}

TEST(DualScaleRefusals, NameTheSearchThatAFormatHasNot) {
  const auto recipe = parse_recipe("int2_dual:search,recent=64");
  ASSERT_FALSE(recipe.ok());
  EXPECT_THAT(recipe.error().message, HasSubstr("int2_dual/int2_dual takes no such option"));
}

}  // namespace
}  // namespace kvx::kv::dual_scale_cache_test

// Latent caches (MLA): V is a part of K's rows. They give what a cache gives that stores the same V
// apart, with the bytes of K alone, through windows, forks, prefixes, files and the host tier.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "kv/files/transcode.hpp"
#include "tests/kv/latent_stream.hpp"

namespace kvx::kv::latent_cache_test {
namespace {

using testing::HasSubstr;

constexpr const char* kOneSegmentRecipes[] = {"f32",
                                              "bf16",
                                              "int8",
                                              "fp8_e4m3",
                                              "nvfp4:search,sink=16,recent=40",
                                              "mxfp4",
                                              "int4:sink=10,recent=40,full_precision=f16"};
constexpr const char* kRecipes[] = {"bf16",      "int8",
                                    "nvfp4",     "int4:sink=10,recent=40,full_precision=f16",
                                    "int8+bf16", "nvfp4+bf16:auto",
                                    "int4:auto", "int4+int8:immediate,hadamard"};

std::vector<int32_t> token_ids(int count) {
  std::vector<int32_t> ids;
  for (int i = 0; i < count; ++i) ids.push_back(i);
  return ids;
}

std::string creation_error(KvCacheConfig config) {
  const Result<std::unique_ptr<KvCache>> cache = KvCache::create(std::move(config), context());
  return cache.ok() ? "accepted" : cache.error().message;
}

// A GPU's kernels for the two may differ; on the host every bit is the same.
void expect_same(const std::vector<float>& measured, const std::vector<float>& expected,
                 const char* recipe) {
  if (is_on_gpu()) {
    EXPECT_LT(relative_rms(measured, expected), 3.5e-3) << recipe;
  } else {
    EXPECT_EQ(measured, expected) << recipe;
  }
}

TEST(LatentCache, GivesWhatACacheWithVApartGives) {
  const LatentStream stream(130);
  for (const char* recipe : kOneSegmentRecipes) {
    auto latent = created(latent_config(recipe));
    auto apart = created(latent_config(recipe, ValuePlace::kApart));
    const int one = latent->create_sequence().value();
    const int other = apart->create_sequence().value();
    expect_same(feed(*latent, one, stream, 0, 130, 24), feed(*apart, other, stream, 0, 130, 24),
                recipe);
    std::vector<float> v(130 * kValueDim), v_apart(v.size());
    const auto to = [](std::vector<float>& rows) {
      return dense_rows(static_cast<void*>(rows.data()), DType::kF32, 1, kValueDim);
    };
    ASSERT_TRUE(gather(*latent, one, 1, 0, 130, {}, to(v)).ok());
    ASSERT_TRUE(gather(*apart, other, 1, 0, 130, {}, to(v_apart)).ok());
    EXPECT_EQ(v, v_apart) << recipe;
  }
}

// K of tokens [0, num_tokens) in layer 1.
std::vector<float> keys_of(const KvCache& cache, int sequence, int num_tokens) {
  std::vector<float> k(static_cast<size_t>(num_tokens) * kRowDim);
  const MutableFloatRows rows = dense_rows(static_cast<void*>(k.data()), DType::kF32, 1, kRowDim);
  EXPECT_TRUE(gather(cache, sequence, 1, 0, num_tokens, rows, {}).ok());
  return k;
}

TEST(LatentCache, StoresRotaryNumbersInTheirOwnFormat) {
  const LatentStream stream(90);
  const auto keys = [&](const char* recipe) {
    auto cache = created(latent_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 90, 90);
    return keys_of(*cache, sequence, 90);
  };
  const std::vector<float> latent = keys("int8");
  const std::vector<float> rotary = keys("bf16");
  const std::vector<float> both = keys("int8+bf16");
  for (size_t i = 0; i < both.size(); ++i) {
    const bool is_latent = i % kRowDim < kValueDim;
    ASSERT_EQ(both[i], is_latent ? latent[i] : rotary[i]) << i;
  }
  const auto cost = [](const char* recipe) {
    return cost_of(latent_config(recipe), 1024).value().bits_per_value;
  };
  EXPECT_DOUBLE_EQ(cost("int8+bf16"), (8.25 * kValueDim + 16 * (kRowDim - kValueDim)) / kRowDim);
  EXPECT_DOUBLE_EQ(cost("nvfp4+bf16:immediate"),
                   (4.5 * kValueDim + 16 * (kRowDim - kValueDim)) / kRowDim);
}

TEST(LatentCache, AttendsToItsRowsInSegments) {
  for (const char* recipe : {"int8+bf16", "nvfp4+bf16:auto", "int4:auto", "mxfp4+int8:hadamard",
                             "fp8_e4m3:hadamard", "int8+fp8_e4m3"}) {
    LatentStream stream(120);
    auto cache = created(latent_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 119, 119);
    const std::vector<float> last = feed(*cache, sequence, stream, 119, 120, 1);
    stream.k = keys_of(*cache, sequence, 120);
    auto exact = created(latent_config("f32"));
    const int expected = exact->create_sequence().value();
    feed(*exact, expected, stream, 0, 119, 119);
    EXPECT_LT(relative_rms(last, feed(*exact, expected, stream, 119, 120, 1)), 3.5e-3) << recipe;
  }
}

TEST(LatentCache, RotatesTheNumbersOfVAlone) {
  const LatentStream stream(64);
  auto rotated = created(latent_config("f32:hadamard"));
  auto plain = created(latent_config("f32"));
  const int one = rotated->create_sequence().value();
  const int other = plain->create_sequence().value();
  EXPECT_LT(
      relative_rms(feed(*rotated, one, stream, 0, 64, 20), feed(*plain, other, stream, 0, 64, 20)),
      1e-5);
  EXPECT_LT(relative_rms(keys_of(*rotated, one, 64), keys_of(*plain, other, 64)), 1e-6);
}

TEST(LatentCache, TakesTheBytesOfKAlone) {
  auto cache = created(latent_config("bf16"));
  EXPECT_EQ(cache->sequence_bytes(160).codes, int64_t{160} * kNumLayers * kRowDim * 2);
  const RecipeCost cost = cost_of(latent_config("int8"), 1024).value();
  EXPECT_DOUBLE_EQ(cost.bits_per_value, 8.25);  // a 16-bit scale for 64 numbers
}

TEST(LatentCache, KeepsItsPageSharedScalesThroughSpeculation) {
  KvCacheConfig config = latent_config("int8:source=page");
  config.max_speculative_tokens = 8;
  const LatentStream stream(40);
  auto cache = created(config);
  auto plain = created(config);
  const int sequence = cache->create_sequence().value();
  const int expected = plain->create_sequence().value();
  feed(*cache, sequence, stream, 0, 20, 20);
  const StepEntry entry{sequence, 5, true};
  ASSERT_TRUE(cache->begin_step({&entry, 1}).ok());
  const LatentStream other(5, 9);
  std::vector<float> out(5 * kLatentQHeads * kValueDim);
  for (int layer = 0; layer < kNumLayers; ++layer) {
    ASSERT_TRUE(append_and_attend(*cache, 5, layer, {kLatentQHeads, 0.1f, 0.0f, nullptr},
                                  other.q_rows(0), other.k_rows(0), {},
                                  dense_rows(out.data(), DType::kF32, kLatentQHeads, kValueDim))
                    .ok());
  }
  const int kept[] = {0};
  ASSERT_TRUE(cache->end_step(kept).ok());
  feed(*plain, expected, stream, 0, 20, 20);
  EXPECT_EQ(feed(*cache, sequence, stream, 20, 40, 3), feed(*plain, expected, stream, 20, 40, 3));
}

TEST(LatentCache, TakesKsMeanAndFactorForBoth) {
  const LatentStream stream(70);
  KvCacheConfig config = latent_config("f32");
  LayerCalibration tables;
  for (int d = 0; d < kRowDim; ++d) {
    tables.k_mean.push_back(0.25f * static_cast<float>(d % 7));
    tables.k_factor.push_back(d % 3 == 0 ? 0.5f : 2.0f);
  }
  config.calibration.assign(kNumLayers, tables);
  auto calibrated = created(config);
  auto plain = created(latent_config("f32"));
  const int one = calibrated->create_sequence().value();
  const int other = plain->create_sequence().value();
  EXPECT_LT(
      relative_rms(feed(*calibrated, one, stream, 0, 70, 9), feed(*plain, other, stream, 0, 70, 9)),
      1e-5);
}

TEST(LatentCache, ForksAndTruncates) {
  const LatentStream stream(90);
  const LatentStream other(90, 2);
  for (const char* recipe : kRecipes) {
    auto cache = created(latent_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 60, 60);
    const int fork = cache->fork_sequence(sequence).value();
    feed(*cache, fork, other, 60, 66, 6);
    ASSERT_TRUE(cache->truncate_sequence(fork, 60).ok());
    EXPECT_EQ(feed(*cache, sequence, stream, 60, 90, 4), feed(*cache, fork, stream, 60, 90, 4))
        << recipe;
  }
}

TEST(LatentCache, FindsPrefixesAlsoInTheHostTier) {
  const LatentStream stream(112);
  for (const char* recipe : kRecipes) {
    KvCacheConfig config = latent_config(recipe);
    config.max_sequences = 1;
    config.max_tokens_per_sequence = 112;
    config.tiers = {{.budget_bytes = 1 << 24}};
    auto cache = created(config);
    int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 96, 96);
    ASSERT_TRUE(cache->record_tokens(sequence, token_ids(96)).ok());
    const std::vector<float> expected = feed(*cache, sequence, stream, 96, 112, 16);
    ASSERT_TRUE(cache->free_sequence(sequence).ok());
    // Another prompt takes the pool's blocks; the first one's go to the host tier.
    sequence = cache->create_sequence().value();
    feed(*cache, sequence, LatentStream(112, 5), 0, 112, 112);
    ASSERT_TRUE(cache->free_sequence(sequence).ok());
    cache->wait_for_tiers();
    sequence = cache->create_sequence_from({}, token_ids(112)).value();
    const auto num_found = static_cast<int>(cache->num_tokens(sequence));
    EXPECT_GE(num_found, 80) << recipe;
    std::vector<float> out = feed(*cache, sequence, stream, num_found, 112, 112);
    out.erase(out.begin(), out.end() - static_cast<std::ptrdiff_t>(expected.size()));
    EXPECT_LT(relative_rms(out, expected), 3.5e-3) << recipe;
  }
}

class LatentFile : public testing::Test {
 protected:
  ~LatentFile() override { std::filesystem::remove(path_); }
  std::string path_ =
      (std::filesystem::temp_directory_path() / ("kvx_latent_" + std::to_string(getpid())))
          .string();

  void save(KvCache& cache, int sequence, int num_tokens) {
    ASSERT_TRUE(cache.record_tokens(sequence, token_ids(num_tokens)).ok());
    const Status saved = cache.save_sequence(sequence, path_);
    ASSERT_TRUE(saved.ok()) << saved.error().message;
  }
};

TEST_F(LatentFile, ALoadedSequenceGoesOnBitForBit) {
  const LatentStream stream(110);
  for (const char* recipe : kRecipes) {
    auto cache = created(latent_config(recipe));
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, 90, 90);
    save(*cache, sequence, 90);
    auto other = created(latent_config(recipe));
    const Result<int> loaded = other->load_sequence(path_);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    EXPECT_EQ(feed(*other, loaded.value(), stream, 90, 110, 7),
              feed(*cache, sequence, stream, 90, 110, 7))
        << recipe;
  }
}

TEST_F(LatentFile, IsTranscodedToAnotherFormat) {
  const LatentStream stream(90);
  auto from = created(latent_config("f32"));
  const int sequence = from->create_sequence().value();
  feed(*from, sequence, stream, 0, 80, 80);
  save(*from, sequence, 80);
  auto to = created(latent_config("int8"));
  const Result<int> loaded = transcode_sequence(*to, path_);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  auto expected = created(latent_config("int8"));
  const int fed = expected->create_sequence().value();
  feed(*expected, fed, stream, 0, 80, 80);
  EXPECT_EQ(feed(*to, loaded.value(), stream, 80, 90, 10),
            feed(*expected, fed, stream, 80, 90, 10));
}

TEST_F(LatentFile, IsNotLoadedWithAnotherRotaryFormat) {
  const LatentStream stream(60);
  auto from = created(latent_config("int8+bf16"));
  const int sequence = from->create_sequence().value();
  feed(*from, sequence, stream, 0, 40, 40);
  save(*from, sequence, 40);
  auto to = created(latent_config("int8+f16"));
  EXPECT_FALSE(to->load_sequence(path_).ok());
  const Result<int> transcoded = transcode_sequence(*to, path_);
  ASSERT_TRUE(transcoded.ok()) << transcoded.error().message;
  EXPECT_LT(relative_rms(feed(*to, transcoded.value(), stream, 40, 60, 20),
                         feed(*from, sequence, stream, 40, 60, 20)),
            3.5e-3);
}

TEST_F(LatentFile, IsNotLoadedIntoACacheWithVApart) {
  const LatentStream stream(40);
  auto from = created(latent_config("int8"));
  const int sequence = from->create_sequence().value();
  feed(*from, sequence, stream, 0, 40, 40);
  save(*from, sequence, 40);
  auto to = created(latent_config("int8", ValuePlace::kApart));
  const Result<int> loaded = to->load_sequence(path_);
  ASSERT_FALSE(loaded.ok());
  EXPECT_THAT(loaded.error().message, HasSubstr("latent"));
  const Result<int> transcoded = transcode_sequence(*to, path_);
  ASSERT_FALSE(transcoded.ok());
  EXPECT_THAT(transcoded.error().message, HasSubstr("latent is 1; expected 0"));
}

TEST(LatentCache, RefusesWhatItsOneRowCannotBe) {
  EXPECT_THAT(creation_error(latent_config("int8/int4")), HasSubstr("one row for both"));
  EXPECT_THAT(creation_error(latent_config("nvfp4:v.search")), HasSubstr("one row for both"));
  EXPECT_THAT(creation_error(latent_config("int8:v.hadamard")), HasSubstr("one row for both"));
  KvCacheConfig config = latent_config("int8");
  config.geometry.v_head_dim = kRowDim + 1;
  EXPECT_THAT(creation_error(config), HasSubstr("v_head_dim is 193; expected 1 to 192"));
  config.geometry.v_head_dim = 0;
  EXPECT_THAT(creation_error(config), HasSubstr("v_head_dim is 0; expected 1 to 192"));
  config = latent_config("int8");
  config.overrides.push_back(parse_layer_override("1=int8/bf16").value());
  EXPECT_THAT(creation_error(config), HasSubstr("one row for both"));
  config = latent_config("int8");
  LayerCalibration tables;
  tables.v_mean.assign(kValueDim, 1.0f);
  config.calibration.assign(kNumLayers, tables);
  EXPECT_THAT(creation_error(config), HasSubstr("layer 0 v_mean has 128 numbers; expected none"));
  tables = {};
  tables.k_block_offset.assign(kRowDim, 1.0f);
  config.calibration.assign(kNumLayers, tables);
  EXPECT_THAT(creation_error(config), HasSubstr("layer 0 k_block_offset is given"));
  EXPECT_THAT(creation_error(latent_config("int8+bf16", ValuePlace::kApart)),
              HasSubstr("only a latent cache's rows"));
  config = latent_config("int8+bf16");
  config.geometry.v_head_dim = kRowDim;
  EXPECT_THAT(creation_error(config), HasSubstr("v_head_dim is 192, all of K's row"));
  EXPECT_FALSE(parse_recipe("int8/int4+bf16").ok());
  EXPECT_FALSE(parse_recipe("int8+").ok());
  EXPECT_FALSE(parse_recipe("int8+bf16+bf16").ok());
  config = latent_config("int8+bf16");
  tables = {};
  tables.k_mean.assign(kRowDim, 1.0f);
  config.calibration.assign(kNumLayers, tables);
  EXPECT_THAT(creation_error(config), HasSubstr("layer 0 k_mean has 192 numbers; expected 128"));
}

}  // namespace
}  // namespace kvx::kv::latent_cache_test

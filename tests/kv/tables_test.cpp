// Calibrated tables in the assembled cache: they change nothing where nothing is quantised, and
// prefixes, forks and files are those of their tables alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "tests/kv/stream.hpp"

namespace kvx::kv {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

std::vector<float> random_table(uint32_t seed, float low, float high) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(low, high);
  std::vector<float> table(static_cast<size_t>(kNumKvHeads) * kHeadDim);
  for (float& x : table) x = uniform(random);
  return table;
}

Rope a_rope() {
  Rope rope;
  for (int i = 0; i < kHeadDim / 2; ++i) rope.inv_freq.push_back(1.0 / (1 + i));
  return rope;
}

// Every table but those of scales, which formats without scales do not have.
std::vector<LayerCalibration> all_tables(uint32_t seed = 1) {
  std::vector<LayerCalibration> layers(kNumLayers);
  for (LayerCalibration& layer : layers) {
    layer.k_mean = random_table(++seed, -1, 1);
    layer.v_mean = random_table(++seed, -1, 1);
    layer.k_factor = random_table(++seed, 0.5f, 2);
    layer.v_factor = random_table(++seed, 0.5f, 2);
    layer.k_rope_mean = random_table(++seed, -3, 3);
    layer.k_rope = a_rope();
  }
  return layers;
}

std::vector<float> outputs(const KvCacheConfig& config, const Stream& stream, int num_tokens) {
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  return feed(*cache, sequence, stream, 0, num_tokens, 37);
}

TEST(Tables, ChangeNothingWhereNothingIsQuantised) {
  const Stream stream(150);
  for (const char* recipe : {"f32", "f32:hadamard"}) {
    KvCacheConfig config = config_of("f32");
    const std::vector<float> expected = outputs(config, stream, 150);
    config = config_of(recipe);
    config.calibration = all_tables();
    EXPECT_LT(relative_rms(outputs(config, stream, 150), expected), 2e-6) << recipe;
  }
}

// Tables change what is stored, never where: policy 16 of TurboMind may be tuned.
TEST(Tables, GiveTheSameNumbersInTurboMindsBlocks) {
  const Stream stream(150);
  for (const char* recipe : {"mxfp4_g16:k.hadamard,search", "nvfp4:hadamard,search"}) {
    KvCacheConfig config = config_of(recipe);
    config.calibration = all_tables();
    const std::vector<float> expected = outputs(config, stream, 150);
    config = config_of(std::string(recipe) + ",order=turbomind");
    config.calibration = all_tables();
    EXPECT_EQ(outputs(config, stream, 150), expected) << recipe;
    config.calibration.clear();
    EXPECT_NE(outputs(config, stream, 150), expected) << recipe;
  }
}

TEST(Tables, BlockOffsetsOfARopeMeanAreThoseOfTheCachesBlocks) {
  const Stream stream(100);
  KvCacheConfig config = config_of("nvfp4:k.hadamard");
  config.calibration = all_tables();
  const std::vector<float> found = outputs(config, stream, 100);
  for (LayerCalibration& layer : config.calibration) {
    layer.k_block_offset = rope_block_offsets(layer.k_rope, layer.k_rope_mean, kNumKvHeads,
                                              kHeadDim, config.block_size, 400 / 16);
    layer.k_rope_mean.clear();
  }
  EXPECT_EQ(outputs(config, stream, 100), found);
}

TEST(Tables, AForkGoesOnAsItsSequence) {
  const Stream stream(120);
  KvCacheConfig config = config_of("nvfp4:k.hadamard,sink=16,recent=16");
  config.calibration = all_tables();
  config.max_sequences = 2;
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, 90, 40);
  const int fork = cache->fork_sequence(sequence).value();
  EXPECT_EQ(feed(*cache, fork, stream, 90, 120, 30), feed(*cache, sequence, stream, 90, 120, 30));
}

class TablesInFiles : public testing::Test {
 protected:
  TablesInFiles()
      : path_((fs::temp_directory_path() / ("kvx_tables_" + std::to_string(getpid()))).string()) {}
  ~TablesInFiles() override {
    fs::remove(path_);
    fs::remove(prefixes());
  }

  static KvCacheConfig config() {
    KvCacheConfig config = config_of("int8:sink=16,recent=16", 16);
    config.calibration = all_tables();
    config.prefix = {true, cache::HashAlgorithm::kXxh3, "a model"};
    return config;
  }
  void save(const KvCacheConfig& config, const Stream& stream, int num_tokens) const {
    auto cache = created(config);
    const int sequence = cache->create_sequence().value();
    feed(*cache, sequence, stream, 0, num_tokens, 1000);
    std::vector<int32_t> tokens(num_tokens);
    for (int i = 0; i < num_tokens; ++i) tokens[i] = i;
    ASSERT_TRUE(cache->record_tokens(sequence, tokens).ok());
    ASSERT_TRUE(cache->save_sequence(sequence, path_, {}).ok());
    ASSERT_TRUE(cache->save_prefixes(prefixes(), {}).ok());
  }
  std::string load_error(const KvCacheConfig& config) const {
    auto cache = created(config);
    const auto loaded = cache->load_sequence(path_);
    const auto prefixes_loaded = cache->load_prefixes(prefixes());
    EXPECT_EQ(loaded.ok(), prefixes_loaded.ok());
    return loaded.ok() ? "loaded" : loaded.error().message;
  }
  std::string prefixes() const { return path_ + ".prefixes"; }

  std::string path_;
};

TEST_F(TablesInFiles, ALongerCacheOfTheSameTablesLoadsIt) {
  const Stream stream(150);
  KvCacheConfig longer = config();
  longer.max_tokens_per_sequence = 1000;
  save(config(), stream, 100);
  auto cache = created(longer);
  const auto loaded = cache->load_sequence(path_);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  auto own = created(longer);
  const int sequence = own->create_sequence().value();
  feed(*own, sequence, stream, 0, 100, 1000);
  EXPECT_EQ(feed(*cache, loaded.value(), stream, 100, 150, 50),
            feed(*own, sequence, stream, 100, 150, 50));
}

TEST_F(TablesInFiles, AnyOtherTableIsAnotherCache) {
  save(config(), Stream(100), 100);
  EXPECT_EQ(load_error(config()), "loaded");
  const auto changed = [&](auto change) {
    KvCacheConfig other = config();
    change(other.calibration.back());
    return load_error(other);
  };
  const auto expected = HasSubstr("calibration is ");
  EXPECT_THAT(changed([](auto& t) { t.k_mean[3] += 1; }), expected);
  EXPECT_THAT(changed([](auto& t) { t.v_mean.clear(); }), expected);
  EXPECT_THAT(changed([](auto& t) { t.k_factor[0] *= 2; }), expected);
  EXPECT_THAT(changed([](auto& t) { t.v_factor[127] *= 2; }), expected);
  EXPECT_THAT(changed([](auto& t) { t.k_rope_mean[64] += 1; }), expected);
  EXPECT_THAT(changed([](auto& t) { t.k_rope.inv_freq[1] *= 0.5; }), expected);
  EXPECT_THAT(changed([](auto& t) { t.k_rope.pairs = RopePairs::kInterleaved; }), expected);
  EXPECT_THAT(changed([](auto& t) { t.k_rope.attention_scaling = 2; }), expected);
  KvCacheConfig without = config();
  without.calibration.clear();
  EXPECT_THAT(load_error(without), HasSubstr("expected none"));
}

TEST(Tables, ThatCannotBeAreNamed) {
  const auto error_of = [](auto change) {
    KvCacheConfig config = config_of("int8");
    config.calibration = all_tables();
    change(config.calibration.back());
    const auto cache = KvCache::create(config, context());
    return cache.ok() ? "created" : cache.error().message;
  };
  EXPECT_THAT(error_of([](auto& t) { t.k_rope_mean.resize(7); }),
              HasSubstr("layer 1 k_rope_mean has 7 numbers; expected 128"));
  EXPECT_THAT(error_of([](auto& t) { t.k_rope.inv_freq.clear(); }),
              HasSubstr("layer 1 k_rope inv_freq has 0 numbers"));
  EXPECT_THAT(error_of([](auto& t) { t.k_block_offset = t.k_mean; }),
              HasSubstr("layer 1 k_block_offset and k_rope_mean are both given"));
}

}  // namespace
}  // namespace kvx::kv

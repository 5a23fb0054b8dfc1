// "tuned:FILE" as a cache's recipe: what it stands for, whose it is, and what may follow it.
#include "tune/tuned_recipe.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "tests/tune/a_tune_file.hpp"

namespace kvx::tune {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class TunedRecipeWord : public testing::Test {
 protected:
  TunedRecipeWord()
      : path_((fs::temp_directory_path() / ("kvx_word_" + std::to_string(getpid()))).string()) {
    write(a_tune_file());
  }
  ~TunedRecipeWord() override { fs::remove(path_); }

  void write(const TuneFile& file) const { EXPECT_TRUE(write_tune_file(path_, file).ok()); }
  CacheRecipe read(const std::string& options = "") const {
    auto recipe = read_recipe("tuned:" + path_ + options);
    if (recipe.ok()) return recipe.value();
    ADD_FAILURE() << recipe.error().message;
    return {};
  }
  std::string error_of(const std::string& options) const {
    const auto recipe = read_recipe("tuned:" + path_ + options);
    return recipe.ok() ? "accepted" : recipe.error().message;
  }
  kv::KvCacheConfig config() const {
    kv::KvCacheConfig config;
    config.geometry = a_tune_file().geometry;
    return config;
  }

  std::string path_;
};

TEST_F(TunedRecipeWord, StandsForTheFilesRecipeOverridesAndTables) {
  const CacheRecipe recipe = read();
  EXPECT_EQ(recipe.recipe.text, "tuned:" + path_);
  EXPECT_EQ(recipe.recipe.k.spec.facts->name, "nvfp4");
  EXPECT_FALSE(recipe.recipe.has_full_precision_window);
  ASSERT_EQ(recipe.overrides.size(), 2u);
  EXPECT_EQ(recipe.overrides[0].where[0].layer, 1);
  EXPECT_EQ(recipe.overrides[1].where[0].head, 1);

  kv::KvCacheConfig config = this->config();
  config.overrides.push_back(kv::parse_layer_override("0=bf16").value());
  const Status used = use_recipe(recipe, config);
  ASSERT_TRUE(used.ok()) << used.error().message;
  EXPECT_EQ(config.calibration.size(), 2u);
  EXPECT_EQ(config.calibration[1].k_factor, a_tune_file().layers[1].k_factor);
  ASSERT_EQ(config.overrides.size(), 3u);
  EXPECT_EQ(config.overrides[2].recipe.text, "bf16");  // the caller's come last, and win
}

TEST_F(TunedRecipeWord, AnyOtherRecipeIsReadAsBefore) {
  const auto recipe = read_recipe("int8:sink=4");
  ASSERT_TRUE(recipe.ok());
  EXPECT_EQ(recipe.value().file, nullptr);
  EXPECT_EQ(recipe.value().recipe.sink_tokens, 4);
  EXPECT_TRUE(recipe.value().calibration().empty());
  EXPECT_THAT(read_recipe("tuned").error().message, HasSubstr("format is 'tuned'"));
  EXPECT_THAT(kv::parse_recipe("tuned:x").error().message,
              HasSubstr("'tuned:x'; a tuned recipe cannot be used here"));
}

TEST_F(TunedRecipeWord, OnlyTheWindowMayChange) {
  const kv::Recipe recipe = read(",sink=16,recent=128,full_precision=f16").recipe;
  EXPECT_TRUE(recipe.has_full_precision_window);
  EXPECT_EQ(recipe.sink_tokens, 16);
  EXPECT_EQ(recipe.recent_tokens, 128);
  EXPECT_EQ(recipe.full_precision_spec.facts->name, "f16");
  EXPECT_TRUE(recipe.k.hadamard);
  EXPECT_THAT(error_of(",hadamard"), HasSubstr("option is 'hadamard'; expected sink=N"));
  EXPECT_THAT(error_of(",recent=x"), HasSubstr("recent is 'x'"));
  EXPECT_THAT(error_of(","), HasSubstr("option is ''"));
  EXPECT_THAT(error_of(",full_precision=f16"), HasSubstr("it needs sink=N or recent=N"));
}

TEST_F(TunedRecipeWord, AWindowOfTheFileIsReplacedPartByPart) {
  TuneFile file = a_tune_file();
  file.recipe += ",sink=16,recent=64";
  write(file);
  EXPECT_EQ(read().recipe.recent_tokens, 64);
  const kv::Recipe longer = read(",recent=128").recipe;
  EXPECT_EQ(longer.sink_tokens, 16);
  EXPECT_EQ(longer.recent_tokens, 128);
  EXPECT_FALSE(read(",immediate").recipe.has_full_precision_window);
  EXPECT_TRUE(read(",immediate,recent=32").recipe.has_full_precision_window);
}

TEST_F(TunedRecipeWord, AFileThatWasReplacedIsReadAgain) {
  EXPECT_EQ(read().recipe.k.spec.facts->name, "nvfp4");
  TuneFile file = a_tune_file();
  file.recipe = "mxfp4/fp8_e4m3";
  write(file);
  EXPECT_EQ(read().recipe.k.spec.facts->name, "mxfp4");
  fs::remove(path_);
  EXPECT_THAT(error_of(""), HasSubstr("cannot be read"));
}

TEST_F(TunedRecipeWord, LayersOfItKeepTheirOverridesAndTables) {
  const auto second = layers_of(read(), 1, 1);
  ASSERT_TRUE(second.ok()) << second.error().message;
  kv::KvCacheConfig config = this->config();
  config.geometry.num_layers = 1;
  ASSERT_TRUE(use_recipe(second.value(), config).ok());
  EXPECT_EQ(config.calibration[0].k_factor, a_tune_file().layers[1].k_factor);
  EXPECT_EQ(config.overrides[0].where[0].layer, 0);
  EXPECT_TRUE(config.overrides[1].where.empty());
  EXPECT_THAT(layers_of(read(), 2, 1).error().message,
              HasSubstr("layer is 2; the tuned recipe has layers 0 to 1"));
  EXPECT_FALSE(layers_of(read(), -1, 1).ok());
  EXPECT_FALSE(layers_of(second.value(), 1, 1).ok());
}

TEST_F(TunedRecipeWord, AnotherModelIsRefusedByName) {
  const CacheRecipe recipe = read();
  EXPECT_TRUE(check_model(recipe, "A small model", "llama").ok());
  EXPECT_TRUE(check_model(recipe, "someone/A Small Model/", "").ok());
  EXPECT_TRUE(check_model(recipe, "", "").ok());
  EXPECT_THAT(
      check_model(recipe, "Another", "llama").error().message,
      HasSubstr("was tuned for the model 'A small model' (llama); this model is 'Another'"));
  EXPECT_THAT(check_model(recipe, "A small model", "qwen2").error().message,
              HasSubstr("(llama); this model is 'A small model' (qwen2)"));
}

TEST_F(TunedRecipeWord, AnotherShapeIsRefused) {
  const auto error_of = [&](auto change) {
    kv::KvCacheConfig config = this->config();
    change(config.geometry);
    const Status used = use_recipe(read(), config);
    return used.ok() ? "accepted" : used.error().message;
  };
  EXPECT_EQ(error_of([](auto&) {}), "accepted");
  EXPECT_EQ(error_of([](auto& g) { g.num_layers = 3; }),
            "the tuned recipe has num_layers 2; the cache has 3");
  EXPECT_EQ(error_of([](auto& g) { g.num_kv_heads = 4; }),
            "the tuned recipe has num_kv_heads 2; the cache has 4");
  EXPECT_EQ(error_of([](auto& g) { g.k_head_dim = 128; }),
            "the tuned recipe has k_head_dim 64; the cache has 128");
  EXPECT_EQ(error_of([](auto& g) { g.v_head_dim = 128; }),
            "the tuned recipe has v_head_dim 64; the cache has 128");
}

}  // namespace
}  // namespace kvx::tune

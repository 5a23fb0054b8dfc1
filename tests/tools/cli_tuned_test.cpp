// The program with a tuned recipe, from outside: where --cache takes it, and whose it must be.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/tools/cli_with_model.hpp"
#include "tune/tune_file.hpp"

namespace kvx::tool::cli_tuned_test {
namespace {

using ::testing::HasSubstr;

class CliTuned : public CliWithModel {
 protected:
  // Of the tiny model, with a mean and factors that change from number to number.
  static tune::TuneFile tuned(const char* recipe) {
    tune::TuneFile file;
    file.recipe = recipe;
    file.geometry.num_layers = 2;
    file.geometry.num_kv_heads = 2;
    file.geometry.k_head_dim = file.geometry.v_head_dim = tests::kTinyHeadDim;
    file.model.architecture = "llama";
    file.layers.resize(2);
    for (kv::LayerCalibration& layer : file.layers) {
      for (int i = 0; i < 2 * tests::kTinyHeadDim; ++i) {
        layer.k_factor.push_back(1 + 0.125f * static_cast<float>(i % 5));
        layer.v_mean.push_back(0.25f * static_cast<float>(i % 3));
        layer.k_rope_mean.push_back(0.5f - 0.25f * static_cast<float>(i % 4));
      }
      layer.k_rope.pairs = kv::RopePairs::kInterleaved;
      layer.k_rope.inv_freq = {1.0, 0.1, 0.01, 0.001};
    }
    return file;
  }
  void write_tuned(const tune::TuneFile& file) {
    const Status written = tune::write_tune_file((work() / "m.kvxtune").string(), file);
    ASSERT_TRUE(written.ok()) << written.error().message;
  }
};

TEST_F(CliTuned, IsComparedAndItsTablesLoseNothingByThemselves) {
  write_tuned(tuned("f32:hadamard"));
  const Outcome outcome =
      kvx("compare -m model.gguf -f text.txt --formats "
          "f32,tuned:m.kvxtune,sink=4,full_precision=f32,int8 "
          "--ctx 32 --chunks 2 --block-size 4 --json r.json");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  const auto json = nlohmann::json::parse(read_file("json", work() / "r.json").value());
  ASSERT_EQ(json["caches"].size(), 4u);
  EXPECT_EQ(json["caches"][2]["name"], "tuned:m.kvxtune,sink=4,full_precision=f32");
  // Beside f32, not bf16: the base rounds, these two do not.
  const double kl = json["caches"][1]["kl"]["value"];
  EXPECT_NEAR(json["caches"][2]["kl"]["value"], kl, 0.02 * kl + 1e-7);
}

TEST_F(CliTuned, StaticScalesThatAreTooSmallFailTheirGateAndAreShownInStress) {
  const std::vector<uint8_t> model = tests::tiny_chat_model(1024).file();
  write("long.gguf", {reinterpret_cast<const char*>(model.data()), model.size()});
  tune::TuneFile file = tuned("int8:source=given");
  for (kv::LayerCalibration& layer : file.layers) {
    layer.k.group_scales = {8.0f, 1e-5f};  // the second KV head's keys are clipped
    layer.v.group_scales = {8.0f, 8.0f};
  }
  write_tuned(file);
  const Outcome outcome =
      kvx("compare -m model.gguf -f text.txt --formats tuned:m.kvxtune --ctx 32 --chunks 1 "
          "--fail-if 'saturated>0' --json r.json");
  EXPECT_EQ(outcome.exit_code, 3);
  EXPECT_THAT(outcome.err, HasSubstr("kvx: tuned:m.kvxtune: saturated is "));
  const auto json = nlohmann::json::parse(read_file("json", work() / "r.json").value());
  const auto& layers = json["caches"][1]["saturated_by_head"];
  EXPECT_EQ(layers[0]["k"][0], 0);
  EXPECT_GT(layers[0]["k"][1], 0);
  EXPECT_EQ(layers[1]["v"][1], 0);
  const Outcome stress =
      kvx("stress -m long.gguf --cache tuned:m.kvxtune --lengths 500 --samples 1 --drift 0");
  ASSERT_EQ(stress.exit_code, 0) << stress.err;
  EXPECT_THAT(stress.out,
              ::testing::ContainsRegex("clipped by a static scale, tuned:m.kvxtune: "
                                       "[0-9]+ inputs in 2 of 4 heads, most in [01]:1"));
}

TEST_F(CliTuned, GivenScalesAreTheFiles) {
  tune::TuneFile file = tuned("int8:source=given");
  for (kv::LayerCalibration& layer : file.layers) {
    layer.k.group_scales = layer.v.group_scales = {0.0625f, 0.125f};
  }
  write_tuned(file);
  const Outcome outcome = kvx("run -m model.gguf -p hello -n 8 --raw --cache tuned:m.kvxtune");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("cache tuned:m.kvxtune: "));
  expect_refused("run -m model.gguf -p hello --cache int8:source=given",
                 "layer 0 k_group_scales is missing; source=given needs 2 calibrated scales");
}

TEST_F(CliTuned, ASavedCacheIsLoadedWithItsTables) {
  write_tuned(tuned("int8:hadamard"));
  const std::string options = "-m model.gguf --cache tuned:m.kvxtune --block-size 4 ";
  const Outcome run = kvx("run " + options + "--raw -p 'hello there my friend' -n 12");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  ASSERT_EQ(kvx("cache save " + options + "--raw -p 'hello there my friend' -o c.kvx").exit_code,
            0);
  const Outcome loaded = kvx("cache load " + options + "c.kvx -n 12");
  ASSERT_EQ(loaded.exit_code, 0) << loaded.err;
  EXPECT_EQ(loaded.out, run.out);
  constexpr const char* kWhy =
      "the cache had a tuned recipe's tables, which --cache tuned:FILE names";
  EXPECT_THAT(kvx("cache inspect c.kvx").out, HasSubstr(kWhy));
  expect_refused("cache load -m model.gguf c.kvx", kWhy);
  expect_refused("cache load -m model.gguf --cache int8:hadamard --block-size 4 c.kvx",
                 "calibration is ");
}

TEST_F(CliTuned, AnotherModelsIsRefused) {
  tune::TuneFile file = tuned("int8");
  file.model.architecture = "qwen2";
  write_tuned(file);
  expect_refused("run -m model.gguf -p hello --cache tuned:m.kvxtune",
                 "recipe 'tuned:m.kvxtune' was tuned for the model '' (qwen2); this model is");
  file = tuned("int8");
  file.geometry.num_layers = 3;
  file.layers.resize(3);
  write_tuned(file);
  expect_refused("compare -m model.gguf -f text.txt --formats tuned:m.kvxtune --ctx 32 --chunks 1",
                 "the tuned recipe has num_layers 3; the cache has 2");
  expect_refused("bench --formats tuned:m.kvxtune",
                 "formats has 'tuned:m.kvxtune'; this command has no model");
  expect_refused("run -m model.gguf -p hello --cache tuned:none.kvxtune",
                 "'none.kvxtune' cannot be read");
}

}  // namespace
}  // namespace kvx::tool::cli_tuned_test

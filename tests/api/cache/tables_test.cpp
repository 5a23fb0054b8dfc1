// Tuned recipes through the C ABI: from tables, files and bytes; in caches and in a caller's
// layers; and caches that mix formats.
#include <gmock/gmock.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

std::vector<float> table(size_t count, float low, float high) {
  std::vector<float> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    numbers[i] = low + (high - low) * static_cast<float>(i * 7 % 13) / 13;
  }
  return numbers;
}

// An engine's tables of two layers, with all that the structs point to.
struct EnginesTables {
  explicit EnginesTables(const char* recipe = "nvfp4/int8:k.hadamard") {
    k.mean = mean.data();
    k.factor = factor.data();
    k.tensor_scales = tensor_scales.data();
    v.mean = factor.data();
    layer.k = &k;
    layer.v = &v;
    for (size_t i = 0; i < feedback.size(); ++i) {
      if (i % kOwnedDim > i / kOwnedDim % kOwnedDim) feedback[i] = 0.05f;
    }
    layer.k_feedback = feedback.data();
    layer.k_rope_mean = mean.data();
    layer.inv_freq = inv_freq.data();
    layer.num_inv_freq = 16;
    config.num_layers = kOwnedLayers;
    config.num_kv_heads = kOwnedHeads;
    config.k_head_dim = config.v_head_dim = kOwnedDim;
    config.recipe = recipe;
    config.layer_overrides = overrides;
    config.num_layer_overrides = 1;
    config.layers = layers;
    config.model_name = "a model";
    config.measured = R"({"kl":0.01})";
  }
  EnginesTables(const EnginesTables&) = delete;

  std::vector<float> mean = table(kOwnedHeads * kOwnedDim, -1, 1);
  std::vector<float> factor = table(kOwnedHeads * kOwnedDim, 0.5f, 2);
  std::vector<float> tensor_scales = {0.5f, 0.25f};
  std::vector<float> feedback = std::vector<float>(kOwnedHeads * kOwnedDim * kOwnedDim);
  std::vector<double> inv_freq = std::vector<double>(16, 0.125);
  kvx_side_tables_t k = sized<kvx_side_tables_t>();
  kvx_side_tables_t v = sized<kvx_side_tables_t>();
  kvx_layer_tables_t layer = sized<kvx_layer_tables_t>();
  const kvx_layer_tables_t* layers[kOwnedLayers] = {&layer, &layer};
  const char* overrides[1] = {"0=nvfp4/int4:k.hadamard"};
  kvx_tables_config_t config = sized<kvx_tables_config_t>();
};

class TablesOnDisk : public testing::Test {
 protected:
  TablesOnDisk()
      : path_((fs::temp_directory_path() / ("kvx_api_" + std::to_string(getpid()))).string()) {}
  ~TablesOnDisk() override { fs::remove(path_); }

  std::string path_;
};

std::string fingerprint(const kvx_cache_config_t& config, kvx_cache_options_t options) {
  options.flags = KVX_CACHE_PREFIXES;
  const auto cache = api::Cache::create(config, &options);
  return cache.ok() ? cache->fingerprint().value() : "error: " + cache.failure().text;
}

TEST_F(TablesOnDisk, AreTheSameFromTablesFromAFileAndFromBytes) {
  const EnginesTables engines;
  const api::Tables made = api::Tables::create(engines.config).value();
  ASSERT_TRUE(made.save(path_).ok()) << kvx_last_error();
  const api::Tables loaded = api::Tables::load(path_).value();
  std::ifstream file(path_, std::ios::binary);
  const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  const api::Tables of_bytes = api::Tables::load_bytes(bytes).value();

  const kvx_tables_info_t info = of_bytes.info().value();
  EXPECT_EQ(info.num_layers, kOwnedLayers);
  EXPECT_EQ(info.k_head_dim, uint32_t{kOwnedDim});
  EXPECT_EQ(info.needs_positions, 1u);
  EXPECT_STREQ(info.recipe, "nvfp4/int8:k.hadamard");
  EXPECT_STREQ(info.model_name, "a model");
  EXPECT_STREQ(info.measured, R"({"kl":0.01})");

  const std::string by_name = "tuned:" + path_;
  const std::string expected =
      fingerprint(owned_config(by_name.c_str()), sized<kvx_cache_options_t>());
  EXPECT_THAT(expected, HasSubstr("K nvfp4"));
  EXPECT_THAT(expected, Not(HasSubstr("calibration none")));
  for (const api::Tables* tables : {&made, &loaded, &of_bytes}) {
    auto options = sized<kvx_cache_options_t>();
    options.tables = tables->handle();
    EXPECT_EQ(fingerprint(owned_config(nullptr), options), expected);
  }
}

TEST_F(TablesOnDisk, ARecipeBesideThemChangesTheWindowAlone) {
  const EnginesTables engines;
  const api::Tables tables = api::Tables::create(engines.config).value();
  auto options = sized<kvx_cache_options_t>();
  options.tables = tables.handle();
  EXPECT_THAT(fingerprint(owned_config("tuned,recent=16"), options), HasSubstr("wide bf16"));
  EXPECT_THAT(fingerprint(owned_config("tuned,hadamard"), options),
              HasSubstr("error: option is 'hadamard'"));
  EXPECT_THAT(fingerprint(owned_config("int8"), options),
              HasSubstr("error: config.recipe is 'int8'; with options.tables expected null"));
}

TEST(Tables, ACacheReadsWhatItsStepsAppended) {
  const EnginesTables engines("f32");
  kvx_tables_config_t config = engines.config;
  config.num_layer_overrides = 0;
  const api::Tables tables = api::Tables::create(config).value();
  auto options = sharing_options();
  options.tables = tables.handle();
  auto cache = api::Cache::create(owned_config(nullptr), &options);
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  api::Cache plain = sharing_cache("f32");
  const int32_t sequence = cache->create_sequence().value();
  const int32_t other = plain.create_sequence().value();
  feed(*cache, sequence, 0, 30);
  feed(plain, other, 0, 30);
  EXPECT_LT(largest_difference(rows_of(*cache, sequence), rows_of(plain, other)), 1e-5);
}

TEST(Tables, LayersAndHeadsOfACacheMayMixFormats) {
  const char* layers[] = {"1=bf16"};
  const char* heads[] = {"0:1=int4"};
  auto options = sized<kvx_cache_options_t>();
  options.layer_overrides = layers;
  options.num_layer_overrides = 1;
  options.head_overrides = heads;
  options.num_head_overrides = 1;
  const std::string mixed = fingerprint(owned_config("int8"), options);
  EXPECT_THAT(mixed, HasSubstr("1 heads K int8"));
  EXPECT_THAT(mixed, HasSubstr("1 heads K int4"));
  EXPECT_THAT(mixed, HasSubstr("2 heads K bf16"));
  layers[0] = "2=bf16";
  EXPECT_THAT(fingerprint(owned_config("int8"), options), HasSubstr("error: layer is 2"));
  layers[0] = nullptr;
  EXPECT_THAT(fingerprint(owned_config("int8"), options),
              HasSubstr("error: options.layer_overrides[0] is null"));
  options.layer_overrides = nullptr;
  EXPECT_THAT(fingerprint(owned_config("int8"), options),
              HasSubstr("error: options.layer_overrides is null"));
}

// Layer 1 in pages of the caller's, with the tables of a handle.
struct TunedPages {
  explicit TunedPages(const api::Tables& tables) {
    args.layer = 1;
    args.block_size = page.block_size = 8;
    args.max_tokens = 64;
    uint32_t num_heads = 0;
    kvx_tables_run(tables.handle(), &args, 0, &num_heads, &k, &v);
    page.k_head_dim = page.v_head_dim = kOwnedDim;
    page.k_spec = k.spec;
    page.v_spec = v.spec;
    uint64_t bytes = 0;
    EXPECT_EQ(kvx_page_bytes_per_token(&page, &bytes), KVX_STATUS_OK) << kvx_last_error();
    memory.resize(6 * num_heads * 8 * bytes);
    kvx_describe_pages(&page, memory.data(), num_heads, &k, &v);
    EXPECT_EQ(kvx_tables_run(tables.handle(), &args, 0, &num_heads, &k, &v), KVX_STATUS_OK);
    transforms = tables.transforms(args).value();
    run.num_heads = num_heads;
    run.k = &k;
    run.v = &v;
    layer.block_size = 8;
    layer.num_blocks = 6;
    layer.num_kv_heads = num_heads;
    layer.num_runs = 1;
    layer.runs = &runs;
    layer.k_transform = &transforms.k;
    layer.v_transform = &transforms.v;
  }
  TunedPages(const TunedPages&) = delete;

  kvx_tables_layer_args_t args = sized<kvx_tables_layer_args_t>();
  kvx_page_desc_t page = sized<kvx_page_desc_t>();
  kvx_side_t k = sized<kvx_side_t>();
  kvx_side_t v = sized<kvx_side_t>();
  std::vector<uint8_t> memory;
  api::Tables::Transforms transforms;
  kvx_head_run_t run = sized<kvx_head_run_t>();
  const kvx_head_run_t* runs = &run;
  kvx_layer_t layer = sized<kvx_layer_t>();
};

TEST(Tables, ALayerInACallersPagesHoldsWhatACacheHolds) {
  const EnginesTables engines;
  const api::Tables tables = api::Tables::create(engines.config).value();
  TunedPages pages(tables);
  EXPECT_NE(pages.k.tensor_scales, nullptr);
  EXPECT_NE(pages.k.feedback, nullptr);
  EXPECT_NE(pages.transforms.k.block_offset, nullptr);

  auto options = sharing_options();
  options.tables = tables.handle();
  auto cache = api::Cache::create(owned_config(nullptr), &options);
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  const int32_t sequence = cache->create_sequence().value();
  begin(*cache, sequence, kTokens);
  const std::vector<float> k = test_rows(kTokens, kOwnedHeads, kOwnedDim, 0.3f);
  const std::vector<float> v = test_rows(kTokens, kOwnedHeads, kOwnedDim, 1.9f);
  step_layers(*cache, test_rows(kTokens, kQHeads, kOwnedDim, 2.5f), k, v);
  ASSERT_TRUE(cache->end_step().ok());

  const OneSequence one({4, 1, 5}, kTokens);
  const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
  const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
  const std::vector<int64_t> slots = slots_of(one, 8);
  kvx_append_args_t args = append_args(pages.layer, k_rows, slots);
  args.v = &v_rows;
  EXPECT_EQ(kvx_append(&args, nullptr), KVX_STATUS_INVALID_ARGUMENT);  // without positions
  std::vector<int64_t> positions(kTokens);
  for (int i = 0; i < kTokens; ++i) positions[static_cast<size_t>(i)] = i;
  args.positions = positions.data();
  ASSERT_EQ(kvx_append(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();

  std::vector<float> k_read(k.size()), v_read(v.size());
  ASSERT_EQ(gather_rows(pages.layer, one, k_read, v_read), KVX_STATUS_OK) << kvx_last_error();
  std::vector<float> expected = rows_of(*cache, sequence);
  k_read.insert(k_read.end(), v_read.begin(), v_read.end());
  EXPECT_EQ(k_read, expected);
}

TEST(Tables, EqualArgumentsGiveEqualAddresses) {
  const EnginesTables engines;
  const api::Tables tables = api::Tables::create(engines.config).value();
  auto args = sized<kvx_tables_layer_args_t>();
  args.block_size = 16;
  args.max_tokens = 100;
  const auto first = tables.transforms(args).value();
  EXPECT_EQ(first.k.num_offset_blocks, 7);
  EXPECT_EQ(tables.transforms(args).value().k.block_offset, first.k.block_offset);
  args.max_tokens = 200;
  EXPECT_EQ(tables.transforms(args).value().k.num_offset_blocks, 13);
  EXPECT_EQ(first.k.flags, uint32_t{KVX_TRANSFORM_HADAMARD});
}

TEST(Tables, WhatCannotBeIsNamed) {
  const auto error_of = [](auto change) {
    EnginesTables engines;
    change(engines);
    const auto tables = api::Tables::create(engines.config);
    return tables.ok() ? "created" : tables.failure().text;
  };
  EXPECT_EQ(error_of([](auto&) {}), "created");
  EXPECT_THAT(error_of([](auto& e) { e.config.recipe = nullptr; }), HasSubstr("format is ''"));
  EXPECT_THAT(error_of([](auto& e) { e.config.num_layers = 0; }), HasSubstr("num_layers is 0"));
  EXPECT_THAT(error_of([](auto& e) { e.factor[5] = 0; }), HasSubstr("layer 0 k_factor[5] is 0"));
  EXPECT_THAT(error_of([](auto& e) { e.feedback[0] = -1; }),
              HasSubstr("layer 0 k_feedback[0] is -1; expected 0 or more"));
  EXPECT_THAT(error_of([](auto& e) { e.feedback[kOwnedDim] = 1; }),
              HasSubstr("is 1; expected 0: number 0 is rounded before number 1"));
  EXPECT_THAT(
      error_of([](auto& e) { e.layer.num_inv_freq = 17; }),
      HasSubstr("config.layers[0].num_inv_freq is 17; expected at most k_head_dim / 2, 16"));
  EXPECT_THAT(error_of([](auto& e) { e.layer.inv_freq = nullptr; }),
              HasSubstr("config.layers[0] has 16 inv_freq; expected k_rope_mean and inv_freq"));
  EXPECT_THAT(error_of([](auto& e) { e.layer.rope_pairs = 2; }), HasSubstr("rope_pairs is 2"));
  EXPECT_THAT(error_of([](auto& e) { e.k.num_group_scales = 3; }),
              HasSubstr("config.layers[0].k.group_scales is"));
  EXPECT_THAT(error_of([](auto& e) { e.layer.num_offset_blocks = 3; }),
              HasSubstr("k_block_offset is 0x0 with 3 blocks"));
  EXPECT_THAT(error_of([](auto& e) { e.config.measured = "{"; }), HasSubstr("measured is no JSON"));

  const EnginesTables engines;
  const api::Tables tables = api::Tables::create(engines.config).value();
  const auto layer_error = [&](auto change) {
    auto args = sized<kvx_tables_layer_args_t>();
    args.block_size = 16;
    args.max_tokens = 100;
    change(args);
    const auto transforms = tables.transforms(args);
    return transforms.ok() ? "filled" : transforms.failure().text;
  };
  EXPECT_EQ(layer_error([](auto&) {}), "filled");
  EXPECT_THAT(layer_error([](auto& a) { a.layer = 2; }), HasSubstr("args.layer is 2"));
  EXPECT_THAT(layer_error([](auto& a) { a.block_size = 0; }), HasSubstr("args.block_size is 0"));
  EXPECT_THAT(layer_error([](auto& a) { a.max_tokens = 0; }), HasSubstr("args.max_tokens is 0"));
  EXPECT_THAT(layer_error([](auto& a) { a.memory = 9; }), HasSubstr("args.memory is 9"));

  const char bytes[] = "no such file";
  kvx_tables_t handle = nullptr;
  EXPECT_EQ(kvx_tables_load_bytes(bytes, sizeof bytes, &handle), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kvx_tables_load("/nowhere", &handle), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(handle, nullptr);
}

TEST(Tables, AFreedHandleIsRefused) {
  const EnginesTables engines;
  kvx_tables_t handle = nullptr;
  ASSERT_EQ(kvx_tables_create(&engines.config, &handle), KVX_STATUS_OK) << kvx_last_error();
  kvx_tables_free(handle);
  kvx_tables_free(handle);
  kvx_tables_free(nullptr);
  auto info = sized<kvx_tables_info_t>();
  EXPECT_EQ(kvx_tables_info(handle, &info), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_STREQ(kvx_last_error(), "tables is not a handle, or was freed");
  auto options = sized<kvx_cache_options_t>();
  options.tables = handle;
  EXPECT_THAT(fingerprint(owned_config(nullptr), options), HasSubstr("error: tables is not"));
}

}  // namespace
}  // namespace kvx::api_test

// Owned caches whose V is a part of K's rows (KVX_CACHE_LATENT).
#include <gtest/gtest.h>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test::owned_latent_test {
namespace {

constexpr int kRowDim = 48;
constexpr int kValueDim = 32;
constexpr int kHeads = 4;

kvx_cache_config_t latent_config(const char* recipe) {
  kvx_cache_config_t config = owned_config(recipe);
  config.num_kv_heads = 1;
  config.k_head_dim = kRowDim;
  config.v_head_dim = kValueDim;
  return config;
}

api::Result<api::Cache> latent_cache(const kvx_cache_config_t& config) {
  auto options = sized<kvx_cache_options_t>();
  options.flags = KVX_CACHE_LATENT;
  return api::Cache::create(config, &options);
}

// The first numbers of rows.
std::vector<float> values_of(const std::vector<float>& rows) {
  std::vector<float> values;
  for (auto row = rows.begin(); row != rows.end(); row += kRowDim) {
    values.insert(values.end(), row, row + kValueDim);
  }
  return values;
}

kvx_step_layer_args_t layer_args(const kvx_rows_t& q, const kvx_rows_t& k, const kvx_rows_t& out) {
  auto args = sized<kvx_step_layer_args_t>();
  args.num_q_heads = kHeads;
  args.q = &q;
  args.k = &k;
  args.out = &out;
  return args;
}

TEST(OwnedLatentCache, AttendsToTheFirstNumbersOfItsRows) {
  auto cache = latent_cache(latent_config("f32"));
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  const int32_t sequence = *cache->create_sequence();
  const std::vector<float> k = test_rows(20, 1, kRowDim, 1.0f);
  const std::vector<float> q = test_rows(20, kHeads, kRowDim, 2.0f);
  std::vector<float> out(20 * kHeads * kValueDim);
  begin(*cache, sequence, 20);
  const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
  const kvx_rows_t k_rows = api::rows(k.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
  for (uint32_t layer = 0; layer < kOwnedLayers; ++layer) {
    kvx_step_layer_args_t args = layer_args(q_rows, k_rows, out_rows);
    args.layer = layer;
    ASSERT_TRUE(cache->step_layer(args).ok()) << kvx_last_error();
  }
  ASSERT_TRUE(cache->end_step().ok());
  const Geometry geometry{.num_kv_heads = 1, .head_dim = kRowDim};
  const std::vector<float> expected = plain_attention(q, k, k, 20, 20, kHeads, geometry);
  EXPECT_LT(largest_difference(out, values_of(expected)), 2e-5);

  std::vector<float> v(20 * kValueDim);
  const kvx_rows_t v_rows = api::rows(v.data(), KVX_DTYPE_F32);
  ASSERT_TRUE(cache->gather(sequence, 1, 0, 20, nullptr, &v_rows).ok()) << kvx_last_error();
  EXPECT_EQ(v, values_of(k));
}

TEST(OwnedLatentCache, RefusesAVOfItsOwn) {
  auto cache = latent_cache(latent_config("nvfp4"));
  ASSERT_TRUE(cache.ok()) << kvx_last_error();
  const int32_t sequence = *cache->create_sequence();
  const std::vector<float> numbers(kHeads * kRowDim);
  std::vector<float> out(kHeads * kRowDim);
  const kvx_rows_t rows = api::rows(numbers.data(), KVX_DTYPE_F32);
  const kvx_rows_t out_rows = api::rows(out.data(), KVX_DTYPE_F32);
  begin(*cache, sequence, 1);
  kvx_step_layer_args_t args = layer_args(rows, rows, out_rows);
  args.v = &rows;
  EXPECT_FALSE(cache->step_layer(args).ok());
  EXPECT_STREQ(kvx_last_error(),
               "args.v is set; a latent cache's V is a part of K's rows: expected null");
  args.v = nullptr;
  EXPECT_TRUE(cache->step_layer(args).ok()) << kvx_last_error();
}

TEST(OwnedLatentCache, RefusesRecipesAndShapesOfTwoRows) {
  const auto status_of = [](const kvx_cache_config_t& config) {
    const auto cache = latent_cache(config);
    return cache.ok() ? KVX_STATUS_OK : cache.failure().status;
  };
  EXPECT_EQ(status_of(latent_config("bf16/f16")), KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(status_of(latent_config("nvfp4+bf16:auto")), KVX_STATUS_OK);
  EXPECT_EQ(status_of(latent_config("nvfp4:hadamard")), KVX_STATUS_OK);
  kvx_cache_config_t config = latent_config("bf16");
  config.v_head_dim = kRowDim + 1;
  EXPECT_EQ(status_of(config), KVX_STATUS_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kvx::api_test::owned_latent_test

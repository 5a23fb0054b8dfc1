// Owned caches for tests: two layers whose rows are a function of the token and its place.
#pragma once

#include <gtest/gtest.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {

inline constexpr uint32_t kOwnedLayers = 2;
inline constexpr int kOwnedHeads = 2;
inline constexpr int kOwnedDim = 32;

inline kvx_cache_config_t owned_config(const char* recipe) {
  auto config = sized<kvx_cache_config_t>();
  config.num_layers = kOwnedLayers;
  config.num_kv_heads = kOwnedHeads;
  config.k_head_dim = config.v_head_dim = kOwnedDim;
  config.block_size = 8;
  config.max_sequences = 4;
  config.max_tokens_per_sequence = 64;
  config.recipe = recipe;
  return config;
}

inline kvx_cache_options_t sharing_options() {
  auto options = sized<kvx_cache_options_t>();
  options.flags = KVX_CACHE_PREFIXES;
  options.model = "a model";
  return options;
}

inline api::Cache sharing_cache(const char* recipe,
                                const kvx_cache_options_t& options = sharing_options()) {
  auto cache = api::Cache::create(owned_config(recipe), &options);
  if (!cache.ok()) throw std::runtime_error(cache.failure().text);
  return std::move(*cache);
}

inline std::vector<int32_t> token_ids(int32_t first, int32_t last) {
  std::vector<int32_t> tokens;
  for (int32_t token = first; token < last; ++token) tokens.push_back(token);
  return tokens;
}

inline void begin(api::Cache& cache, int32_t sequence, int32_t count) {
  const int32_t sequences[] = {sequence};
  const int32_t counts[] = {count};
  ASSERT_TRUE(cache.begin_step(sequences, counts).ok()) << kvx_last_error();
}

// The same rows to all layers of the open step.
inline void step_layers(api::Cache& cache, const kvx_rows_t& q, const kvx_rows_t& k,
                        const kvx_rows_t& v, const kvx_rows_t& out) {
  for (uint32_t layer = 0; layer < kOwnedLayers; ++layer) {
    auto args = sized<kvx_step_layer_args_t>();
    args.layer = layer;
    args.num_q_heads = kQHeads;
    args.q = &q;
    args.k = &k;
    args.v = &v;
    args.out = &out;
    EXPECT_TRUE(cache.step_layer(args).ok()) << kvx_last_error();
  }
}

// Gives the last layer's output.
inline std::vector<float> step_layers(api::Cache& cache, const std::vector<float>& q,
                                      const std::vector<float>& k, const std::vector<float>& v) {
  std::vector<float> out(q.size());
  step_layers(cache, api::rows(q.data(), KVX_DTYPE_F32), api::rows(k.data(), KVX_DTYPE_F32),
              api::rows(v.data(), KVX_DTYPE_F32), api::rows(out.data(), KVX_DTYPE_F32));
  return out;
}

// Rows of tokens first_token, first_token + 1, ... to all layers of the open step.
inline void append(api::Cache& cache, int32_t first_token, int32_t count) {
  std::vector<float> k;
  std::vector<float> v;
  for (int32_t token = first_token; token < first_token + count; ++token) {
    const auto number = static_cast<float>(token);
    const std::vector<float> k_row = test_rows(1, kOwnedHeads, kOwnedDim, number);
    const std::vector<float> v_row = test_rows(1, kOwnedHeads, kOwnedDim, number + 0.5f);
    k.insert(k.end(), k_row.begin(), k_row.end());
    v.insert(v.end(), v_row.begin(), v_row.end());
  }
  const float seed = static_cast<float>(first_token) + 0.7f;
  step_layers(cache, test_rows(count, kQHeads, kOwnedDim, seed), k, v);
}

// Tokens [first, last), one a step, recorded.
inline void feed(api::Cache& cache, int32_t sequence, int32_t first, int32_t last) {
  for (int32_t token = first; token < last; ++token) {
    begin(cache, sequence, 1);
    append(cache, token, 1);
    ASSERT_TRUE(cache.end_step().ok()) << kvx_last_error();
  }
  ASSERT_TRUE(cache.record_tokens(sequence, token_ids(first, last)).ok()) << kvx_last_error();
}

// K and V of the last layer's first num_tokens; -1: all.
inline std::vector<float> rows_of(const api::Cache& cache, int32_t sequence,
                                  int64_t num_tokens = -1) {
  if (num_tokens < 0) num_tokens = *cache.num_tokens(sequence);
  const size_t side = static_cast<size_t>(num_tokens) * kOwnedHeads * kOwnedDim;
  std::vector<float> rows(2 * side);
  const kvx_rows_t k = api::rows(rows.data(), KVX_DTYPE_F32);
  const kvx_rows_t v = api::rows(rows.data() + side, KVX_DTYPE_F32);
  EXPECT_TRUE(cache.gather(sequence, kOwnedLayers - 1, 0, num_tokens, &k, &v).ok())
      << kvx_last_error();
  return rows;
}

}  // namespace kvx::api_test

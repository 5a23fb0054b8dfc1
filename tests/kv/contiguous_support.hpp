// Contiguous caches and numbers for their tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "kv/contiguous/contiguous_cache.hpp"
#include "tests/support/cpu_levels.hpp"

namespace kvx::kv {

inline ops::CpuContext scalar_context() {
  return tests::serial_context(device::CpuLevel::kScalar);
}

inline Recipe recipe_of(std::string_view text) {
  const Result<Recipe> recipe = parse_recipe(text);
  EXPECT_TRUE(recipe.ok()) << (recipe.ok() ? "" : recipe.error().message);
  return recipe.value();
}

// Two layers, two sequences, four query heads on two KV heads.
inline ContiguousConfig small_config(std::string_view recipe, int max_seq_len, int head_dim = 32) {
  ContiguousConfig config;
  config.geometry = {.num_layers = 2,
                     .num_kv_heads = 2,
                     .k_head_dim = head_dim,
                     .v_head_dim = head_dim,
                     .layer_windows = {}};
  config.recipe = recipe_of(recipe);
  config.batch_size = 2;
  config.num_q_heads = 4;
  config.max_seq_len = max_seq_len;
  return config;
}

inline ContiguousCache cache_of(const ContiguousConfig& config) {
  Result<ContiguousCache> cache = ContiguousCache::create(config, scalar_context());
  EXPECT_TRUE(cache.ok()) << (cache.ok() ? "" : cache.error().message);
  return std::move(cache).value();
}

inline std::string message_of(const Status& status) {
  return status.ok() ? "ok" : status.error().message;
}

// [batch, num_tokens, num_heads, head_dim] numbers that depend on the token's position, its
// sequence, head and element, and on nothing else, so that chunks of a text equal the whole.
inline std::vector<float> numbers(const ContiguousConfig& config, int seed, int first_position,
                                  int num_tokens, int num_heads, int head_dim) {
  std::vector<float> result;
  for (int b = 0; b < config.batch_size; ++b) {
    for (int t = first_position; t < first_position + num_tokens; ++t) {
      for (int h = 0; h < num_heads; ++h) {
        for (int d = 0; d < head_dim; ++d) {
          const double phase = seed + 12.9898 * t + 78.233 * d + 37.719 * h + 4.581 * b;
          result.push_back(static_cast<float>(2.0 * std::sin(phase * 1.7)));
        }
      }
    }
  }
  return result;
}

inline FloatRows input(const std::vector<float>& values, int num_heads, int head_dim) {
  return dense_rows(static_cast<const void*>(values.data()), DType::kF32, num_heads, head_dim);
}
inline MutableFloatRows output(std::vector<float>& values, int num_heads, int head_dim) {
  return dense_rows(static_cast<void*>(values.data()), DType::kF32, num_heads, head_dim);
}

// Appends tokens [first_position, first_position + num_tokens) to one layer.
inline Status append_layer(ContiguousCache& cache, int layer, int first_position, int num_tokens) {
  const ContiguousConfig& config = cache.config();
  const int heads = config.geometry.num_kv_heads;
  const int k_dim = config.geometry.k_head_dim, v_dim = config.geometry.v_head_dim;
  const auto k = numbers(config, 1 + layer, first_position, num_tokens, heads, k_dim);
  const auto v = numbers(config, 101 + layer, first_position, num_tokens, heads, v_dim);
  return cache.append(layer, num_tokens, input(k, heads, k_dim), input(v, heads, v_dim));
}

// Appends to every layer, then advances.
inline Status append_all(ContiguousCache& cache, int first_position, int num_tokens) {
  for (int layer = 0; layer < cache.config().geometry.num_layers; ++layer) {
    KVX_RETURN_IF_ERROR(append_layer(cache, layer, first_position, num_tokens));
  }
  return cache.advance(num_tokens);
}

// The last q_len tokens, which end before end_position, ask.
inline std::vector<float> attend(ContiguousCache& cache, int layer, int end_position, int q_len,
                                 const ContiguousAttention& attention = {}) {
  const ContiguousConfig& config = cache.config();
  const int heads = config.num_q_heads;
  const int k_dim = config.geometry.k_head_dim, v_dim = config.geometry.v_head_dim;
  const auto q = numbers(config, 201 + layer, end_position - q_len, q_len, heads, k_dim);
  std::vector<float> out(static_cast<size_t>(config.batch_size) * q_len * heads * v_dim);
  const Status status =
      cache.attend(layer, q_len, input(q, heads, k_dim), output(out, heads, v_dim), attention);
  EXPECT_TRUE(status.ok()) << message_of(status);
  return out;
}

struct Held {
  std::vector<float> k, v;  // [batch, num_held, num_kv_heads, head_dim]
};
inline Held gather(ContiguousCache& cache, int layer) {
  const CacheGeometry& geometry = cache.config().geometry;
  const size_t rows = static_cast<size_t>(cache.config().batch_size) * cache.num_held(layer) *
                      geometry.num_kv_heads;
  Held held{std::vector<float>(rows * geometry.k_head_dim),
            std::vector<float>(rows * geometry.v_head_dim)};
  const Status status =
      cache.gather(layer, output(held.k, geometry.num_kv_heads, geometry.k_head_dim),
                   output(held.v, geometry.num_kv_heads, geometry.v_head_dim));
  EXPECT_TRUE(status.ok()) << message_of(status);
  return held;
}

// Textbook attention in double over what a layer holds: query i of q_len sees the held tokens up to
// its own position, at most `window` of them (0: all).
inline std::vector<double> reference_attention(ContiguousCache& cache, int layer, int end_position,
                                               int q_len, double scale, int window) {
  const ContiguousConfig& config = cache.config();
  const Held held = gather(cache, layer);
  const int kv_heads = config.geometry.num_kv_heads, q_heads = config.num_q_heads;
  const int k_dim = config.geometry.k_head_dim, v_dim = config.geometry.v_head_dim;
  const int num_held = cache.num_held(layer);
  const auto q = numbers(config, 201 + layer, end_position - q_len, q_len, q_heads, k_dim);
  std::vector<double> out;
  for (int b = 0; b < config.batch_size; ++b) {
    for (int i = 0; i < q_len; ++i) {
      const int last = num_held - q_len + i;
      const int first = window == 0 ? 0 : std::max(last - window + 1, 0);
      for (int h = 0; h < q_heads; ++h) {
        const int kv_head = h * kv_heads / q_heads;
        const auto row = [&](int t) { return (size_t{} + b * num_held + t) * kv_heads + kv_head; };
        const float* query = q.data() + ((size_t{} + b * q_len + i) * q_heads + h) * k_dim;
        std::vector<double> sum(v_dim);
        double total = 0;
        for (int t = first; t <= last; ++t) {
          double score = 0;
          for (int d = 0; d < k_dim; ++d) score += double{query[d]} * held.k[row(t) * k_dim + d];
          const double weight = std::exp(score * scale);
          total += weight;
          for (int d = 0; d < v_dim; ++d) sum[d] += weight * held.v[row(t) * v_dim + d];
        }
        for (double value : sum) out.push_back(value / total);
      }
    }
  }
  return out;
}

// Relative root-mean-square distance.
template <class A, class B>
double relative_rms(const std::vector<A>& values, const std::vector<B>& expected) {
  EXPECT_EQ(values.size(), expected.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(double{values[i]} - double{expected[i]}, 2);
    size += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(error / size);
}

}  // namespace kvx::kv

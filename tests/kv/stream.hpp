// A small cache and streams of rows to feed it with: what the tests of the assembled cache share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/kv/place.hpp"

namespace kvx::kv {

inline constexpr int kNumLayers = 2;
inline constexpr int kNumKvHeads = 2;
inline constexpr int kNumQHeads = 6;
inline constexpr int kHeadDim = 64;

inline ops::CpuContext context() {
  static const device::CpuLevel level = device::choose_cpu_level().value();
  return {&ops::cpu::kernel_table(level), &serial_executor()};
}

inline KvCacheConfig config_of(std::string_view recipe, int block_size = 16) {
  KvCacheConfig config;
  config.geometry = {kNumLayers, kNumKvHeads, kHeadDim, kHeadDim, {}};
  config.recipe = parse_recipe(recipe).value();
  config.block_size = block_size;
  config.max_sequences = 2;
  config.max_tokens_per_sequence = 400;
  if (is_on_gpu()) config.cuda = CudaPlacement{*test_gpu()};
  return config;
}

inline std::unique_ptr<KvCache> created(KvCacheConfig config) {
  Result<std::unique_ptr<KvCache>> cache = KvCache::create(std::move(config), context());
  if (!cache.ok()) {
    ADD_FAILURE() << cache.error().message;
    return nullptr;
  }
  return std::move(cache).value();
}

// Rows of one stream of tokens: the same tokens give the same rows however they are cut into steps.
struct Stream {
  std::vector<float> q, k, v;  // [tokens, heads, head_dim]

  explicit Stream(int num_tokens, uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& rows, int heads) {
      rows.resize(static_cast<size_t>(num_tokens) * heads * kHeadDim);
      for (float& x : rows) x = normal(random);
    };
    fill(q, kNumQHeads);
    fill(k, kNumKvHeads);
    fill(v, kNumKvHeads);
  }
  FloatRows rows(const std::vector<float>& from, int heads, int64_t first) const {
    return dense_rows(from.data() + first * heads * kHeadDim, DType::kF32, heads, kHeadDim);
  }
};

inline AttentionParams params() {
  return {kNumQHeads, 0.125f, 0.0f, nullptr};
}

// Feeds tokens [first, last) in steps of at most step_tokens; returns a layer's output rows.
inline std::vector<float> feed(KvStep& step, KvCache& cache, int sequence, const Stream& stream,
                               int first, int last, int step_tokens, int read_layer = 0) {
  std::vector<float> out(static_cast<size_t>(last - first) * kNumQHeads * kHeadDim);
  std::vector<float> ignored(out.size());
  for (int at = first; at < last;) {
    const int64_t most = std::min<int64_t>(step_tokens, cache.max_step_tokens(sequence));
    const int count = static_cast<int>(std::min<int64_t>(most, last - at));
    const StepEntry entry{sequence, count};
    const Status begun = step.begin({&entry, 1});
    EXPECT_TRUE(begun.ok()) << begun.error().message;
    if (!begun.ok()) return out;
    for (int layer = 0; layer < kNumLayers; ++layer) {
      float* target = (layer == read_layer ? out : ignored).data() +
                      static_cast<size_t>(at - first) * kNumQHeads * kHeadDim;
      const Status done = append_and_attend(
          cache, step, count, layer, params(), stream.rows(stream.q, kNumQHeads, at),
          stream.rows(stream.k, kNumKvHeads, at), stream.rows(stream.v, kNumKvHeads, at),
          dense_rows(target, DType::kF32, kNumQHeads, kHeadDim));
      EXPECT_TRUE(done.ok()) << done.error().message;
    }
    EXPECT_TRUE(step.end().ok());
    at += count;
  }
  return out;
}

inline std::vector<float> feed(KvCache& cache, int sequence, const Stream& stream, int first,
                               int last, int step_tokens) {
  KvStep step(cache);
  return feed(step, cache, sequence, stream, first, last, step_tokens);
}

inline double relative_rms(const std::vector<float>& measured, const std::vector<float>& expected) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(double{measured[i]} - expected[i], 2);
    norm += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(error / norm);
}

}  // namespace kvx::kv

// A small latent cache, a cache that stores the same V apart, and rows to feed both with.
#pragma once

#include "tests/kv/stream.hpp"

namespace kvx::kv {

inline constexpr int kRowDim = 192;    // K's
inline constexpr int kValueDim = 128;  // its first numbers are V
inline constexpr int kLatentQHeads = 5;

enum class ValuePlace : uint8_t { kInK, kApart };

inline KvCacheConfig latent_config(std::string_view recipe, ValuePlace place = ValuePlace::kInK) {
  KvCacheConfig config = config_of(recipe);
  config.geometry = {.num_layers = kNumLayers,
                     .num_kv_heads = 1,
                     .k_head_dim = kRowDim,
                     .v_head_dim = kValueDim,
                     .is_latent = place == ValuePlace::kInK};
  config.max_sequences = 4;
  config.prefix = {true, cache::HashAlgorithm::kXxh3, "a latent model"};
  return config;
}

// Rows of one stream of tokens, in the shapes of latent_config().
struct LatentStream {
  std::vector<float> q;  // [tokens, kLatentQHeads, kRowDim]
  std::vector<float> k;  // [tokens, kRowDim]

  explicit LatentStream(int num_tokens, uint32_t seed = 1)
      : q(static_cast<size_t>(num_tokens) * kLatentQHeads * kRowDim),
        k(static_cast<size_t>(num_tokens) * kRowDim) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : q) x = normal(random);
    for (float& x : k) x = normal(random);
  }
  FloatRows q_rows(int64_t first) const {
    return dense_rows(q.data() + first * kLatentQHeads * kRowDim, DType::kF32, kLatentQHeads,
                      kRowDim);
  }
  FloatRows k_rows(int64_t first) const {
    return dense_rows(k.data() + first * kRowDim, DType::kF32, 1, kRowDim);
  }
};

// Feeds tokens [first, last) in steps of at most step_tokens; returns the last layer's output. A
// cache that stores V apart is given the rows' first numbers as V.
inline std::vector<float> feed(KvCache& cache, int sequence, const LatentStream& stream, int first,
                               int last, int step_tokens) {
  constexpr int kOutRow = kLatentQHeads * kValueDim;
  std::vector<float> out(static_cast<size_t>(last - first) * kOutRow);
  for (int at = first; at < last; at += step_tokens) {
    const StepEntry entry{sequence, std::min(step_tokens, last - at)};
    const Status begun = cache.begin_step({&entry, 1});
    EXPECT_TRUE(begun.ok()) << begun.error().message;
    if (!begun.ok()) return out;
    std::vector<float> values;
    for (int t = at; t < at + entry.num_tokens; ++t) {
      values.insert(values.end(), stream.k.begin() + t * kRowDim,
                    stream.k.begin() + t * kRowDim + kValueDim);
    }
    const bool is_latent = cache.config().geometry.is_latent;
    const FloatRows v =
        is_latent ? FloatRows()
                  : dense_rows(static_cast<const void*>(values.data()), DType::kF32, 1, kValueDim);
    for (int layer = 0; layer < kNumLayers; ++layer) {
      const Status done =
          append_and_attend(cache, entry.num_tokens, layer, {kLatentQHeads, 0.1f, 0.0f, nullptr},
                            stream.q_rows(at), stream.k_rows(at), v,
                            dense_rows(out.data() + static_cast<size_t>(at - first) * kOutRow,
                                       DType::kF32, kLatentQHeads, kValueDim));
      EXPECT_TRUE(done.ok()) << done.error().message;
    }
    EXPECT_TRUE(cache.end_step().ok());
  }
  return out;
}

}  // namespace kvx::kv

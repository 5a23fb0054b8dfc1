// A cache whose calibration has error feedback: its keys' scores err less, in blocks that are
// appended packed and in those that leave the full-precision window.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kv/plan/feedback_table.hpp"
#include "tests/kv/stream.hpp"

namespace kvx::kv::feedback_cache_test {
namespace {

using testing::HasSubstr;

constexpr int kTokens = 96;

// The queries' second moments of a KV head, [kNumKvHeads, kHeadDim, kHeadDim].
std::vector<double> moments_of(const Stream& stream) {
  std::vector<double> moments(size_t(kNumKvHeads) * kHeadDim * kHeadDim);
  for (size_t row = 0; row < stream.q.size() / kHeadDim; ++row) {
    const size_t kv_head = row % kNumQHeads * kNumKvHeads / kNumQHeads;
    const float* q = &stream.q[row * kHeadDim];
    for (int i = 0; i < kHeadDim; ++i) {
      for (int j = 0; j < kHeadDim; ++j) {
        moments[(kv_head * kHeadDim + i) * kHeadDim + j] += double{q[i]} * q[j];
      }
    }
  }
  return moments;
}

// Queries and keys of a few directions, as those of a model are.
Stream correlated_stream() {
  Stream stream(kTokens);
  for (size_t row = 0; row < stream.q.size() / kHeadDim; ++row) {
    float* q = &stream.q[row * kHeadDim];
    for (int d = 0; d < kHeadDim; ++d) {
      q[d] = 0.1f * q[d] + (d % 2 ? q[0] : q[1]) + (d % 4 < 2 ? q[2] : -q[2]);
    }
  }
  return stream;
}

// The mean square of what rounding K changes in the products of queries and keys.
double error_of_scores(const Stream& stream, const std::vector<float>& keys) {
  double total = 0;
  size_t count = 0;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kNumQHeads; ++h) {
      const float* q = &stream.q[(size_t(t) * kNumQHeads + h) * kHeadDim];
      for (int s = 0; s < kTokens; ++s, ++count) {
        const size_t row = (size_t(s) * kNumKvHeads + h * kNumKvHeads / kNumQHeads) * kHeadDim;
        double error = 0;
        for (int d = 0; d < kHeadDim; ++d) error += q[d] * (keys[row + d] - stream.k[row + d]);
        total += error * error;
      }
    }
  }
  return total / static_cast<double>(count);
}

double error_of_cache(const char* recipe, bool feeds_back) {
  const Stream stream = correlated_stream();
  KvCacheConfig config = config_of(recipe);
  if (feeds_back) {
    config.calibration.resize(kNumLayers);
    const std::vector<double> moments = moments_of(stream);
    FeedbackInput input;
    input.num_kv_heads = kNumKvHeads, input.head_dim = kHeadDim;
    input.moments = moments, input.hadamard = config.recipe.k.hadamard;
    for (LayerCalibration& layer : config.calibration) {
      layer.k_feedback = feedback_table(input).value();
    }
  }
  auto cache = created(config);
  const int sequence = cache->create_sequence().value();
  feed(*cache, sequence, stream, 0, kTokens, 7);
  std::vector<float> keys(size_t(kTokens) * kNumKvHeads * kHeadDim);
  EXPECT_TRUE(gather(*cache, sequence, 0, 0, kTokens,
                     dense_rows(keys.data(), DType::kF32, kNumKvHeads, kHeadDim), {})
                  .ok());
  return error_of_scores(stream, keys);
}

TEST(KvCacheFeedback, ScoresErrLess) {
  for (const char* recipe : {"nvfp4", "nvfp4:k.hadamard", "int4:k.hadamard,k.search",
                             "nvfp4:k.hadamard,recent=16", "int4_affine", "int8"}) {
    EXPECT_LT(error_of_cache(recipe, true), error_of_cache(recipe, false) / 2) << recipe;
  }
}

TEST(KvCacheFeedback, ErrorsNameTheTableItsPlaceAndWhatWasExpected) {
  const auto message = [](size_t size, size_t at, float weight) {
    KvCacheConfig config = config_of("nvfp4");
    config.calibration.resize(kNumLayers);
    config.calibration[1].k_feedback.resize(size);
    config.calibration[1].k_feedback[at] = weight;
    const auto cache = KvCache::create(std::move(config), context());
    return cache.ok() ? std::string() : cache.error().message;
  };
  constexpr size_t kSize = size_t(kNumKvHeads) * kHeadDim * kHeadDim;
  EXPECT_EQ(message(kSize, 1, 0.5f), "");
  EXPECT_EQ(message(kSize - 1, 1, 0.5f), "layer 1 k_feedback has 8191 numbers; expected 8192");
  EXPECT_THAT(message(kSize, kHeadDim, 0.5f),
              HasSubstr("layer 1 k_feedback[64] is 0.5; expected 0"));
  EXPECT_THAT(message(kSize, 1, 2e6f),
              HasSubstr("k_feedback[1] is 2000000; expected at most 1048576"));
}

}  // namespace
}  // namespace kvx::kv::feedback_cache_test

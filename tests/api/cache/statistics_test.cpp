// Statistics through the C ABI: fed, merged, read, and fitted to a tuned recipe.
#include <gmock/gmock.h>

#include <cmath>
#include <cstddef>

#include "tests/api/owned_cache.hpp"

namespace kvx::api_test::statistics_test {
namespace {

using testing::HasSubstr;

constexpr auto kInvalid = KVX_STATUS_INVALID_ARGUMENT;
constexpr uint32_t kLayers = 2, kHeads = 2, kQueryHeads = 4, kDim = 32;
constexpr int kRows = 40;

class Collected {
 public:
  Collected() {
    config_.num_layers = kLayers;
    config_.num_q_heads = kQueryHeads;
    config_.num_kv_heads = kHeads;
    config_.k_head_dim = config_.v_head_dim = kDim;
    config_.inv_freq = inv_freq_.data();
    config_.num_inv_freq = static_cast<uint32_t>(inv_freq_.size());
    EXPECT_EQ(kvx_statistics_create(&config_, &handle_), KVX_STATUS_OK) << kvx_last_error();
  }
  ~Collected() { kvx_statistics_free(handle_); }
  Collected(const Collected&) = delete;
  operator kvx_statistics_t() const { return handle_; }

  kvx_status_t feed(uint32_t layer, int first, const std::vector<float>& some_k,
                    const std::vector<float>& some_v, const std::vector<float>& some_q) {
    const kvx_rows_t k_rows = api::rows(some_k.data(), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(some_v.data(), KVX_DTYPE_F32);
    const kvx_rows_t q_rows = api::rows(some_q.data(), KVX_DTYPE_F32);
    auto args = sized<kvx_statistics_rows_t>();
    args.layer = layer;
    args.first_position = first;
    args.num_rows = std::ssize(some_k) / (kHeads * kDim);
    args.k = &k_rows;
    args.v = &v_rows;
    args.q = &q_rows;
    return kvx_statistics_feed(handle_, &args);
  }
  // Rows [first, last) of both layers.
  void feed(int first, int last) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto part = [&](const std::vector<float>& all, uint32_t heads) {
        const int64_t row = heads * kDim;
        return std::vector<float>(all.begin() + first * row, all.begin() + last * row);
      };
      EXPECT_EQ(feed(layer, first, part(k, kHeads), part(v, kHeads), part(q, kQueryHeads)),
                KVX_STATUS_OK)
          << kvx_last_error();
    }
  }

  const std::vector<float> k = test_rows(kRows, kHeads, kDim, 0.3f);
  const std::vector<float> v = test_rows(kRows, kHeads, kDim, 1.9f);
  const std::vector<float> q = test_rows(kRows, kQueryHeads, kDim, 4.2f);

 private:
  std::vector<double> inv_freq_ = std::vector<double>(kDim / 2, 0.125);
  kvx_statistics_config_t config_ = sized<kvx_statistics_config_t>();
  kvx_statistics_t handle_ = nullptr;
};

struct LayerValues {
  explicit LayerValues(kvx_statistics_t statistics, uint32_t layer = 1) {
    values.k_mean = k_mean.data();
    values.v_mean = v_mean.data();
    values.k_largest = k_largest.data();
    values.v_largest = v_largest.data();
    values.k_rope_mean = k_rope_mean.data();
    values.query_moments = moments.data();
    EXPECT_EQ(kvx_statistics_layer(statistics, layer, &values), KVX_STATUS_OK) << kvx_last_error();
  }
  std::vector<float> k_mean = std::vector<float>(kHeads * kDim), v_mean = k_mean,
                     k_largest = k_mean, v_largest = k_mean, k_rope_mean = k_mean,
                     moments = std::vector<float>(kHeads * kDim * kDim);
  kvx_statistics_layer_t values = sized<kvx_statistics_layer_t>();
};

TEST(Statistics, AreThoseOfTheRows) {
  Collected collected;
  collected.feed(0, kRows);
  const LayerValues found(collected);
  EXPECT_EQ(found.values.num_rows, kRows);
  for (uint32_t c = 0; c < kHeads * kDim; ++c) {
    double sum = 0;
    float largest = 0;
    for (int t = 0; t < kRows; ++t) {
      const float x = collected.k[t * kHeads * kDim + c];
      if (t >= 4) sum += x;  // the first tokens are no part of means
      largest = std::max(largest, std::fabs(x));
    }
    EXPECT_NEAR(found.k_mean[c], sum / (kRows - 4), 1e-6);
    EXPECT_EQ(found.k_largest[c], largest);
  }
  double moment = 0;  // of channels 3 and 5 of KV head 1, whose queries are heads 2 and 3
  for (int t = 0; t < kRows; ++t) {
    for (const uint32_t head : {2u, 3u}) {
      const float* row = collected.q.data() + (t * kQueryHeads + head) * kDim;
      moment += double{row[3]} * row[5];
    }
  }
  EXPECT_NEAR(found.moments[kDim * kDim + 3 * kDim + 5], moment / (2 * kRows), 1e-5);
}

TEST(Statistics, OfPartsAreThoseOfTheWhole) {
  Collected whole, first, second;
  whole.feed(0, kRows);
  first.feed(0, 17);
  second.feed(17, kRows);
  ASSERT_EQ(kvx_statistics_merge(first, second), KVX_STATUS_OK) << kvx_last_error();
  const LayerValues expected(whole), found(first);
  EXPECT_EQ(found.values.num_rows, kRows);
  EXPECT_EQ(found.k_mean, expected.k_mean);
  EXPECT_EQ(found.v_largest, expected.v_largest);
  EXPECT_EQ(found.k_rope_mean, expected.k_rope_mean);
  EXPECT_LT(largest_difference(found.moments, expected.moments), 1e-6);
  std::vector<float> a(kHeads * 2), b(a.size());
  ASSERT_EQ(kvx_statistics_percentiles(whole, 0, 1, 16, 99.0, a.data()), KVX_STATUS_OK);
  ASSERT_EQ(kvx_statistics_percentiles(first, 0, 1, 16, 99.0, b.data()), KVX_STATUS_OK);
  EXPECT_EQ(a, b);
}

TEST(Statistics, PercentilesAreOfGroupsOfChannels) {
  Collected collected;
  collected.feed(0, kRows);
  std::vector<float> found(kHeads * 2);
  ASSERT_EQ(kvx_statistics_percentiles(collected, 0, 0, 16, 100.0, found.data()), KVX_STATUS_OK);
  float largest = 0;
  for (int t = 0; t < kRows; ++t) {
    for (uint32_t d = 16; d < kDim; ++d) {
      largest = std::max(largest, std::fabs(collected.k[t * kHeads * kDim + d]));
    }
  }
  EXPECT_EQ(found[1], largest);  // head 0, its second group
}

TEST(Statistics, AreFittedToATunedRecipe) {
  Collected collected;
  collected.feed(0, kRows);
  auto config = sized<kvx_fit_config_t>();
  config.tables = KVX_FIT_K_MEAN | KVX_FIT_K_FEEDBACK;
  config.recipe = "nvfp4:immediate";
  config.model_name = "a model";
  kvx_tables_t tables = nullptr;
  ASSERT_EQ(kvx_statistics_fit(collected, &config, &tables), KVX_STATUS_OK) << kvx_last_error();
  auto args = sized<kvx_tables_layer_args_t>();
  args.layer = 1;
  args.block_size = 16;
  auto k = sized<kvx_transform_t>(), v = sized<kvx_transform_t>();
  ASSERT_EQ(kvx_tables_layer(tables, &args, &k, &v), KVX_STATUS_OK) << kvx_last_error();
  const LayerValues values(collected);
  ASSERT_NE(k.mean, nullptr);
  EXPECT_TRUE(std::equal(values.k_mean.begin(), values.k_mean.end(), k.mean));
  EXPECT_EQ(v.mean, nullptr);
  auto info = sized<kvx_tables_info_t>();
  ASSERT_EQ(kvx_tables_info(tables, &info), KVX_STATUS_OK);
  EXPECT_STREQ(info.model_name, "a model");
  EXPECT_EQ(info.needs_positions, 0u);
  kvx_tables_free(tables);

  config.tables = KVX_FIT_K_BLOCK_OFFSET;
  ASSERT_EQ(kvx_statistics_fit(collected, &config, &tables), KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(kvx_tables_info(tables, &info), KVX_STATUS_OK);
  EXPECT_EQ(info.needs_positions, 1u);
  kvx_tables_free(tables);
}

TEST(Statistics, RefuseAPlaceOfRowsThatCannotBe) {
  const Collected collected;
  const std::vector<float> q(kQueryHeads * kDim);
  const kvx_rows_t q_rows = api::rows(q.data(), KVX_DTYPE_F32);
  auto args = sized<kvx_statistics_rows_t>();
  args.num_rows = 1;
  args.q = &q_rows;
  args.memory = KVX_MEMORY_UNIFIED;
  EXPECT_EQ(kvx_statistics_feed(collected, &args), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("rows.memory is 3"));
  args.memory = KVX_MEMORY_HOST;
  int stream = 0;
  args.stream = &stream;
  EXPECT_EQ(kvx_statistics_feed(collected, &args), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("expected KVX_MEMORY_DEVICE with a stream"));
  args.stream = nullptr;
  args.reserved = 1;
  EXPECT_EQ(kvx_statistics_feed(collected, &args), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("rows.reserved is 1"));
  args.reserved = 0;
  args.memory = KVX_MEMORY_DEVICE;  // the rows are the host's
  EXPECT_NE(kvx_statistics_feed(collected, &args), KVX_STATUS_OK);
  // A caller of before these fields.
  args.memory = 77;
  args.size = offsetof(kvx_statistics_rows_t, memory);
  EXPECT_EQ(kvx_statistics_feed(collected, &args), KVX_STATUS_OK) << kvx_last_error();
}

TEST(Statistics, RefuseWhatDoesNotFitAndNameIt) {
  auto config = sized<kvx_statistics_config_t>();
  kvx_statistics_t handle = nullptr;
  EXPECT_EQ(kvx_statistics_create(nullptr, &handle), kInvalid);
  EXPECT_EQ(kvx_statistics_create(&config, nullptr), kInvalid);
  EXPECT_EQ(kvx_statistics_create(&config, &handle), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("num_layers"));
  config.num_layers = kLayers;
  config.num_kv_heads = kHeads;
  config.k_head_dim = config.v_head_dim = kDim;
  config.num_q_heads = 3;
  EXPECT_EQ(kvx_statistics_create(&config, &handle), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("num_q_heads is 3"));
  config.num_q_heads = 4;
  config.num_inv_freq = 3;
  EXPECT_EQ(kvx_statistics_create(&config, &handle), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("num_inv_freq is 3"));
  EXPECT_EQ(handle, nullptr);

  Collected collected;
  std::vector<float> k(kHeads * kDim), v = k, q(kQueryHeads * kDim);
  EXPECT_EQ(collected.feed(2, 0, k, v, q), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(collected.feed(0, -1, k, v, q), kInvalid);
  EXPECT_EQ(collected.feed(0, 0, {}, v, q), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("num_rows is 0"));
  q[kDim + 3] = NAN;
  EXPECT_EQ(collected.feed(1, 7, k, v, q), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("q of layer 1 is nan at position 7, head 1, channel 3"));
  auto values = sized<kvx_statistics_layer_t>();
  ASSERT_EQ(kvx_statistics_layer(collected, 1, &values), KVX_STATUS_OK);
  EXPECT_EQ(values.num_rows, 0);  // nothing of them was counted
  values.k_mean = k.data();
  EXPECT_EQ(kvx_statistics_layer(collected, 1, &values), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("layer 1 was fed 0 rows"));
  EXPECT_EQ(kvx_statistics_layer(collected, 2, &values), KVX_STATUS_OUT_OF_RANGE);
  EXPECT_EQ(kvx_statistics_percentiles(collected, 0, 2, 16, 99, k.data()), kInvalid);
  EXPECT_EQ(kvx_statistics_percentiles(collected, 0, 0, 5, 99, k.data()), kInvalid);
  EXPECT_EQ(kvx_statistics_percentiles(collected, 0, 0, 16, 101, k.data()), kInvalid);
  EXPECT_EQ(kvx_statistics_merge(collected, collected), kInvalid);
  EXPECT_EQ(kvx_statistics_merge(collected, nullptr), kInvalid);

  auto fit = sized<kvx_fit_config_t>();
  kvx_tables_t tables = nullptr;
  fit.recipe = "nvfp4:immediate";
  EXPECT_EQ(kvx_statistics_fit(collected, &fit, &tables), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("config.tables is 0"));
  fit.tables = KVX_FIT_K_MEAN;
  EXPECT_EQ(kvx_statistics_fit(collected, &fit, &tables), kInvalid);
  EXPECT_THAT(kvx_last_error(), HasSubstr("layer 0 was fed 0 rows"));
  collected.feed(0, kRows);
  fit.recipe = "int5";
  EXPECT_EQ(kvx_statistics_fit(collected, &fit, &tables), kInvalid);
  EXPECT_EQ(tables, nullptr);
  EXPECT_EQ(kvx_statistics_feed(nullptr, nullptr), kInvalid);
  kvx_statistics_free(nullptr);
}

}  // namespace
}  // namespace kvx::api_test::statistics_test

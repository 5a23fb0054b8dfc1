// v1 caches of 8-bit floats in the verbs of 1.2: the scales of kvx_layer_t.
#include <gmock/gmock.h>

#include "tests/api/caller_layer.hpp"

namespace kvx::api_test::cache_layer_test {
namespace {

using testing::HasSubstr;

// Geometry{}'s blocks as 8-bit floats in NHD, with scales of one granularity for K and for V.
struct Fp8Cache {
  Fp8Cache(kvx_dtype_t dtype, kvx_scale_granularity_t granularity)
      : k_scale(desc(granularity, k_scales.data())), v_scale(desc(granularity, v_scales.data())) {
    for (size_t i = 0; i < k_scales.size(); ++i) {
      k_scales[i] = 0.01f + 0.003f * static_cast<float>(i);
      v_scales[i] = 0.05f - 0.002f * static_cast<float>(i);
    }
    cache = api::nhd_cache(k.data(), v.data(), dtype, {6, 8, 2, 32});
    layer.cache = &cache;
    layer.k_scale = &k_scale;
    layer.v_scale = &v_scale;
  }
  Fp8Cache(const Fp8Cache&) = delete;

  static kvx_scale_desc_t desc(kvx_scale_granularity_t granularity, const float* data) {
    auto result = sized<kvx_scale_desc_t>();
    result.dtype = KVX_DTYPE_F32;
    result.granularity = granularity;
    result.data = data;
    result.ndim = granularity == KVX_SCALE_PER_BLOCK_HEAD ? 2 : 1;
    const bool has_blocks =
        granularity == KVX_SCALE_PER_BLOCK || granularity == KVX_SCALE_PER_BLOCK_HEAD;
    result.shape[0] = has_blocks ? 6 : granularity == KVX_SCALE_PER_HEAD ? 2 : 1;
    result.shape[1] = 2;
    result.stride[0] = granularity == KVX_SCALE_PER_BLOCK_HEAD ? 2 : 1;
    result.stride[1] = 1;
    return result;
  }

  std::vector<uint8_t> k = std::vector<uint8_t>(6 * 8 * 64, 0x31);
  std::vector<uint8_t> v = std::vector<uint8_t>(6 * 8 * 64, 0x31);
  std::vector<float> k_scales = std::vector<float>(12);
  std::vector<float> v_scales = std::vector<float>(12);
  kvx_scale_desc_t k_scale;
  kvx_scale_desc_t v_scale;
  kvx_cache_desc_t cache;
  kvx_layer_t layer = sized<kvx_layer_t>();
};

constexpr kvx_dtype_t kTypes[] = {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2};
constexpr kvx_scale_granularity_t kGranularities[] = {KVX_SCALE_PER_TENSOR, KVX_SCALE_PER_BLOCK,
                                                      KVX_SCALE_PER_HEAD, KVX_SCALE_PER_BLOCK_HEAD};

kvx_status_t write_v1(Fp8Cache& target, const std::vector<float>& k, const std::vector<float>& v,
                      const std::vector<int64_t>& slots) {
  auto write = sized<kvx_write_desc_t>();
  write.io = sized<kvx_kv_io_desc_t>();
  const auto num_tokens = std::ssize(slots);
  const auto rows_of = [num_tokens](const std::vector<float>& rows) {
    return api::tensor(const_cast<float*>(rows.data()), KVX_DTYPE_F32, KVX_LAYOUT_INVALID,
                       {num_tokens, 2, 32});
  };
  write.io.key = rows_of(k);
  write.io.value = rows_of(v);
  write.io.num_tokens = static_cast<uint32_t>(num_tokens);
  write.io.num_kv_heads = 2;
  write.io.head_dim = 32;
  write.slots = sized<kvx_slot_mapping_t>();
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = static_cast<uint32_t>(num_tokens);
  write.slots.invalid_slot = -1;
  write.slots.slots = slots.data();
  write.k_scale_desc = target.k_scale;
  write.v_scale_desc = target.v_scale;
  return kvx_write_kv(&target.cache, &write, nullptr);
}

struct Rows {
  std::vector<float> k = std::vector<float>(kTokens * 64);
  std::vector<float> v = std::vector<float>(kTokens * 64);
};

TEST(Fp8CacheLayer, AppendWritesTheBytesOfTheV1Call) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<int64_t> slots = slots_of(sequence, 8);
  const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
  const std::vector<float> v = test_rows(kTokens, 2, 32, 1.9f);
  for (const kvx_dtype_t dtype : kTypes) {
    for (const kvx_scale_granularity_t granularity : kGranularities) {
      SCOPED_TRACE(testing::Message() << dtype << " " << granularity);
      Fp8Cache expected(dtype, granularity);
      Fp8Cache found(dtype, granularity);
      ASSERT_EQ(write_v1(expected, k, v, slots), KVX_STATUS_OK) << kvx_last_error();
      ASSERT_EQ(append_rows(found.layer, k, v, slots), KVX_STATUS_OK) << kvx_last_error();
      EXPECT_EQ(found.k, expected.k);
      EXPECT_EQ(found.v, expected.v);
    }
  }
}

TEST(Fp8CacheLayer, IsGatheredAttendedAndTranscodedUnderItsScales) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<int64_t> slots = slots_of(sequence, 8);
  const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
  const std::vector<float> v = test_rows(kTokens, 2, 32, 1.9f);
  for (const kvx_dtype_t dtype : kTypes) {
    for (const kvx_scale_granularity_t granularity : kGranularities) {
      SCOPED_TRACE(testing::Message() << dtype << " " << granularity);
      Fp8Cache cache(dtype, granularity);
      ASSERT_EQ(write_v1(cache, k, v, slots), KVX_STATUS_OK) << kvx_last_error();
      Rows rows;
      ASSERT_EQ(gather_rows(cache.layer, sequence, rows.k, rows.v), KVX_STATUS_OK)
          << kvx_last_error();
      // E5M2 has three bits of a number; the magnitudes are at most 1.45 and the scales small.
      EXPECT_LT(largest_difference(rows.k, k), 0.2);
      EXPECT_LT(largest_difference(rows.v, v), 0.2);
      for (const int num_queries : {1, 5}) {
        Attention attention(cache.layer, sequence, num_queries);
        ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
        EXPECT_LT(largest_difference(attention.out,
                                     plain_attention(attention.q, rows.k, rows.v, num_queries,
                                                     kTokens, kQHeads, Geometry{})),
                  2e-5);
      }
      PagedLayer floats(Geometry{}, in_page(KVX_FORMAT_F32), in_page(KVX_FORMAT_F32));
      auto transcode = sized<kvx_transcode_args_t>();
      transcode.from = &cache.layer;
      transcode.to = &floats.layer;
      transcode.slot_dtype = KVX_DTYPE_S64;
      transcode.num_tokens = kTokens;
      transcode.from_slots = transcode.to_slots = slots.data();
      ASSERT_EQ(kvx_transcode(&transcode, nullptr), KVX_STATUS_OK) << kvx_last_error();
      Rows again;
      ASSERT_EQ(gather_rows(floats.layer, sequence, again.k, again.v), KVX_STATUS_OK);
      EXPECT_EQ(again.k, rows.k);
      EXPECT_EQ(again.v, rows.v);
    }
  }
}

// Scales of 16 bits, between numbers that are none: what is appended, gathered and copied under
// them are the bytes and numbers of the v1 calls.
TEST(Fp8CacheLayer, TakesScalesOf16Bits) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  const std::vector<int64_t> slots = slots_of(sequence, 8);
  const std::vector<float> k = test_rows(kTokens, 2, 32, 0.3f);
  const std::vector<float> v = test_rows(kTokens, 2, 32, 1.9f);
  for (const kvx_dtype_t scale_dtype : {KVX_DTYPE_F16, KVX_DTYPE_BF16}) {
    for (const kvx_scale_granularity_t granularity : kGranularities) {
      SCOPED_TRACE(testing::Message() << scale_dtype << " " << granularity);
      std::vector<uint16_t> scales(24, 0x7FFF);
      for (size_t i = 0; i < 12; ++i) {
        scales[2 * i] = static_cast<uint16_t>((scale_dtype == KVX_DTYPE_F16 ? 0x2800 : 0x3D00) +
                                              37 * i);  // from 1/32 on
      }
      const auto with_them = [&](Fp8Cache& cache) {
        for (kvx_scale_desc_t* desc : {&cache.k_scale, &cache.v_scale}) {
          desc->dtype = scale_dtype;
          desc->data = scales.data();
          desc->stride[0] *= 2;
          desc->stride[1] = 2;
        }
      };
      Fp8Cache expected(KVX_DTYPE_F8_E4M3, granularity);
      Fp8Cache found(KVX_DTYPE_F8_E4M3, granularity);
      with_them(expected);
      with_them(found);
      ASSERT_EQ(write_v1(expected, k, v, slots), KVX_STATUS_OK) << kvx_last_error();
      ASSERT_EQ(append_rows(found.layer, k, v, slots), KVX_STATUS_OK) << kvx_last_error();
      EXPECT_EQ(found.k, expected.k);
      EXPECT_EQ(found.v, expected.v);
      Rows rows;
      ASSERT_EQ(gather_rows(found.layer, sequence, rows.k, rows.v), KVX_STATUS_OK)
          << kvx_last_error();
      EXPECT_LT(largest_difference(rows.k, k), 0.2);
      Attention attention(found.layer, sequence, 1);
      ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
      EXPECT_LT(largest_difference(attention.out, plain_attention(attention.q, rows.k, rows.v, 1,
                                                                  kTokens, kQHeads, Geometry{})),
                2e-5);
    }
  }
}

TEST(Fp8CacheLayer, CopiesItsBlocksToOneOfTheSameScales) {
  const OneSequence sequence({4, 1, 5}, kTokens);
  Fp8Cache from(KVX_DTYPE_F8_E4M3, KVX_SCALE_PER_HEAD);
  Fp8Cache to(KVX_DTYPE_F8_E4M3, KVX_SCALE_PER_HEAD);
  ASSERT_EQ(write_v1(from, test_rows(kTokens, 2, 32, 0.3f), test_rows(kTokens, 2, 32, 1.9f),
                     slots_of(sequence, 8)),
            KVX_STATUS_OK);
  const std::vector<int64_t> blocks = {4, 1, 5};
  auto copy = sized<kvx_copy_args_t>();
  copy.from = &from.layer;
  copy.to = &to.layer;
  copy.num_copies = 3;
  copy.from_blocks = copy.to_blocks = blocks.data();
  ASSERT_EQ(kvx_copy_blocks(&copy, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(to.k, from.k);
  EXPECT_EQ(to.v, from.v);
}

TEST(Fp8CacheLayer, RefusesScalesThatDoNotFitAndWritesNothing) {
  struct Case {
    const char* message;
    kvx_status_t status;
    void (*spoil)(Fp8Cache&);
  };
  static float zeros[12] = {};
  const Case cases[] = {
      {"layer.k_scale is null; its side of the cache is F8", KVX_STATUS_INVALID_ARGUMENT,
       [](Fp8Cache& c) { c.layer.k_scale = nullptr; }},
      {"layer.v_scale.data is null", KVX_STATUS_INVALID_ARGUMENT,
       [](Fp8Cache& c) { c.v_scale.data = nullptr; }},
      {"layer.v_scale.shape[0] is 5; expected 2", KVX_STATUS_INVALID_ARGUMENT,
       [](Fp8Cache& c) { c.v_scale.shape[0] = 5; }},
      {"layer.k_scale of head 0, group 0 is 0", KVX_STATUS_INVALID_ARGUMENT,
       [](Fp8Cache& c) { c.k_scale.data = zeros; }},
      {"layer.k_scale is set; its side of the cache is f16", KVX_STATUS_INVALID_ARGUMENT,
       [](Fp8Cache& c) {
         static std::vector<uint16_t> halves(6 * 8 * 64);
         c.cache.k = api::tensor(halves.data(), KVX_DTYPE_F16, KVX_LAYOUT_BLOCK_NHD, {6, 8, 2, 32});
       }},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.message);
    Fp8Cache cache(KVX_DTYPE_F8_E4M3, KVX_SCALE_PER_HEAD);
    bad.spoil(cache);
    const std::vector<uint8_t> before = cache.v;
    EXPECT_EQ(append_rows(cache.layer, test_rows(1, 2, 32, 0.3f), test_rows(1, 2, 32, 0.5f), {3}),
              bad.status);
    EXPECT_THAT(kvx_last_error(), HasSubstr(bad.message));
    EXPECT_EQ(cache.v, before);
  }
  PagedLayer pages(Geometry{}, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT8));
  const kvx_scale_desc_t scale = Fp8Cache::desc(KVX_SCALE_PER_TENSOR, zeros);
  pages.layer.v_scale = &scale;
  EXPECT_EQ(append_rows(pages.layer, test_rows(1, 2, 32, 0.3f), test_rows(1, 2, 32, 0.5f), {3}),
            KVX_STATUS_INVALID_ARGUMENT);
  EXPECT_THAT(kvx_last_error(), HasSubstr("layer.v_scale is set; only a layer of a v1 cache"));
}

}  // namespace
}  // namespace kvx::api_test::cache_layer_test

// vLLM's and FlashMLA's latent rows of 656 bytes, read and written where they lie, against bytes
// made by vLLM's own rule.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#define KVX_NO_SHORT_NAMESPACE  // the core's own kvx::Result is seen here
#include "kvx/engines/vllm.hpp"
#include "tests/api/caller_layer.hpp"
#include "tests/support/golden.hpp"

namespace kvx::api_test::fp8_ds_mla_test {
namespace {

using api::engines::Tensor;
using testing::HasSubstr;

constexpr int64_t kBlocks = 2;
constexpr int64_t kBlockTokens = 8;
constexpr int64_t kRecord = 656;

class Fp8DsMla : public testing::Test {
 protected:
  Tensor kv_cache() { return {memory_.data(), KVX_DTYPE_U8, {kBlocks, kBlockTokens, kRecord}}; }
  // The golden records as tokens 0, 1, ... of block 1.
  void fill() {
    auto to = memory_.begin() + kBlockTokens * kRecord;
    for (const tests::Json& row : rows_) {
      to = std::ranges::copy(tests::bytes_of_hex(row.at("record")), to).out;
    }
  }
  std::vector<float> all(const char* field) const {
    std::vector<float> numbers;
    for (const tests::Json& row : rows_) {
      const auto of_row = tests::floats_of_hex(row.at(field));
      numbers.insert(numbers.end(), of_row.begin(), of_row.end());
    }
    return numbers;
  }

  const tests::Json golden_ = tests::read_golden("latent_fp8");
  const tests::Json& rows_ = golden_.at("rows");
  const int latent_ = golden_.at("latent");
  const int row_ = latent_ + golden_.at("rotary").get<int>();
  const OneSequence sequence_{{1}, static_cast<int32_t>(rows_.size())};
  std::vector<uint8_t> memory_ = std::vector<uint8_t>(kBlocks * kBlockTokens * kRecord, 0xAB);
};

TEST_F(Fp8DsMla, RowsAreReadAsVllmReadsThem) {
  fill();
  const auto layer = api::vllm::fp8_ds_mla_layer(kv_cache());
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const std::vector<float> expected = all("decoded");
  std::vector<float> k(expected.size());
  std::vector<float> v(rows_.size() * latent_);
  ASSERT_EQ(gather_rows(*layer->get(), sequence_, k, v), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(k, expected);
  for (size_t i = 0; i < v.size(); ++i) ASSERT_EQ(v[i], k[i / latent_ * row_ + i % latent_]) << i;
}

TEST_F(Fp8DsMla, RowsAreWrittenAsVllmWritesThem) {
  fill();
  const std::vector<uint8_t> expected = memory_;
  std::ranges::fill(memory_, uint8_t{0xAB});
  const auto layer = api::vllm::fp8_ds_mla_layer(kv_cache());
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  const std::vector<float> rows = all("row");
  const kvx_rows_t k_rows = api::rows(rows.data(), KVX_DTYPE_F32);
  const std::vector<int64_t> slots = slots_of(sequence_, kBlockTokens);
  kvx_append_args_t args = append_args(*layer->get(), k_rows, slots);
  args.v = nullptr;
  ASSERT_EQ(kvx_append(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(memory_, expected);
}

TEST_F(Fp8DsMla, AttentionReadsTheRecords) {
  fill();
  const auto layer = api::vllm::fp8_ds_mla_layer(kv_cache());
  ASSERT_TRUE(layer.ok()) << layer.failure().text;
  Attention attention(*layer->get(), sequence_, 1, static_cast<uint32_t>(row_));
  ASSERT_EQ(kvx_attend(&attention.args, nullptr), KVX_STATUS_OK) << kvx_last_error();
  const std::vector<float> k = all("decoded");
  Geometry geometry;
  geometry.head_dim = static_cast<uint32_t>(row_);
  geometry.num_kv_heads = 1;
  const std::vector<float> whole =
      plain_attention(attention.q, k, k, 1, sequence_.lengths[0], kQHeads, geometry);
  for (int h = 0; h < kQHeads; ++h) {
    for (int d = 0; d < latent_; ++d) {
      ASSERT_NEAR(attention.out[h * latent_ + d], whole[h * row_ + d], 2e-5) << h << ", " << d;
    }
  }
}

TEST_F(Fp8DsMla, OtherRowsAreRefused) {
  Tensor narrow = kv_cache();
  narrow.shape[2] = 640;
  EXPECT_THAT(api::vllm::fp8_ds_mla_layer(narrow).failure().text, HasSubstr("rows of 640"));
  Tensor floats = kv_cache();
  floats.dtype = KVX_DTYPE_BF16;
  EXPECT_THAT(api::vllm::fp8_ds_mla_layer(floats).failure().text, HasSubstr("expected 656"));
}

}  // namespace
}  // namespace kvx::api_test::fp8_ds_mla_test

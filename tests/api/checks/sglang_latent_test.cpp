// SGLang's packed FP4 latent rows, described to the verbs where they lie: kv_buffer and
// kv_scale_buffer of one layer, slot after slot, against bytes made by SGLang's own rule.
#include <gtest/gtest.h>

#include "tests/api/caller_layer.hpp"
#include "tests/support/golden.hpp"

namespace kvx::api_test::sglang_latent_test {
namespace {

constexpr int kPageSize = 16;

// kv_buffer uint8 [slots, 1, row / 2], kv_scale_buffer uint8 [slots, row / 16].
struct SglangLayer : PrefixLayer {
  SglangLayer(int latent_dim, int row_dim)
      : PrefixLayer(latent_dim), row_bytes(row_dim / 2), scale_bytes(row_dim / 16) {
    kv_buffer.resize(kPageSize * row_bytes);
    kv_scale_buffer.resize(kPageSize * scale_bytes);
    k.head_dim = static_cast<uint32_t>(row_dim);
    k.spec = &spec;
    k.codes = kv_buffer.data();
    k.code_token_stride = k.code_head_stride = static_cast<int64_t>(row_bytes);
    k.code_block_stride = static_cast<int64_t>(kPageSize * row_bytes);
    k.scales = kv_scale_buffer.data();
    k.scale_group_stride = 1;
    k.scale_token_stride = k.scale_head_stride = static_cast<int64_t>(scale_bytes);
    k.scale_block_stride = static_cast<int64_t>(kPageSize * scale_bytes);
    layer.block_size = kPageSize;
    layer.num_blocks = 1;
  }

  size_t row_bytes, scale_bytes;
  std::vector<uint8_t> kv_buffer, kv_scale_buffer;
  kvx_format_spec_t spec = format_spec(KVX_FORMAT_MXFP4_G16);
};

class SglangLatent : public testing::Test {
 protected:
  const tests::Json golden_ = tests::read_golden("sglang_latent");
  const int latent_ = golden_.at("latent");
  const int row_ = latent_ + golden_.at("rotary").get<int>();
};

TEST_F(SglangLatent, RowsAreReadAsSglangReadsThem) {
  SglangLayer layer(latent_, row_);
  std::vector<float> expected;
  for (size_t t = 0; t < golden_.at("rows").size(); ++t) {
    const tests::Json& row = golden_.at("rows").at(t);
    const auto codes = tests::bytes_of_hex(row.at("kv_buffer"));
    const auto scales = tests::bytes_of_hex(row.at("kv_scale_buffer"));
    std::ranges::copy(codes, layer.kv_buffer.begin() + t * layer.row_bytes);
    std::ranges::copy(scales, layer.kv_scale_buffer.begin() + t * layer.scale_bytes);
    const auto decoded = tests::floats_of_hex(row.at("decoded"));
    expected.insert(expected.end(), decoded.begin(), decoded.end());
  }
  const auto num_rows = static_cast<int>(golden_.at("rows").size());
  const OneSequence sequence({0}, num_rows);
  std::vector<float> k(expected.size());
  std::vector<float> v(static_cast<size_t>(num_rows * latent_));
  ASSERT_EQ(gather_rows(layer.layer, sequence, k, v), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_EQ(k, expected);
  for (int t = 0; t < num_rows; ++t) {
    for (int d = 0; d < latent_; ++d) ASSERT_EQ(v[t * latent_ + d], expected[t * row_ + d]);
  }
}

TEST_F(SglangLatent, RowsAreWrittenAsSglangWritesThem) {
  int num_compared = 0;
  for (const tests::Json& row : golden_.at("rows")) {
    if (row.at("has_ties").get<bool>()) continue;  // of which the two rules take another neighbour
    SglangLayer layer(latent_, row_);
    const auto numbers = tests::floats_of_hex(row.at("row"));
    const int64_t slot = 3;
    ASSERT_EQ(layer.append(numbers, {slot}), KVX_STATUS_OK) << kvx_last_error();
    const auto codes = tests::bytes_of_hex(row.at("kv_buffer"));
    const auto scales = tests::bytes_of_hex(row.at("kv_scale_buffer"));
    const auto at = [&](const std::vector<uint8_t>& buffer, size_t bytes) {
      return std::vector<uint8_t>(buffer.begin() + slot * bytes,
                                  buffer.begin() + (slot + 1) * bytes);
    };
    EXPECT_EQ(at(layer.kv_buffer, layer.row_bytes), codes);
    EXPECT_EQ(at(layer.kv_scale_buffer, layer.scale_bytes), scales);
    ++num_compared;
  }
  EXPECT_EQ(num_compared, 3);
}

}  // namespace
}  // namespace kvx::api_test::sglang_latent_test

// Error feedback: what it does to the scores' error, and which rows it leaves alone.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/copy_blocks/copy_blocks.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests::ops_feedback_test {
namespace {

constexpr int kTokens = 40;
constexpr int kHeads = 2;

LayerShape shape_of(int head_dim) {
  return {
      .num_blocks = 3, .block_size = 16, .num_heads = kHeads, .k_dim = head_dim, .v_dim = head_dim};
}

// Weights that differ from head to head, [kHeads, head_dim, head_dim].
std::vector<float> weights_of(int head_dim) {
  std::vector<float> weights = normal_floats(size_t(kHeads) * head_dim * head_dim, 5, 0.2f);
  for (int i = 0; i < kHeads * head_dim; ++i) {
    for (int j = 0; j <= i % head_dim; ++j) weights[size_t(i) * head_dim + j] = 0;
  }
  return weights;
}

// The layer's bytes after an append of the rows, K with the feedback.
struct Appended {
  Appended(const format::FormatSpec& spec, const LayerShape& shape, const KvRows& rows,
           const float* feedback)
      : layer(spec, spec, shape) {
    layer.k.view.feedback = feedback;
    if (spec.scale_source == format::ScaleSource::kGiven) {
      layer.k.fill_scales(format::round_scale(spec.scale_type, 0.02f));
    }
    const auto report = append_rows(serial_context(device::CpuLevel::kScalar), layer, shape, rows,
                                    slots_from(0, kTokens));
    EXPECT_TRUE(report.ok());
  }
  TestLayer layer;
};

TEST(Feedback, ZeroWeightsChangeNoByte) {
  for (const char* name : {"nvfp4", "mxfp4", "int4", "int8", "fp8_e4m3", "int4_affine"}) {
    const LayerShape shape = shape_of(64);
    const KvRows rows = normal_rows(shape, kTokens, 3);
    const std::vector<float> zeros(size_t(kHeads) * 64 * 64);
    const Appended plain(spec_named(name), shape, rows, nullptr);
    const Appended fed(spec_named(name), shape, rows, zeros.data());
    EXPECT_TRUE(same_bytes(plain.layer.k.codes, fed.layer.k.codes)) << name;
    EXPECT_TRUE(same_bytes(plain.layer.k.scales, fed.layer.k.scales)) << name;
  }
}

TEST(Feedback, ChangesCodesOfItsSideAloneAndNoScale) {
  for (const char* name : {"nvfp4", "mxfp4", "int4", "int8", "fp8_e4m3", "int4_affine"}) {
    const LayerShape shape = shape_of(64);
    const KvRows rows = normal_rows(shape, kTokens, 3);
    const std::vector<float> weights = weights_of(64);
    const Appended plain(spec_named(name), shape, rows, nullptr);
    const Appended fed(spec_named(name), shape, rows, weights.data());
    EXPECT_FALSE(same_bytes(plain.layer.k.codes, fed.layer.k.codes)) << name;
    EXPECT_TRUE(same_bytes(plain.layer.k.scales, fed.layer.k.scales)) << name;
    EXPECT_TRUE(same_bytes(plain.layer.v.codes, fed.layer.v.codes)) << name;
  }
}

TEST(Feedback, LeavesRowsAloneThatAreNotFiniteOrTooLarge) {
  for (const float outlier : {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity(), 0x1p60f, -0x1p90f}) {
    const LayerShape shape = shape_of(64);
    KvRows rows = normal_rows(shape, kTokens, 3);
    for (size_t row = 0; row < size_t(kTokens) * kHeads; ++row) rows.k[row * 64 + 17] = outlier;
    const std::vector<float> weights = weights_of(64);
    const Appended plain(spec_named("nvfp4"), shape, rows, nullptr);
    const Appended fed(spec_named("nvfp4"), shape, rows, weights.data());
    EXPECT_TRUE(same_bytes(plain.layer.k.codes, fed.layer.k.codes)) << outlier;
  }
}

TEST(Feedback, OneCallWritesWhatACallATokenDoes) {
  const LayerShape shape = shape_of(80);
  const KvRows rows = normal_rows(shape, kTokens, 3);
  const std::vector<float> weights = weights_of(80);
  const auto spec = spec_named("int4");
  const Appended at_once(spec, shape, rows, weights.data());
  TestLayer one_by_one(spec, spec, shape);
  one_by_one.k.view.feedback = weights.data();
  const size_t row = size_t(kHeads) * 80;
  for (int t = 0; t < kTokens; ++t) {
    const auto of_token = [&](const std::vector<float>& all) {
      return std::vector<float>(all.begin() + t * row, all.begin() + (t + 1) * row);
    };
    ASSERT_TRUE(append_rows(serial_context(device::CpuLevel::kScalar), one_by_one, shape,
                            {of_token(rows.k), of_token(rows.v)}, {t})
                    .ok());
  }
  EXPECT_TRUE(same_bytes(at_once.layer.k.codes, one_by_one.k.codes));
}

// A block that leaves the full-precision window is rounded as an appended one.
TEST(Feedback, CopiesFromSixteenBitsFeedBackToo) {
  const LayerShape shape = shape_of(64);
  const KvRows rows = normal_rows(shape, kTokens, 3);
  const std::vector<float> weights = weights_of(64);
  const auto spec = spec_named("nvfp4");
  Appended wide(spec_named("bf16"), shape, rows, nullptr);
  const auto context = serial_context(device::CpuLevel::kScalar);
  const KvRows stored = gather_slots(context, wide.layer, shape, kTokens);
  const Appended expected(spec, shape, stored, weights.data());
  TestLayer copied(spec, spec, shape);
  copied.k.view.feedback = weights.data();
  const ops::BlockCopy copies[] = {{0, 0, 16}, {1, 1, 16}, {2, 2, 8}};
  ASSERT_TRUE(ops::copy_blocks(context, wide.layer.view(), copied.view(), copies).ok());
  EXPECT_TRUE(same_bytes(expected.layer.k.codes, copied.k.codes));
}

}  // namespace
}  // namespace kvx::tests::ops_feedback_test

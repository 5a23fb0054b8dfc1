// Defects of public implementations of these formats (requirements, part 3), each held off by a
// test that they would fail.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "format/list.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/store_row.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::defects_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders

CpuContext best_context() {
  return serial_context(cpu_levels_here().back());
}

// 3.1.1: decode never applied the scales.
TEST(Defects31, No1DecodingAppliesTheScales) {
  for (const char* name : {"mxfp4_g16", "nvfp4"}) {
    std::vector<float> x(32, 6.0f);
    for (int i = 16; i < 32; ++i) x[i] = 96.0f;
    EXPECT_EQ(store_row(spec_named(name), x).back, x) << name;
  }
}

// 3.1.2: at head_dim 128 the eight tokens of a tile shared one maximum, and only 8 of 64 tokens had
// their scale bytes written.
TEST(Defects31, No2EveryTokenOfATileHasItsOwnScaleBytesAndAllAreWritten) {
  const LayerShape shape = {
      .num_blocks = 1, .block_size = 64, .num_heads = 8, .k_dim = 128, .v_dim = 128};
  for (const char* name : {"mxfp4_g16", "nvfp4"}) {
    TestLayer layer(spec_named(name), spec_named(name), shape);
    KvRows rows = normal_rows(shape, 64, 1);
    for (size_t i = 0; i < rows.k.size(); ++i) {  // token t is 2^(t % 8) times as large
      rows.k[i] *= std::ldexp(1.0f, static_cast<int>(i / (8 * 128) % 8));
    }
    ASSERT_TRUE(append_rows(best_context(), layer, shape, rows, slots_from(0, 64)).ok());
    for (int head = 0; head < 8; ++head) {
      for (int t = 0; t < 64; ++t) {
        const auto first = rows.k.begin() + (t * 8 + head) * 128;
        const StoredRow alone = store_row(spec_named(name), {first, first + 128});
        EXPECT_TRUE(same_bytes(alone.scales, layer.k.scales_at(0, t, head)))
            << name << " token " << t << " head " << head;
        for (const uint8_t byte : layer.v.scales_at(0, t, head)) EXPECT_NE(byte, 0xCC);
      }
    }
  }
}

// 3.1.2: rows past the end of the call took part in a maximum, so every decode step was wrong.
TEST(Defects31, No2OneTokenAloneHasTheBytesItHasInACrowd) {
  const LayerShape shape = {.num_blocks = 1, .block_size = 64, .num_heads = 1, .k_dim = 128};
  TestLayer crowd(spec_named("mxfp4_g16"), spec_named("mxfp4_g16"), shape);
  TestLayer alone(spec_named("mxfp4_g16"), spec_named("mxfp4_g16"), shape);
  const KvRows rows = normal_rows(shape, 64, 2);
  ASSERT_TRUE(append_rows(best_context(), crowd, shape, rows, slots_from(0, 64)).ok());
  ASSERT_TRUE(append_rows(best_context(), alone, shape, rows, {0}).ok());
  EXPECT_TRUE(same_bytes(crowd.k.codes_at(0, 0, 0), alone.k.codes_at(0, 0, 0)));
  EXPECT_TRUE(same_bytes(crowd.k.scales_at(0, 0, 0), alone.k.scales_at(0, 0, 0)));
}

// 3.1.3: kernels added 16 parameter bits a token that the allocation had not counted.
TEST(Defects31, No3Fp4RowsHaveNoAffineParameters) {
  for (const char* name : {"mxfp4_g16", "nvfp4"}) {
    const auto spec = spec_named(name);
    EXPECT_EQ(format::code_bytes_per_row(spec, 128), 64);
    EXPECT_EQ(format::scale_bytes_per_row(spec, 128), 8);
    EXPECT_FALSE(spec.is_affine());
  }
}

// 3.1.4: "NVFP4" was the MXFP4 kernel.
TEST(Defects31, No4Nvfp4StoresE4M3ScalesNotExponents) {
  std::vector<float> x(16, 0.0f);
  x[0] = 6 * 1.125f;
  EXPECT_EQ(store_row(spec_named("nvfp4"), x).scales[0], 0x39);
  EXPECT_EQ(store_row(spec_named("mxfp4_g16"), x).scales[0], 128);
  EXPECT_EQ(store_row(spec_named("nvfp4"), x).back[0], x[0]);
}

// 3.1.5: int4 and int8 flatten built its converters before the parameters were loaded.
TEST(Defects31, No5GatherUsesEachTokensOwnAffineParameters) {
  const LayerShape shape = {.num_blocks = 2, .block_size = 8, .num_heads = 2};
  for (const char* name : {"int8_affine", "int4_affine"}) {
    TestLayer layer(spec_named(name), spec_named(name), shape);
    KvRows rows = normal_rows(shape, 16, 3);
    for (size_t i = 0; i < rows.k.size(); ++i) rows.k[i] += static_cast<float>(i / 64);
    ASSERT_TRUE(append_rows(best_context(), layer, shape, rows, slots_from(0, 16)).ok());
    const KvRows back = gather_slots(best_context(), layer, shape, 16);
    for (size_t first = 0; first < rows.k.size(); first += 64) {
      const std::vector<float> x(rows.k.begin() + first, rows.k.begin() + first + 64);
      const std::vector<float> found(back.k.begin() + first, back.k.begin() + first + 64);
      EXPECT_EQ(store_row(spec_named(name), x).back, found) << name << " row " << first / 64;
    }
  }
}

// 3.1.6: 2^e went through expf and then half precision, which overflows above 2^15.
TEST(Defects31, No6EveryPowerOfTwoScaleDecodesExactly) {
  for (int e = -126; e <= 125; ++e) {
    const std::vector<float> x(16, std::ldexp(6.0f, e - 1));
    const StoredRow row = store_row(spec_named("mxfp4_g16"), x);
    EXPECT_EQ(row.back, x) << e;
  }
}

// 3.3: the Metal kernels computed head_dim / 32 elements a lane, so dims 64 to 79 of 80 were lost.
TEST(Defects33, UnevenHeadDim80KeepsDims64To79) {
  for (const format::Facts* facts : format::kRowFacts) {
    const auto spec = computed_spec(*facts);
    if (!format::check_head_dim(spec, 80).ok()) continue;
    std::vector<float> x(80, 0.0f);
    for (int i = 64; i < 80; ++i) x[i] = 4.0f;
    const StoredRow row = store_row(spec, x);
    for (int i = 64; i < 80; ++i) EXPECT_NEAR(row.back[i], 4.0f, 0.13f) << facts->name << " " << i;
  }
}

// 3.3: head_dim above 128 was refused or wrong.
TEST(Defects33, HeadDimsBeyond128AreKept) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const int head_dim : {192, 256, 576}) {
      const std::vector<float> x(head_dim, -4.0f);
      const StoredRow row = store_row(computed_spec(*facts), x);
      for (int i = 0; i < head_dim; ++i) {
        ASSERT_NEAR(row.back[i], -4.0f, 0.13f) << facts->name << " " << i;
      }
    }
  }
}

// 3.3: the Python "fp4" was a linear code in [-4, 3.5] steps that clips the maximum by 42 %.
TEST(Defects33, Fp4IsReallyE2M1) {
  std::vector<float> x(8, 0.0f);
  std::set<float> magnitudes;
  for (int i = 0; i <= 600; ++i) {
    x[0] = 6.0f;
    x[1] = static_cast<float>(i) / 100;
    magnitudes.insert(store_row(spec_named("fp4_row"), x).back[1]);
  }
  EXPECT_EQ(magnitudes, (std::set<float>{0, 0.5f, 1, 1.5f, 2, 3, 4, 6}));
  const StoredRow row = store_row(spec_named("fp4_row"), {6, -6, 3, 1, 0, 0, 0, 0});
  EXPECT_EQ(row.back[0], 6.0f) << "the largest number is not clipped";
  EXPECT_EQ(row.back[1], -6.0f);
}

// 3.3: the Python "fp8" was linear with an offset of 128 for E4M3 and E5M2 alike.
TEST(Defects33, Fp8IsReallyAFloat) {
  const auto one = format::StoredScale{std::bit_cast<uint32_t>(1.0f)};
  const std::vector<float> x = {0x1p-9f, 448.0f, 1.0f, -0.0625f};
  EXPECT_EQ(store_row(spec_named("fp8_e4m3"), x, 1, one).back, x);
  const std::vector<float> extremes = {0x1p-16f, 57344.0f, 1.0f, -0.0625f};
  EXPECT_EQ(store_row(spec_named("fp8_e5m2"), extremes, 1, one).back, extremes);
}

}  // namespace
}  // namespace kvx::ops::defects_test

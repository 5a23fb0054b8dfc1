// Page-shared scales: one scale a group of a block, and what happens when it must grow.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "format/list.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::page_shared_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using format::ScaleSource;

constexpr LayerShape kShape = {
    .num_blocks = 2, .block_size = 8, .num_heads = 2, .k_dim = 96, .v_dim = 96};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Page {
  explicit Page(const format::Facts& facts)
      : spec(format::make_spec(facts, {.scale_source = ScaleSource::kPageShared}).value()),
        layer(spec, spec, kShape) {}
  explicit Page(std::string_view name)
      : Page(format::facts_of(format::format_named(name).value())) {}

  AppendReport append(const CpuContext& context, const KvRows& rows, int64_t first, int count) {
    return append_rows(context, layer, kShape, rows, slots_from(first, count)).value();
  }
  // The step of a group, decoded; formats with a tensor scale use 1 here.
  float step(int64_t block, int head, int group) const {
    const uint8_t* scale =
        layer.k.view.scales.at(block, 0, head) + group * layer.k.view.scales.group_stride;
    return decode_scale(spec.scale_type, format::load_scale(spec.scale_type, scale));
  }

  format::FormatSpec spec;
  TestLayer layer;
};

// Rows whose magnitude doubles from token to token, so that every append makes the scale grow.
KvRows growing_rows(int num_tokens) {
  KvRows rows = normal_rows(kShape, num_tokens, 11);
  const size_t row = size_t(kShape.num_heads) * kShape.k_dim;
  for (size_t i = 0; i < rows.k.size(); ++i) {
    rows.k[i] *= std::ldexp(1.0f, static_cast<int>(i / row));
    rows.v[i] *= std::ldexp(1.0f, static_cast<int>(i / row));
  }
  return rows;
}

KvRows token_of(const KvRows& rows, int token) {
  const size_t row = size_t(kShape.num_heads) * kShape.k_dim;
  return {{rows.k.begin() + token * row, rows.k.begin() + (token + 1) * row},
          {rows.v.begin() + token * row, rows.v.begin() + (token + 1) * row}};
}

std::vector<const format::Facts*> formats_with_page_scales() {
  std::vector<const format::Facts*> found;
  for (const format::Facts* facts : format::kAllFacts) {
    if (facts->scale_sources.allows(ScaleSource::kPageShared)) found.push_back(facts);
  }
  return found;
}

// Half the widest gap of a format's grid, in steps.
double half_gap(const format::Facts& facts) {
  if (facts.element == "E2M1") return 1.0;     // 4 to 6
  if (facts.element == "E4M3") return 16.0;    // 416 to 448
  if (facts.element == "E5M2") return 4096.0;  // 49152 to 57344
  return 0.5;
}

TEST(PageShared, OneCallForAWholeBlockIsOneScaleThatClipsNothing) {
  for (const format::Facts* facts : formats_with_page_scales()) {
    Page page(*facts);
    const KvRows rows = growing_rows(8);
    page.append(serial_context(cpu_levels_here().back()), rows, 0, 8);
    const KvRows back =
        gather_slots(serial_context(cpu_levels_here().back()), page.layer, kShape, 8);
    const int length = format::group_length(page.spec, kShape.k_dim);
    for (size_t i = 0; i < rows.k.size(); ++i) {
      const int head = static_cast<int>(i / 96 % 2);
      const double step = page.step(0, head, static_cast<int>(i % 96) / length);
      EXPECT_LE(std::fabs(rows.k[i] - back.k[i]), half_gap(*facts) * step * 1.001)
          << facts->name << " element " << i;
    }
  }
}

// Each growth at least doubles the step here, so the errors of all requantisations add up to less
// than two of the last.
TEST(PageShared, TokenByTokenStaysWithinTwoRoundingsOfTheLastStep) {
  for (const device::CpuLevel level : cpu_levels_here()) {
    for (const format::Facts* facts : formats_with_page_scales()) {
      Page page(*facts);
      const KvRows rows = growing_rows(8);
      for (int t = 0; t < 8; ++t) page.append(serial_context(level), token_of(rows, t), t, 1);
      const KvRows back = gather_slots(serial_context(level), page.layer, kShape, 8);
      const int length = format::group_length(page.spec, kShape.k_dim);
      for (size_t i = 0; i < rows.k.size(); ++i) {
        const int head = static_cast<int>(i / 96 % 2);
        const double step = page.step(0, head, static_cast<int>(i % 96) / length);
        EXPECT_LE(std::fabs(rows.k[i] - back.k[i]), 2.2 * half_gap(*facts) * step)
            << facts->name << " element " << i << " at " << name_of(level);
      }
    }
  }
}

TEST(PageShared, ASmallerTokenLeavesTheScaleAndEarlierCodesAlone) {
  for (const format::Facts* facts : formats_with_page_scales()) {
    Page page(*facts);
    const CpuContext context = serial_context(cpu_levels_here().back());
    const KvRows rows = growing_rows(2);
    page.append(context, token_of(rows, 1), 0, 1);
    const auto scales = page.layer.k.scales;
    const auto codes = page.layer.k.codes_at(0, 0, 1);
    KvRows smaller = token_of(rows, 0);
    for (float& x : smaller.k) x *= 0.01f;
    page.append(context, smaller, 1, 1);
    EXPECT_TRUE(same_bytes(scales, page.layer.k.scales)) << facts->name;
    EXPECT_TRUE(same_bytes(codes, page.layer.k.codes_at(0, 0, 1))) << facts->name;
  }
}

TEST(PageShared, ANewFirstTokenForgetsTheBlocksFormerScale) {
  Page page("int8");
  const CpuContext context = serial_context(cpu_levels_here().back());
  const KvRows rows = growing_rows(8);
  page.append(context, token_of(rows, 7), 0, 1);
  const float large = page.step(0, 0, 0);
  page.append(context, token_of(rows, 0), 0, 1);
  EXPECT_LT(page.step(0, 0, 0), large / 16);
}

TEST(PageShared, ABadTokenDoesNotDestroyTheOthersAndIsNotPlausible) {
  for (const format::Facts* facts : formats_with_page_scales()) {
    Page page(*facts);
    const CpuContext context = serial_context(cpu_levels_here().back());
    const KvRows rows = growing_rows(3);
    page.append(context, token_of(rows, 0), 0, 1);
    const auto scales = page.layer.k.scales;
    const auto codes = page.layer.k.codes_at(0, 0, 0);
    KvRows bad = token_of(rows, 0);
    bad.k[5] = kNan;
    bad.k[6] = std::numeric_limits<float>::infinity();
    const AppendReport report = page.append(context, bad, 1, 1);
    const bool can_say_nan = facts->element == "E4M3" || facts->element == "E5M2";
    EXPECT_EQ(report.nonfinite_inputs, can_say_nan ? 0 : 2) << facts->name;
    EXPECT_TRUE(same_bytes(scales, page.layer.k.scales)) << facts->name;
    EXPECT_TRUE(same_bytes(codes, page.layer.k.codes_at(0, 0, 0))) << facts->name;
    const KvRows back = gather_slots(context, page.layer, kShape, 2);
    const size_t row = size_t(kShape.num_heads) * kShape.k_dim;
    EXPECT_TRUE(can_say_nan ? std::isnan(back.k[row + 5]) : back.k[row + 5] == 0) << facts->name;
    EXPECT_TRUE(can_say_nan ? !std::isfinite(back.k[row + 6]) : back.k[row + 6] == 0);

    // Growth keeps a NaN a NaN and an infinity an infinity.
    page.append(context, token_of(rows, 2), 2, 1);
    const KvRows grown = gather_slots(context, page.layer, kShape, 2);
    EXPECT_EQ(std::isnan(grown.k[row + 5]), can_say_nan) << facts->name;
    EXPECT_EQ(std::isinf(grown.k[row + 6]), facts->element == "E5M2") << facts->name;
  }
}

TEST(PageShared, AnAllZeroPageStoresZeroBytesAndGrowsFromThem) {
  for (const format::Facts* facts : formats_with_page_scales()) {
    Page page(*facts);
    const CpuContext context = serial_context(cpu_levels_here().back());
    KvRows zeros = token_of(growing_rows(1), 0);
    for (size_t i = 0; i < zeros.k.size(); ++i) zeros.k[i] = zeros.v[i] = i % 2 ? -0.0f : 0.0f;
    page.append(context, zeros, 0, 1);
    for (const uint8_t byte : page.layer.k.codes_at(0, 0, 0)) EXPECT_EQ(byte, 0) << facts->name;
    for (const uint8_t byte : page.layer.k.scales_at(0, 0, 0)) EXPECT_EQ(byte, 0) << facts->name;
    page.append(context, token_of(growing_rows(1), 0), 1, 1);
    const KvRows back = gather_slots(context, page.layer, kShape, 1);
    for (const float x : back.k) EXPECT_EQ(x, 0.0f) << facts->name;
  }
}

}  // namespace
}  // namespace kvx::ops::page_shared_test

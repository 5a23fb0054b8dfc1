// Laws that hold for every format, as properties over formats, head_dims and numbers.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "format/list.hpp"
#include "tests/support/store_row.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops {
namespace {

using namespace kvx::tests;  // NOLINT: builders
using format::Facts;
using format::FormatSpec;

constexpr int kHeadDims[] = {16, 32, 64, 80, 96, 128, 192, 256, 576};

// A format with computed scales and a head_dim that it stores.
struct Case {
  FormatSpec spec;
  int head_dim;
  device::CpuLevel level;
};

Case any_case() {
  const auto* facts = *rc::gen::elementOf(
      std::vector<const Facts*>(std::begin(format::kRowFacts), std::end(format::kRowFacts)));
  const FormatSpec spec = computed_spec(*facts);
  const int head_dim = *rc::gen::suchThat(
      rc::gen::elementOf(std::vector<int>(std::begin(kHeadDims), std::end(kHeadDims))),
      [&](int d) { return format::check_head_dim(spec, d).ok(); });
  return {spec, head_dim, *rc::gen::elementOf(cpu_levels_here())};
}

// A row of normal numbers around a power of two that every format reaches.
std::vector<float> any_row(int head_dim) {
  const auto seed = *rc::gen::arbitrary<uint32_t>();
  const int exponent = *rc::gen::inRange(-6, 4);
  return normal_floats(head_dim, seed, std::ldexp(1.0f, exponent));
}

StoredRow store(const Case& c, const std::vector<float>& x) {
  return store_row(c.level, c.spec, x);
}

// What a code may be wrong by, for a number of a group with this amax: half a grid interval and,
// for scales with few bits, what clipping adds.
double error_bound(const FormatSpec& spec, double x, double amax) {
  const std::string_view element = spec.facts->element;
  if (element == "F32") return 0;
  if (element == "F16") return std::max(std::fabs(x) * 0x1p-11, 0x1p-25);
  if (element == "BF16") return std::fabs(x) * 0x1p-8;
  // Scales are stored to 11 bits (f16), 24 bits (f32) or 4 bits (E4M3), or doubled (E8M0).
  const bool is_e4m3_scale = spec.scale_type == format::ScaleType::kE4M3;
  const double slack = spec.scale_type == format::ScaleType::kE8M0 ? 2.0
                       : is_e4m3_scale                             ? 1.0 + 0x1p-4
                                                                   : 1.001;
  const double clipped = is_e4m3_scale ? amax * 0x1p-4 : amax * 0x1p-11;
  // An f16 or E4M3 step below its normal range has a coarser rounding.
  const double coarse = is_e4m3_scale ? 6 * 0x1p-10 : 127 * 0x1p-25;
  if (element == "E2M1") return amax * slack / 6 + clipped + coarse;
  if (element == "E4M3") return amax * slack * 16 / 448 + clipped;
  if (element == "E5M2") return amax * slack * 4096 / 57344 + clipped;
  if (element == "INT8") return amax * slack / 254 + clipped + coarse;
  return amax * slack / 14 + clipped + coarse;
}

RC_GTEST_PROP(RowLaws, TheErrorStaysWithinWhatTheFactsImply, ()) {
  const Case c = any_case();
  RC_PRE(!c.spec.is_affine());
  const std::vector<float> x = any_row(c.head_dim);
  const StoredRow row = store(c, x);
  const int length = format::group_length(c.spec, c.head_dim);
  for (int i = 0; i < c.head_dim; ++i) {
    const int first = i / length * length;
    double amax = 0;
    for (int j = first; j < std::min(first + length, c.head_dim); ++j) {
      amax = std::max(amax, std::fabs(static_cast<double>(x[j])));
    }
    if (std::fabs(x[i] - row.back[i]) > error_bound(c.spec, x[i], amax)) {
      RC_FAIL(fmt::format("{} head_dim {} dim {}: {} came back as {}", c.spec.facts->name,
                          c.head_dim, i, x[i], row.back[i]));
    }
  }
}

RC_GTEST_PROP(RowLaws, AnAffineRowIsWithinOneStepAndTheParametersRounding, ()) {
  const Case c = any_case();
  RC_PRE(c.spec.is_affine());
  const std::vector<float> x = any_row(c.head_dim);
  const StoredRow row = store(c, x);
  const auto [low, high] = std::minmax_element(x.begin(), x.end());
  const double qmax = c.spec.facts->element_bits == 8 ? 255 : 15;
  const double magnitude = std::max(std::fabs(*low), std::fabs(*high));
  for (int i = 0; i < c.head_dim; ++i) {
    const double bound = (*high - *low) / qmax * 0.51 + 6 * magnitude * 0x1p-11;
    RC_ASSERT(std::fabs(x[i] - row.back[i]) <= bound);
  }
}

RC_GTEST_PROP(RowLaws, AnAllZeroRowIsZeroBytesAndZerosBack, ()) {
  const Case c = any_case();
  const StoredRow row = store(c, std::vector<float>(c.head_dim, 0.0f));
  for (const uint8_t byte : row.codes) RC_ASSERT(byte == 0);
  for (const uint8_t byte : row.scales) RC_ASSERT(byte == 0);
  for (const float x : row.back) RC_ASSERT(x == 0.0f);
}

RC_GTEST_PROP(RowLaws, NegatingARowNegatesWhatComesBackAndLeavesTheScales, ()) {
  const Case c = any_case();
  RC_PRE(!c.spec.is_affine());
  std::vector<float> x = any_row(c.head_dim);
  const StoredRow row = store(c, x);
  for (float& value : x) value = -value;
  const StoredRow negated = store(c, x);
  RC_ASSERT(row.scales == negated.scales);
  for (int i = 0; i < c.head_dim; ++i) RC_ASSERT(row.back[i] == -negated.back[i]);
}

// Not for affine rows (their zero moves) nor for E4M3 scales (a saturated or clipped group may fit
// a smaller one); for the others the largest code is qmax or its scale is a power of two.
RC_GTEST_PROP(RowLaws, StoringWhatCameBackGivesTheSameBytes, ()) {
  const Case c = any_case();
  RC_PRE(!c.spec.has_scale() || c.spec.scale_type == format::ScaleType::kE8M0 ||
         c.spec.scale_type == format::ScaleType::kF32);
  const StoredRow row = store(c, any_row(c.head_dim));
  const StoredRow again = store(c, row.back);
  if (c.spec.scale_type == format::ScaleType::kE8M0) {
    RC_ASSERT(row.back == again.back);  // an amax at 3 * 2^e may choose 2^(e-1)
    return;
  }
  if (c.spec.has_scale()) {
    // amax / qmax comes back within an ulp, so numbers are equal to an ulp and codes are equal.
    RC_ASSERT(row.codes == again.codes);
    return;
  }
  RC_ASSERT(row.codes == again.codes);
  RC_ASSERT(row.scales == again.scales);
}

RC_GTEST_PROP(RowLaws, DoublingARowChangesOnlyAPowerOfTwoScaleByOne, ()) {
  const Case c = any_case();
  RC_PRE(c.spec.scale_type == format::ScaleType::kE8M0);
  std::vector<float> x = any_row(c.head_dim);
  const StoredRow row = store(c, x);
  for (float& value : x) value *= 2;
  const StoredRow doubled = store(c, x);
  RC_ASSERT(row.codes == doubled.codes);
  for (size_t g = 0; g < row.scales.size(); ++g) RC_ASSERT(row.scales[g] + 1 == doubled.scales[g]);
}

RC_GTEST_PROP(RowLaws, DoublingARowDoublesWhatComesBackFromAnyFloatScale, ()) {
  const Case c = any_case();
  RC_PRE(c.spec.has_scale() && !c.spec.is_affine() &&
         c.spec.scale_type != format::ScaleType::kE8M0);
  // Rounding commutes with doubling unless the stored scale is subnormal or saturates.
  std::vector<float> x = any_row(c.head_dim);
  for (float& value : x) value = value * 4 + (value < 0 ? -1.0f : 1.0f);
  const StoredRow row = store(c, x);
  for (float& value : x) value *= 2;
  const StoredRow doubled = store(c, x);
  for (int i = 0; i < c.head_dim; ++i) RC_ASSERT(2 * row.back[i] == doubled.back[i]);
}

// Page-shared scales are the exception; page_shared_test.cpp has their bound.
RC_GTEST_PROP(RowLaws, AppendAtOnceEqualsAppendTokenByToken, ()) {
  const Case c = any_case();
  const LayerShape shape = {.num_blocks = 3,
                            .block_size = *rc::gen::inRange(1, 20),
                            .num_heads = *rc::gen::inRange(1, 4),
                            .k_dim = c.head_dim,
                            .v_dim = c.head_dim};
  const int num_tokens = *rc::gen::inRange(1, 3 * shape.block_size + 1);
  const KvRows rows = normal_rows(shape, num_tokens, *rc::gen::arbitrary<uint32_t>());
  TestLayer at_once(c.spec, c.spec, shape);
  TestLayer one_by_one(c.spec, c.spec, shape);
  const CpuContext context = serial_context(c.level);
  RC_ASSERT(append_rows(context, at_once, shape, rows, slots_from(0, num_tokens)).ok());
  const size_t row = size_t(shape.num_heads) * c.head_dim;
  for (int t = 0; t < num_tokens; ++t) {
    const KvRows one = {{rows.k.begin() + t * row, rows.k.begin() + (t + 1) * row},
                        {rows.v.begin() + t * row, rows.v.begin() + (t + 1) * row}};
    RC_ASSERT(append_rows(context, one_by_one, shape, one, {t}).ok());
  }
  RC_ASSERT(at_once.k.codes == one_by_one.k.codes);
  RC_ASSERT(at_once.k.scales == one_by_one.k.scales);
  RC_ASSERT(at_once.v.codes == one_by_one.v.codes);
  RC_ASSERT(at_once.v.scales == one_by_one.v.scales);
}

}  // namespace
}  // namespace kvx::ops

// int3, a format from outside the tree, at every CPU level of this machine: the bytes of its rows
// against a plain reference of its own, and what the verbs read from them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/attend/attend.hpp"
#include "ops/copy_blocks/copy_blocks.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops {
namespace {

using namespace kvx::tests;  // NOLINT: builders

// K's rows are whole parts of sixteen numbers; V's are not, and end with a shorter group.
const LayerShape kShape = {
    .num_blocks = 3, .block_size = 8, .num_heads = 2, .k_dim = 64, .v_dim = 40};
constexpr int kGroup = 32;
constexpr int kTokens = 20;

struct ReferenceRow {
  std::vector<uint8_t> codes;   // eight codes in 24 bits, the first in the lowest
  std::vector<uint8_t> scales;  // f32
  std::vector<float> numbers;   // what the bytes mean
};

// given_step: of every group; 0: computed, amax / 3.
ReferenceRow reference_row(const float* x, int dim, float given_step) {
  ReferenceRow row;
  row.codes.resize(dim * 3 / 8);
  for (int first = 0; first < dim; first += kGroup) {
    const int n = std::min(kGroup, dim - first);
    float amax = 0;
    for (int i = first; i < first + n; ++i) amax = std::max(amax, std::fabs(x[i]));
    const float step = given_step > 0 ? given_step : amax / 3.0f;
    const float inverse = 1.0f / step;
    for (int i = first; i < first + n; ++i) {
      const float whole = std::nearbyint(std::clamp(x[i] * inverse, -3.0f, 3.0f));
      const int code = static_cast<int>(whole) & 7;
      for (int bit = 0; bit < 3; ++bit) {
        const int at = 3 * i + bit;
        if ((code >> bit & 1) != 0) {
          row.codes[at / 8] = static_cast<uint8_t>(row.codes[at / 8] | 1 << (at % 8));
        }
      }
      row.numbers.push_back(whole * step);
    }
    uint8_t bytes[4];
    std::memcpy(bytes, &step, 4);
    row.scales.insert(row.scales.end(), bytes, bytes + 4);
  }
  return row;
}

void expect_rows(const TestSide& side, const std::vector<float>& x, int dim, float given_step) {
  for (int t = 0; t < kTokens; ++t) {
    for (int head = 0; head < kShape.num_heads; ++head) {
      const ReferenceRow row =
          reference_row(x.data() + (size_t(t) * kShape.num_heads + head) * dim, dim, given_step);
      const int64_t block = t / kShape.block_size;
      const int token = t % kShape.block_size;
      ASSERT_EQ(side.codes_at(block, token, head), row.codes) << "token " << t << " head " << head;
      ASSERT_EQ(side.scales_at(block, token, head), row.scales)
          << "token " << t << " head " << head;
    }
  }
}

std::vector<float> reference_numbers(const std::vector<float>& x, int dim, float given_step) {
  std::vector<float> numbers;
  for (size_t first = 0; first < x.size(); first += dim) {
    const ReferenceRow row = reference_row(x.data() + first, dim, given_step);
    numbers.insert(numbers.end(), row.numbers.begin(), row.numbers.end());
  }
  return numbers;
}

class Int3 : public testing::TestWithParam<device::CpuLevel> {
 protected:
  static TestLayer layer(const format::FormatSpec& spec) { return {spec, spec, kShape}; }
  CpuContext context() const { return serial_context(GetParam()); }
  KvRows rows() const { return normal_rows(kShape, kTokens, 11); }
};

TEST_P(Int3, AppendWritesTheReferencesBytesAndGatherReadsTheirNumbers) {
  TestLayer packed = layer(spec_named("int3"));
  ASSERT_TRUE(append_rows(context(), packed, kShape, rows(), slots_from(0, kTokens)).ok());
  expect_rows(packed.k, rows().k, kShape.k_dim, 0);
  expect_rows(packed.v, rows().v, kShape.v_dim, 0);
  const KvRows back = gather_slots(context(), packed, kShape, kTokens);
  EXPECT_EQ(back.k, reference_numbers(rows().k, kShape.k_dim, 0));
  EXPECT_EQ(back.v, reference_numbers(rows().v, kShape.v_dim, 0));
}

TEST_P(Int3, TakesGivenScales) {
  constexpr float kStep = 0.625f;
  TestLayer packed = layer(spec_named("int3", {.scale_source = format::ScaleSource::kGiven}));
  const auto scale = format::round_scale(format::ScaleType::kF32, kStep);
  packed.k.fill_scales(scale);
  packed.v.fill_scales(scale);
  ASSERT_TRUE(append_rows(context(), packed, kShape, rows(), slots_from(0, kTokens)).ok());
  expect_rows(packed.k, rows().k, kShape.k_dim, kStep);
  expect_rows(packed.v, rows().v, kShape.v_dim, kStep);
}

// Half a step of the page's largest magnitude, twice where a later token moved the scale.
TEST_P(Int3, SharesScalesInPages) {
  TestLayer packed = layer(spec_named("int3", {.scale_source = format::ScaleSource::kPageShared}));
  const KvRows all = rows();
  ASSERT_TRUE(append_rows(context(), packed, kShape, all, slots_from(0, kTokens)).ok());
  const KvRows back = gather_slots(context(), packed, kShape, kTokens);
  float amax = 0;
  for (const float x : all.k) amax = std::max(amax, std::fabs(x));
  for (size_t i = 0; i < all.k.size(); ++i) ASSERT_NEAR(all.k[i], back.k[i], amax / 3) << i;
}

TEST_P(Int3, CopiesBlocksAsTheyAre) {
  TestLayer from = layer(spec_named("int3"));
  TestLayer to = layer(spec_named("int3"));
  ASSERT_TRUE(append_rows(context(), from, kShape, rows(), slots_from(0, kTokens)).ok());
  const BlockCopy copies[] = {{0, 0, 8}, {1, 1, 8}, {2, 2, 4}};
  ASSERT_TRUE(copy_blocks(context(), from.view(), to.view(), copies).ok());
  expect_rows(to.k, rows().k, kShape.k_dim, 0);
  expect_rows(to.v, rows().v, kShape.v_dim, 0);
}

TEST_P(Int3, CopiesBlocksIntoAndOutOfOtherFormats) {
  TestLayer floats = layer(spec_named("f32"));
  TestLayer packed = layer(spec_named("int3"));
  const BlockCopy copies[] = {{0, 0, 8}, {1, 1, 8}, {2, 2, 4}};
  ASSERT_TRUE(append_rows(context(), floats, kShape, rows(), slots_from(0, kTokens)).ok());
  ASSERT_TRUE(copy_blocks(context(), floats.view(), packed.view(), copies).ok());
  expect_rows(packed.k, rows().k, kShape.k_dim, 0);
  ASSERT_TRUE(copy_blocks(context(), packed.view(), floats.view(), copies).ok());
  const KvRows back = gather_slots(context(), floats, kShape, kTokens);
  EXPECT_EQ(back.k, reference_numbers(rows().k, kShape.k_dim, 0));
}

// One query token a head over the reference's numbers, in binary64.
std::vector<double> reference_attention(const std::vector<float>& q, const std::vector<float>& k,
                                        const std::vector<float>& v, int num_q_heads,
                                        double scale) {
  const int q_per_kv = num_q_heads / kShape.num_heads;
  std::vector<double> out;
  for (int h = 0; h < num_q_heads; ++h) {
    const int kv_head = h / q_per_kv;
    double total = 0;
    std::vector<double> sums(kShape.v_dim);
    for (int t = 0; t < kTokens; ++t) {
      const size_t row = size_t(t) * kShape.num_heads + kv_head;
      double score = 0;
      for (int d = 0; d < kShape.k_dim; ++d) {
        score += double{q[size_t(h) * kShape.k_dim + d]} * k[row * kShape.k_dim + d];
      }
      const double p = std::exp(score * scale);
      total += p;
      for (int d = 0; d < kShape.v_dim; ++d) sums[d] += p * v[row * kShape.v_dim + d];
    }
    for (const double sum : sums) out.push_back(sum / total);
  }
  return out;
}

TEST_P(Int3, AttendComputesWithTheReferencesNumbers) {
  TestLayer packed = layer(spec_named("int3"));
  ASSERT_TRUE(append_rows(context(), packed, kShape, rows(), slots_from(0, kTokens)).ok());
  const int num_q_heads = 4;
  const std::vector<float> q = normal_floats(size_t(num_q_heads) * kShape.k_dim, 6);
  const int32_t ids[] = {0, 1, 2};
  const int32_t seq_len = kTokens;
  const int32_t q_starts[] = {0, 1};
  std::vector<float> out(size_t(num_q_heads) * kShape.v_dim);
  AttendArgs args;
  args.packed = packed.view();
  args.num_sequences = 1;
  args.block_table = {ids, 3};
  args.max_blocks_per_sequence = 3;
  args.seq_lens = &seq_len;
  args.q_starts = q_starts;
  args.num_q_heads = num_q_heads;
  args.q = dense_rows(static_cast<const void*>(q.data()), DType::kF32, num_q_heads, kShape.k_dim);
  args.out = dense_rows(out.data(), DType::kF32, num_q_heads, kShape.v_dim);
  args.softmax_scale = 0.125f;
  const Status status = attend(context(), args);
  ASSERT_TRUE(status.ok()) << status.error().message;
  const std::vector<double> expected =
      reference_attention(q, reference_numbers(rows().k, kShape.k_dim, 0),
                          reference_numbers(rows().v, kShape.v_dim, 0), num_q_heads, 0.125);
  for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 1e-5) << i;
}

INSTANTIATE_TEST_SUITE_P(Levels, Int3, testing::ValuesIn(cpu_levels_here()), level_test_name);

}  // namespace
}  // namespace kvx::ops

// A format from outside src/ goes through append, gather and attend: adding a format is its facts
// and its codec, and one entry of a kernel table.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "format/list.hpp"
#include "ops/attend/attend.hpp"
#include "ops/cpu/format_kernels.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::ops::made_up_format_test {
namespace {

using namespace kvx::tests;  // NOLINT: builders

// Squares: code m with a sign means +-m * m, m up to 15, so that small numbers lie close together.
struct SquareCodec {
  using Code = uint8_t;
  static constexpr int kBits = 8;
  static constexpr float kQmax = 225.0f;
  static constexpr bool kCountsNonfinite = true;
  static constexpr uint32_t kSign = 0x80;

  KVX_INLINE static constexpr Code encode(float product) {
    const float magnitude = product < 0 ? -product : product;
    uint32_t code = 0;
    for (int m = 0; m < 15; ++m) {  // past the middle between m * m and (m + 1) * (m + 1)
      const float middle = static_cast<float>(m * m + (m + 1) * (m + 1)) / 2;
      code += magnitude > middle ? 1u : 0u;
    }
    return static_cast<Code>(code | (product < 0 ? kSign : 0u));
  }
  KVX_INLINE static constexpr float decode(Code code) {
    const int m = code & 0xF;
    return static_cast<float>((code & kSign) != 0 ? -m * m : m * m);
  }
  KVX_INLINE static constexpr float rounded(float product) { return decode(encode(product)); }
  KVX_INLINE static constexpr Code encode_nonfinite(float) { return 0; }
};

struct MadeUp {
  using Codec = SquareCodec;
  static constexpr format::Facts kFacts = {
      .id = static_cast<format::FormatId>(format::kNumFormats),
      .name = "squares",
      .element = "SQUARE",
      .element_bits = Codec::kBits,
      .group_sizes = {{8, 24}, 2},
      .scale_types = {{format::ScaleType::kBF16, format::ScaleType::kF32}, 2},
      .scale_rules = {{format::ScaleRule::kAmax}, 1},
      .scale_sources = {{format::ScaleSource::kComputed, format::ScaleSource::kGiven,
                         format::ScaleSource::kPageShared},
                        3},
      .has_tensor_scale = false,
      .packing = format::Packing::kBytes,
      .head_dim_multiple = 4,
      .summary = "signed squares, one scale a group",
  };
};

// A level's table with one format more.
struct LargerTable {
  std::array<cpu::FormatKernels, format::kNumFormats + 1> formats;
  cpu::KernelTable table;

  explicit LargerTable(device::CpuLevel level) : table(cpu::kernel_table(level)) {
    std::copy_n(table.formats, format::kNumFormats, formats.begin());
    formats.back() = cpu::format_kernels<MadeUp>();
    table.formats = formats.data();
    table.num_formats = format::kNumFormats + 1;
  }
};

const LayerShape kShape = {
    .num_blocks = 3, .block_size = 8, .num_heads = 2, .k_dim = 52, .v_dim = 40};

void expect_close(const std::vector<float>& x, const std::vector<float>& back, float bound) {
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], back[i], bound) << i;
}

TEST(MadeUpFormat, GoesThroughAppendAndGatherWithEverySourceOfScales) {
  const LargerTable larger(cpu_levels_here().back());
  const CpuContext context = {&larger.table, &serial_executor()};
  for (const int group_size : {8, 24}) {
    for (int s = 0; s < 3; ++s) {
      const auto spec = format::make_spec(
          MadeUp::kFacts,
          {.group_size = group_size, .scale_source = MadeUp::kFacts.scale_sources.values[s]});
      ASSERT_TRUE(spec.ok()) << spec.error().message;
      TestLayer layer(spec.value(), spec.value(), kShape);
      layer.k.fill_scales(format::round_scale(format::ScaleType::kBF16, 5.0f / 225));
      layer.v.fill_scales(format::round_scale(format::ScaleType::kBF16, 5.0f / 225));
      const KvRows rows = normal_rows(kShape, 24, 9);
      ASSERT_TRUE(append_rows(context, layer, kShape, rows, slots_from(0, 24)).ok());
      const KvRows back = gather_slots(context, layer, kShape, 24);
      expect_close(rows.k, back.k, 5.0f * 14.5f / 225 + 0.02f);  // half the widest gap, 196 to 225
      expect_close(rows.v, back.v, 5.0f * 14.5f / 225 + 0.02f);
    }
  }
}

TEST(MadeUpFormat, ItsWrongOptionsAreNamed) {
  const auto spec = format::make_spec(MadeUp::kFacts, {.group_size = 16});
  ASSERT_FALSE(spec.ok());
  EXPECT_EQ(spec.error().message, "group size is 16; squares takes 8 or 24");
}

// Attention over the made-up bytes is attention over the numbers that they mean.
TEST(MadeUpFormat, GoesThroughAttend) {
  const LargerTable larger(cpu_levels_here().back());
  const CpuContext context = {&larger.table, &serial_executor()};
  const auto spec = format::make_spec(MadeUp::kFacts).value();
  TestLayer packed(spec, spec, kShape);
  TestLayer numbers(spec_named("f32"), spec_named("f32"), kShape);
  ASSERT_TRUE(
      append_rows(context, packed, kShape, normal_rows(kShape, 20, 4), slots_from(0, 20)).ok());
  const KvRows meant = gather_slots(context, packed, kShape, 20);
  ASSERT_TRUE(append_rows(context, numbers, kShape, meant, slots_from(0, 20)).ok());

  const int num_q_heads = 4;
  const std::vector<float> q = normal_floats(size_t(num_q_heads) * kShape.k_dim, 6);
  const int32_t ids[] = {0, 1, 2};
  const int32_t seq_len = 20;
  const int32_t q_starts[] = {0, 1};
  const auto attention_over = [&](TestLayer& layer) {
    std::vector<float> out(size_t(num_q_heads) * kShape.v_dim);
    AttendArgs args;
    args.packed = layer.view();
    args.num_sequences = 1;
    args.block_table = {ids, 3};
    args.max_blocks_per_sequence = 3;
    args.seq_lens = &seq_len;
    args.q_starts = q_starts;
    args.num_q_heads = num_q_heads;
    args.q = dense_rows(static_cast<const void*>(q.data()), DType::kF32, num_q_heads, kShape.k_dim);
    args.out = dense_rows(out.data(), DType::kF32, num_q_heads, kShape.v_dim);
    args.softmax_scale = 0.14f;
    const Status status = attend(context, args);
    EXPECT_TRUE(status.ok()) << status.error().message;
    return out;
  };
  const std::vector<float> found = attention_over(packed);
  EXPECT_EQ(found, attention_over(numbers));
  EXPECT_GT(std::fabs(found[0]) + std::fabs(found[1]), 0.0f);
}

}  // namespace
}  // namespace kvx::ops::made_up_format_test

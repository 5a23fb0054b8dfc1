// Every golden row through append and gather, byte for byte, at every CPU level.
#include <gtest/gtest.h>

#include "ops/append/append.hpp"
#include "ops/gather/gather.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/cpu_levels.hpp"
#include "tests/support/golden_rows.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::tests {
namespace {

using format::FormatSpec;

// A cache of one block of three slots and one head that stores K alone; the row goes to slot 1.
class OneRow {
 public:
  OneRow(const FormatSpec& spec, int head_dim, float tensor_scale, const float* feedback = nullptr)
      : layer_(spec, spec, {.num_blocks = 1, .block_size = 3, .num_heads = 1, .k_dim = head_dim}),
        tensor_scale_(tensor_scale),
        head_dim_(head_dim) {
    layer_.k.view.tensor_scales = &tensor_scale_;
    layer_.k.view.feedback = feedback;
    layer_.v.view.head_dim = 0;
  }
  OneRow(const OneRow&) = delete;

  void give_scales(const std::vector<uint8_t>& bytes) {
    std::copy(bytes.begin(), bytes.end(), layer_.k.view.scales.at(0, 1, 0));
  }

  ops::AppendReport append(device::CpuLevel level, const ops::SideTransform& transform, DType type,
                           const std::vector<uint8_t>& input) {
    const int64_t slot = 1;
    const int64_t position = 1;
    ops::AppendArgs args;
    args.cache = layer_.view();
    args.transform.k = transform;
    args.k = dense_rows(input.data(), type, 1, head_dim_);
    args.slot_mapping = {&slot, 1};
    args.positions = {&position, 1};
    auto report = ops::append(serial_context(level), args);
    EXPECT_TRUE(report.ok());
    return report.value();
  }

  std::vector<float> gather(device::CpuLevel level, const ops::SideTransform& transform) {
    std::vector<float> out(head_dim_);
    const int32_t block = 0;
    const ops::GatherRange range = {.first_token = 1, .num_tokens = 1};
    ops::GatherArgs args;
    args.cache = layer_.view();
    args.transform.k = transform;
    args.block_table = {&block, 1};
    args.max_blocks_per_sequence = 1;
    args.num_sequences = 1;
    args.ranges = {&range, 1};
    args.k = dense_rows(out.data(), DType::kF32, 1, head_dim_);
    EXPECT_TRUE(ops::gather(serial_context(level), args).ok());
    return out;
  }

  std::vector<uint8_t> codes() const { return layer_.k.codes_at(0, 1, 0); }
  std::vector<uint8_t> scales() const { return layer_.k.scales_at(0, 1, 0); }
  // The slots beside the row are still as they were.
  bool neighbours_are_untouched() const {
    for (const int token : {0, 2}) {
      for (const uint8_t byte : layer_.k.codes_at(0, token, 0)) {
        if (byte != 0xCC) return false;
      }
    }
    return true;
  }

 private:
  TestLayer layer_;
  float tensor_scale_;
  int head_dim_;
};

void check_case(device::CpuLevel level, const Json& row, const std::string& format_name,
                const float* feedback = nullptr) {
  const FormatSpec spec = spec_of(row, format_name);
  const int head_dim = row["head_dim"];
  SCOPED_TRACE(fmt::format("{} at {}", title_of_row(row, format_name, spec), name_of(level)));
  const DType type = dtype_named(row["input_type"]);
  const std::vector<uint8_t> scales = bytes_of_hex(row["scales"]);
  OneRow cache(spec, head_dim, tensor_scale_of(row), feedback);
  if (spec.scale_source == format::ScaleSource::kGiven) cache.give_scales(scales);
  const ops::AppendReport report = cache.append(level, {}, type, memory_of(type, row["input"]));

  const auto group_of = [&](size_t byte) {
    return fmt::format("token 1, head 0, group {}",
                       byte / std::max(1, format::scale_bytes_per_group(spec)));
  };
  const auto dims_of = [&](size_t byte) {
    const int dim = static_cast<int>(byte) * 8 / spec.facts->element_bits;
    return fmt::format("token 1, head 0, dim {}, group {}", dim,
                       dim / format::group_length(spec, head_dim));
  };
  EXPECT_TRUE(same_bytes(scales, cache.scales(), group_of));
  EXPECT_TRUE(same_bytes(bytes_of_hex(row["codes"]), cache.codes(), dims_of));
  EXPECT_TRUE(same_floats(floats_of_hex(row["decoded"]), cache.gather(level, {})));
  EXPECT_TRUE(cache.neighbours_are_untouched());
  if (row.contains("nonfinite_count")) {
    EXPECT_EQ(report.nonfinite_inputs, row["nonfinite_count"].get<int64_t>());
  }
}

class GoldenRows : public testing::TestWithParam<device::CpuLevel> {};

TEST_P(GoldenRows, EveryFormatsRowsAreTheOraclesBytes) {
  for_each_golden_row(
      [](const Json& row, const std::string& name) { check_case(GetParam(), row, name); });
}

TEST_P(GoldenRows, ScalesChosenBySquaredErrorAreTheOracles) {
  for_each_golden_choice(
      [](const Json& row, const std::string& name) { check_case(GetParam(), row, name); });
}

TEST_P(GoldenRows, RowsRoundedWithErrorFeedbackAreTheOracles) {
  for_each_golden_feedback(
      [](const Json& row, const std::string& name, const std::vector<float>& weights) {
        check_case(GetParam(), row, name, weights.data());
      });
}

// The terms of one head_dim as a transform; the vectors hold the memory.
struct Terms {
  std::vector<float> mean, block_offset, factor;

  ops::SideTransform present(const Json& row) const {
    ops::SideTransform transform;
    if (row["mean"].get<bool>()) transform.mean = mean.data();
    if (row["factor"].get<bool>()) transform.factor = factor.data();
    if (row["block_offset"].get<bool>()) {
      transform.block_offset = block_offset.data();
      transform.num_offset_blocks = 1;
    }
    transform.hadamard = row["hadamard"];
    return transform;
  }
};

TEST_P(GoldenRows, TransformsAreTheOracles) {
  for_each_golden_transform([](const Json& row, const Json& terms, const Json& golden) {
    const int head_dim = row["head_dim"];
    const Terms of_dim = {floats_of_hex(terms["mean"]), floats_of_hex(terms["block_offset"]),
                          floats_of_hex(terms["factor"])};
    const ops::SideTransform transform = of_dim.present(row);
    const std::vector<uint8_t> input = memory_of(DType::kF32, terms["input"]);

    OneRow plain(format::make_spec(format::FormatId::kF32).value(), head_dim, 1.0f);
    plain.append(GetParam(), transform, DType::kF32, input);
    EXPECT_TRUE(same_bytes(memory_of(DType::kF32, row["transformed"]), plain.codes()));
    EXPECT_TRUE(same_floats(floats_of_hex(row["restored"]), plain.gather(GetParam(), transform)));

    if (row.contains("nvfp4_codes")) {
      OneRow nvfp4(format::make_spec(format::FormatId::kNvfp4).value(), head_dim,
                   float_of_hex(golden["nvfp4_tensor_scale"]));
      nvfp4.append(GetParam(), transform, DType::kF32, input);
      EXPECT_TRUE(same_bytes(bytes_of_hex(row["nvfp4_codes"]), nvfp4.codes()));
      EXPECT_TRUE(same_bytes(bytes_of_hex(row["nvfp4_scales"]), nvfp4.scales()));
      EXPECT_TRUE(
          same_floats(floats_of_hex(row["nvfp4_gathered"]), nvfp4.gather(GetParam(), transform)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, GoldenRows, testing::ValuesIn(cpu_levels_here()),
                         level_test_name);

}  // namespace
}  // namespace kvx::tests

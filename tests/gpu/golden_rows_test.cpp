// Every golden row through append and gather on the device, byte for byte.
#include "tests/support/golden_rows.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::tests {
namespace {

class GpuGoldenRows : public GpuTest {
 protected:
  // One row into slot 1 of one block of three, and out again.
  void check_case(const Json& row, const std::string& format_name,
                  const float* feedback = nullptr) {
    const format::FormatSpec spec = spec_of(row, format_name);
    const int head_dim = row["head_dim"];
    SCOPED_TRACE(title_of_row(row, format_name, spec));
    const float tensor_scale = tensor_scale_of(row);
    TestLayer layer(spec, spec,
                    {.num_blocks = 1, .block_size = 3, .num_heads = 1, .k_dim = head_dim});
    layer.k.view.tensor_scales = &tensor_scale;
    layer.k.view.feedback = feedback;
    layer.v.view.head_dim = 0;
    const std::vector<uint8_t> scales = bytes_of_hex(row["scales"]);
    if (spec.scale_source == format::ScaleSource::kGiven) {
      std::copy(scales.begin(), scales.end(), layer.k.view.scales.at(0, 1, 0));
    }
    const DType type = dtype_named(row["input_type"]);
    std::vector<uint8_t> input = memory_of(type, row["input"]);

    Mirror mirror(memory());
    MirroredLayer on_device(mirror, layer);
    const DeferredErrors counters(memory());
    append_row(mirror, on_device, {}, type, input, head_dim, counters);
    EXPECT_TRUE(same_floats(floats_of_hex(row["decoded"]),
                            gather_row(mirror, on_device, {}, head_dim, counters)));
    on_device.fetch(mirror);
    EXPECT_TRUE(same_bytes(scales, layer.k.scales_at(0, 1, 0)));
    EXPECT_TRUE(same_bytes(bytes_of_hex(row["codes"]), layer.k.codes_at(0, 1, 0)));
    for (const int token : {0, 2}) {
      for (const uint8_t byte : layer.k.codes_at(0, token, 0)) ASSERT_EQ(byte, 0xCC);
    }
    EXPECT_EQ(counters.read().out_of_range, 0u);
    if (row.contains("nonfinite_count")) {
      EXPECT_EQ(counters.read().nonfinite_inputs, row["nonfinite_count"].get<uint64_t>());
    }
  }

  void append_row(Mirror& mirror, const MirroredLayer& layer, const ops::SideTransform& transform,
                  DType type, std::vector<uint8_t>& input, int head_dim,
                  const DeferredErrors& counters) {
    std::vector<int64_t> slot = {1};
    ops::AppendArgs args;
    args.cache = layer.view();
    args.transform.k = transform;
    const uint8_t* rows = mirror.add(input);
    args.k = dense_rows(rows, type, 1, head_dim);
    args.slot_mapping = {mirror.add(slot), 1};
    args.positions = args.slot_mapping;
    const Status status = ops::append(context(), args, counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
  }

  std::vector<float> gather_row(Mirror& mirror, const MirroredLayer& layer,
                                const ops::SideTransform& transform, int head_dim,
                                const DeferredErrors& counters) {
    std::vector<int32_t> block = {0};
    std::vector<ops::GatherRange> range = {{.first_token = 1, .num_tokens = 1}};
    std::vector<float> out(head_dim);
    ops::GatherArgs args;
    args.cache = layer.view();
    args.transform.k = transform;
    args.block_table = {mirror.add(block), 1};
    args.max_blocks_per_sequence = 1;
    args.num_sequences = 1;
    args.ranges = {mirror.add(range), 1};
    args.k = dense_rows(mirror.add(out), DType::kF32, 1, head_dim);
    const Status status = ops::gather(context(), args, 1, counters.get());
    EXPECT_TRUE(status.ok());
    synchronize();
    mirror.fetch(out);
    return out;
  }
};

TEST_F(GpuGoldenRows, EveryFormatsRowsAreTheOraclesBytes) {
  for_each_golden_row([this](const Json& row, const std::string& name) { check_case(row, name); });
}

TEST_F(GpuGoldenRows, ScalesChosenBySquaredErrorAreTheOracles) {
  for_each_golden_choice(
      [this](const Json& row, const std::string& name) { check_case(row, name); });
}

TEST_F(GpuGoldenRows, RowsRoundedWithErrorFeedbackAreTheOracles) {
  for_each_golden_feedback(
      [this](const Json& row, const std::string& name, const std::vector<float>& weights) {
        check_case(row, name, weights.data());
      });
}

TEST_F(GpuGoldenRows, TransformsAreTheOracles) {
  for_each_golden_transform([this](const Json& row, const Json& terms, const Json&) {
    const int head_dim = row["head_dim"];
    std::vector<float> mean = floats_of_hex(terms["mean"]);
    std::vector<float> factor = floats_of_hex(terms["factor"]);
    std::vector<float> offset = floats_of_hex(terms["block_offset"]);
    Mirror mirror(memory());
    ops::SideTransform transform;
    if (row["mean"].get<bool>()) transform.mean = mirror.add(mean);
    if (row["factor"].get<bool>()) transform.factor = mirror.add(factor);
    if (row["block_offset"].get<bool>()) {
      transform.block_offset = mirror.add(offset);
      transform.num_offset_blocks = 1;
    }
    transform.hadamard = row["hadamard"];
    std::vector<uint8_t> input = memory_of(DType::kF32, terms["input"]);
    const auto f32 = format::make_spec(format::FormatId::kF32).value();
    TestLayer layer(f32, f32,
                    {.num_blocks = 1, .block_size = 3, .num_heads = 1, .k_dim = head_dim});
    layer.v.view.head_dim = 0;
    MirroredLayer on_device(mirror, layer);
    const DeferredErrors counters(memory());
    append_row(mirror, on_device, transform, DType::kF32, input, head_dim, counters);
    EXPECT_TRUE(same_floats(floats_of_hex(row["restored"]),
                            gather_row(mirror, on_device, transform, head_dim, counters)));
    on_device.fetch(mirror);
    EXPECT_TRUE(same_bytes(memory_of(DType::kF32, row["transformed"]), layer.k.codes_at(0, 1, 0)));
  });
}

}  // namespace
}  // namespace kvx::tests

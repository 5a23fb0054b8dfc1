// transcode on the device against gather and append on the CPU, byte for byte.
#include "ops/transcode/transcode_cuda.hpp"

#include <numeric>

#include "format/list.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests::transcode_test {
namespace {

constexpr LayerShape kFromShape = {
    .num_blocks = 5, .block_size = 8, .num_heads = 3, .k_dim = 128, .v_dim = 96};
constexpr LayerShape kToShape = {.num_blocks = 3,
                                 .block_size = 16,
                                 .num_heads = 3,
                                 .k_dim = 128,
                                 .v_dim = 96,
                                 .order = Order::kHnd};
// Tokens between two layers whose slots they nearly fill.
struct Batch {
  bool is_from_interleaved = false;  // E2M1 codes of either layer on the device
  bool is_to_interleaved = false;
  LayerShape from = kFromShape;
  LayerShape to = kToShape;
  int num_tokens = 38;
};

// So many that each of a device's warps takes heads of several tokens.
Batch many_tokens() {
  Batch batch;
  batch.from.num_blocks = 1200;
  batch.to.num_blocks = 602;
  batch.num_tokens = 9590;
  return batch;
}

// Tables of a mean and a factor, and a rotation.
struct Tables {
  std::vector<float> mean = normal_floats(3 * 128, 21);
  std::vector<float> factor = std::vector<float>(3 * 128, 1.25f);
  ops::LayerTransform transform() const {
    ops::LayerTransform result;
    result.k = {.mean = mean.data(), .factor = factor.data(), .hadamard = true};
    result.v.hadamard = true;
    return result;
  }
};

class GpuTranscode : public GpuTest {
 protected:
  // Tokens of `from` to slots of the target in an order of their own, on both machines.
  void compare(const format::FormatSpec& from_spec, const format::FormatSpec& to_spec,
               const ops::LayerTransform& from_transform, const ops::LayerTransform& to_transform,
               const Batch& batch = {}) {
    SCOPED_TRACE(fmt::format("{} to {}", from_spec.facts->name, to_spec.facts->name));
    TestLayer from(from_spec, from_spec, batch.from);
    TestLayer host(to_spec, to_spec, batch.to);
    TestLayer device(to_spec, to_spec, batch.to);
    const int num_tokens = batch.num_tokens;
    const KvRows rows = normal_rows(batch.from, num_tokens, 3);
    const auto cpu = serial_context(device::CpuLevel::kScalar);
    std::vector<int64_t> from_slots = slots_from(0, num_tokens);
    ASSERT_TRUE(append_to(cpu, from, batch.from, from_transform, rows, from_slots));
    KvRows between = rows;
    gather_from(cpu, from, batch, from_transform, between);
    constexpr int kFirstSlots = 6;  // of the last tokens
    std::vector<int64_t> to_slots = slots_from(16, num_tokens - kFirstSlots);
    for (int64_t slot = 0; slot < kFirstSlots; ++slot) to_slots.push_back(slot);
    ASSERT_TRUE(append_to(cpu, host, batch.to, to_transform, between, to_slots));

    // Not copied: no slot on one side, and one beyond each layer.
    from_slots.insert(from_slots.end(), {-1, 0, batch.from.num_blocks * batch.from.block_size, 0});
    to_slots.insert(to_slots.end(), {0, -1, 0, batch.to.num_blocks * batch.to.block_size});
    Mirror mirror(memory());
    MirroredLayer from_device(mirror, from, batch.is_from_interleaved);
    MirroredLayer to_device(mirror, device, batch.is_to_interleaved);
    const DeferredErrors counters(memory());
    ops::TranscodeArgs args;
    args.from = from_device.view();
    args.to = to_device.view();
    args.from_transform = on_device(mirror, from_transform);
    args.to_transform = on_device(mirror, to_transform);
    args.from_slots = mirror.add(from_slots);
    args.to_slots = mirror.add(to_slots);
    args.num_tokens = std::ssize(from_slots);
    const Status status = ops::transcode(context(), args, counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    to_device.fetch(mirror);
    expect_same_bytes(host, device);
    EXPECT_EQ(counters.read().out_of_range, 4u);  // two tokens, K and V
  }

  static bool append_to(const ops::CpuContext& cpu, TestLayer& layer, const LayerShape& shape,
                        const ops::LayerTransform& transform, const KvRows& rows,
                        const std::vector<int64_t>& slots) {
    ops::AppendArgs args;
    args.cache = layer.view();
    args.transform = transform;
    args.k = dense_rows(rows.k.data(), DType::kF32, shape.num_heads, shape.k_dim);
    args.v = dense_rows(rows.v.data(), DType::kF32, shape.num_heads, shape.v_dim);
    args.slot_mapping = slots;
    return ops::append(cpu, args).ok();
  }

 private:
  static void gather_from(const ops::CpuContext& cpu, TestLayer& layer, const Batch& batch,
                          const ops::LayerTransform& transform, KvRows& rows) {
    std::vector<int32_t> ids(batch.from.num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    const ops::GatherRange range = {.num_tokens = batch.num_tokens};
    ops::GatherArgs args;
    args.cache = layer.view();
    args.transform = transform;
    args.block_table = {ids.data(), std::ssize(ids)};
    args.max_blocks_per_sequence = std::ssize(ids);
    args.num_sequences = 1;
    args.ranges = {&range, 1};
    args.k = dense_rows(rows.k.data(), DType::kF32, kFromShape.num_heads, kFromShape.k_dim);
    args.v = dense_rows(rows.v.data(), DType::kF32, kFromShape.num_heads, kFromShape.v_dim);
    ASSERT_TRUE(ops::gather(cpu, args).ok());
  }
  static ops::LayerTransform on_device(Mirror& mirror, const ops::LayerTransform& host) {
    return {mirrored(mirror, host.k, 3 * 128), mirrored(mirror, host.v, 3 * 96)};
  }
};

TEST_F(GpuTranscode, WritesTheCpusBytesFromEveryFormatToEveryOther) {
  for (const format::Facts* from : format::kRowFacts) {
    for (const format::Facts* to : format::kRowFacts) {
      compare(computed_or_only(*from), computed_or_only(*to), {}, {});
    }
  }
}

TEST_F(GpuTranscode, TakesAndLeavesInterleaved) {
  for (const char* name : {"nvfp4", "mxfp4", "mxfp4_g16"}) {
    const auto spec = computed_or_only(*spec_named(name).facts);
    for (const char* other : {"bf16", "f32", "int8", "nvfp4"}) {
      const auto other_spec = computed_or_only(*spec_named(other).facts);
      compare(spec, other_spec, {}, {}, {.is_from_interleaved = true});
      compare(other_spec, spec, {}, {}, {.is_to_interleaved = true});
      compare(spec, other_spec, {}, {}, {.is_from_interleaved = true, .is_to_interleaved = true});
    }
  }
}

TEST_F(GpuTranscode, UndoesOneTransformAndAppliesTheOther) {
  const Tables tables, others;  // a mirror keeps a piece of memory once
  const format::FormatSpec int8 = spec_named("int8"), bf16 = spec_named("bf16");
  compare(bf16, int8, {}, tables.transform());
  compare(int8, bf16, tables.transform(), {});
  compare(int8, spec_named("nvfp4"), tables.transform(), others.transform());
}

TEST_F(GpuTranscode, TakesManyTokens) {
  const Tables tables, others;
  const format::FormatSpec bf16 = spec_named("bf16"), nvfp4 = spec_named("nvfp4");
  compare(bf16, spec_named("int8"), {}, tables.transform(), many_tokens());
  compare(nvfp4, spec_named("int4_affine"), {}, {}, many_tokens());
  compare(spec_named("int8"), nvfp4, tables.transform(), others.transform(), many_tokens());
}

// K's second segment alone, whose heads have no V, behind another layer's rows.
struct DeviceSegment {
  explicit DeviceSegment(const ops::LayerView& layer)
      : runs(layer.runs.begin(), layer.runs.end()), view(layer) {
    for (ops::HeadRun& run : runs) run.v = {};
    view.runs = runs;
  }
  std::vector<ops::HeadRun> runs;
  ops::LayerView view;
};

// What one call makes of rows in two segments is what a call for each makes.
TEST_F(GpuTranscode, TakesRowsInTwoSegments) {
  const format::FormatSpec int8 = spec_named("int8"), nvfp4 = spec_named("nvfp4"),
                           bf16 = spec_named("bf16"), f16 = spec_named("f16");
  constexpr int kTokens = 38;
  TestLayer from(int8, int8, kFromShape), from_rest(bf16, bf16, kFromShape);
  const KvRows rows = normal_rows(kFromShape, kTokens, 3);
  const auto cpu = serial_context(device::CpuLevel::kScalar);
  for (TestLayer* layer : {&from, &from_rest}) {
    ASSERT_TRUE(append_to(cpu, *layer, kFromShape, {}, rows, slots_from(0, kTokens)));
  }
  TestLayer one(nvfp4, nvfp4, kToShape), one_rest(f16, f16, kToShape);
  TestLayer each(nvfp4, nvfp4, kToShape), each_rest(f16, f16, kToShape);
  Mirror mirror(memory());
  MirroredLayer source(mirror, from), source_rest(mirror, from_rest);
  MirroredLayer together(mirror, one), together_rest(mirror, one_rest);
  MirroredLayer apart(mirror, each), apart_rest(mirror, each_rest);
  const DeviceSegment of_source(source_rest.view()), of_together(together_rest.view()),
      of_apart(apart_rest.view());
  const DeferredErrors counters(memory());
  std::vector<int64_t> from_slots = slots_from(0, kTokens), to_slots = slots_from(5, kTokens);
  ops::TranscodeArgs args;
  args.from_slots = mirror.add(from_slots);
  args.to_slots = mirror.add(to_slots);
  args.num_tokens = kTokens;
  const auto run = [&](const ops::LayerView& a, const ops::LayerView& b) {
    args.from = a;
    args.to = b;
    return ops::transcode(context(), args, counters.get());
  };
  ops::LayerView whole = source.view(), target = together.view();
  whole.next_segment = &of_source.view;
  EXPECT_FALSE(run(whole, target).ok()) << "to has one segment";
  target.next_segment = &of_together.view;
  ASSERT_TRUE(run(whole, target).ok());
  ASSERT_TRUE(run(source.view(), apart.view()).ok());
  ASSERT_TRUE(run(of_source.view, of_apart.view).ok());
  synchronize();
  for (MirroredLayer* layer : {&together, &together_rest, &apart, &apart_rest})
    layer->fetch(mirror);
  expect_same_bytes(each, one);
  expect_same_bytes(each_rest, one_rest);
  EXPECT_EQ(counters.read().out_of_range, 0u);
}

TEST_F(GpuTranscode, MakesPageSharedScalesAsTheCpu) {
  const Tables tables;
  for (const format::Facts* facts : format::kRowFacts) {
    if (!facts->scale_sources.allows(format::ScaleSource::kPageShared)) continue;
    const auto page =
        format::make_spec(*facts, {.scale_source = format::ScaleSource::kPageShared}).value();
    compare(spec_named("bf16"), page, {}, {});
    compare(page, spec_named("int8"), {}, {});
    compare(page, page, tables.transform(), {});
  }
}

}  // namespace
}  // namespace kvx::tests::transcode_test

// What the device counts by head against the CPU: append, copy_blocks and transcode, by chunks, by
// rows and by pages. feedback_test.cpp compares rows with error feedback.
#include <cmath>
#include <random>

#include "format/list.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/transcode/transcode_cuda.hpp"
#include "tests/gpu/layer_counts.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests::saturation_test {
namespace {

using format::FormatSpec;
using format::ScaleSource;

constexpr int kTokens = 61;

// A fifth of the numbers beyond any static scale of this test; here and there none that is finite.
std::vector<float> clipped_rows(int num_heads, int head_dim, uint32_t seed) {
  std::vector<float> rows =
      normal_floats(static_cast<size_t>(kTokens) * num_heads * head_dim, seed, 20.0f);
  std::mt19937 random(seed);
  for (float& x : rows) {
    const auto r = static_cast<uint32_t>(random());
    if (r % 5 == 0) x *= std::exp2(static_cast<float>(r % 24));
    if (r % 1009 == 1) x = std::numeric_limits<float>::infinity();
    if (r % 1013 == 2) x = std::nanf("");
    if (r % 7 == 3) x = 0.0f;
  }
  return rows;
}

std::vector<FormatSpec> specs_of(const format::Facts& facts) {
  std::vector<FormatSpec> specs;
  for (int type = 0; type < facts.scale_types.count; ++type) {
    for (int source = 0; source < facts.scale_sources.count; ++source) {
      for (const auto choice : {format::ScaleChoice::kAmax, format::ScaleChoice::kSearch}) {
        const auto spec =
            format::make_spec(facts, {.scale_type = facts.scale_types.values[type],
                                      .scale_source = facts.scale_sources.values[source],
                                      .scale_choice = choice});
        if (spec.ok()) specs.push_back(spec.value());
      }
    }
  }
  return specs;
}

class GpuSaturation : public GpuTest {
 protected:
  struct Layer {
    Layer(const FormatSpec& spec, const LayerShape& shape) : rows(spec, spec, shape) {
      counts.emplace(rows, shape.num_heads);
      for (TestSide* side : {&rows.k, &rows.v}) {
        side->view.tensor_scales = spec.facts->has_tensor_scale ? kTensorScales : nullptr;
        if (spec.scale_source != ScaleSource::kGiven) continue;
        side->fill_scales(spec.scale_type == format::ScaleType::kE8M0
                              ? format::StoredScale{125}
                              : format::round_scale(spec.scale_type, 0.3f));
      }
    }
    static constexpr float kTensorScales[] = {0.25f, 1.0f, 1e-3f};
    TestLayer rows;
    std::optional<LayerCounts> counts;
  };

  // Returns the CPU's saturated numbers, which the device has counted, too.
  int64_t compare_append(const FormatSpec& spec, const LayerShape& shape, DType type) {
    Layer host(spec, shape), device(spec, shape);
    std::vector<uint8_t> rows[2];
    for (int i = 0; i < 2; ++i) {
      const int dim = i == 0 ? shape.k_dim : shape.v_dim;
      const std::vector<float> x = clipped_rows(shape.num_heads, dim, 5 + i);
      rows[i].resize(x.size() * bytes_of(type));
      ops::cpu::kernel_table(device::CpuLevel::kScalar)
          .store_floats(type, x.data(), static_cast<int>(x.size()), rows[i].data());
    }
    std::vector<int64_t> slots = slots_from(0, kTokens);
    slots[7] = -1;
    ops::AppendArgs args;
    args.cache = host.rows.view();
    args.k = dense_rows(std::as_const(rows[0]).data(), type, shape.num_heads, shape.k_dim);
    args.v = dense_rows(std::as_const(rows[1]).data(), type, shape.num_heads, shape.v_dim);
    args.slot_mapping = slots;
    EXPECT_TRUE(ops::append(serial_context(device::choose_cpu_level().value()), args).ok());

    Mirror mirror(memory());
    const MirroredLayer on_device(mirror, device.rows);
    const DeferredErrors counters(memory());
    args.cache = on_device.view();
    args.k.data = mirror.add(rows[0]);
    args.v.data = mirror.add(rows[1]);
    args.slot_mapping = {mirror.add(slots), slots.size()};
    const Status status = ops::append(context(), args, counters.get());
    EXPECT_TRUE(status.ok()) << status.error().message;
    synchronize();
    device.counts->fetch(mirror);
    expect_same_counts(*host.counts, *device.counts);
    return host.counts->saturated();
  }
};

TEST_F(GpuSaturation, OfAppendIsTheCpusInEveryFormat) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : specs_of(*facts)) {
      for (const int head_dim : {64, 128, 80}) {
        for (const DType type : {DType::kBF16, DType::kF32}) {
          if (!format::check_head_dim(spec, head_dim).ok()) continue;
          SCOPED_TRACE(fmt::format("{} {} {} {}, head_dim {}, {}", facts->name,
                                   name_of(spec.scale_type), name_of(spec.scale_source),
                                   name_of(spec.scale_choice), head_dim, name_of(type)));
          const LayerShape shape = {.num_heads = 3, .k_dim = head_dim, .v_dim = head_dim};
          const int64_t saturated = compare_append(spec, shape, type);
          EXPECT_TRUE(saturated > 0 || spec.scale_source != ScaleSource::kGiven);
        }
      }
    }
  }
  EXPECT_GT(compare_append(spec_named("nvfp4"), {.num_heads = 3}, DType::kBF16), 0);
}

// Rows of 16 bits into packed blocks, as a full-precision window does it; and from slot to slot.
TEST_F(GpuSaturation, OfCopiesAndTranscodingIsTheCpus) {
  const LayerShape shape = {.num_heads = 3};
  const ops::CpuContext cpu = serial_context(device::choose_cpu_level().value());
  TestLayer from(spec_named("f32"), spec_named("f32"), shape);
  TestLayer from_bf16(spec_named("bf16"), spec_named("bf16"), shape);
  std::vector<int64_t> slots = slots_from(0, kTokens);
  const std::vector<float> k = clipped_rows(3, 64, 3), v = clipped_rows(3, 64, 4);
  for (TestLayer* layer : {&from, &from_bf16}) {
    ops::AppendArgs args;
    args.cache = layer->view();
    args.k = dense_rows(k.data(), DType::kF32, 3, 64);
    args.v = dense_rows(v.data(), DType::kF32, 3, 64);
    args.slot_mapping = slots;
    ASSERT_TRUE(ops::append(cpu, args).ok());
  }
  std::vector<ops::BlockCopy> copies = {{0, 0, 16}, {1, 1, 16}, {2, 2, 16}, {3, 3, 13}};
  for (const char* name : {"fp8_e4m3", "int8", "nvfp4"}) {
    for (const auto source : {ScaleSource::kGiven, ScaleSource::kComputed}) {
      const auto spec = format::make_spec(*spec_named(name).facts, {.scale_source = source});
      if (!spec.ok()) continue;
      for (TestLayer* source_layer : {&from, &from_bf16}) {
        SCOPED_TRACE(fmt::format("{} {} from {}", name, name_of(source),
                                 source_layer->k.view.spec.facts->name));
        Layer host(spec.value(), shape);
        ASSERT_TRUE(ops::copy_blocks(cpu, source_layer->view(), host.rows.view(), copies).ok());
        Mirror mirror(memory());
        const MirroredLayer from_device(mirror, *source_layer);
        const DeferredErrors counters(memory());
        const auto expect_same = [&](const auto& verb) {
          Layer device(spec.value(), shape);
          const MirroredLayer to_device(mirror, device.rows);
          const Status status = verb(to_device.view());
          ASSERT_TRUE(status.ok()) << status.error().message;
          synchronize();
          device.counts->fetch(mirror);
          expect_same_counts(*host.counts, *device.counts);
        };
        expect_same([&](const ops::LayerView& to) {
          return ops::copy_blocks(context(), from_device.view(), to, mirror.add(copies),
                                  std::ssize(copies), counters.get());
        });
        expect_same([&](const ops::LayerView& to) {
          ops::TranscodeArgs args;
          args.from = from_device.view();
          args.to = to;
          args.from_slots = args.to_slots = mirror.add(slots);
          args.num_tokens = kTokens;
          return ops::transcode(context(), args, counters.get());
        });
      }
    }
  }
}

}  // namespace
}  // namespace kvx::tests::saturation_test

// Error feedback on the device against the CPU, byte for byte: append, copy_blocks and transcode.
#include <cmath>
#include <random>

#include "format/list.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/transcode/transcode_cuda.hpp"
#include "tests/gpu/layer_counts.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests::feedback_test {
namespace {

using format::FormatSpec;

// [num_heads, head_dim, head_dim], which differ from head to head.
std::vector<float> weights_of(int num_heads, int head_dim) {
  std::vector<float> weights = normal_floats(size_t(num_heads) * head_dim * head_dim, 5, 0.15f);
  for (int i = 0; i < num_heads * head_dim; ++i) {
    for (int j = 0; j <= i % head_dim; ++j) weights[size_t(i) * head_dim + j] = 0;
  }
  return weights;
}

// Rows of many sizes; in some of them zeros, numbers too large for feedback, infinities and NaNs.
std::vector<float> wild_rows(int64_t num_rows, int head_dim, uint32_t seed) {
  std::vector<float> rows = normal_floats(static_cast<size_t>(num_rows * head_dim), seed);
  std::mt19937 random(seed);
  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = rows.data() + r * head_dim;
    const float scale = std::ldexp(1.0f, static_cast<int>(random() % 24) - 12);
    for (int d = 0; d < head_dim; ++d) row[d] *= scale;
    const int at = static_cast<int>(random() % static_cast<unsigned>(head_dim));
    if (r % 11 == 3) std::fill(row, row + head_dim / 2, -0.0f);
    if (r % 29 == 5) row[at] = 0x1p61f;
    if (r % 31 == 6) row[at] = std::numeric_limits<float>::infinity();
    if (r % 37 == 7) row[at] = std::nanf("");
  }
  return rows;
}

// What K and V go through, [num_heads, head_dim] each.
struct Tables {
  Tables(int num_heads, int head_dim)
      : mean(normal_floats(size_t(num_heads) * head_dim, 31)),
        factor(size_t(num_heads) * head_dim, 1.25f),
        offset(size_t(kOffsetBlocks) * num_heads * head_dim) {
    offset = normal_floats(offset.size(), 33);
  }
  ops::SideTransform transform() const {
    return {mean.data(), factor.data(), offset.data(), kOffsetBlocks, true};
  }
  static constexpr int kOffsetBlocks = 4;
  std::vector<float> mean, factor, offset;
};

struct Case {
  LayerShape shape;
  DType type = DType::kBF16;
  int num_tokens = 75;
  bool is_transformed = false;
  bool is_interleaved = false;
};

class GpuFeedback : public GpuTest {
 protected:
  void compare(const FormatSpec& spec, const Case& c) {
    const LayerShape& shape = c.shape;
    SCOPED_TRACE(fmt::format("{} group {} {} {} head_dim {}, {} tokens, {}", spec.facts->name,
                             spec.group_size, name_of(spec.scale_source),
                             name_of(spec.scale_choice), shape.k_dim, c.num_tokens,
                             name_of(c.type)));
    std::vector<int64_t> slots = slots_from(0, c.num_tokens);
    std::shuffle(slots.begin() + c.num_tokens / 2, slots.end(), std::mt19937(3));
    slots[c.num_tokens / 2] = -1;
    std::vector<int64_t> positions(slots.size());
    for (size_t t = 0; t < slots.size(); ++t) {
      positions[t] = static_cast<int64_t>(t) % (Tables::kOffsetBlocks * shape.block_size);
    }
    std::vector<uint8_t> rows[2];
    for (int i = 0; i < 2; ++i) {
      const int dim = i == 0 ? shape.k_dim : shape.v_dim;
      const int64_t num_rows = int64_t{c.num_tokens} * shape.num_heads;
      const std::vector<float> x = wild_rows(num_rows, dim, 7 + static_cast<uint32_t>(i));
      rows[i].resize(x.size() * bytes_of(c.type));
      ops::cpu::kernel_table(device::CpuLevel::kScalar)
          .store_floats(c.type, x.data(), static_cast<int>(x.size()), rows[i].data());
    }
    const std::vector<float> weights = weights_of(shape.num_heads, shape.k_dim);
    const Tables tables(shape.num_heads, shape.k_dim);
    TestLayer host(spec, spec, shape);
    TestLayer device(spec, spec, shape);
    LayerCounts host_counts(host, shape.num_heads), device_counts(device, shape.num_heads);
    for (TestLayer* layer : {&host, &device}) {
      layer->k.view.feedback = weights.data();
      if (spec.scale_source != format::ScaleSource::kGiven) continue;
      for (TestSide* side : {&layer->k, &layer->v}) {
        side->fill_scales(spec.scale_type == format::ScaleType::kE8M0
                              ? format::StoredScale{126}
                              : format::round_scale(spec.scale_type, 0.3f));
      }
    }
    Mirror mirror(memory());
    MirroredLayer on_device(mirror, device, c.is_interleaved);
    const DeferredErrors counters(memory());

    ops::AppendArgs args;
    args.cache = host.view();
    if (c.is_transformed) args.transform.k = tables.transform();
    args.k = dense_rows(std::as_const(rows[0]).data(), c.type, shape.num_heads, shape.k_dim);
    args.v = dense_rows(std::as_const(rows[1]).data(), c.type, shape.num_heads, shape.v_dim);
    args.slot_mapping = slots;
    args.positions = positions;
    const auto report = ops::append(serial_context(device::choose_cpu_level().value()), args);
    ASSERT_TRUE(report.ok()) << report.error().message;

    args.cache = on_device.view();
    args.transform.k = mirrored(mirror, args.transform.k, int64_t{shape.num_heads} * shape.k_dim);
    args.k.data = mirror.add(rows[0]);
    args.v.data = mirror.add(rows[1]);
    args.slot_mapping = {mirror.add(slots), slots.size()};
    args.positions = {mirror.add(positions), positions.size()};
    const Status status = ops::append(context(), args, counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    on_device.fetch(mirror);
    expect_same_bytes(host, device);
    device_counts.fetch(mirror);
    expect_same_counts(host_counts, device_counts);
    EXPECT_EQ(counters.read().nonfinite_inputs,
              static_cast<uint64_t>(report.value().nonfinite_inputs));
    EXPECT_EQ(counters.read().out_of_range, 0u);
  }

  // Every source of scales, and every choice where the encoder has one.
  static std::vector<FormatSpec> specs_of(const format::Facts& facts) {
    std::vector<FormatSpec> specs;
    for (int g = 0; g < facts.group_sizes.count; ++g) {
      for (int s = 0; s < facts.scale_sources.count; ++s) {
        for (const auto choice : {format::ScaleChoice::kAmax, format::ScaleChoice::kSearch}) {
          const auto spec = format::make_spec(facts, {.group_size = facts.group_sizes.values[g],
                                                      .scale_source = facts.scale_sources.values[s],
                                                      .scale_choice = choice});
          if (spec.ok() && spec.value().has_scale()) specs.push_back(spec.value());
        }
      }
    }
    return specs;
  }
};

// Blocks for so many tokens.
LayerShape shape_for(int num_tokens, int k_dim, int v_dim, int num_heads = 3) {
  return {
      .num_blocks = num_tokens / 16 + 1, .num_heads = num_heads, .k_dim = k_dim, .v_dim = v_dim};
}

TEST_F(GpuFeedback, WritesTheCpusBytesInEveryFormat) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : specs_of(*facts)) {
      compare(spec, {.shape = shape_for(75, 128, 64)});
      compare(spec, {.shape = shape_for(75, 64, 64), .is_transformed = true});
    }
  }
}

// So many rows that each has a lane of its own.
TEST_F(GpuFeedback, WritesTheCpusBytesOfManyRows) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : specs_of(*facts)) {
      compare(spec,
              {.shape = shape_for(3300, 64, 64, 4), .num_tokens = 3300, .is_transformed = true});
    }
  }
  const FormatSpec nvfp4 = spec_named("nvfp4");
  compare(nvfp4, {.shape = shape_for(3300, 128, 128, 4), .num_tokens = 3300});
  compare(nvfp4, {.shape = shape_for(3300, 512, 64, 4), .num_tokens = 3300});
}

TEST_F(GpuFeedback, WritesTheCpusBytesFromEveryTypeInEveryShape) {
  for (const char* name : {"nvfp4", "int8", "fp8_e4m3", "int4_affine"}) {
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int head_dim : {16, 80, 96, 256, 1024}) {
        LayerShape shape = shape_for(75, head_dim, 32);
        shape.order = Order::kHnd;
        compare(specs_of(*spec_named(name).facts).front(), {.shape = shape, .type = type});
      }
    }
  }
  // Rows that are no whole chunks.
  compare(spec_named("int8"), {.shape = shape_for(75, 20, 100), .is_transformed = true});
  compare(spec_named("int4"), {.shape = shape_for(75, 70, 70)});
}

TEST_F(GpuFeedback, WritesTheCpusCodesInterleaved) {
  for (const char* name : {"nvfp4", "mxfp4", "mxfp4_g16"}) {
    for (const int num_tokens : {75, 3300}) {
      compare(spec_named(name), {.shape = shape_for(num_tokens, 128, 128, 4),
                                 .num_tokens = num_tokens,
                                 .is_interleaved = true});
    }
  }
}

TEST_F(GpuFeedback, CopiesAndTranscodesFeedBackToo) {
  for (const char* name : {"nvfp4", "int4", "int8_affine"}) {
    const FormatSpec bf16 = spec_named("bf16"), spec = spec_named(name);
    const LayerShape shape = shape_for(64, 128, 64);
    const std::vector<float> weights = weights_of(shape.num_heads, shape.k_dim);
    TestLayer from(bf16, bf16, shape), host(spec, spec, shape);
    const auto cpu = serial_context(device::CpuLevel::kScalar);
    ASSERT_TRUE(append_rows(cpu, from, shape, normal_rows(shape, 64, 3), slots_from(0, 64)).ok());
    std::vector<ops::BlockCopy> copies = {{0, 0, 16}, {1, 1, 16}, {2, 2, 16}, {3, 3, 16}};
    host.k.view.feedback = weights.data();
    ASSERT_TRUE(ops::copy_blocks(cpu, from.view(), host.view(), copies).ok());

    Mirror mirror(memory());
    MirroredLayer from_device(mirror, from);
    const DeferredErrors counters(memory());
    const auto expect_same = [&](const auto& verb) {
      TestLayer device(spec, spec, shape);
      device.k.view.feedback = weights.data();
      MirroredLayer to_device(mirror, device);
      const Status status = verb(to_device.view());
      ASSERT_TRUE(status.ok()) << status.error().message;
      synchronize();
      to_device.fetch(mirror);
      expect_same_bytes(host, device);
    };
    expect_same([&](const ops::LayerView& to) {
      return ops::copy_blocks(context(), from_device.view(), to, mirror.add(copies), 4,
                              counters.get());
    });
    std::vector<int64_t> slots = slots_from(0, 64);
    expect_same([&](const ops::LayerView& to) {
      ops::TranscodeArgs args;
      args.from = from_device.view();
      args.to = to;
      args.from_slots = args.to_slots = mirror.add(slots);
      args.num_tokens = 64;
      return ops::transcode(context(), args, counters.get());
    });
  }
}

}  // namespace
}  // namespace kvx::tests::feedback_test

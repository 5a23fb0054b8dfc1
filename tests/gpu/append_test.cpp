// append and gather on the device against the CPU: the same bytes and the same numbers.
#include "ops/append/append_cuda.hpp"

#include <cmath>
#include <random>

#include "format/list.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests {
namespace {

using format::FormatSpec;

// All that a format can be told at append, with scales per row.
std::vector<FormatSpec> all_specs(const format::Facts& facts) {
  std::vector<FormatSpec> specs;
  const auto each = [](const auto& choices, const auto& use) {
    for (int i = 0; i < choices.count; ++i) use(choices.values[i]);
  };
  each(facts.group_sizes, [&](int group) {
    each(facts.scale_types, [&](format::ScaleType type) {
      each(facts.scale_rules, [&](format::ScaleRule rule) {
        for (const auto choice : {format::ScaleChoice::kAmax, format::ScaleChoice::k4Over6,
                                  format::ScaleChoice::kSearch}) {
          const auto spec =
              format::make_spec(facts, {group, type, rule, format::ScaleSource::kComputed, choice});
          if (spec.ok()) specs.push_back(spec.value());
        }
      });
    });
  });
  if (specs.empty()) specs.push_back(format::make_spec(facts).value());
  return specs;
}

// Numbers of many sizes, and now and then a zero, an infinity or a NaN.
std::vector<float> wild_floats(size_t n, uint32_t seed) {
  std::vector<float> x = normal_floats(n, seed);
  std::mt19937 random(seed + 7);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t r = static_cast<uint32_t>(random());
    if (i % 512 < 128) x[i] *= std::exp2(static_cast<float>(static_cast<int>(r % 40) - 20));
    if (r % 10007 == 0) x[i] = std::numeric_limits<float>::infinity();
    if (r % 10009 == 0) x[i] = std::nanf("");
    if (r % 97 == 0) x[i] = 0.0f;
  }
  return x;
}

class GpuAppend : public GpuTest {
 protected:
  // Appends the same rows on both machines and compares all bytes of the cache, then gathers.
  // is_interleaved: the device's E2M1 codes.
  void compare(const FormatSpec& k, const FormatSpec& v, const LayerShape& shape, DType type,
               uint32_t seed, bool is_interleaved = false) {
    SCOPED_TRACE(fmt::format("{} group {} {} {} / {}, head_dim {}/{}, {}, block_size {}",
                             k.facts->name, k.group_size, name_of(k.scale_type),
                             name_of(k.scale_choice), v.facts->name, shape.k_dim, shape.v_dim,
                             name_of(type), shape.block_size));
    const int num_tokens = shape.num_blocks * shape.block_size - 3;
    std::vector<int64_t> slots = slots_from(0, num_tokens);
    std::shuffle(slots.begin() + num_tokens / 2, slots.end(), std::mt19937(seed));
    slots[num_tokens / 2] = -1;
    std::vector<uint8_t> rows[2];
    for (int i = 0; i < 2; ++i) {
      const int64_t n =
          int64_t{num_tokens} * shape.num_heads * (i == 0 ? shape.k_dim : shape.v_dim);
      const std::vector<float> x = wild_floats(n, seed + i);
      rows[i].resize(n * bytes_of(type));
      ops::cpu::kernel_table(device::CpuLevel::kScalar)
          .store_floats(type, x.data(), static_cast<int>(n), rows[i].data());
    }
    TestLayer host(k, v, shape);
    TestLayer device(k, v, shape);
    Mirror mirror(memory());
    MirroredLayer on_device(mirror, device, is_interleaved);
    const DeferredErrors counters(memory());

    ops::AppendArgs args;
    args.cache = host.view();
    args.k = dense_rows(std::as_const(rows[0]).data(), type, shape.num_heads, shape.k_dim);
    args.v = dense_rows(std::as_const(rows[1]).data(), type, shape.num_heads, shape.v_dim);
    args.slot_mapping = slots;
    const auto report = ops::append(serial_context(device::CpuLevel::kScalar), args);
    ASSERT_TRUE(report.ok());

    args.cache = on_device.view();
    args.k.data = mirror.add(rows[0]);
    args.v.data = mirror.add(rows[1]);
    args.slot_mapping = {mirror.add(slots), slots.size()};
    const Status status = ops::append(context(), args, counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    on_device.fetch(mirror);
    expect_same_bytes(host, device);
    EXPECT_EQ(counters.read().nonfinite_inputs,
              static_cast<uint64_t>(report.value().nonfinite_inputs));
    EXPECT_EQ(counters.read().out_of_range, 0u);
    compare_gather(mirror, on_device, host, shape, type);
  }

  void compare_gather(Mirror& mirror, const MirroredLayer& on_device, TestLayer& host,
                      const LayerShape& shape, DType type) {
    const int num_tokens = shape.num_blocks * shape.block_size;
    std::vector<int32_t> ids(shape.num_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<ops::GatherRange> ranges = {
        {0, 0, num_tokens / 2, 0},
        {0, num_tokens / 2, num_tokens - num_tokens / 2, num_tokens / 2}};
    std::vector<uint8_t> expected[2], found[2];
    ops::GatherArgs args;
    args.max_blocks_per_sequence = shape.num_blocks;
    args.num_sequences = 1;
    for (int i = 0; i < 2; ++i) {
      expected[i].resize(int64_t{num_tokens} * shape.num_heads *
                         (i == 0 ? shape.k_dim : shape.v_dim) * bytes_of(type));
      found[i] = expected[i];
    }
    args.cache = host.view();
    args.block_table = {ids.data(), shape.num_blocks};
    args.ranges = ranges;
    args.k = dense_rows(expected[0].data(), type, shape.num_heads, shape.k_dim);
    args.v = dense_rows(expected[1].data(), type, shape.num_heads, shape.v_dim);
    ASSERT_TRUE(ops::gather(serial_context(device::CpuLevel::kScalar), args).ok());

    args.cache = on_device.view();
    args.block_table = {mirror.add(ids), shape.num_blocks};
    args.ranges = {mirror.add(ranges), ranges.size()};
    args.k.data = mirror.add(found[0]);
    args.v.data = mirror.add(found[1]);
    const DeferredErrors counters(memory());
    ASSERT_TRUE(ops::gather(context(), args, num_tokens, counters.get()).ok());
    synchronize();
    for (int i = 0; i < 2; ++i) {
      mirror.fetch(found[i]);
      expect_same_numbers(type, expected[i], found[i]);
    }
  }

  // NaNs of arithmetic differ in sign and payload from machine to machine (f32 output alone).
  static void expect_same_numbers(DType type, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& found) {
    if (type != DType::kF32) {
      EXPECT_TRUE(same_bytes(expected, found));
      return;
    }
    for (size_t i = 0; i + 4 <= expected.size(); i += 4) {
      float a, b;
      memcpy(&a, expected.data() + i, 4);
      memcpy(&b, found.data() + i, 4);
      if (std::isnan(a) && std::isnan(b)) continue;
      ASSERT_EQ(std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b)) << "number " << i / 4;
    }
  }
};

TEST_F(GpuAppend, WritesTheCpusBytesInEveryFormatAndOption) {
  uint32_t seed = 1;
  for (const format::Facts* facts : format::kRowFacts) {
    for (const FormatSpec& spec : all_specs(*facts)) {
      const LayerShape shape = {.num_blocks = 5, .num_heads = 3, .k_dim = 128, .v_dim = 64};
      compare(spec, spec, shape, DType::kBF16, seed += 10);
    }
  }
}

TEST_F(GpuAppend, WritesTheCpusCodesInterleaved) {
  uint32_t seed = 500;
  for (const char* name : {"nvfp4", "mxfp4", "mxfp4_g16"}) {
    for (const FormatSpec& spec : all_specs(*spec_named(name).facts)) {
      for (const DType type : {DType::kF32, DType::kBF16}) {
        const LayerShape shape = {.num_blocks = 5, .num_heads = 3, .k_dim = 128, .v_dim = 64};
        compare(spec, spec, shape, type, seed += 10, true);
      }
    }
  }
}

TEST_F(GpuAppend, WritesTheCpusBytesFromEveryTypeInEveryShape) {
  uint32_t seed = 1000;
  for (const format::Facts* facts : format::kRowFacts) {
    const FormatSpec spec = all_specs(*facts).front();
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const int head_dim : {32, 96, 192, 256, 1024}) {
        compare(spec, spec,
                {.num_blocks = 3,
                 .block_size = 7,
                 .num_heads = 2,
                 .k_dim = head_dim,
                 .v_dim = head_dim,
                 .order = Order::kHnd},
                type, seed += 10);
      }
    }
  }
}

TEST_F(GpuAppend, HandlesHeadDimsThatFillNoWord) {
  const auto compare_dim = [&](const char* name, int k_dim, int v_dim) {
    const FormatSpec spec = all_specs(*spec_named(name).facts).front();
    compare(spec, spec, {.num_blocks = 2, .num_heads = 2, .k_dim = k_dim, .v_dim = v_dim},
            DType::kF32, static_cast<uint32_t>(k_dim));
  };
  for (const int dim : {1, 3, 17, 100}) {
    for (const char* name : {"f32", "bf16", "int8", "fp8_e4m3", "int8_affine"}) {
      compare_dim(name, dim, dim + 2);
    }
  }
  for (const int dim : {2, 6, 70}) compare_dim("int4", dim, dim + 4);
  compare_dim("nvfp4", 80, 48);
}

TEST_F(GpuAppend, SkipsAndCountsSlotsOutOfRange) {
  const LayerShape shape = {.num_blocks = 2, .block_size = 4, .num_heads = 1};
  const FormatSpec spec = spec_named("int8");
  TestLayer layer(spec, spec, shape);
  Mirror mirror(memory());
  MirroredLayer on_device(mirror, layer);
  KvRows rows = normal_rows(shape, 3, 5);
  std::vector<int64_t> slots = {8, int64_t{1} << 40, 7};
  ops::AppendArgs args;
  args.cache = on_device.view();
  args.k = dense_rows(static_cast<const float*>(mirror.add(rows.k)), DType::kF32, 1, 64);
  args.v = dense_rows(static_cast<const float*>(mirror.add(rows.v)), DType::kF32, 1, 64);
  args.slot_mapping = {mirror.add(slots), slots.size()};
  const DeferredErrors counters(memory());
  ASSERT_TRUE(ops::append(context(), args, counters.get()).ok());
  synchronize();
  EXPECT_EQ(counters.read().out_of_range, 4u);  // two tokens, K and V
  on_device.fetch(mirror);
  for (int slot = 0; slot < 7; ++slot) {
    for (const uint8_t byte : layer.k.codes_at(slot / 4, slot % 4, 0)) ASSERT_EQ(byte, 0xCC);
  }
}

// The layer of a latent cache: V is the beginning of K's rows and has none of its own.
TEST_F(GpuAppend, WritesTheCpusBytesWhereVIsAPartOfK) {
  const LayerShape shape = {.num_heads = 1, .k_dim = 128};
  const FormatSpec spec = spec_named("int8");
  TestLayer host(spec, spec, shape);
  TestLayer device(spec, spec, shape);
  const int num_tokens = shape.num_blocks * shape.block_size;
  std::vector<uint16_t> rows;
  for (const float x : normal_floats(static_cast<size_t>(num_tokens) * shape.k_dim, 11)) {
    rows.push_back(f32_to_bf16(x));
  }
  std::vector<int64_t> slots = slots_from(0, num_tokens);
  Mirror mirror(memory());
  MirroredLayer on_device(mirror, device);
  const DeferredErrors counters(memory());
  const auto args_of = [&](const ops::LayerView& layer, ops::HeadRun& run, const uint16_t* k,
                           const int64_t* to) {
    run = layer.runs.front();
    run.v = run.k;
    run.v.is_alias = true;
    ops::AppendArgs args;
    args.cache = layer;
    args.cache.runs = {&run, 1};
    args.k = dense_rows(k, DType::kBF16, 1, shape.k_dim);
    args.slot_mapping = {to, slots.size()};
    return args;
  };
  ops::HeadRun run;
  ASSERT_TRUE(ops::append(serial_context(device::CpuLevel::kScalar),
                          args_of(host.view(), run, rows.data(), slots.data()))
                  .ok());
  const Status status =
      ops::append(context(), args_of(on_device.view(), run, mirror.add(rows), mirror.add(slots)),
                  counters.get());
  ASSERT_TRUE(status.ok()) << status.error().message;
  synchronize();
  on_device.fetch(mirror);
  expect_same_bytes(host, device);
}

#if KVX_HAS_CUDA
// Before a device is asked for anything. Eight heads of so many tokens are 2^64 rows, or 0.
TEST(CudaAppend, RefusesMoreTokensThanItCountsRowsOf) {
  const LayerShape shape = {.num_blocks = 1, .block_size = 4, .num_heads = 8};
  const FormatSpec spec = spec_named("int8");
  TestLayer layer(spec, spec, shape);
  ops::AppendArgs args;
  args.cache = layer.view();
  const int64_t slot = 0;
  args.slot_mapping = {&slot, size_t{1} << 61};
  const Status status = ops::append(ops::CudaContext{}, args, nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(status.error().message,
            "slot_mapping has 2305843009213693952 tokens; a call takes at most 268435455 of 8 "
            "heads");
}
#endif

// All formats that can, each from several types; half of the slots in order, half shuffled.
TEST_F(GpuAppend, WritesTheCpusBytesUnderPageSharedScales) {
  uint32_t seed = 5000;
  for (const format::Facts* facts : format::kRowFacts) {
    if (!facts->scale_sources.allows(format::ScaleSource::kPageShared)) continue;
    for (const DType type : {DType::kF32, DType::kBF16}) {
      const FormatSpec spec =
          format::make_spec(*facts, {.scale_source = format::ScaleSource::kPageShared}).value();
      compare(spec, spec, {.num_blocks = 5, .num_heads = 3, .k_dim = 128, .v_dim = 96}, type,
              seed += 10);
      compare(spec, computed_or_only(*facts), {.num_blocks = 3, .order = Order::kHnd}, type,
              seed += 10);
    }
  }
}

}  // namespace
}  // namespace kvx::tests

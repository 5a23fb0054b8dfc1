// copy_blocks on the device against the CPU, byte for byte.
#include "ops/copy_blocks/copy_blocks_cuda.hpp"

#include "format/list.hpp"
#include "ops/cuda/common_runs.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests {
namespace {

// Whether E2M1 codes on the device lie in interleaved order.
struct Interleaved {
  bool from = false;
  bool to = false;
};

class GpuCopyBlocks : public GpuTest {
 protected:
  struct Specs {
    format::FormatSpec k;
    format::FormatSpec v;
  };
  void compare(const format::FormatSpec& from, const format::FormatSpec& to,
               const Interleaved& is_interleaved = {}) {
    compare({from, from}, {to, to}, is_interleaved);
  }
  // Copies some blocks, one of them in part, on both machines.
  void compare(const Specs& from_specs, const Specs& to_specs,
               const Interleaved& is_interleaved = {}) {
    SCOPED_TRACE(fmt::format("{} and {} to {} and {}", from_specs.k.facts->name,
                             from_specs.v.facts->name, to_specs.k.facts->name,
                             to_specs.v.facts->name));
    const LayerShape shape = {.num_blocks = 4, .block_size = 8, .num_heads = 2, .k_dim = 128};
    LayerShape to_shape = shape;
    to_shape.order = Order::kHnd;
    TestLayer from(from_specs.k, from_specs.v, shape);
    TestLayer host(to_specs.k, to_specs.v, to_shape);
    TestLayer device(to_specs.k, to_specs.v, to_shape);
    const auto cpu = serial_context(device::CpuLevel::kScalar);
    ASSERT_TRUE(append_rows(cpu, from, shape, normal_rows(shape, 32, 3), slots_from(0, 32)).ok());
    std::vector<ops::BlockCopy> copies = {{0, 3, 8}, {2, 0, 5}, {1, 1, 8}};
    ASSERT_TRUE(ops::copy_blocks(cpu, from.view(), host.view(), copies).ok());

    Mirror mirror(memory());
    MirroredLayer from_device(mirror, from, is_interleaved.from);
    MirroredLayer to_device(mirror, device, is_interleaved.to);
    const DeferredErrors counters(memory());
    const Status status = ops::copy_blocks(context(), from_device.view(), to_device.view(),
                                           mirror.add(copies), 3, counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    to_device.fetch(mirror);
    expect_same_bytes(host, device);
    EXPECT_EQ(counters.read().out_of_range, 0u);
  }

  // Whole blocks, a part of one, a block that is not there.
  void copy_inside(const format::FormatSpec& spec, Order order, int block_size,
                   bool is_interleaved = false) {
    SCOPED_TRACE(fmt::format("{}, blocks of {}, {}", spec.facts->name, block_size,
                             order == Order::kHnd ? "HND" : "NHD"));
    const LayerShape shape = {
        .num_blocks = 6, .block_size = block_size, .num_heads = 3, .k_dim = 128, .order = order};
    TestLayer host(spec, spec, shape);
    TestLayer device(spec, spec, shape);
    const auto cpu = serial_context(device::CpuLevel::kScalar);
    const int num_tokens = 3 * block_size;
    const auto rows = normal_rows(shape, num_tokens, 5);
    for (TestLayer* layer : {&host, &device}) {
      ASSERT_TRUE(append_rows(cpu, *layer, shape, rows, slots_from(0, num_tokens)).ok());
    }
    std::vector<ops::BlockCopy> copies = {{0, 5, block_size}, {2, 3, block_size - 3}, {1, 4, 1}};
    ASSERT_TRUE(ops::copy_blocks(cpu, host.view(), host.view(), copies).ok());

    Mirror mirror(memory());
    MirroredLayer on_device(mirror, device, is_interleaved);
    const DeferredErrors counters(memory());
    copies.push_back({6, 3, block_size});
    const Status status = ops::copy_blocks(context(), on_device.view(), on_device.view(),
                                           mirror.add(copies), std::ssize(copies), counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    on_device.fetch(mirror);
    expect_same_bytes(host, device);
    EXPECT_EQ(counters.read().out_of_range, 1u);
  }
};

TEST_F(GpuCopyBlocks, WritesTheCpusBytesFromEveryFormatToEveryOther) {
  for (const format::Facts* from : format::kRowFacts) {
    for (const format::Facts* to : format::kRowFacts) {
      compare(computed_or_only(*from), computed_or_only(*to));
    }
  }
}

// Inside one cache nothing has to be looked at: scales are the same table, rows lie alike.
TEST_F(GpuCopyBlocks, MovesRunsOfRowsInsideACache) {
  for (const format::Facts* facts : format::kRowFacts) {
    for (const Order order : {Order::kHnd, Order::kNhd}) {
      for (const int block_size : {16, 48}) {
        copy_inside(computed_or_only(*facts), order, block_size);
      }
    }
  }
}

// Codes stay what they are, in whichever order: scales are not made again.
TEST_F(GpuCopyBlocks, ChangesTheOrderOfCodes) {
  for (const char* name : {"nvfp4", "mxfp4", "mxfp4_g16", "fp4_row"}) {
    const format::FormatSpec spec = computed_or_only(*spec_named(name).facts);
    compare(spec, spec, {.from = true, .to = false});
    compare(spec, spec, {.from = false, .to = true});
    compare(spec, spec, {.from = true, .to = true});
    compare(spec, spec_named("bf16"), {.from = true});
    compare(spec_named("bf16"), spec, {.to = true});
    compare(computed_or_only(*spec_named("int8").facts), spec, {.to = true});
    copy_inside(spec, Order::kHnd, 48, true);
  }
}

std::vector<format::FormatSpec> specs_with_pages() {
  std::vector<format::FormatSpec> specs;
  for (const format::Facts* facts : format::kRowFacts) {
    if (!facts->scale_sources.allows(format::ScaleSource::kPageShared)) continue;
    specs.push_back(
        format::make_spec(*facts, {.scale_source = format::ScaleSource::kPageShared}).value());
  }
  return specs;
}

TEST_F(GpuCopyBlocks, MakesPageSharedScalesFromWholePages) {
  const format::FormatSpec bf16 = spec_named("bf16");
  const format::FormatSpec int4 = spec_named("int4");
  for (const format::FormatSpec& page : specs_with_pages()) {
    compare(bf16, page);
    compare(page, bf16);
    compare({int4, int4}, {page, int4});  // V is copied as it is
    compare({page, bf16}, {computed_or_only(*page.facts), page});
    for (const format::FormatSpec& other : specs_with_pages()) compare(page, other);
  }
}

TEST_F(GpuCopyBlocks, CopiesPagesWithTheirScalesInsideACache) {
  for (const format::FormatSpec& page : specs_with_pages()) {
    copy_inside(page, Order::kHnd, 16);
    copy_inside(page, Order::kNhd, 48);
  }
}

// Copies with a tensor scale a head: equal in the first head, where pages are copied as they are.
TEST_F(GpuCopyBlocks, DecidesHeadByHeadWhetherAPageMeansTheSame) {
  const format::FormatSpec page =
      spec_named("nvfp4", {.scale_source = format::ScaleSource::kPageShared});
  const LayerShape shape = {.num_blocks = 2, .block_size = 16};
  // K's and V's lie apart: a mirror keeps a piece of memory once.
  const std::vector<float> from_k = {0.25f, 0.25f}, from_v = from_k;
  const std::vector<float> to_k = {0.25f, 0.5f}, to_v = to_k;
  TestLayer from(page, page, shape);
  TestLayer host(page, page, shape);
  TestLayer device(page, page, shape);
  from.k.view.tensor_scales = from_k.data();
  from.v.view.tensor_scales = from_v.data();
  for (TestLayer* to : {&host, &device}) {
    to->k.view.tensor_scales = to_k.data();
    to->v.view.tensor_scales = to_v.data();
  }
  const auto cpu = serial_context(device::CpuLevel::kScalar);
  ASSERT_TRUE(append_rows(cpu, from, shape, normal_rows(shape, 20, 3), slots_from(0, 20)).ok());
  std::vector<ops::BlockCopy> copies = {{0, 1, 16}, {1, 0, 4}};
  ASSERT_TRUE(ops::copy_blocks(cpu, from.view(), host.view(), copies).ok());
  Mirror mirror(memory());
  MirroredLayer from_device(mirror, from);
  MirroredLayer to_device(mirror, device);
  const DeferredErrors counters(memory());
  ASSERT_TRUE(ops::copy_blocks(context(), from_device.view(), to_device.view(), mirror.add(copies),
                               2, counters.get())
                  .ok());
  synchronize();
  to_device.fetch(mirror);
  expect_same_bytes(host, device);
}

TEST_F(GpuCopyBlocks, TakesLayersWhoseRunsAreCutDifferently) {
  const LayerShape shape = {.num_blocks = 3, .block_size = 16, .num_heads = 5, .k_dim = 128};
  TestLayer from(spec_named("int8"), spec_named("bf16"), shape);
  TestLayer host(spec_named("nvfp4"), spec_named("int4"), shape);
  TestLayer device(spec_named("nvfp4"), spec_named("int4"), shape);
  const auto cpu = serial_context(device::CpuLevel::kScalar);
  ASSERT_TRUE(append_rows(cpu, from, shape, normal_rows(shape, 48, 3), slots_from(0, 48)).ok());
  std::vector<ops::BlockCopy> copies = {{0, 2, 16}, {1, 0, 7}};
  ASSERT_TRUE(ops::copy_blocks(cpu, from.view(), host.view(), copies).ok());
  Mirror mirror(memory());
  MirroredLayer from_device(mirror, from);
  MirroredLayer to_device(mirror, device);
  const auto cut = [](ops::LayerView view, int first, int second) {
    const ops::HeadRun& whole = view.runs.front();
    return std::vector<ops::HeadRun>{
        ops::cuda::part_of(whole, 0, first), ops::cuda::part_of(whole, first, second),
        ops::cuda::part_of(whole, first + second, whole.num_heads - first - second)};
  };
  ops::LayerView from_view = from_device.view(), to_view = to_device.view();
  const auto from_runs = cut(from_view, 1, 3), to_runs = cut(to_view, 2, 1);
  from_view.runs = from_runs;
  to_view.runs = to_runs;
  copies.push_back({3, 1, 1});
  const DeferredErrors counters(memory());
  ASSERT_TRUE(
      ops::copy_blocks(context(), from_view, to_view, mirror.add(copies), 3, counters.get()).ok());
  synchronize();
  to_device.fetch(mirror);
  expect_same_bytes(host, device);
  EXPECT_EQ(counters.read().out_of_range, 1u);
}

TEST_F(GpuCopyBlocks, SkipsAndCountsCopiesOutOfRange) {
  const format::FormatSpec spec = spec_named("int8");
  const LayerShape shape = {.num_blocks = 2, .block_size = 4, .num_heads = 1};
  TestLayer from(spec, spec, shape);
  TestLayer to(spec, spec, shape);
  to.k.codes.assign(to.k.codes.size(), 0x11);
  Mirror mirror(memory());
  MirroredLayer from_device(mirror, from);
  MirroredLayer to_device(mirror, to);
  std::vector<ops::BlockCopy> copies = {{0, 2, 4}, {-1, 0, 4}, {0, 0, 5}};
  const DeferredErrors counters(memory());
  ASSERT_TRUE(ops::copy_blocks(context(), from_device.view(), to_device.view(), mirror.add(copies),
                               3, counters.get())
                  .ok());
  synchronize();
  EXPECT_EQ(counters.read().out_of_range, 3u);
  to_device.fetch(mirror);
  for (const uint8_t byte : to.k.codes) ASSERT_EQ(byte, 0x11);
}

}  // namespace
}  // namespace kvx::tests

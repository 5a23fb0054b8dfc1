// copy_blocks on the device against the CPU, byte for byte.
#include "ops/copy_blocks/copy_blocks_cuda.hpp"

#include "format/list.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests {
namespace {

class GpuCopyBlocks : public GpuTest {
 protected:
  // Copies some blocks, one of them in part, on both machines.
  void compare(const format::FormatSpec& from_spec, const format::FormatSpec& to_spec) {
    SCOPED_TRACE(fmt::format("{} to {}", from_spec.facts->name, to_spec.facts->name));
    const LayerShape shape = {.num_blocks = 4, .block_size = 8, .num_heads = 2, .k_dim = 128};
    LayerShape to_shape = shape;
    to_shape.order = Order::kHnd;
    TestLayer from(from_spec, from_spec, shape);
    TestLayer host(to_spec, to_spec, to_shape);
    TestLayer device(to_spec, to_spec, to_shape);
    const auto cpu = serial_context(device::CpuLevel::kScalar);
    ASSERT_TRUE(append_rows(cpu, from, shape, normal_rows(shape, 32, 3), slots_from(0, 32)).ok());
    std::vector<ops::BlockCopy> copies = {{0, 3, 8}, {2, 0, 5}, {1, 1, 8}};
    ASSERT_TRUE(ops::copy_blocks(cpu, from.view(), host.view(), copies).ok());

    Mirror mirror(memory());
    MirroredLayer from_device(mirror, from);
    MirroredLayer to_device(mirror, device);
    const Findings findings(memory());
    const Status status = ops::copy_blocks(context(), from_device.view(), to_device.view(),
                                           mirror.add(copies), 3, findings.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    to_device.fetch(mirror);
    expect_same_bytes(host, device);
    EXPECT_EQ(findings.read().out_of_range, 0u);
  }

  // Whole blocks, a part of one, a block that is not there.
  void copy_inside(const format::FormatSpec& spec, Order order, int block_size) {
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
    MirroredLayer on_device(mirror, device);
    const Findings findings(memory());
    copies.push_back({6, 3, block_size});
    const Status status = ops::copy_blocks(context(), on_device.view(), on_device.view(),
                                           mirror.add(copies), std::ssize(copies), findings.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    on_device.fetch(mirror);
    expect_same_bytes(host, device);
    EXPECT_EQ(findings.read().out_of_range, 1u);
  }
};

TEST_F(GpuCopyBlocks, WritesTheCpusBytesFromEveryFormatToEveryOther) {
  for (const format::Facts* from : format::kAllFacts) {
    for (const format::Facts* to : format::kAllFacts) {
      compare(computed_or_only(*from), computed_or_only(*to));
    }
  }
}

// Inside one cache nothing has to be looked at: scales are the same table, rows lie alike.
TEST_F(GpuCopyBlocks, MovesRunsOfRowsInsideACache) {
  for (const format::Facts* facts : format::kAllFacts) {
    for (const Order order : {Order::kHnd, Order::kNhd}) {
      for (const int block_size : {16, 48}) {
        copy_inside(computed_or_only(*facts), order, block_size);
      }
    }
  }
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
  const Findings findings(memory());
  ASSERT_TRUE(ops::copy_blocks(context(), from_device.view(), to_device.view(), mirror.add(copies),
                               3, findings.get())
                  .ok());
  synchronize();
  EXPECT_EQ(findings.read().out_of_range, 3u);
  to_device.fetch(mirror);
  for (const uint8_t byte : to.k.codes) ASSERT_EQ(byte, 0x11);
}

}  // namespace
}  // namespace kvx::tests

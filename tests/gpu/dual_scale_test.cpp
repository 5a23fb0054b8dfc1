// Dual-scale blocks on the device: the CPU's bytes, with and without error feedback, and what
// gather reads of them.
#include "ops/append/append_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"
#include "tests/gpu/mirrored_layer.hpp"
#include "tests/support/verbs.hpp"

namespace kvx::tests {
namespace {

class GpuDualScale : public GpuTest {
 protected:
  ops::CpuContext cpu() const {
    return {&ops::cpu::kernel_table(device::CpuLevel::kScalar), &serial_executor()};
  }

  // Weights above the diagonal, and of errors on it.
  static std::vector<float> feedback_of(const LayerShape& shape) {
    const auto n = static_cast<size_t>(shape.k_dim);
    std::vector<float> weights = normal_floats(shape.num_heads * n * n, 5, 0.15f);
    for (size_t i = 0; i < weights.size(); ++i) {
      const size_t from = i / n % n, to = i % n;
      if (to < from) weights[i] = 0;
      if (to == from) weights[i] = 0.5f + std::abs(weights[i]);
    }
    return weights;
  }

  void compare(const char* name, const char* from_name, int block_size, int head_dim,
               bool has_feedback) {
    SCOPED_TRACE(fmt::format("{} to {}, blocks of {}, head_dim {}{}", from_name, name, block_size,
                             head_dim, has_feedback ? ", with feedback" : ""));
    const LayerShape shape = {.num_blocks = 4,
                              .block_size = block_size,
                              .num_heads = 2,
                              .k_dim = head_dim,
                              .v_dim = head_dim};
    const format::FormatSpec rows = spec_named(from_name), spec = spec_named(name);
    TestLayer from(rows, rows, shape);
    TestLayer host(spec, spec, shape);
    TestLayer device(spec, spec, shape);
    KvRows numbers = normal_rows(shape, 3 * block_size, 3);
    for (int d = 0; d < head_dim; ++d) numbers.k[d] = 0;  // a token of zeros
    numbers.v[head_dim * 7 + 3] = std::numeric_limits<float>::quiet_NaN();
    ASSERT_TRUE(append_rows(cpu(), from, shape, numbers, slots_from(0, 3 * block_size)).ok());
    const std::vector<float> feedback = feedback_of(shape);
    if (has_feedback) host.k.view.feedback = device.k.view.feedback = feedback.data();
    std::vector<ops::BlockCopy> copies = {
        {0, 3, block_size}, {1, 0, block_size}, {2, 1, block_size - 5}};
    ASSERT_TRUE(ops::copy_blocks(cpu(), from.view(), host.view(), copies).ok());

    Mirror mirror(memory());
    MirroredLayer from_device(mirror, from);
    MirroredLayer to_device(mirror, device);
    const DeferredErrors counters(memory());
    Status status = ops::copy_blocks(context(), from_device.view(), to_device.view(),
                                     mirror.add(copies), std::ssize(copies), counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    // Inside the cache, as they are.
    std::vector<ops::BlockCopy> inside = {{3, 2, block_size}};
    ASSERT_TRUE(ops::copy_blocks(cpu(), host.view(), host.view(), inside).ok());
    status = ops::copy_blocks(context(), to_device.view(), to_device.view(), mirror.add(inside), 1,
                              counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    to_device.fetch(mirror);
    expect_same_bytes(host, device);

    // Back into rows of 32 bits: every number as the CPU reads it.
    TestLayer host_rows(spec_named("f32"), spec_named("f32"), shape);
    TestLayer device_rows(spec_named("f32"), spec_named("f32"), shape);
    std::vector<ops::BlockCopy> back = {{3, 0, block_size}, {0, 1, block_size}};
    ASSERT_TRUE(ops::copy_blocks(cpu(), host.view(), host_rows.view(), back).ok());
    MirroredLayer rows_device(mirror, device_rows);
    status = ops::copy_blocks(context(), to_device.view(), rows_device.view(), mirror.add(back), 2,
                              counters.get());
    ASSERT_TRUE(status.ok()) << status.error().message;
    synchronize();
    rows_device.fetch(mirror);
    expect_same_bytes(host_rows, device_rows);
  }
};

TEST_F(GpuDualScale, WritesAndReadsTheCpusBytes) {
  for (const char* name : {"int4_dual", "int3_dual", "int2_dual"}) {
    for (const int block_size : {64, 128}) {
      for (const int head_dim : {64, 128}) {
        for (const bool has_feedback : {false, true}) {
          compare(name, "bf16", block_size, head_dim, has_feedback);
        }
      }
    }
    compare(name, "f32", 64, 256, false);
    compare(name, "nvfp4", 64, 64, true);
  }
}

// Whole blocks anywhere in a call, beside tokens that are skipped.
TEST_F(GpuDualScale, AppendWritesTheCpusBytesAndCountsPartsOfBlocks) {
  for (const char* name : {"int4_dual", "int3_dual", "int2_dual"}) {
    for (const int block_size : {64, 128}) {
      SCOPED_TRACE(fmt::format("{}, blocks of {}", name, block_size));
      const LayerShape shape = {
          .num_blocks = 5, .block_size = block_size, .num_heads = 2, .k_dim = 128, .v_dim = 64};
      TestLayer host(spec_named(name), spec_named("int8"), shape);
      TestLayer device(spec_named(name), spec_named("int8"), shape);
      const std::vector<float> feedback = feedback_of(shape);
      host.k.view.feedback = device.k.view.feedback = feedback.data();
      std::vector<int64_t> slots(17, -1);
      for (const int64_t block : {3, 0, 4}) {
        for (int64_t t = 0; t < block_size; ++t) slots.push_back(block * block_size + t);
        slots.push_back(-1);
      }
      KvRows rows = normal_rows(shape, static_cast<int>(slots.size()) + 9, 3);
      ops::AppendArgs args;
      args.cache = host.view();
      args.transform.k.hadamard = true;
      args.k = dense_rows(std::as_const(rows.k).data(), DType::kF32, shape.num_heads, shape.k_dim);
      args.v = dense_rows(std::as_const(rows.v).data(), DType::kF32, shape.num_heads, shape.v_dim);
      args.window_dtype = DType::kBF16;
      args.slot_mapping = slots;
      ASSERT_TRUE(ops::append(cpu(), args).ok());

      // Nine tokens of block 1, which the rows of V are stored of and those of K are not.
      std::vector<int64_t> more = slots;
      for (int64_t t = 0; t < 9; ++t) more.push_back(block_size + t);
      Mirror mirror(memory());
      MirroredLayer layer(mirror, device);
      const DeferredErrors counters(memory());
      args.cache = layer.view();
      args.k.data = reinterpret_cast<const uint8_t*>(mirror.add(rows.k));
      args.v.data = reinterpret_cast<const uint8_t*>(mirror.add(rows.v));
      args.slot_mapping = {mirror.add(more), more.size()};
      const Status status = ops::append(context(), args, counters.get());
      ASSERT_TRUE(status.ok()) << status.error().message;
      synchronize();
      layer.fetch(mirror);
      EXPECT_TRUE(same_bytes(host.k.codes, device.k.codes));
      EXPECT_TRUE(same_bytes(host.k.scales, device.k.scales));
      EXPECT_TRUE(same_bytes(host.k.channels, device.k.channels));
      EXPECT_EQ(counters.read().out_of_range, 9u);
    }
  }
}

}  // namespace
}  // namespace kvx::tests

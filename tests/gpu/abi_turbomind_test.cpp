// TurboMind's pools of the ABI in a GPU's memory: the host's bytes, rows and attention.
#include "tests/api/engines/turbomind_pools.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::tests {
namespace {

using api_test::kTokens;
using api_test::OneSequence;
using api_test::sized;
using api_test::TurbomindLayer;
using api_test::TurbomindPools;

constexpr uint32_t kModes[] = {KVX_TURBOMIND_MODE_NONE, KVX_TURBOMIND_MODE_INT4,
                               KVX_TURBOMIND_MODE_INT8, KVX_TURBOMIND_MODE_FP4_MX,
                               KVX_TURBOMIND_MODE_FP4_NV};

class GpuAbiTurboMind : public GpuTest {
 protected:
  // Appends to layer 1 of pools on the device, whose blocks were the host's.
  void append(Mirror& mirror, const TurbomindLayer& layer, std::vector<float>& k,
              std::vector<float>& v, std::vector<int64_t>& slots) {
    const kvx_rows_t k_rows = api::rows(mirror.add(k), KVX_DTYPE_F32);
    const kvx_rows_t v_rows = api::rows(mirror.add(v), KVX_DTYPE_F32);
    auto args = sized<kvx_append_args_t>();
    args.layer = &layer.layer;
    args.k = &k_rows;
    args.v = &v_rows;
    args.slot_dtype = KVX_DTYPE_S64;
    args.slots = mirror.add(slots);
    args.num_tokens = std::ssize(slots);
    ASSERT_EQ(kvx_append(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
    synchronize();
  }
};

TEST_F(GpuAbiTurboMind, AppendWritesTheHostsBytesAndTheProbeReadsThem) {
  for (const uint32_t mode : kModes) {
    SCOPED_TRACE(mode);
    const api_test::TurbomindShape shape{.mode = mode, .head_dim = 64};
    std::vector<float> k = api_test::test_rows(kTokens, 2, 64, 0.3f);
    std::vector<float> v = api_test::test_rows(kTokens, 2, 64, 1.9f);
    const OneSequence sequence({4, 1, 5}, kTokens);
    std::vector<int64_t> slots = api_test::slots_of(sequence, 8);
    TurbomindPools host(shape);
    TurbomindPools device(shape);
    Mirror mirror(memory());
    device.args.data = mirror.add(device.data);
    if (device.args.scales != nullptr) device.args.scales = mirror.add(device.scales);
    const TurbomindLayer on_host(host.args, 1);
    TurbomindLayer on_device(device.args, 1);
    on_device.layer.memory = KVX_MEMORY_DEVICE;
    ASSERT_EQ(api_test::append_rows(on_host.layer, k, v, slots), KVX_STATUS_OK);
    append(mirror, on_device, k, v, slots);
    mirror.fetch(device.data);
    EXPECT_TRUE(same_bytes(host.data, device.data));
    if (device.args.scales == nullptr) continue;
    mirror.fetch(device.scales);
    EXPECT_TRUE(same_bytes(host.scales, device.scales));

    std::vector<const void*> blocks;
    std::vector<const void*> scales;
    std::vector<const void*> host_blocks;
    std::vector<const void*> host_scales;
    for (const int32_t id : sequence.blocks) {
      const auto bytes = static_cast<int64_t>(host.sizes.block_bytes);
      const auto scale_bytes = static_cast<int64_t>(host.sizes.scale_block_bytes);
      blocks.push_back(static_cast<const uint8_t*>(device.args.data) + id * bytes);
      scales.push_back(static_cast<const uint8_t*>(device.args.scales) + id * scale_bytes);
      host_blocks.push_back(host.block(id).data());
      host_scales.push_back(host.scale_block(id).data());
    }
    auto found = sized<kvx_turbomind_probe_t>();
    auto expected = sized<kvx_turbomind_probe_t>();
    ASSERT_EQ(kvx_turbomind_probe(&device.args, mirror.add(blocks), mirror.add(scales), 3, 1, 1, 9,
                                  KVX_MEMORY_DEVICE, context().stream, &found),
              KVX_STATUS_OK)
        << kvx_last_error();
    ASSERT_EQ(kvx_turbomind_probe(&host.args, host_blocks.data(), host_scales.data(), 3, 1, 1, 9, 0,
                                  nullptr, &expected),
              KVX_STATUS_OK);
    EXPECT_EQ(memcmp(&found, &expected, sizeof found), 0);
  }
}

}  // namespace
}  // namespace kvx::tests

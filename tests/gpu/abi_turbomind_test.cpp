// TurboMind's pools of the ABI in a GPU's memory: the host's bytes, rows and attention.
#include <cmath>

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

// Pointer tables become ids where they lie: the host's ids, and -1 where its call is OUT_OF_RANGE.
TEST_F(GpuAbiTurboMind, TablesOfPointersBecomeIdsOnTheDevice) {
  for (const uint32_t mode : kModes) {
    SCOPED_TRACE(mode);
    TurbomindPools pools({.mode = mode, .head_dim = 64});
    const bool has_scales = pools.args.scales != nullptr;
    std::vector<const void*> blocks, scales;
    std::vector<int32_t> expected(300);
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = static_cast<int32_t>(i * 7 % 6);
      blocks.push_back(pools.block(expected[i]).data());
      if (has_scales) scales.push_back(pools.scale_block(expected[i]).data());
    }
    std::vector<int32_t> host(expected.size());
    ASSERT_EQ(
        kvx_turbomind_block_ids(&pools.args, blocks.data(), has_scales ? scales.data() : nullptr,
                                std::ssize(blocks), host.data()),
        KVX_STATUS_OK)
        << kvx_last_error();
    EXPECT_EQ(host, expected);
    const auto* const data = static_cast<const uint8_t*>(pools.args.data);
    blocks[3] = data + 1;
    blocks[17] = nullptr;
    blocks[101] = data - pools.sizes.block_bytes;
    blocks[299] = data + 6 * pools.sizes.block_bytes;
    for (const size_t bad : {3, 17, 101, 299}) expected[bad] = -1;
    if (has_scales) {
      std::swap(scales[200], scales[201]);
      expected[200] = expected[201] = -1;
    }
    Mirror mirror(memory());
    std::vector<int32_t> ids(expected.size(), 9);
    std::vector<uint64_t> counters = {0, 0};
    int32_t* const ids_there = mirror.add(ids);
    uint64_t* const counters_there = mirror.add(counters);
    ASSERT_EQ(kvx_turbomind_device_block_ids(
                  &pools.args, mirror.add(blocks), has_scales ? mirror.add(scales) : nullptr,
                  std::ssize(blocks), ids_there, counters_there, context().stream),
              KVX_STATUS_OK)
        << kvx_last_error();
    synchronize();
    mirror.fetch(ids);
    mirror.fetch(counters);
    EXPECT_EQ(ids, expected);
    EXPECT_EQ(counters[0], has_scales ? 6u : 4u);
    EXPECT_EQ(counters[1], 0u);
    EXPECT_EQ(kvx_turbomind_device_block_ids(&pools.args, blocks.data(), nullptr, 1, ids_there,
                                             nullptr, context().stream),
              KVX_STATUS_INVALID_ARGUMENT);
  }
}

// Biases and RoPE in place: the host's rows and blocks, in each type that rows have.
TEST_F(GpuAbiTurboMind, ProcessKvLeavesTheHostsBytes) {
  constexpr uint32_t kDim = 64;
  constexpr int kPairs = 24;
  std::vector<float> cos_sin;
  for (int p = 0; p < kTokens; ++p) {
    for (int i = 0; i < 2 * kPairs; ++i) {
      const float angle = 0.1f * static_cast<float>(p * (i % kPairs + 1));
      cos_sin.push_back(i < kPairs ? std::cos(angle) : std::sin(angle));
    }
  }
  std::vector<int64_t> positions;
  for (int t = 0; t < kTokens; ++t) positions.push_back(kTokens - 1 - t);
  const OneSequence sequence({4, 1, 5}, kTokens);
  std::vector<int64_t> slots = api_test::slots_of(sequence, 8);
  slots[2] = -1;
  for (const uint32_t pairs : {KVX_ROPE_PAIRS_HALVES, KVX_ROPE_PAIRS_INTERLEAVED}) {
    SCOPED_TRACE(pairs);
    const api_test::TurbomindShape shape{.head_dim = kDim};
    std::vector<float> k = api_test::test_rows(kTokens, 2, kDim, 0.3f);
    std::vector<float> v = api_test::test_rows(kTokens, 2, kDim, 1.9f);
    std::vector<float> k_there = k;
    std::vector<float> v_there = v;
    std::vector<float> bias = api_test::test_rows(1, 2, kDim, 2.2f);
    TurbomindPools host(shape);
    TurbomindPools device(shape);
    Mirror mirror(memory());
    device.args.data = mirror.add(device.data);
    device.args.scales = mirror.add(device.scales);
    const TurbomindLayer on_host(host.args, 1);
    TurbomindLayer on_device(device.args, 1);
    on_device.layer.memory = KVX_MEMORY_DEVICE;
    const auto process = [&](const kvx_layer_t& layer, float* k_rows, float* v_rows, auto address,
                             void* stream) {
      const kvx_rows_t k_desc = api::rows(k_rows, KVX_DTYPE_F32);
      const kvx_rows_t v_desc = api::rows(v_rows, KVX_DTYPE_F32);
      auto append = sized<kvx_append_args_t>();
      append.layer = &layer;
      append.k = &k_desc;
      append.v = &v_desc;
      append.slot_dtype = KVX_DTYPE_S64;
      append.slots = address(slots);
      append.num_tokens = kTokens;
      append.positions = address(positions);
      auto args = sized<kvx_turbomind_process_args_t>();
      args.rope_pairs = pairs;
      args.append = &append;
      args.k_bias = args.v_bias = address(bias);
      args.cos_sin = address(cos_sin);
      args.num_positions = kTokens;
      args.num_pairs = kPairs;
      return kvx_turbomind_process_kv(&args, stream);
    };
    ASSERT_EQ(process(
                  on_host.layer, k.data(), v.data(), [](auto& x) { return x.data(); }, nullptr),
              KVX_STATUS_OK)
        << kvx_last_error();
    float* k_on_device = mirror.add(k_there);
    float* v_on_device = mirror.add(v_there);
    ASSERT_EQ(process(
                  on_device.layer, k_on_device, v_on_device,
                  [&mirror](auto& x) { return mirror.add(x); }, context().stream),
              KVX_STATUS_OK)
        << kvx_last_error();
    synchronize();
    mirror.fetch(k_there);
    mirror.fetch(v_there);
    mirror.fetch(device.data);
    mirror.fetch(device.scales);
    EXPECT_EQ(k_there, k);
    EXPECT_EQ(v_there, v);
    EXPECT_TRUE(same_bytes(host.data, device.data));
    EXPECT_TRUE(same_bytes(host.scales, device.scales));
  }
}

TEST_F(GpuAbiTurboMind, APoolLiesInTheDevicesMemory) {
  kvx_turbomind_pools_t pools = api_test::pools_of({.head_dim = 64});
  pools.num_blocks = 6;
  auto config = sized<kvx_turbomind_pool_config_t>();
  config.memory = KVX_MEMORY_DEVICE;
  config.device = static_cast<uint32_t>(context().device.index);
  config.pools = &pools;
  kvx_turbomind_pool_t pool = nullptr;
  ASSERT_EQ(kvx_turbomind_pool_create(&config, &pool), KVX_STATUS_OK) << kvx_last_error();
  ASSERT_EQ(kvx_turbomind_pool_describe(pool, &pools), KVX_STATUS_OK);
  TurbomindLayer layer(pools, 1);
  layer.layer.memory = KVX_MEMORY_DEVICE;
  std::vector<int32_t> ids(3);
  ASSERT_EQ(kvx_turbomind_pool_allocate(pool, 3, ids.data()), KVX_STATUS_OK);
  const OneSequence sequence(ids, kTokens);
  std::vector<int64_t> slots = api_test::slots_of(sequence, 8);
  std::vector<float> k = api_test::test_rows(kTokens, 2, 64, 0.3f);
  std::vector<float> v = api_test::test_rows(kTokens, 2, 64, 1.9f);
  Mirror mirror(memory());
  append(mirror, layer, k, v, slots);
  TurbomindPools host({.head_dim = 64});
  const TurbomindLayer on_host(host.args, 1);
  ASSERT_EQ(api_test::append_rows(on_host.layer, k, v, slots), KVX_STATUS_OK);
  // The bytes of layer 1 of the first of the blocks; the other layer was not written.
  std::vector<uint8_t> found(host.sizes.block_bytes);
  const auto at = static_cast<int64_t>(host.sizes.block_bytes) * ids[0];
  ASSERT_TRUE(device::cuda_copy(found.data(), static_cast<const uint8_t*>(pools.data) + at,
                                std::ssize(found))
                  .ok());
  const size_t half = found.size() / 2;
  const auto expected = host.block(ids[0]).subspan(half);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found.begin() + half));
  kvx_turbomind_pool_free(pool);
}

}  // namespace
}  // namespace kvx::tests

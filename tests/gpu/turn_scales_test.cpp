// kvx_turn_scales on the device: the host's bytes, which the engine's adapters are tested by.
#include "tests/api/caller_layer.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/support/compare_bytes.hpp"

namespace kvx::tests {
namespace {

class GpuTurnScales : public GpuTest {};

TEST_F(GpuTurnScales, LeavesTheHostsBytesInBothDirections) {
  // A side of vLLM's pages, of head_dim 16, 128 and 1024, by heads and by tokens, with gaps.
  for (const uint32_t num_groups : {1u, 8u, 64u}) {
    for (const bool is_hnd : {true, false}) {
      SCOPED_TRACE(fmt::format("{} groups, {}", num_groups, is_hnd ? "HND" : "NHD"));
      constexpr int64_t kBlocks = 5, kHeads = 3, kTokens = 20;
      auto args = api::sized<kvx_turn_scales_args_t>();
      args.num_blocks = kBlocks;
      args.num_heads = kHeads;
      args.block_size = kTokens;
      args.num_groups = num_groups;
      args.token_stride = is_hnd ? num_groups : kHeads * num_groups;
      args.head_stride = is_hnd ? kTokens * num_groups : num_groups;
      args.block_stride = kTokens * kHeads * num_groups + 11;
      std::vector<uint8_t> host(static_cast<size_t>(kBlocks * args.block_stride));
      for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<uint8_t>(i * 37 + i / 251);
      std::vector<uint8_t> device = host;
      const std::vector<uint8_t> before = host;
      Mirror mirror(memory());
      uint8_t* const there = mirror.add(device);
      for (const uint32_t order : {KVX_SCALE_ORDER_LINEAR, KVX_SCALE_ORDER_SWIZZLED}) {
        args.order = order;
        args.scales = host.data();
        args.memory = KVX_MEMORY_HOST;
        ASSERT_EQ(kvx_turn_scales(&args, nullptr), KVX_STATUS_OK) << kvx_last_error();
        args.scales = there;
        args.memory = KVX_MEMORY_DEVICE;
        ASSERT_EQ(kvx_turn_scales(&args, context().stream), KVX_STATUS_OK) << kvx_last_error();
        synchronize();
        mirror.fetch(device);
        EXPECT_TRUE(same_bytes(host, device));
        EXPECT_EQ(host == before, order == KVX_SCALE_ORDER_SWIZZLED || num_groups == 1);
      }
    }
  }
}

}  // namespace
}  // namespace kvx::tests

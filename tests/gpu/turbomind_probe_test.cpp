// The probe of a GPU's blocks sees what append wrote there: the host's bytes.
#include <gmock/gmock.h>

#include "engines/turbomind/probe.hpp"
#include "ops/append/append_cuda.hpp"
#include "tests/engines/turbomind_pool.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::engines::turbomind::turbomind_probe_test {
namespace {

using testing::HasSubstr;

constexpr int kLayers = 2, kHeads = 2, kHeadDim = 64, kBlockLen = 4;
constexpr int kTokens = 2 * kBlockLen;
constexpr int kBlocks[] = {3, 1};  // the sequence's, in a pool of four

class GpuTurbomindProbe : public tests::GpuTest {};

PoolLayout layout_of(KvCacheMode mode) {
  return make_pool_layout({mode, DType::kBF16, kLayers, kHeads, kHeadDim, kBlockLen}).value();
}

std::vector<float> numbers(float first) {
  std::vector<float> rows(static_cast<size_t>(kTokens) * kHeads * kHeadDim);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = std::ldexp(std::sin(first + static_cast<float>(i)), static_cast<int>(i / 16 % 7));
  }
  return rows;
}

TEST_F(GpuTurbomindProbe, SeesWhatAppendWrote) {
  for (const KvCacheMode mode : {KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
    TestPool host(layout_of(mode), 4);
    tests::Mirror mirror(memory());
    const tests::DeferredErrors counters(memory());
    Pools there = host.pools;
    there.data = mirror.add(host.data);
    there.scales = mirror.add(host.scales);
    std::vector<uint8_t*> data, scales, data_there, scales_there;
    for (const int block : kBlocks) {
      data.push_back(get_block_ptr(host.pools, block));
      scales.push_back(get_scale_block_ptr(host.pools, block));
      data_there.push_back(get_block_ptr(there, block));
      scales_there.push_back(get_scale_block_ptr(there, block));
    }
    std::vector<int64_t> slots;
    for (int t = 0; t < kTokens; ++t) {
      slots.push_back(int64_t{kBlocks[t / kBlockLen]} * kBlockLen + t % kBlockLen);
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> k = numbers(static_cast<float>(layer)), v = numbers(0.5f);
      const auto on_host = layer_blocks(host.layout, host.pools, layer);
      const auto on_device = layer_blocks(host.layout, there, layer);
      ASSERT_TRUE(on_host.ok() && on_device.ok());
      ops::AppendArgs args{.cache = on_host.value().view(),
                           .transform = {},
                           .k = input_rows(k.data(), kHeads, kHeadDim),
                           .v = input_rows(v.data(), kHeads, kHeadDim),
                           .slot_mapping = slots,
                           .positions = {}};
      ASSERT_TRUE(ops::append(scalar_context(), args).ok());
      args.cache = on_device.value().view();
      args.k = input_rows(mirror.add(k), kHeads, kHeadDim);
      args.v = input_rows(mirror.add(v), kHeads, kHeadDim);
      args.slot_mapping = {mirror.add(slots), slots.size()};
      const Status appended = ops::append(context(), args, counters.get());
      ASSERT_TRUE(appended.ok()) << appended.error().message;
    }
    const DeviceSequenceBlocks blocks{mirror.add(data_there), mirror.add(scales_there),
                                      std::ssize(data_there)};
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kHeads; ++head) {
        for (int token = 0; token < kTokens; ++token) {
          const auto expected = fp4_kv_probe_host(host.layout, {data, scales}, layer, head, token);
          const auto found =
              fp4_kv_probe(host.layout, blocks, layer, head, token, context().stream);
          ASSERT_TRUE(found.ok()) << found.error().message;
          EXPECT_EQ(found.value(), expected.value()) << layer << " " << head << " " << token;
        }
      }
    }
    EXPECT_THAT(fp4_kv_probe(host.layout, blocks, 0, 0, kTokens).error().message,
                HasSubstr("token is 8; expected 0 to 7"));
    EXPECT_THAT(fp4_kv_probe(host.layout, {blocks.data, nullptr, 2}, 0, 0, 0).error().message,
                HasSubstr("the table of scale blocks is null"));
  }
}

}  // namespace
}  // namespace kvx::engines::turbomind::turbomind_probe_test

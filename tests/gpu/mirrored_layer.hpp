// A TestLayer's memory on the device, and its view there.
#pragma once

#include "ops/transform.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::tests {

// After a verb on the host and its twin on the device.
inline void expect_same_bytes(const TestLayer& host, const TestLayer& device) {
  EXPECT_TRUE(same_bytes(host.k.codes, device.k.codes));
  EXPECT_TRUE(same_bytes(host.k.scales, device.k.scales));
  EXPECT_TRUE(same_bytes(host.v.codes, device.v.codes));
  EXPECT_TRUE(same_bytes(host.v.scales, device.v.scales));
}

class MirroredLayer {
 public:
  MirroredLayer(Mirror& mirror, TestLayer& layer) : layer_(layer) {
    const ops::LayerView host = layer.view();
    run_ = host.runs.front();
    for (auto [side, memory] : {std::pair{&run_.k, &layer.k}, std::pair{&run_.v, &layer.v}}) {
      mirror.add(memory->codes);
      mirror.add(memory->scales);
      side->codes.base = mirror.at(side->codes.base);
      if (!memory->scales.empty()) side->scales.base = mirror.at(side->scales.base);
      if (side->tensor_scales) {
        side->tensor_scales = mirror.add(side->tensor_scales, host.num_kv_heads);
      }
    }
    view_ = host;
    view_.runs = {&run_, 1};
  }
  MirroredLayer(const MirroredLayer&) = delete;

  const ops::LayerView& view() const { return view_; }

  // The device's bytes into the TestLayer.
  void fetch(const Mirror& mirror) {
    for (TestSide* side : {&layer_.k, &layer_.v}) {
      mirror.fetch(side->codes);
      mirror.fetch(side->scales);
    }
  }

 private:
  TestLayer& layer_;
  ops::HeadRun run_;
  ops::LayerView view_;
};

// Where a transform's tables lie on the device.
inline ops::SideTransform mirrored(Mirror& mirror, const ops::SideTransform& host,
                                   int64_t head_floats) {
  ops::SideTransform transform = host;
  transform.mean = mirror.add(host.mean, head_floats);
  transform.factor = mirror.add(host.factor, head_floats);
  transform.block_offset = mirror.add(host.block_offset, head_floats * host.num_offset_blocks);
  return transform;
}

}  // namespace kvx::tests

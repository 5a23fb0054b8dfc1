// A TestLayer's memory on the device, and its view there.
#pragma once

#include "ops/transform.hpp"
#include "tests/gpu/gpu.hpp"
#include "tests/support/compare_bytes.hpp"
#include "tests/support/interleaved_order.hpp"
#include "tests/support/test_layer.hpp"

namespace kvx::tests {

// After a verb on the host and its fork on the device.
inline void expect_same_bytes(const TestLayer& host, const TestLayer& device) {
  EXPECT_TRUE(same_bytes(host.k.codes, device.k.codes));
  EXPECT_TRUE(same_bytes(host.k.scales, device.k.scales));
  EXPECT_TRUE(same_bytes(host.v.codes, device.v.codes));
  EXPECT_TRUE(same_bytes(host.v.scales, device.v.scales));
  EXPECT_TRUE(same_bytes(host.k.channels, device.k.channels));
  EXPECT_TRUE(same_bytes(host.v.channels, device.v.channels));
}

class MirroredLayer {
 public:
  // is_interleaved: the device's codes, as far as they may; the TestLayer's stay nibbles.
  MirroredLayer(Mirror& mirror, TestLayer& layer, bool is_interleaved = false) : layer_(layer) {
    const ops::LayerView host = layer.view();
    run_ = host.runs.front();
    for (auto [side, memory] : {std::pair{&run_.k, &layer.k}, std::pair{&run_.v, &layer.v}}) {
      side->is_interleaved = is_interleaved && side->spec.facts->element == "E2M1";
      convert(memory->view, *side, format::interleaved_from_nibbles);
      mirror.add(memory->codes);
      convert(memory->view, *side, format::nibbles_from_interleaved);
      mirror.add(memory->scales);
      mirror.add(memory->channels);
      side->codes.base = mirror.at(side->codes.base);
      if (!memory->scales.empty()) side->scales.base = mirror.at(side->scales.base);
      if (!memory->channels.empty()) side->channels.base = mirror.at(side->channels.base);
      if (side->tensor_scales) {
        side->tensor_scales = mirror.add(side->tensor_scales, host.num_kv_heads);
      }
      side->feedback =
          mirror.add(side->feedback, int64_t{host.num_kv_heads} * side->head_dim * side->head_dim);
      side->counts = mirror.add(side->counts, host.num_kv_heads);
    }
    view_ = host;
    view_.runs = {&run_, 1};
  }
  MirroredLayer(const MirroredLayer&) = delete;

  const ops::LayerView& view() const { return view_; }

  // The device's bytes into the TestLayer.
  void fetch(const Mirror& mirror) {
    for (auto [side, memory] : {std::pair{&run_.k, &layer_.k}, std::pair{&run_.v, &layer_.v}}) {
      mirror.fetch(memory->codes);
      mirror.fetch(memory->scales);
      mirror.fetch(memory->channels);
      convert(memory->view, *side, format::nibbles_from_interleaved);
    }
  }

 private:
  template <class Convert>
  void convert(const ops::SideView& host, const ops::SideView& device, const Convert& codes) const {
    if (!device.is_interleaved) return;
    const ops::LayerView layer = layer_.view();
    convert_codes(host, layer.num_blocks, layer.block_size, layer.num_kv_heads, codes);
  }

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

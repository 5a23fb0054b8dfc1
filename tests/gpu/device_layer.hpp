// DeviceLayer: a layer of the C ABI on the device.
#pragma once

#include "tests/api/caller_layer.hpp"
#include "tests/gpu/gpu.hpp"

namespace kvx::tests {

// The memory of a PagedLayer, or of another layer of one run, on the device, and its description
// there.
class DeviceLayer {
 public:
  template <class Layer>
  DeviceLayer(cache::Memory& memory, Layer& host)
      : host_(host.memory),
        mirror_(memory),
        counters_(memory),
        k_(host.k),
        v_(host.v),
        run_(host.run) {
    mirror_.add(host.memory);
    for (kvx_side_t* side : {&k_, &v_}) {
      side->codes = mirror_.at(static_cast<uint8_t*>(side->codes));
      side->scales = mirror_.at(static_cast<uint8_t*>(side->scales));
    }
    run_.k = &k_;
    run_.v = &v_;
    layer = host.layer;
    layer.runs = &runs_;
    layer.memory = KVX_MEMORY_DEVICE;
    layer.counters = reinterpret_cast<uint64_t*>(counters_.get());
  }
  DeviceLayer(const DeviceLayer&) = delete;

  Mirror& mirror() { return mirror_; }
  void set_flags(uint32_t flags) { k_.flags = v_.flags = flags; }
  void fetch() { mirror_.fetch(host_); }
  uint64_t out_of_range() const { return counters_.read().out_of_range; }

  kvx_layer_t layer;

 private:
  std::vector<uint8_t>& host_;
  Mirror mirror_;
  DeferredErrors counters_;
  kvx_side_t k_;
  kvx_side_t v_;
  kvx_head_run_t run_;
  const kvx_head_run_t* runs_ = &run_;
};

}  // namespace kvx::tests

// PreparedLayer: a caller's layer on a GPU, checked once for many calls.
#pragma once

#include "api/verbs/device_verb.hpp"

namespace kvx::boundary {

// The layers of a call of attend. Both lie on the host, or both on a GPU.
struct CallLayers {
  LayerOfCaller packed;
  LayerOfCaller full_precision;
  bool has_full_precision = false;
};

// Reads the layers of a call or of a handle; full_precision may be null.
Status read_call_layers(const kvx_layer_t* layer, const kvx_layer_t* full_precision,
                        CallLayers& layers);

struct PreparedLayer {
  CallLayers layers;
  const device::CudaDevice* device = nullptr;
  ops::DeviceCounters* counters = nullptr;

  // A call on the device, without a look at its addresses.
  Result<DeviceVerb> begin(void* stream) const;
};

// INVALID_ARGUMENT: not a handle, or one that was freed.
Result<const PreparedLayer*> find_prepared_layer(kvx_prepared_layer_t handle);

}  // namespace kvx::boundary

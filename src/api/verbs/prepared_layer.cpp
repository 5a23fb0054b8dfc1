// kvx_prepare_layer: checks a layer's description and addresses once.
#include "api/verbs/prepared_layer.hpp"

#include <memory>

#include "api/call.hpp"
#include "api/handle_map.hpp"

namespace kvx::boundary {
namespace {

using PreparedLayers = HandleMap<kvx_prepared_layer_t, PreparedLayer>;

// Never destroyed: threads may still call when static objects are.
PreparedLayers& prepared_layers() {
  static auto* const all = new PreparedLayers;
  return *all;
}

Status prepare_layer(const kvx_layer_t* layer, const kvx_layer_t* full_precision,
                     kvx_prepared_layer_t* result) {
  if (result == nullptr) return invalid_argument("prepared is null");
  auto prepared = std::make_unique<PreparedLayer>();
  CallLayers& layers = prepared->layers;
  KVX_RETURN_IF_ERROR(read_call_layers(layer, full_precision, layers));
  if (!layers.packed.is_on_device()) {
    return unsupported(
        "layer lies on the host, where nothing is prepared; expected one on a GPU, or kvx_append "
        "and kvx_attend");
  }
  if (layers.packed.has_narrow_scales() ||
      (layers.has_full_precision && layers.full_precision.has_narrow_scales())) {
    return unsupported(
        "a layer has F16 or BF16 scales, which each call converts; expected F32 scales, or "
        "kvx_append and kvx_attend");
  }
  VerbAddresses addresses(layers.packed);
  if (layers.has_full_precision) addresses.add(layers.full_precision, "full_precision");
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb,
                       begin_on_device(layers.packed, addresses, /*stream=*/nullptr));
  KVX_ASSIGN_OR_RETURN(prepared->device, device::known_cuda_device(verb.context.device.index));
  prepared->counters = verb.counters;
  *result = prepared_layers().add(std::move(prepared));
  return {};
}

}  // namespace

Status read_call_layers(const kvx_layer_t* layer, const kvx_layer_t* full_precision,
                        CallLayers& layers) {
  KVX_RETURN_IF_ERROR(read_layer(layer, "layer", layers.packed, LayerMemory::kHostOrDevice));
  layers.has_full_precision = full_precision != nullptr;
  if (!layers.has_full_precision) return {};
  KVX_RETURN_IF_ERROR(read_layer(full_precision, "full_precision", layers.full_precision,
                                 LayerMemory::kHostOrDevice));
  const ops::LayerTransform& transform = layers.full_precision.transform;
  if (!transform.k.is_identity() || !transform.v.is_identity()) {
    return invalid_argument(
        "full_precision has a transform; both layers hold rows of layer's transform");
  }
  if (layers.full_precision.is_on_device() == layers.packed.is_on_device()) return {};
  return unsupported(
      "full_precision and layer lie one on the host and one on a GPU; expected both in one");
}

Result<DeviceVerb> PreparedLayer::begin(void* stream) const {
  KVX_ASSIGN_OR_RETURN(auto current, device::CurrentCudaDevice::set(device->index));
  return DeviceVerb{{*device, stream}, counters, std::move(current)};
}

Result<const PreparedLayer*> find_prepared_layer(kvx_prepared_layer_t handle) {
  if (handle == nullptr) return invalid_argument("prepared is null");
  const PreparedLayer* const prepared = prepared_layers().find(handle);
  if (prepared == nullptr) return invalid_argument("prepared is not a handle, or was freed");
  return prepared;
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_prepare_layer(const kvx_layer_t* layer,
                                          const kvx_layer_t* full_precision,
                                          kvx_prepared_layer_t* prepared) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::prepare_layer(layer, full_precision, prepared); });
}

extern "C" void kvx_prepared_layer_free(kvx_prepared_layer_t prepared) {
  (void)kvx::boundary::prepared_layers().remove(
      prepared, [](const kvx::boundary::PreparedLayer&) { return true; });
}

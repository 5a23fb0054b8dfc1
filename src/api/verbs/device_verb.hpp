// What the calls of 1.2 need to run on a GPU.
#pragma once

#include <vector>

#include "api/checks/device_memory.hpp"
#include "api/checks/layer_view.hpp"
#include "api/device_counters.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::boundary {

// The addresses of a call, by the fields' names, for find_device.
class VerbAddresses {
 public:
  VerbAddresses() = default;
  explicit VerbAddresses(const LayerOfCaller& layer) { add(layer, "layer"); }
  // Null is allowed. What does not begin on a whole element is remembered for begin_on_device: a
  // kernel would fault on it, and take the caller's context with it.
  template <class T>
  VerbAddresses& add(std::string_view name, const T* address) {
    return add(name, address, alignof(T));
  }
  template <class Rows>
  VerbAddresses& add_rows(std::string_view name, const Rows& rows) {
    return add(name, rows.data, static_cast<size_t>(bytes_of(rows.dtype)));
  }
  VerbAddresses& add(const LayerOfCaller& layer, std::string_view name);
  std::span<const CallAddress> all() const { return addresses_; }
  const DeferredErrors& counters() const { return counters_; }

 private:
  VerbAddresses& add(std::string_view name, const void* address, size_t alignment);

  DeferredErrors counters_;
  std::vector<CallAddress> addresses_;
};

// A call's device, current until the end of the call, and where kernels count what they skip.
struct DeviceVerb {
  ops::CudaContext context;
  ops::DeviceCounters* counters;
  device::CurrentCudaDevice current;
};

// INVALID_ARGUMENT: an address that the GPU cannot read, or a layer whose kind it contradicts.
// UNSUPPORTED: one that does not begin on a whole element.
Result<DeviceVerb> begin_on_device(const LayerOfCaller& layer, const VerbAddresses& addresses,
                                   void* stream);

// A table and lengths as kernels take them: PACKED, 32 bits. INVALID_ARGUMENT as on the host;
// UNSUPPORTED: other formats and widths, which the host would have to convert.
struct DeviceTable {
  ops::BlockTable table;
  int64_t max_blocks = 0;
  int num_sequences = 0;
  const int32_t* seq_lens = nullptr;
};
Result<DeviceTable> read_device_table(const kvx_block_table_t* table,
                                      const kvx_seq_lens_t* seq_lens);

}  // namespace kvx::boundary

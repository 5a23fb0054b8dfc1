// The device of a verb's call on a GPU, and its block table there.
#pragma once

#include <array>
#include <vector>

#include "api/checks/device_memory.hpp"
#include "api/checks/layer_view.hpp"
#include "device/cuda_async.hpp"
#include "ops/attend/args.hpp"
#include "ops/cuda/context.hpp"
#include "ops/cuda/convert/pack_table.hpp"
#include "ops/cuda/convert/widen_scales.hpp"
#include "ops/cuda/ignored_counters.hpp"

namespace kvx::boundary {

// The addresses of a call with the names of their fields, as find_device() takes them.
class VerbAddresses {
 public:
  VerbAddresses() = default;
  explicit VerbAddresses(const LayerOfCaller& layer) { add(layer, "layer"); }
  // Null is allowed. An address that is not aligned to its elements is a deferred error, which
  // begin_on_device() returns: a kernel would fault on it and destroy the caller's CUDA context.
  template <class T>
  VerbAddresses& add(std::string_view name, const T* address) {
    return add(name, address, alignof(T));
  }
  template <class Rows>
  VerbAddresses& add_rows(std::string_view name, const Rows& rows) {
    return add(name, rows.data, static_cast<size_t>(bytes_of(rows.dtype)));
  }
  VerbAddresses& add(const LayerOfCaller& layer, std::string_view name);
  // For the next call; keeps the memory.
  void clear() {
    addresses_.clear();
    deferred_errors_ = {};
  }
  std::span<const CallAddress> all() const { return addresses_; }
  const DeferredErrors& deferred_errors() const { return deferred_errors_; }

 private:
  VerbAddresses& add(std::string_view name, const void* address, size_t alignment);

  DeferredErrors deferred_errors_;
  std::vector<CallAddress> addresses_;
};

// A call's device, which is current while this object lives, and the counters that its kernels add
// to.
struct DeviceVerb {
  ops::CudaContext context;
  ops::DeviceCounters* counters;
  device::CurrentCudaDevice current;
};

// INVALID_ARGUMENT: an address that the GPU cannot read, or that is not in the layer's kind of
// memory. UNSUPPORTED: an address that is not aligned to its elements.
Result<DeviceVerb> begin_on_device(const LayerOfCaller& layer, const VerbAddresses& addresses,
                                   void* stream);
// The same without a layer. counters: a caller's, whose address is among the others, or null.
Result<DeviceVerb> begin_on_device(const VerbAddresses& addresses, uint64_t* counters,
                                   void* stream);

// A table and lengths on a GPU: the caller's own where kernels can read them, which are PACKED ids
// and lengths of 32 bits. Others are packed on the device by pack_if_needed().
struct DeviceTable {
  ops::BlockTable table;
  int64_t max_blocks = 0;
  int num_sequences = 0;  // rows: beams are sequences
  const int32_t* seq_lens = nullptr;
  bool needs_packing = false;
  ops::PackTable source;
  // Attention by decode_mma reads table and seq_lens of other kinds, too, where they lie.
  bool has_in_place = false;
  ops::TableInPlace in_place;
  int64_t row_stride_in_place = 0;
  device::StreamMemory packed;  // what table and seq_lens point to once they are packed
};
// row_stride: entries from a row of a PACKED table to the next; 0: max_blocks_per_seq. A RAGGED
// table's max_blocks_per_seq is the most blocks of a sequence. INVALID_ARGUMENT: as on the host.
// UNSUPPORTED: more rows than a GPU's grid has.
Result<DeviceTable> read_device_table(const kvx_block_table_t* table,
                                      const kvx_seq_lens_t* seq_lens, int block_size,
                                      int64_t row_stride = 0);
void add_table(VerbAddresses& addresses, const DeviceTable& table);
// Launches the packing, behind which the verb is launched. OUT_OF_RANGE: the device has no room.
Status pack_if_needed(const ops::CudaContext& context, DeviceTable& table);

// F32 scales of a v1 cache for the time of a call.
using WidenedScales = std::array<device::StreamMemory, 2>;  // K's and V's
// Launches the conversion of a layer's 16-bit scales, behind which the verb is launched, and points
// the layer's runs at the result. OUT_OF_RANGE: the device has no room.
Result<WidenedScales> widen_scales(const ops::CudaContext& context, LayerOfCaller& layer);

}  // namespace kvx::boundary

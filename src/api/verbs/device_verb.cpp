// Finds the device of a verb's call, and reads its block table, on a GPU.
#include "api/verbs/device_verb.hpp"

#include "api/checks/check_index.hpp"
#include "api/checks/table_view.hpp"
#include "api/guard.hpp"

namespace kvx::boundary {
namespace {

void add_transform(VerbAddresses& addresses, const ops::SideTransform& transform) {
  addresses.add("a transform's mean", transform.mean)
      .add("a transform's factor", transform.factor)
      .add("a transform's block_offset", transform.block_offset);
}

}  // namespace

VerbAddresses& VerbAddresses::add(std::string_view name, const void* address, size_t alignment) {
  check_alignment(address, static_cast<int>(alignment), name, deferred_errors_);
  addresses_.push_back(readable(name, address));
  return *this;
}

VerbAddresses& VerbAddresses::add(const LayerOfCaller& layer, std::string_view name) {
  for (const MemoryRange& range : layer.memory) {
    addresses_.push_back({name, range.begin, layer.kind});
  }
  for (const ops::HeadRun& run : layer.runs) {
    add("tensor_scales", run.k.tensor_scales).add("tensor_scales", run.v.tensor_scales);
  }
  add_transform(*this, layer.transform.k);
  add_transform(*this, layer.transform.v);
  return add("counters", layer.counters);
}

Result<DeviceVerb> begin_on_device(const LayerOfCaller& layer, const VerbAddresses& addresses,
                                   void* stream) {
  KVX_RETURN_IF_ERROR(addresses.deferred_errors().status());
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* device, find_device(addresses.all()));
  KVX_ASSIGN_OR_RETURN(auto current, device::CurrentCudaDevice::set(device->index));
  ops::DeviceCounters* counters = layer.counters;
  if (counters == nullptr) {
    KVX_ASSIGN_OR_RETURN(counters, ops::cuda::ignored_counters());
  }
  return DeviceVerb{{*device, stream}, counters, std::move(current)};
}

Result<DeviceTable> read_device_table(const kvx_block_table_t* table,
                                      const kvx_seq_lens_t* seq_lens, int64_t row_stride) {
  KVX_RETURN_IF_ERROR(check_top_level(table, "block_table"));
  KVX_RETURN_IF_ERROR(check_top_level(seq_lens, "seq_lens"));
  if (table->seq_count == 0 && seq_lens->seq_count == 0) return DeviceTable{};
  constexpr uint32_t kMostSequences = 65535;  // a GPU's limit for a dimension of a grid
  if (table->seq_count > kMostSequences) {
    return unsupported("block_table.seq_count is {}; a call on a GPU takes at most {}",
                       table->seq_count, kMostSequences);
  }
  if (number_of(table->format) == KVX_BLOCK_TABLE_KV_OFFSETS) {
    return unsupported("block_table.format is KV_OFFSETS 3; expected PACKED 1 on a GPU");
  }
  DeferredErrors deferred_errors;
  KVX_ASSIGN_OR_RETURN(const TableView view, check_table(*table, {}, {}, deferred_errors));
  KVX_ASSIGN_OR_RETURN(const IndexArray lengths,
                       check_seq_lens(*seq_lens, view.num_sequences, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  if (view.kind != TableView::Kind::kPacked || view.indices.is_64_bit || lengths.is_64_bit) {
    return unsupported(
        "block_table and seq_lens lie on a GPU in a format or width that the host would have to "
        "convert; expected PACKED, S32 indices and S32 lengths");
  }
  KVX_ASSIGN_OR_RETURN(const int64_t stride, read_table_stride(*table, row_stride));
  return DeviceTable{{static_cast<const int32_t*>(view.indices.data), stride},
                     view.max_blocks,
                     static_cast<int>(view.num_sequences),
                     static_cast<const int32_t*>(lengths.data)};
}

}  // namespace kvx::boundary

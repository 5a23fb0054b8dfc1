// Finds the device of a verb's call, and reads its block table, on a GPU.
#include "api/verbs/device_verb.hpp"

#include "api/checks/check_index.hpp"
#include "api/checks/table_view.hpp"
#include "api/guard.hpp"
#include "ops/attend/attend_cuda.hpp"

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
    add("feedback", run.k.feedback).add("feedback", run.v.feedback);
  }
  for (const ops::HeadRun& run : layer.rest_runs) {
    add("tensor_scales", run.k.tensor_scales).add("feedback", run.k.feedback);
  }
  add_transform(*this, layer.transform.k);
  add_transform(*this, layer.transform.v);
  return add("counters", layer.counters);
}

namespace {

Result<DeviceVerb> begin_counting(const VerbAddresses& addresses, ops::DeviceCounters* counters,
                                  void* stream) {
  KVX_RETURN_IF_ERROR(addresses.deferred_errors().status());
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* device, find_device(addresses.all()));
  KVX_ASSIGN_OR_RETURN(auto current, device::CurrentCudaDevice::set(device->index));
  if (counters == nullptr) {
    KVX_ASSIGN_OR_RETURN(counters, ops::cuda::ignored_counters());
  }
  return DeviceVerb{{*device, stream}, counters, std::move(current)};
}

// What decode_mma needs to read the table as it is.
void read_in_place(DeviceTable& table) {
  const TableView& view = table.source.table;
  const auto words = [](const IndexArray& array) { return array.is_64_bit ? 2 : 1; };
  table.has_in_place = view.kind != TableView::Kind::kRaggedTokens && view.num_beams == 1;
  table.row_stride_in_place = table.source.row_stride;
  table.in_place.entry_words = words(view.indices);
  table.in_place.length_words = words(table.source.lengths);
  if (view.kind == TableView::Kind::kRaggedPages) {
    table.in_place.indptr = static_cast<const int32_t*>(view.indptr.data);
    table.in_place.indptr_words = words(view.indptr);
    table.in_place.num_entries = view.num_indices;
  }
  if (view.kind == TableView::Kind::kKvOffsets) {
    table.row_stride_in_place = 2 * view.max_blocks;
    table.in_place.v_entries_at = view.max_blocks;
  }
}

}  // namespace

Result<DeviceVerb> begin_on_device(const LayerOfCaller& layer, const VerbAddresses& addresses,
                                   void* stream) {
  return begin_counting(addresses, layer.counters, stream);
}

Result<DeviceVerb> begin_on_device(const VerbAddresses& addresses, uint64_t* counters,
                                   void* stream) {
  return begin_counting(addresses, reinterpret_cast<ops::DeviceCounters*>(counters), stream);
}

Result<DeviceTable> read_device_table(const kvx_block_table_t* table,
                                      const kvx_seq_lens_t* seq_lens, int block_size,
                                      int64_t row_stride) {
  KVX_RETURN_IF_ERROR(check_top_level(table, "block_table"));
  KVX_RETURN_IF_ERROR(check_top_level(seq_lens, "seq_lens"));
  if (table->seq_count == 0 && seq_lens->seq_count == 0) return DeviceTable{};
  DeferredErrors deferred_errors;
  KVX_ASSIGN_OR_RETURN(const TableView view, check_table(*table, deferred_errors));
  if (view.num_rows() > ops::kMaxCudaSequences) {
    return unsupported(
        "block_table.seq_count is {} with beam_width {}; a call on a GPU takes at "
        "most {} rows",
        view.num_sequences, view.num_beams, ops::kMaxCudaSequences);
  }
  KVX_ASSIGN_OR_RETURN(const IndexArray lengths,
                       check_seq_lens(*seq_lens, view.num_sequences, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  KVX_ASSIGN_OR_RETURN(const int64_t stride, read_table_stride(*table, row_stride));
  DeviceTable result;
  result.max_blocks = view.max_blocks;
  result.num_sequences = static_cast<int>(view.num_rows());
  result.source = {view, lengths, stride, block_size};
  result.needs_packing =
      view.kind != TableView::Kind::kPacked || view.indices.is_64_bit || lengths.is_64_bit;
  result.table.row_stride = result.needs_packing ? view.max_blocks : stride;
  read_in_place(result);
  // Until they are packed, others only say that they are there.
  result.table.ids = static_cast<const int32_t*>(view.indices.data);
  result.seq_lens = static_cast<const int32_t*>(lengths.data);
  return result;
}

void add_table(VerbAddresses& addresses, const DeviceTable& table) {
  const auto add = [&](std::string_view name, const IndexArray& array) {
    addresses.add(name, static_cast<const uint8_t*>(array.data));  // alignment: checked already
  };
  add("block_table.indices", table.source.table.indices);
  add("block_table.indptr", table.source.table.indptr);
  add("seq_lens.lengths", table.source.lengths);
}

Status pack_if_needed(const ops::CudaContext& context, DeviceTable& table) {
  if (!table.needs_packing) return {};
  const int64_t num_ids = table.num_sequences * table.max_blocks;
  KVX_ASSIGN_OR_RETURN(table.packed, device::StreamMemory::create(
                                         (num_ids + table.num_sequences) * 4, context.stream));
  auto* ids = reinterpret_cast<int32_t*>(table.packed.data());
  KVX_RETURN_IF_ERROR(ops::pack_table(context, table.source, ids, ids + num_ids));
  table.table.ids = ids;
  table.seq_lens = ids + num_ids;
  return {};
}

Result<WidenedScales> widen_scales(const ops::CudaContext& context, LayerOfCaller& layer) {
  WidenedScales widened;
  for (size_t i = 0; i < widened.size(); ++i) {
    const ScaleView& scales = layer.narrow_scales[i];
    if (scales.data == nullptr) continue;
    ops::HeadRun& run = layer.runs.front();  // a v1 cache has one
    const auto counts = ops::scale_counts(scales, layer.view.num_blocks, run.num_heads);
    KVX_ASSIGN_OR_RETURN(widened[i], device::StreamMemory::create(
                                         counts.total() * int64_t{sizeof(float)}, context.stream));
    auto* const wide = reinterpret_cast<float*>(widened[i].data());
    KVX_RETURN_IF_ERROR(ops::widen_scales(context, scales, counts, wide));
    (i == 0 ? run.k : run.v).scales.base = widened[i].data();
  }
  return widened;
}

}  // namespace kvx::boundary

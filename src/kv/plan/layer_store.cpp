// LayerStore::create joins layout, memory and tables into the verbs' views.
#include "kv/plan/layer_store.hpp"

#include "ops/attend/attend_cuda.hpp"
#include "ops/side_rows.hpp"
#include "ops/value_prefix.hpp"

namespace kvx::kv {
namespace {

using format::FormatSpec;
using format::ScaleSource;

cache::SideBytes side_bytes(const FormatSpec& spec, int head_dim) {
  if (head_dim == 0) return {};
  const int scale_bytes = format::scale_bytes_per_row(spec, head_dim);
  cache::SideBytes bytes;
  bytes.row_code_bytes = format::code_bytes_per_row(spec, head_dim);
  if (spec.scale_source == ScaleSource::kComputed) bytes.row_scale_bytes = scale_bytes;
  if (spec.scale_source == ScaleSource::kPageShared) bytes.page_scale_bytes = scale_bytes;
  return bytes;
}

// A pool without blocks has no memory: of a cache whose window holds every token, say.
uint8_t* after(uint8_t* base, int64_t bytes) {
  return base == nullptr ? nullptr : base + bytes;
}

ops::SideView side_view(const FormatSpec& spec, int head_dim, const LayerMemory& memory,
                        const cache::RunPlace& run, const cache::SidePlace& place) {
  ops::SideView view;
  view.spec = spec;
  view.head_dim = place.is_stored ? head_dim : 0;
  if (!place.is_stored) return view;
  const int64_t block_bytes = memory.layout->block_bytes;
  view.codes = {after(memory.base, place.codes_offset), block_bytes, place.code_token_stride,
                run.head_stride};
  if (place.has_scales) {
    view.scales = {after(memory.base, place.scales_offset), block_bytes, place.scale_token_stride,
                   run.head_stride, format::scale_bytes_per_group(spec)};
  }
  return view;
}

ops::LayerView layer_view(const CacheGeometry& geometry, const LayerMemory& memory,
                          std::span<const ops::HeadRun> runs) {
  return {memory.num_blocks, static_cast<int>(memory.layout->block_size), geometry.num_kv_heads,
          runs};
}

}  // namespace

cache::LayerBytes packed_bytes(const CacheGeometry& geometry, const LayerPlan& plan) {
  cache::LayerBytes layer;
  for (const HeadRunPlan& run : plan.runs) {
    layer.runs.push_back({run.num_heads, side_bytes(run.k.spec, geometry.k_head_dim),
                          side_bytes(run.v.spec, geometry.stored_v_head_dim())});
  }
  return layer;
}

cache::LayerBytes full_precision_bytes(const CacheGeometry& geometry,
                                       const FormatSpec& full_precision) {
  return {{{geometry.num_kv_heads, side_bytes(full_precision, geometry.k_head_dim),
            side_bytes(full_precision, geometry.stored_v_head_dim())}}};
}

Result<std::unique_ptr<LayerStore>> LayerStore::create(
    const CacheGeometry& geometry, int layer, const LayerPlan& plan,
    const FormatSpec& full_precision_spec, const LayerCalibration& calibration,
    const LayerMemory& packed, const LayerMemory& full_precision, const CudaPlace* device) {
  std::unique_ptr<LayerStore> store(new LayerStore);
  KVX_ASSIGN_OR_RETURN(store->tables_, LayerTables::create(geometry, layer, plan, calibration));
  if (device != nullptr) {
    KVX_RETURN_IF_ERROR(store->tables_.place_in(*device->memory));
  } else {
    store->counts_.k.resize(geometry.num_kv_heads);
    store->counts_.v.resize(geometry.num_kv_heads);
  }

  const cache::LayerPlace& place = packed.layout->layers[packed.layer_in_group];
  for (size_t r = 0; r < plan.runs.size(); ++r) {
    const HeadRunPlan& run = plan.runs[r];
    const cache::RunPlace& at = place.runs[r];
    store->packed_runs_.push_back({run.first_head, run.num_heads,
                                   side_view(run.k.spec, geometry.k_head_dim, packed, at, at.k),
                                   side_view(run.v.spec, geometry.v_head_dim, packed, at, at.v)});
    ops::HeadRun& stored = store->packed_runs_.back();
    const int block_size = static_cast<int>(packed.layout->block_size);
    if (device != nullptr && !geometry.is_latent) {
      stored.k.is_interleaved = stored.v.is_interleaved =
          ops::attend_takes_interleaved_order(device->context, stored, block_size);
    }
    store->tables_.attach(r, stored);
    if (device == nullptr) {
      stored.k.counts = store->counts_.k.data() + run.first_head;
      stored.v.counts = store->counts_.v.data() + run.first_head;
    }
    if (geometry.is_latent) stored.v = ops::prefix_of(stored.k, geometry.v_head_dim);
  }
  store->packed_ = layer_view(geometry, packed, store->packed_runs_);

  if (full_precision.layout != nullptr) {
    const cache::RunPlace& run =
        full_precision.layout->layers[full_precision.layer_in_group].runs.front();
    store->full_precision_runs_.push_back(
        {0, geometry.num_kv_heads,
         side_view(full_precision_spec, geometry.k_head_dim, full_precision, run, run.k),
         side_view(full_precision_spec, geometry.v_head_dim, full_precision, run, run.v)});
    ops::HeadRun& whole = store->full_precision_runs_.front();
    if (geometry.is_latent) whole.v = ops::prefix_of(whole.k, geometry.v_head_dim);
    store->full_precision_ = layer_view(geometry, full_precision, store->full_precision_runs_);
    for (const HeadRunPlan& cut : plan.runs) {
      store->cut_full_precision_runs_.push_back({cut.first_head, cut.num_heads,
                                                 ops::side_from(whole.k, cut.first_head),
                                                 ops::side_from(whole.v, cut.first_head)});
    }
    store->full_precision_in_packed_runs_ =
        layer_view(geometry, full_precision, store->cut_full_precision_runs_);
  }
  return store;
}

LayerStore::Counts LayerStore::counts() const {
  const auto copy = [](std::vector<ops::HeadCounts>& counts) {
    std::vector<ops::HeadCounts> copies;
    for (ops::HeadCounts& one : counts) copies.push_back(ops::load_counts(one));
    return copies;
  };
  return {copy(counts_.k), copy(counts_.v)};
}

}  // namespace kvx::kv

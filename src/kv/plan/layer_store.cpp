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
  bytes.channel_bytes = format::channel_bytes_per_block(spec, head_dim);
  bytes.has_zeros = spec.scale_rule == format::ScaleRule::kAffine;
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
                   place.scale_head_stride, format::scale_bytes_per_group(spec)};
  }
  if (spec.is_dual()) {
    view.channels = {after(memory.base, place.channels_offset), block_bytes, run.head_stride};
  }
  return view;
}

// The numbers of a 16-bit or f32 row behind its first skip.
ops::SideView behind(const ops::SideView& row, int skip) {
  ops::SideView rest = row;
  rest.head_dim = row.head_dim - skip;
  rest.codes.base = after(row.codes.base, format::code_bytes_per_row(row.spec, skip));
  return rest;
}

// Of a latent row the numbers that V shares, where they are a segment.
int first_segment_dim(const CacheGeometry& geometry, const LayerPlan& plan) {
  return plan.has_segments ? geometry.v_head_dim : geometry.k_head_dim;
}

}  // namespace

cache::LayerBytes packed_bytes(const CacheGeometry& geometry, const LayerPlan& plan) {
  cache::LayerBytes layer;
  for (const HeadRunPlan& run : plan.runs) {
    layer.runs.push_back(
        {run.num_heads, side_bytes(run.k.spec, first_segment_dim(geometry, plan)),
         side_bytes(run.v.spec, geometry.stored_v_head_dim()),
         plan.has_segments ? side_bytes(run.rotary, geometry.rotary_dim()) : cache::SideBytes()});
  }
  return layer;
}

cache::LayerBytes full_precision_bytes(const CacheGeometry& geometry,
                                       const FormatSpec& full_precision) {
  return {{{geometry.num_kv_heads,
            side_bytes(full_precision, geometry.k_head_dim),
            side_bytes(full_precision, geometry.stored_v_head_dim()),
            {}}}};
}

void LayerStore::OwnedView::complete(const CacheGeometry& geometry, const LayerMemory& memory) {
  view.num_blocks = memory.num_blocks;
  view.block_size = static_cast<int>(memory.layout->block_size);
  view.num_kv_heads = geometry.num_kv_heads;
  more = view;
  view.runs = runs;
  more.runs = more_runs;
  if (!more_runs.empty()) view.next_segment = &more;
}

Result<std::unique_ptr<LayerStore>> LayerStore::create(
    const CacheGeometry& geometry, int layer, const LayerPlan& plan,
    const FormatSpec& full_precision_spec, const LayerCalibration& calibration,
    const LayerMemory& packed, const LayerMemory& full_precision, const CudaPlace* device) {
  std::unique_ptr<LayerStore> store(new LayerStore);
  KVX_ASSIGN_OR_RETURN(store->tables_, LayerTables::create(geometry, layer, plan, calibration));
  if (device != nullptr) {
    KVX_RETURN_IF_ERROR(store->tables_.place_in(*device->memory));
  }
  KVX_RETURN_IF_ERROR(store->create_counts(geometry.num_kv_heads, device));
  store->create_packed(geometry, plan, packed, device);
  if (full_precision.layout != nullptr) {
    store->create_full_precision(geometry, plan, full_precision_spec, full_precision);
  }
  return store;
}

// device: where codes may lie in interleaved order; null: the host.
void LayerStore::create_packed(const CacheGeometry& geometry, const LayerPlan& plan,
                               const LayerMemory& memory, const CudaPlace* device) {
  const cache::LayerPlace& place = memory.layout->layers[memory.layer_in_group];
  const int k_dim = first_segment_dim(geometry, plan);
  for (size_t r = 0; r < plan.runs.size(); ++r) {
    const HeadRunPlan& run = plan.runs[r];
    const cache::RunPlace& at = place.runs[r];
    ops::HeadRun stored = {run.first_head, run.num_heads,
                           side_view(run.k.spec, k_dim, memory, at, at.k),
                           side_view(run.v.spec, geometry.v_head_dim, memory, at, at.v)};
    const int block_size = static_cast<int>(memory.layout->block_size);
    // Another engine's kernels read TurboMind's order: its codes stay nibbles.
    const bool is_kvx_order = memory.layout->order == cache::BlockOrder::kHeads;
    if (device != nullptr && !geometry.is_latent && is_kvx_order) {
      stored.k.is_interleaved = stored.v.is_interleaved =
          ops::attend_takes_interleaved_order(device->context, stored, block_size);
    }
    tables_.attach(r, stored);
    ops::HeadRun more = {run.first_head,
                         run.num_heads,
                         side_view(run.rotary, geometry.rotary_dim(), memory, at, at.k_more),
                         {}};
    stored.k.counts = more.k.counts = counts_of(true) + run.first_head;
    stored.v.counts = counts_of(false) + run.first_head;
    if (geometry.is_latent) stored.v = ops::prefix_of(stored.k, geometry.v_head_dim);
    packed_.runs.push_back(stored);
    if (plan.has_segments) packed_.more_runs.push_back(more);
  }
  packed_.complete(geometry, memory);
}

void LayerStore::create_full_precision(const CacheGeometry& geometry, const LayerPlan& plan,
                                       const FormatSpec& spec, const LayerMemory& memory) {
  const cache::RunPlace& at = memory.layout->layers[memory.layer_in_group].runs.front();
  ops::HeadRun all = {0, geometry.num_kv_heads,
                      side_view(spec, geometry.k_head_dim, memory, at, at.k),
                      side_view(spec, geometry.v_head_dim, memory, at, at.v)};
  ops::HeadRun more = {0, geometry.num_kv_heads, {}, {}};
  if (plan.has_segments) {
    more.k = behind(all.k, geometry.v_head_dim);
    all.k.head_dim = geometry.v_head_dim;
    full_precision_.more_runs.push_back(more);
  }
  if (geometry.is_latent) all.v = ops::prefix_of(all.k, geometry.v_head_dim);
  full_precision_.runs.push_back(all);
  for (const HeadRunPlan& cut : plan.runs) {
    const auto part_of = [&cut](const ops::HeadRun& run) {
      return ops::HeadRun{cut.first_head, cut.num_heads, ops::side_from(run.k, cut.first_head),
                          ops::side_from(run.v, cut.first_head)};
    };
    full_precision_in_packed_runs_.runs.push_back(part_of(all));
    if (plan.has_segments) full_precision_in_packed_runs_.more_runs.push_back(part_of(more));
  }
  full_precision_.complete(geometry, memory);
  full_precision_in_packed_runs_.complete(geometry, memory);
}

Status LayerStore::create_counts(int num_kv_heads, const CudaPlace* device) {
  counts_.k.resize(num_kv_heads);
  counts_.v.resize(num_kv_heads);
  if (device == nullptr) return {};
  const int64_t bytes = int64_t{2} * num_kv_heads * static_cast<int64_t>(sizeof(ops::HeadCounts));
  KVX_ASSIGN_OR_RETURN(counts_on_device_, device->memory->allocate(bytes, "counts of heads"));
  return {};
}

ops::HeadCounts* LayerStore::counts_of(bool is_k) const {
  if (counts_on_device_.bytes() == 0) return is_k ? counts_.k.data() : counts_.v.data();
  auto* const counts = reinterpret_cast<ops::HeadCounts*>(counts_on_device_.data());
  return is_k ? counts : counts + counts_.k.size();
}

Result<LayerStore::Counts> LayerStore::counts() const {
  if (counts_on_device_.bytes() > 0) return counts_on_device();
  const auto copy = [](std::vector<ops::HeadCounts>& counts) {
    std::vector<ops::HeadCounts> copies;
    for (ops::HeadCounts& one : counts) copies.push_back(ops::load_counts(one));
    return copies;
  };
  return Counts{copy(counts_.k), copy(counts_.v)};
}

Result<LayerStore::Counts> LayerStore::counts_on_device() const {
  const auto num_heads = std::ssize(counts_.k);
  std::vector<ops::HeadCounts> both(static_cast<size_t>(2 * num_heads));
  const int64_t bytes = std::ssize(both) * static_cast<int64_t>(sizeof(ops::HeadCounts));
  KVX_RETURN_IF_ERROR(device::cuda_copy(both.data(), counts_on_device_.data(), bytes));
  return Counts{{both.begin(), both.begin() + num_heads}, {both.begin() + num_heads, both.end()}};
}

}  // namespace kvx::kv

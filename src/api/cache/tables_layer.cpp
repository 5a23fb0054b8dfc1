// kvx_tables_layer and kvx_tables_run: layers in a caller's memory that are stored by a tuned
// recipe.
#include "api/cache/owned_cache.hpp"
#include "api/cache/tables.hpp"
#include "api/call.hpp"
#include "api/checks/format_spec.hpp"
#include "api/guard.hpp"
#include "device/cuda_caller.hpp"

namespace kvx::boundary {
namespace {

using kv::LayerCalibration;

// The device of a layer's memory; -1: the host.
Result<int> read_device(const kvx_tables_layer_args_t& args) {
  if (args.memory == KVX_MEMORY_UNKNOWN || args.memory == KVX_MEMORY_HOST) return -1;
  if (args.memory != KVX_MEMORY_DEVICE || args.device > INT32_MAX) {
    return invalid_argument(
        "args.memory is {} and device {}; expected 0, KVX_MEMORY_HOST or "
        "_DEVICE with a GPU's index",
        args.memory, args.device);
  }
  return static_cast<int>(args.device);
}

Result<std::unique_ptr<PlacedLayer>> place_layer(const OwnedTables& tables,
                                                 const kvx_tables_layer_args_t& args, int device) {
  const tune::TuneFile& file = *tables.file;
  const int layer = static_cast<int>(args.layer);
  auto placed = std::make_unique<PlacedLayer>();
  placed->plan = tables.plans[layer];
  for (const kv::HeadRunPlan& run : placed->plan.runs) {
    placed->specs.emplace_back(spec_of(run.k.spec), spec_of(run.v.spec));
  }
  KVX_ASSIGN_OR_RETURN(
      const LayerCalibration calibration,
      kv::with_block_offsets(file.geometry, layer, static_cast<int>(args.block_size),
                             args.max_tokens, file.layers[layer]));
  KVX_ASSIGN_OR_RETURN(placed->tables,
                       kv::LayerTables::create(file.geometry, layer, placed->plan, calibration));
  if (device < 0) return placed;
  KVX_ASSIGN_OR_RETURN(const device::CudaDevice* known, device::known_cuda_device(device));
  KVX_ASSIGN_OR_RETURN(auto current, device::CurrentCudaDevice::set(device));
  KVX_ASSIGN_OR_RETURN(placed->place, kv::CudaPlace::create({*known, /*stream=*/nullptr}));
  KVX_RETURN_IF_ERROR(placed->tables.place_in(*placed->place->memory));
  // The tables are there before a stream that waits for no other reads them.
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(nullptr));
  return placed;
}

Result<const PlacedLayer*> find_layer(OwnedTables& tables, const kvx_tables_layer_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(const kvx_tables_layer_args_t args, read_struct(caller, "args"));
  const tune::TuneFile& file = *tables.file;
  if (tables.recipe.has_full_precision_window) {
    return unsupported(
        "the tuned recipe is '{}'; a layer in a caller's memory has no full-precision window of "
        "its own",
        tables.recipe.text);
  }
  if (args.layer >= static_cast<uint32_t>(file.geometry.num_layers) || args.reserved != 0) {
    return invalid_argument("args.layer is {}, reserved {}; expected 0 to {}, and 0", args.layer,
                            args.reserved, file.geometry.num_layers - 1);
  }
  if (args.block_size < 1 || args.block_size > cache::kMaxBlockSize) {
    return invalid_argument("args.block_size is {}; expected 1 to {}", args.block_size,
                            cache::kMaxBlockSize);
  }
  if (file.block_size != 0 && args.block_size != static_cast<uint32_t>(file.block_size)) {
    return invalid_argument("args.block_size is {}; the tuned recipe's block offsets are for {}",
                            args.block_size, file.block_size);
  }
  const bool has_rope_mean = !file.layers[args.layer].k_rope_mean.empty();
  if (has_rope_mean && (args.max_tokens < 1 || args.max_tokens > kv::kMaxTokens)) {
    return invalid_argument("args.max_tokens is {}; expected 1 to {}: K has block offsets",
                            args.max_tokens, kv::kMaxTokens);
  }
  KVX_ASSIGN_OR_RETURN(const int device, read_device(args));
  const std::lock_guard lock(tables.mutex);
  std::unique_ptr<PlacedLayer>& placed =
      tables.placed[{args.layer, args.block_size, device, has_rope_mean ? args.max_tokens : 0}];
  if (!placed) {
    KVX_ASSIGN_OR_RETURN(placed, place_layer(tables, args, device));
  }
  return placed.get();
}

kvx_transform_t c_transform(const ops::SideTransform& side) {
  kvx_transform_t transform{};
  transform.flags = side.hadamard ? KVX_TRANSFORM_HADAMARD : 0;
  transform.mean = side.mean;
  transform.factor = side.factor;
  transform.block_offset = side.block_offset;
  transform.num_offset_blocks = side.num_offset_blocks;
  return transform;
}

Status layer(kvx_tables_t handle, const kvx_tables_layer_args_t* args, kvx_transform_t* k,
             kvx_transform_t* v) {
  KVX_ASSIGN_OR_RETURN(OwnedTables * tables, find_tables(handle));
  KVX_RETURN_IF_ERROR(check_out_struct(k, "k"));
  if (v != nullptr) KVX_RETURN_IF_ERROR(check_out_struct(v, "v"));
  KVX_ASSIGN_OR_RETURN(const PlacedLayer* placed, find_layer(*tables, args));
  const ops::LayerTransform& transform = placed->tables.transform();
  KVX_RETURN_IF_ERROR(write_struct(c_transform(transform.k), k, "k"));
  return v == nullptr ? Status() : write_struct(c_transform(transform.v), v, "v");
}

// The caller's side with what the tables decide.
Result<kvx_side_t> filled_side(const kvx_side_t* caller, const kvx_format_spec_t& spec,
                               const ops::SideView& view, const char* name) {
  KVX_RETURN_IF_ERROR(check_out_struct(caller, name));
  KVX_ASSIGN_OR_RETURN(kvx_side_t side, read_struct(caller, name));
  side.head_dim = static_cast<uint32_t>(view.head_dim);
  side.spec = &spec;
  side.tensor_scales = view.tensor_scales;
  side.feedback = view.feedback;
  if (view.scales.base == nullptr) return side;
  side.scales = view.scales.base;
  side.scale_block_stride = view.scales.block_stride;
  side.scale_token_stride = view.scales.token_stride;
  side.scale_head_stride = view.scales.head_stride;
  side.scale_group_stride = view.scales.group_stride;
  return side;
}

Status run(kvx_tables_t handle, const kvx_tables_layer_args_t* args, uint32_t first_head,
           uint32_t* num_heads, kvx_side_t* k, kvx_side_t* v) {
  KVX_ASSIGN_OR_RETURN(OwnedTables * tables, find_tables(handle));
  if (num_heads == nullptr) return invalid_argument("num_heads is null");
  KVX_ASSIGN_OR_RETURN(const PlacedLayer* placed, find_layer(*tables, args));
  const kv::CacheGeometry& geometry = tables->file->geometry;
  for (size_t r = 0; r < placed->plan.runs.size(); ++r) {
    const kv::HeadRunPlan& plan = placed->plan.runs[r];
    if (static_cast<uint32_t>(plan.first_head) != first_head) continue;
    ops::HeadRun view{plan.first_head, plan.num_heads, {}, {}};
    view.k.spec = plan.k.spec, view.k.head_dim = geometry.k_head_dim;
    view.v.spec = plan.v.spec, view.v.head_dim = geometry.v_head_dim;
    placed->tables.attach(r, view);
    KVX_ASSIGN_OR_RETURN(const kvx_side_t k_side,
                         filled_side(k, placed->specs[r].first, view.k, "k"));
    if (geometry.v_head_dim > 0) {
      KVX_ASSIGN_OR_RETURN(const kvx_side_t v_side,
                           filled_side(v, placed->specs[r].second, view.v, "v"));
      KVX_RETURN_IF_ERROR(write_struct(v_side, v, "v"));
    }
    KVX_RETURN_IF_ERROR(write_struct(k_side, k, "k"));
    *num_heads = static_cast<uint32_t>(plan.num_heads);
    return {};
  }
  return out_of_range("first_head is {}; no run of heads begins there", first_head);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_tables_layer(kvx_tables_t tables, const kvx_tables_layer_args_t* args,
                                         kvx_transform_t* k, kvx_transform_t* v) {
  return kvx::boundary::run_call([&] { return kvx::boundary::layer(tables, args, k, v); });
}

extern "C" kvx_status_t kvx_tables_run(kvx_tables_t tables, const kvx_tables_layer_args_t* args,
                                       uint32_t first_head, uint32_t* num_heads, kvx_side_t* k,
                                       kvx_side_t* v) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::run(tables, args, first_head, num_heads, k, v); });
}

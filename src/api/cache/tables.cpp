// kvx_tables_*: tuned recipes from files, from memory and from a caller's tables, and layers in a
// caller's memory that are stored by them.
#include "api/cache/tables.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"
#include "api/checks/format_spec.hpp"
#include "api/guard.hpp"
#include "api/handle_map.hpp"
#include "device/cuda_caller.hpp"
#include "kv/verbs/cuda_place.hpp"

namespace kvx::boundary {
namespace {

using kv::LayerCalibration;

// A layer's tables where its verbs read them.
struct PlacedLayer {
  kv::LayerPlan plan;
  std::vector<std::pair<kvx_format_spec_t, kvx_format_spec_t>> specs;  // [runs], of K and V
  std::unique_ptr<kv::CudaPlace> place;                                // null on the host
  kv::LayerTables tables;
};

struct OwnedTables {
  std::shared_ptr<const tune::TuneFile> file;
  kv::Recipe recipe;
  std::vector<kv::LayerPlan> plans;  // [num_layers]

  // Layer, block size, device (-1: the host), tokens.
  using Key = std::tuple<uint32_t, uint32_t, int, int64_t>;
  std::mutex mutex;
  std::map<Key, std::unique_ptr<PlacedLayer>> placed;
};

using Handles = HandleMap<kvx_tables_t, OwnedTables>;

// Never destroyed: threads may still call when static objects are.
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

Result<OwnedTables*> find_tables(kvx_tables_t handle) {
  if (handle == nullptr) return invalid_argument("tables is null");
  OwnedTables* const tables = handles().find(handle);
  if (tables == nullptr) return invalid_argument("tables is not a handle, or was freed");
  return tables;
}

// Requires: the file was checked.
Status own(tune::TuneFile file, kvx_tables_t* result) {
  auto tables = std::make_unique<OwnedTables>();
  KVX_ASSIGN_OR_RETURN(tune::TunedRecipe tuned, tune::recipe_of(file));
  KVX_ASSIGN_OR_RETURN(tables->plans,
                       kv::plan_layers(file.geometry, tuned.recipe, tuned.overrides));
  tables->recipe = std::move(tuned.recipe);
  tables->file = std::make_shared<const tune::TuneFile>(std::move(file));
  *result = handles().add(std::move(tables));
  return {};
}

Status load(const char* path, kvx_tables_t* result) {
  if (path == nullptr) return invalid_argument("path is null");
  if (result == nullptr) return invalid_argument("tables is null");
  KVX_ASSIGN_OR_RETURN(tune::TuneFile file, tune::read_tune_file(path));
  return own(std::move(file), result);
}

Status load_bytes(const void* bytes, uint64_t num_bytes, kvx_tables_t* result) {
  if (bytes == nullptr) return invalid_argument("bytes is null");
  if (result == nullptr) return invalid_argument("tables is null");
  KVX_ASSIGN_OR_RETURN(tune::TuneFile file,
                       tune::parse_tune_file({static_cast<const uint8_t*>(bytes), num_bytes}));
  return own(std::move(file), result);
}

// ---- a caller's tables

template <class T>
std::vector<T> copy_of(const T* table, size_t count) {
  return table == nullptr ? std::vector<T>() : std::vector<T>(table, table + count);
}

std::string text_of(const char* text) {
  return text == nullptr ? "" : text;
}

Status read_side(const kvx_side_tables_t* caller, size_t heads, size_t head_dim,
                 const std::string& name, kv::StaticScales& scales, std::vector<float>& mean,
                 std::vector<float>& factor) {
  if (caller == nullptr) return {};
  KVX_ASSIGN_OR_RETURN(const kvx_side_tables_t args, read_struct(caller, name));
  if ((args.group_scales == nullptr) != (args.num_group_scales == 0)) {
    return invalid_argument("{}.group_scales is {} with {} numbers; expected both or neither", name,
                            static_cast<const void*>(args.group_scales), args.num_group_scales);
  }
  mean = copy_of(args.mean, heads * head_dim);
  factor = copy_of(args.factor, heads * head_dim);
  scales.tensor_scales = copy_of(args.tensor_scales, heads);
  scales.group_scales = copy_of(args.group_scales, args.num_group_scales);
  return {};
}

Status read_rope(const kvx_layer_tables_t& args, const kv::CacheGeometry& geometry,
                 const std::string& name, LayerCalibration& tables) {
  if ((args.k_rope_mean == nullptr) != (args.num_inv_freq == 0) ||
      (args.inv_freq == nullptr) != (args.num_inv_freq == 0)) {
    return invalid_argument("{} has {} inv_freq; expected k_rope_mean and inv_freq with them", name,
                            args.num_inv_freq);
  }
  if (args.num_inv_freq > static_cast<uint32_t>(geometry.k_head_dim) / 2) {
    return invalid_argument("{}.num_inv_freq is {}; expected at most k_head_dim / 2, {}", name,
                            args.num_inv_freq, geometry.k_head_dim / 2);
  }
  if (args.rope_pairs > KVX_ROPE_PAIRS_INTERLEAVED || args.reserved != 0) {
    return invalid_argument("{}.rope_pairs is {}, reserved {}; expected 0 or 1, and 0", name,
                            args.rope_pairs, args.reserved);
  }
  tables.k_rope_mean =
      copy_of(args.k_rope_mean, static_cast<size_t>(geometry.num_kv_heads) * geometry.k_head_dim);
  tables.k_rope.inv_freq = copy_of(args.inv_freq, args.num_inv_freq);
  tables.k_rope.pairs = args.rope_pairs == KVX_ROPE_PAIRS_HALVES ? kv::RopePairs::kHalves
                                                                 : kv::RopePairs::kInterleaved;
  if (args.attention_scaling != 0) tables.k_rope.attention_scaling = args.attention_scaling;
  return {};
}

Status read_layer(const kvx_layer_tables_t* caller, const kv::CacheGeometry& geometry,
                  const std::string& name, LayerCalibration& tables) {
  if (caller == nullptr) return {};
  KVX_ASSIGN_OR_RETURN(const kvx_layer_tables_t args, read_struct(caller, name));
  const auto heads = static_cast<size_t>(geometry.num_kv_heads);
  const auto k_dim = static_cast<size_t>(geometry.k_head_dim);
  KVX_RETURN_IF_ERROR(
      read_side(args.k, heads, k_dim, name + ".k", tables.k, tables.k_mean, tables.k_factor));
  KVX_RETURN_IF_ERROR(read_side(args.v, heads, static_cast<size_t>(geometry.v_head_dim),
                                name + ".v", tables.v, tables.v_mean, tables.v_factor));
  constexpr int64_t kMostBlocks = INT32_MAX;
  if (args.num_offset_blocks < 0 || args.num_offset_blocks > kMostBlocks ||
      (args.k_block_offset == nullptr) != (args.num_offset_blocks == 0)) {
    return invalid_argument("{}.k_block_offset is {} with {} blocks; expected both or neither",
                            name, static_cast<const void*>(args.k_block_offset),
                            args.num_offset_blocks);
  }
  tables.k_block_offset =
      copy_of(args.k_block_offset, static_cast<size_t>(args.num_offset_blocks) * heads * k_dim);
  tables.k_feedback = copy_of(args.k_feedback, heads * k_dim * k_dim);
  return read_rope(args, geometry, name, tables);
}

Status read_geometry(const kvx_tables_config_t& args, kv::CacheGeometry& geometry) {
  const std::pair<const char*, uint32_t> counts[] = {{"num_layers", args.num_layers},
                                                     {"num_kv_heads", args.num_kv_heads},
                                                     {"k_head_dim", args.k_head_dim},
                                                     {"v_head_dim", args.v_head_dim},
                                                     {"block_size", args.block_size}};
  for (const auto& [name, count] : counts) {
    if (count > INT32_MAX) return invalid_argument("config.{} is {}", name, count);
  }
  geometry.num_layers = static_cast<int>(args.num_layers);
  geometry.num_kv_heads = static_cast<int>(args.num_kv_heads);
  geometry.k_head_dim = static_cast<int>(args.k_head_dim);
  geometry.v_head_dim = static_cast<int>(args.v_head_dim);
  return kv::check_geometry(geometry);
}

Status create(const kvx_tables_config_t* caller, kvx_tables_t* result) {
  if (result == nullptr) return invalid_argument("tables is null");
  KVX_ASSIGN_OR_RETURN(const kvx_tables_config_t args, read_struct(caller, "config"));
  tune::TuneFile file;
  KVX_RETURN_IF_ERROR(read_geometry(args, file.geometry));
  file.block_size = static_cast<int>(args.block_size);
  const auto keep_in = [](std::vector<std::string>& texts) {
    return [&texts](const char* text) {
      texts.emplace_back(text);
      return Status();
    };
  };
  KVX_RETURN_IF_ERROR(read_texts(args.layer_overrides, args.num_layer_overrides,
                                 "config.layer_overrides", keep_in(file.layer_overrides)));
  KVX_RETURN_IF_ERROR(read_texts(args.head_overrides, args.num_head_overrides,
                                 "config.head_overrides", keep_in(file.head_overrides)));
  file.layers.resize(args.num_layers);
  for (uint32_t i = 0; args.layers != nullptr && i < args.num_layers; ++i) {
    KVX_RETURN_IF_ERROR(read_layer(args.layers[i], file.geometry,
                                   fmt::format("config.layers[{}]", i), file.layers[i]));
  }
  file.recipe = text_of(args.recipe);
  file.model = {text_of(args.model_name), text_of(args.model_architecture),
                text_of(args.model_hash)};
  file.text_hash = text_of(args.text_hash);
  file.date = text_of(args.date);
  if (args.measured != nullptr) file.measured = args.measured;
  KVX_RETURN_IF_ERROR(tune::check_tune_file(file));
  return own(std::move(file), result);
}

Status save(kvx_tables_t handle, const char* path) {
  KVX_ASSIGN_OR_RETURN(const OwnedTables* tables, find_tables(handle));
  if (path == nullptr) return invalid_argument("path is null");
  return tune::write_tune_file(path, *tables->file);
}

Status info(kvx_tables_t handle, kvx_tables_info_t* caller) {
  KVX_ASSIGN_OR_RETURN(const OwnedTables* tables, find_tables(handle));
  const tune::TuneFile& file = *tables->file;
  kvx_tables_info_t answer{};
  answer.num_layers = static_cast<uint32_t>(file.geometry.num_layers);
  answer.num_kv_heads = static_cast<uint32_t>(file.geometry.num_kv_heads);
  answer.k_head_dim = static_cast<uint32_t>(file.geometry.k_head_dim);
  answer.v_head_dim = static_cast<uint32_t>(file.geometry.v_head_dim);
  answer.block_size = static_cast<uint32_t>(file.block_size);
  for (const LayerCalibration& layer : file.layers) {
    if (!layer.k_rope_mean.empty() || !layer.k_block_offset.empty()) answer.needs_positions = 1;
  }
  answer.recipe = file.recipe.c_str();
  answer.model_name = file.model.name.c_str();
  answer.model_architecture = file.model.architecture.c_str();
  answer.model_hash = file.model.hash.c_str();
  answer.text_hash = file.text_hash.c_str();
  answer.date = file.date.c_str();
  answer.measured = file.measured.c_str();
  return write_struct(answer, caller, "info");
}

// ---- layers in a caller's memory

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

Result<tune::CacheRecipe> recipe_of_tables(kvx_tables_t handle, const char* text) {
  KVX_ASSIGN_OR_RETURN(const OwnedTables* tables, find_tables(handle));
  const std::string_view given = text == nullptr ? "tuned" : text;
  constexpr std::string_view kWord = "tuned";
  const std::string_view options = given.substr(std::min(kWord.size(), given.size()));
  if (!given.starts_with(kWord) || (!options.empty() && options.front() != ',')) {
    return invalid_argument(
        "config.recipe is '{}'; with options.tables expected null, or 'tuned' with options as "
        "'tuned,recent=128'",
        given);
  }
  KVX_ASSIGN_OR_RETURN(tune::CacheRecipe recipe, tune::recipe_of_file(tables->file, options));
  recipe.recipe.text = given;
  return recipe;
}

}  // namespace kvx::boundary

using kvx::boundary::run_call;

extern "C" kvx_status_t kvx_tables_load(const char* path, kvx_tables_t* tables) {
  return run_call([&] { return kvx::boundary::load(path, tables); });
}

extern "C" kvx_status_t kvx_tables_load_bytes(const void* bytes, uint64_t num_bytes,
                                              kvx_tables_t* tables) {
  return run_call([&] { return kvx::boundary::load_bytes(bytes, num_bytes, tables); });
}

extern "C" kvx_status_t kvx_tables_create(const kvx_tables_config_t* config, kvx_tables_t* tables) {
  return run_call([&] { return kvx::boundary::create(config, tables); });
}

extern "C" kvx_status_t kvx_tables_save(kvx_tables_t tables, const char* path) {
  return run_call([&] { return kvx::boundary::save(tables, path); });
}

extern "C" void kvx_tables_free(kvx_tables_t tables) {
  (void)kvx::boundary::handles().remove(tables,
                                        [](const kvx::boundary::OwnedTables&) { return true; });
}

extern "C" kvx_status_t kvx_tables_info(kvx_tables_t tables, kvx_tables_info_t* info) {
  return run_call([&] { return kvx::boundary::info(tables, info); });
}

extern "C" kvx_status_t kvx_tables_layer(kvx_tables_t tables, const kvx_tables_layer_args_t* args,
                                         kvx_transform_t* k, kvx_transform_t* v) {
  return run_call([&] { return kvx::boundary::layer(tables, args, k, v); });
}

extern "C" kvx_status_t kvx_tables_run(kvx_tables_t tables, const kvx_tables_layer_args_t* args,
                                       uint32_t first_head, uint32_t* num_heads, kvx_side_t* k,
                                       kvx_side_t* v) {
  return run_call([&] { return kvx::boundary::run(tables, args, first_head, num_heads, k, v); });
}

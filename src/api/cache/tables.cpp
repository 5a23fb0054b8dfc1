// kvx_tables_*: tuned recipes from files, from memory and from a caller's tables.
#include "api/cache/tables.hpp"

#include <memory>

#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"
#include "api/guard.hpp"
#include "api/handle_map.hpp"

namespace kvx::boundary {
namespace {

using kv::LayerCalibration;

using Handles = HandleMap<kvx_tables_t, OwnedTables>;

// Never destroyed: threads may still call when static objects are.
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

}  // namespace

Status own_tables(tune::TuneFile file, kvx_tables_t* result) {
  auto tables = std::make_unique<OwnedTables>();
  KVX_ASSIGN_OR_RETURN(tune::TunedRecipe tuned, tune::recipe_of(file));
  KVX_ASSIGN_OR_RETURN(tables->plans,
                       kv::plan_layers(file.geometry, tuned.recipe, tuned.overrides));
  tables->recipe = std::move(tuned.recipe);
  tables->file = std::make_shared<const tune::TuneFile>(std::move(file));
  *result = handles().add(std::move(tables));
  return {};
}

Result<OwnedTables*> find_tables(kvx_tables_t handle) {
  if (handle == nullptr) return invalid_argument("tables is null");
  OwnedTables* const tables = handles().find(handle);
  if (tables == nullptr) return invalid_argument("tables is not a handle, or was freed");
  return tables;
}

namespace {

Status load(const char* path, kvx_tables_t* result) {
  if (path == nullptr) return invalid_argument("path is null");
  if (result == nullptr) return invalid_argument("tables is null");
  KVX_ASSIGN_OR_RETURN(tune::TuneFile file, tune::read_tune_file(path));
  return own_tables(std::move(file), result);
}

Status load_bytes(const void* bytes, uint64_t num_bytes, kvx_tables_t* result) {
  if (bytes == nullptr) return invalid_argument("bytes is null");
  if (result == nullptr) return invalid_argument("tables is null");
  KVX_ASSIGN_OR_RETURN(tune::TuneFile file,
                       tune::parse_tune_file({static_cast<const uint8_t*>(bytes), num_bytes}));
  return own_tables(std::move(file), result);
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
  return own_tables(std::move(file), result);
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

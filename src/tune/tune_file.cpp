// Checks a tuned recipe and writes it.
#include "tune/tune_file.hpp"

#include <algorithm>

#include "cache/block_layout.hpp"
#include "tier/whole_file.hpp"
#include "tune/json.hpp"
#include "tune/safetensors.hpp"
#include "tune/table_list.hpp"

namespace kvx::tune {
namespace {

using kv::LayerCalibration;
using nlohmann::json;

// A file may be hostile: what it makes the library allocate stays in proportion to it.
constexpr int64_t kMaxHeads = 1 << 20;        // of all layers
constexpr size_t kMaxOverrideText = 2048;     // bytes of one
constexpr int64_t kMaxFileBytes = 1LL << 32;  // of a file that is read

std::span<const uint8_t> bytes_of(const auto& numbers) {
  return std::as_bytes(std::span(numbers)).size() == 0
             ? std::span<const uint8_t>()
             : std::span(reinterpret_cast<const uint8_t*>(numbers.data()),
                         std::as_bytes(std::span(numbers)).size());
}

Status add_overrides(const std::vector<std::string>& texts,
                     Result<kv::RecipeOverride> (*parse)(std::string_view),
                     const kv::CacheGeometry& geometry,
                     std::vector<kv::RecipeOverride>& overrides) {
  for (const std::string& text : texts) {
    if (text.size() > kMaxOverrideText) {
      return invalid_argument("an override has {} characters; expected at most {}", text.size(),
                              kMaxOverrideText);
    }
    KVX_ASSIGN_OR_RETURN(kv::RecipeOverride one, parse(text));
    KVX_RETURN_IF_ERROR(kv::plan_layers(geometry, one.recipe, {&one, 1}));
    overrides.push_back(std::move(one));
  }
  return {};
}

Status check_layers(const TuneFile& file) {
  KVX_ASSIGN_OR_RETURN(const TunedRecipe tuned, recipe_of(file));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::LayerPlan> plans,
                       kv::plan_layers(file.geometry, tuned.recipe, tuned.overrides));
  const bool has_offsets =
      std::ranges::any_of(file.layers, [](auto& layer) { return !layer.k_block_offset.empty(); });
  if (file.block_size < 0 || file.block_size > cache::kMaxBlockSize ||
      (file.block_size > 0) != has_offsets) {
    return invalid_argument("k_block_size is {}; expected 1 to {} with k.block_offset, else 0",
                            file.block_size, cache::kMaxBlockSize);
  }
  for (int layer = 0; layer < file.geometry.num_layers; ++layer) {
    // Offsets of one block show whether those of any length can be made.
    KVX_ASSIGN_OR_RETURN(const LayerCalibration tables,
                         kv::with_block_offsets(file.geometry, layer, 1, 1, file.layers[layer]));
    KVX_RETURN_IF_ERROR(kv::LayerTables::create(file.geometry, layer, plans[layer], tables));
  }
  return {};
}

// Each rope once, with the layers that have it: most models have one.
std::vector<std::pair<const kv::Rope*, std::vector<int>>> distinct_ropes(const TuneFile& file) {
  std::vector<std::pair<const kv::Rope*, std::vector<int>>> ropes;
  for (int layer = 0; layer < file.geometry.num_layers; ++layer) {
    const LayerCalibration& tables = file.layers[layer];
    if (tables.k_rope_mean.empty()) continue;
    auto found = std::ranges::find_if(ropes, [&](auto& r) { return *r.first == tables.k_rope; });
    if (found == ropes.end()) found = ropes.insert(found, {&tables.k_rope, {}});
    found->second.push_back(layer);
  }
  return ropes;
}

json header_of(const TuneFile& file) {
  const kv::CacheGeometry& geometry = file.geometry;
  json ropes = json::array();
  for (const auto& [rope, layers] : distinct_ropes(file)) {
    ropes.push_back({{"pairs", rope->pairs == kv::RopePairs::kHalves ? "halves" : "interleaved"},
                     {"attention_scaling", rope->attention_scaling},
                     {"layers", layers}});
  }
  return {{"version", kTuneFileVersion},
          {"recipe", file.recipe},
          {"layer_overrides", file.layer_overrides},
          {"head_overrides", file.head_overrides},
          {"num_layers", geometry.num_layers},
          {"num_kv_heads", geometry.num_kv_heads},
          {"k_head_dim", geometry.k_head_dim},
          {"v_head_dim", geometry.v_head_dim},
          {"k_block_size", file.block_size},
          {"ropes", ropes},
          {"model_name", file.model.name},
          {"model_architecture", file.model.architecture},
          {"model_hash", file.model.hash},
          {"text_hash", file.text_hash},
          {"date", file.date},
          {"measured", json::parse(file.measured)}};
}

Error named(const std::string& path, const Error& error) {
  return {error.code, fmt::format("'{}': {}", path, error.message)};
}

}  // namespace

Result<TunedRecipe> recipe_of(const TuneFile& file) {
  TunedRecipe tuned;
  KVX_ASSIGN_OR_RETURN(tuned.recipe, kv::parse_recipe(file.recipe));
  KVX_RETURN_IF_ERROR(add_overrides(file.layer_overrides, kv::parse_layer_override, file.geometry,
                                    tuned.overrides));
  KVX_RETURN_IF_ERROR(
      add_overrides(file.head_overrides, kv::parse_head_override, file.geometry, tuned.overrides));
  return tuned;
}

Status check_tune_file(const TuneFile& file) {
  const kv::CacheGeometry& geometry = file.geometry;
  KVX_RETURN_IF_ERROR(kv::check_geometry(geometry));
  if (int64_t{geometry.num_layers} * geometry.num_kv_heads > kMaxHeads) {
    return invalid_argument("num_layers x num_kv_heads is {}; expected at most {}",
                            int64_t{geometry.num_layers} * geometry.num_kv_heads, kMaxHeads);
  }
  if (file.layers.size() != static_cast<size_t>(geometry.num_layers)) {
    return invalid_argument("layers has {} entries; expected num_layers, {}", file.layers.size(),
                            geometry.num_layers);
  }
  KVX_RETURN_IF_ERROR(parse_json_object("measured", file.measured, kMaxJsonDepth - 1));
  return check_layers(file);
}

Result<std::vector<uint8_t>> encode_tune_file(const TuneFile& file) {
  KVX_RETURN_IF_ERROR(check_tune_file(file));
  Safetensors container;
  container.metadata["format"] = "kvxtune";
  container.metadata["kvx"] = json_text(header_of(file));
  for (int layer = 0; layer < file.geometry.num_layers; ++layer) {
    for (const TableField& field : table_fields()) {
      const std::vector<float>& table = field.in(file.layers[layer]);
      if (table.empty()) continue;
      container.tensors.push_back({fmt::format("layers.{}.{}", layer, field.name), TensorType::kF32,
                                   field.shape(file.geometry, static_cast<int64_t>(table.size())),
                                   bytes_of(table)});
    }
  }
  int index = 0;
  for (const auto& [rope, layers] : distinct_ropes(file)) {
    container.tensors.push_back({fmt::format("ropes.{}.inv_freq", index++),
                                 TensorType::kF64,
                                 {static_cast<int64_t>(rope->inv_freq.size())},
                                 bytes_of(rope->inv_freq)});
  }
  return encode_safetensors(container);
}

Result<TuneFile> read_tune_file(const std::string& path) {
  KVX_ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes,
                       tier::read_whole_file(path, kMaxFileBytes));
  Result<TuneFile> file = parse_tune_file(bytes);
  if (!file.ok()) return named(path, file.error());
  return file;
}

Status write_tune_file(const std::string& path, const TuneFile& file) {
  const Result<std::vector<uint8_t>> bytes = encode_tune_file(file);
  if (!bytes.ok()) return named(path, bytes.error());
  return tier::write_whole_file(path, bytes.value());
}

}  // namespace kvx::tune

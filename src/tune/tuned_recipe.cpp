// Resolves "tuned:FILE" to a recipe, its overrides and its tables.
#include "tune/tuned_recipe.hpp"

#include <algorithm>
#include <mutex>

#include "core/os/os.hpp"

namespace kvx::tune {
namespace {

// The last file that was read: a caller that makes a cache for each layer reads it once. A file
// that was replaced has another inode or time.
struct LastFile {
  std::mutex mutex;
  std::string path;
  os::FileIdentity identity;
  std::shared_ptr<const TuneFile> file;
};

Result<std::shared_ptr<const TuneFile>> read_once(const std::string& path) {
  static auto* const last = new LastFile;  // threads may still call when static objects are not
  const std::lock_guard lock(last->mutex);
  const std::optional<os::FileIdentity> found = os::identity_of(path);
  if (found && last->file && last->path == path && *found == last->identity) return last->file;
  KVX_ASSIGN_OR_RETURN(TuneFile file, read_tune_file(path));
  last->file = std::make_shared<const TuneFile>(std::move(file));
  last->path = path;
  last->identity = found.value_or(os::FileIdentity());
  return last->file;
}

std::string comparable(std::string_view name) {
  while (name.ends_with('/')) name.remove_suffix(1);
  std::string text(name.substr(name.rfind('/') + 1));
  std::ranges::transform(text, text.begin(), [](unsigned char c) {
    return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  });
  return text;
}

Status check_same(std::string_view field, int of_file, int of_cache) {
  if (of_file == of_cache) return {};
  return invalid_argument("the tuned recipe has {} {}; the cache has {}", field, of_file, of_cache);
}

}  // namespace

std::vector<kv::LayerCalibration> CacheRecipe::calibration() const {
  if (!file) return {};
  const auto first = file->layers.begin() + first_layer;
  return {first, first + num_layers};
}

Result<CacheRecipe> read_recipe(std::string_view text) {
  if (!text.starts_with(kTunedWord)) {
    KVX_ASSIGN_OR_RETURN(kv::Recipe recipe, kv::parse_recipe(text));
    return CacheRecipe{std::move(recipe), {}, nullptr, 0, 0};
  }
  const std::string_view rest = text.substr(kTunedWord.size());
  const size_t comma = std::min(rest.find(','), rest.size());
  if (comma == 0) return invalid_argument("recipe is '{}'; expected tuned:FILE", text);
  KVX_ASSIGN_OR_RETURN(auto file, read_once(std::string(rest.substr(0, comma))));
  KVX_ASSIGN_OR_RETURN(CacheRecipe recipe, recipe_of_file(std::move(file), rest.substr(comma)));
  recipe.recipe.text = text;
  return recipe;
}

Result<CacheRecipe> recipe_of_file(std::shared_ptr<const TuneFile> file, std::string_view options) {
  KVX_ASSIGN_OR_RETURN(TunedRecipe tuned, recipe_of(*file));
  const int num_layers = file->geometry.num_layers;
  CacheRecipe recipe{std::move(tuned.recipe), std::move(tuned.overrides), std::move(file), 0,
                     num_layers};
  if (options.empty()) return recipe;
  KVX_ASSIGN_OR_RETURN(recipe.recipe,
                       kv::with_window_options(std::move(recipe.recipe), options.substr(1)));
  return recipe;
}

Result<CacheRecipe> layers_of(CacheRecipe recipe, int first, int count) {
  if (!recipe.file) return recipe;
  if (first < 0 || count < 1 || first > recipe.num_layers - count) {
    return invalid_argument("layer is {}; the tuned recipe has layers 0 to {}",
                            first < 0 ? first : first + count - 1, recipe.num_layers - 1);
  }
  for (kv::RecipeOverride& change : recipe.overrides) {
    std::erase_if(change.where, [&](const kv::LayerHead& place) {
      return place.layer < first || place.layer >= first + count;
    });
    for (kv::LayerHead& place : change.where) place.layer -= first;
  }
  recipe.first_layer += first;
  recipe.num_layers = count;
  return recipe;
}

Status check_model(const CacheRecipe& recipe, std::string_view name,
                   std::string_view architecture) {
  if (!recipe.file) return {};
  const ModelIdentity& model = recipe.file->model;
  const auto differs = [](std::string_view a, std::string_view b) {
    return !a.empty() && !b.empty() && comparable(a) != comparable(b);
  };
  if (!differs(model.name, name) && !differs(model.architecture, architecture)) return {};
  return invalid_argument("recipe '{}' was tuned for the model '{}' ({}); this model is '{}' ({})",
                          recipe.recipe.text, model.name, model.architecture, name, architecture);
}

Status check_geometry(const CacheRecipe& recipe, const kv::CacheGeometry& geometry,
                      int block_size) {
  if (!recipe.file) return {};
  const kv::CacheGeometry& of_file = recipe.file->geometry;
  KVX_RETURN_IF_ERROR(check_same("num_layers", recipe.num_layers, geometry.num_layers));
  KVX_RETURN_IF_ERROR(check_same("num_kv_heads", of_file.num_kv_heads, geometry.num_kv_heads));
  KVX_RETURN_IF_ERROR(check_same("k_head_dim", of_file.k_head_dim, geometry.k_head_dim));
  KVX_RETURN_IF_ERROR(check_same("v_head_dim", of_file.v_head_dim, geometry.v_head_dim));
  if (block_size == 0 || recipe.file->block_size == 0) return {};
  return check_same("k_block_size", recipe.file->block_size, block_size);
}

Status use_recipe(const CacheRecipe& recipe, kv::KvCacheConfig& config) {
  KVX_RETURN_IF_ERROR(check_geometry(recipe, config.geometry, config.block_size));
  config.recipe = recipe.recipe;
  config.overrides.insert(config.overrides.begin(), recipe.overrides.begin(),
                          recipe.overrides.end());
  config.calibration = recipe.calibration();
  return {};
}

}  // namespace kvx::tune

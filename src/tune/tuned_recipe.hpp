// A recipe that may name a file: what a caller gives as the cache's recipe, with everything that it
// stands for. Only here is a file read; kv::parse_recipe() reads text alone.
//
//   "int8:auto"                        a recipe (kv/recipe.hpp)
//   "tuned:FILE"                       a tuned recipe with its tables (tune/tune_file.hpp)
//   "tuned:FILE,recent=128,immediate"  its full-precision window changed; a comma ends FILE
#pragma once

#include <memory>
#include <string_view>

#include "kv/cache_config.hpp"
#include "tune/tune_file.hpp"

namespace kvx::tune {

inline constexpr std::string_view kTunedWord = "tuned:";

// A recipe with its overrides and tables, for a cache of these layers.
struct CacheRecipe {
  kv::Recipe recipe;  // its text is what the caller gave
  std::vector<kv::RecipeOverride> overrides;
  std::shared_ptr<const TuneFile> file;  // null: no tuned recipe
  // Those of the file's layers that the cache has.
  int first_layer = 0;
  int num_layers = 0;

  std::vector<kv::LayerCalibration> calibration() const;  // [num_layers], or empty
};

// Errors as kv::parse_recipe, read_tune_file and kv::with_window_options.
Result<CacheRecipe> read_recipe(std::string_view text);

// The same of a file that was read. options: ",recent=128", or empty.
Result<CacheRecipe> recipe_of_file(std::shared_ptr<const TuneFile> file, std::string_view options);

// Layers [first, first + count) of a tuned recipe, for a cache of those alone; any other is
// returned as it is. INVALID_ARGUMENT: the file has not all of them.
Result<CacheRecipe> layers_of(CacheRecipe recipe, int first, int count);

// Whether the file is this model's, of what is known of it: an empty text is not compared. Names
// are compared behind their last '/', in lower case. INVALID_ARGUMENT names both.
Status check_model(const CacheRecipe& recipe, std::string_view name, std::string_view architecture);

// Sets the config's recipe and tables, and puts the overrides before those that are there. The
// geometry and the block size are set before. INVALID_ARGUMENT: they are not the file's.
Status use_recipe(const CacheRecipe& recipe, kv::KvCacheConfig& config);

// The same for other owners of layers. block_size 0: it is not known yet.
Status check_geometry(const CacheRecipe& recipe, const kv::CacheGeometry& geometry, int block_size);

}  // namespace kvx::tune

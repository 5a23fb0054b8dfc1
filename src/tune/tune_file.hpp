// TuneFile: a tuned recipe, MODEL.kvxtune: how a model's cache is stored, the tables that it was
// calibrated with, of which model and text, and what was measured. docs/tune-file.md has the bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kv/plan/layer_tables.hpp"
#include "kv/recipe.hpp"

namespace kvx::tune {

inline constexpr int kTuneFileVersion = 1;

// What the tables were made of. A cache's geometry must be the file's. Names are compared where the
// caller knows its model; the hash says which file it was and is compared nowhere: another
// quantisation of a model's weights has nearly the same K and V.
struct ModelIdentity {
  std::string name;          // general.name of a GGUF file, _name_or_path of a configuration
  std::string architecture;  // "llama"
  std::string hash;          // of the model's file, XXH3-128 in hexadecimal; or empty
};

struct TuneFile {
  std::string recipe;                        // kv::parse_recipe() reads it
  std::vector<std::string> layer_overrides;  // kv::parse_layer_override()
  std::vector<std::string> head_overrides;   // kv::parse_head_override()
  kv::CacheGeometry geometry;                // without windows: those are the cache's
  std::vector<kv::LayerCalibration> layers;  // [num_layers]
  int block_size = 0;                        // of the k_block_offset tables; 0: there are none
  ModelIdentity model;
  std::string text_hash;        // of the calibration text, XXH3-128 in hexadecimal; or empty
  std::string date;             // "2026-11-25", or empty
  std::string measured = "{}";  // a JSON object: the figures that were measured, for people
};

// The recipe and its overrides, read.
struct TunedRecipe {
  kv::Recipe recipe;
  std::vector<kv::RecipeOverride> overrides;
};
Result<TunedRecipe> recipe_of(const TuneFile& file);

// Whether a cache of this geometry can be made of it. INVALID_ARGUMENT names the part that is
// wrong: a recipe, a table's length, a number that is not finite.
Status check_tune_file(const TuneFile& file);

// The file's bytes, the same for equal contents. Errors as check_tune_file().
Result<std::vector<uint8_t>> encode_tune_file(const TuneFile& file);

// INVALID_ARGUMENT: no such file, damaged, or as check_tune_file(). INCOMPATIBLE: a newer version.
Result<TuneFile> parse_tune_file(std::span<const uint8_t> bytes);

// The same with a path, whose name stands in front of a message. Writing replaces what is there
// only when the new file is whole.
Result<TuneFile> read_tune_file(const std::string& path);
Status write_tune_file(const std::string& path, const TuneFile& file);

}  // namespace kvx::tune

// CacheOptions: how the caches are made that a command runs beside each other, and what multiplies.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tools/kvx/command_line.hpp"
#include "tools/kvx/engine.hpp"
#include "tools/kvx/model_files.hpp"
#include "tools/kvx/recipe_list.hpp"

namespace kvx::tool {

struct CacheOptions {
  OverrideTexts overrides;
  int block_size = 64;
  std::string products = "f32";
  std::string products_on = "auto";  // open_products()'s
  bool is_fast = false;
  std::string device = "cpu";
  int threads = 0;

  bool is_on_gpu() const { return device == "cuda"; }
};

// --products-on.
void add_products_on(Command command, std::string& products_on);

// --layers, --heads, --block-size, --products, --products-on, --fast, --device and --threads.
void add_cache_options(Command command, CacheOptions& options, const char* products_help);

// A cache of max_tokens for each recipe. The first is the base, which the overrides leave as it is.
// INVALID_ARGUMENT as use_recipe().
Result<std::vector<runner::KvAttentionOptions>> caches_of(
    const CacheOptions& options, std::span<const tune::CacheRecipe> recipes,
    const std::vector<kv::RecipeOverride>& overrides, const runner::Model& model,
    int64_t max_tokens);

// The errors of open_products() and load_model().
Result<LoadedModel> load_model(const std::string& path, const CacheOptions& options,
                               const Engine& engine);

// Where a report's figures are from: the CPU's level, and a GPU if the caches lie there or the
// model multiplies there.
std::string level_text(const CacheOptions& options, const Engine& engine,
                       const runner::Model& model);

}  // namespace kvx::tool

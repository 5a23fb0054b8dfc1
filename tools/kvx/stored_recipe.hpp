// StoredRecipe: the options of the command line that describe the cache that a file was saved from.
#pragma once

#include <string>
#include <string_view>

#include "core/result.hpp"
#include "tools/kvx/recipe_list.hpp"

namespace kvx::tool {

struct StoredRecipe {
  std::string cache;        // of --cache
  OverrideTexts overrides;  // of --layers and --heads
  int block_size = 0;

  // "--cache int4:sink=64,recent=64 --layers 0=bf16 --block-size 64", for a shell.
  std::string command_line() const;
};

// From a file's fingerprint. INVALID_ARGUMENT: it is no fingerprint; UNSUPPORTED: its cache is one
// that no recipe describes, or one of a tuned recipe.
Result<StoredRecipe> stored_recipe(std::string_view fingerprint);

}  // namespace kvx::tool

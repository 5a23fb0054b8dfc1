// Tuned recipes behind the C ABI's handles.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "core/result.hpp"
#include "kv/verbs/cuda_place.hpp"
#include "kvx/kvx_abi.h"
#include "tune/tuned_recipe.hpp"

namespace kvx::boundary {

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

// A handle of a tuned recipe that was made here. Requires: check_tune_file().
Status own_tables(tune::TuneFile file, kvx_tables_t* result);

// INVALID_ARGUMENT: null, or not a handle, or one that was freed.
Result<OwnedTables*> find_tables(kvx_tables_t handle);

// The recipe of a kvx_tables_t. text: null, "tuned", or "tuned" with options of its full-precision
// window. INVALID_ARGUMENT: another text; not a handle, or one that was freed.
Result<tune::CacheRecipe> recipe_of_tables(kvx_tables_t handle, const char* text);

// Calls take(text) with each of a caller's texts. INVALID_ARGUMENT: one is null, or the array is.
template <class Take>
Status read_texts(const char* const* texts, uint32_t count, std::string_view name,
                  const Take& take) {
  constexpr uint32_t kMost = 1 << 20;
  if (count > kMost) {
    return invalid_argument("{} has {} entries; expected at most {}", name, count, kMost);
  }
  if (count > 0 && texts == nullptr) return invalid_argument("{} is null", name);
  for (uint32_t i = 0; i < count; ++i) {
    if (texts[i] == nullptr) return invalid_argument("{}[{}] is null", name, i);
    KVX_RETURN_IF_ERROR(take(texts[i]));
  }
  return {};
}

}  // namespace kvx::boundary

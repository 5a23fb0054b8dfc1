// What the pages of one layer hold: from a recipe's text and a shape to the bytes of a page.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kv/plan/layer_store.hpp"
#include "tune/tuned_recipe.hpp"

namespace kvx::python {

// Of a full-precision window's rows: what a GPU's fast kernels read beside packed ones.
inline constexpr format::FormatId kWindowFormat = format::FormatId::kBF16;
inline constexpr DType kWindowDtype = DType::kBF16;

struct PageShape {
  kv::CacheGeometry geometry;
  kv::LayerPlan plan;
  cache::BlockLayout layout;
  cache::BlockLayout window_layout;  // of a full-precision window's blocks
};

// All raise CoreError.

// The recipe of one layer. layer: of a tuned recipe, which must be named.
tune::CacheRecipe layer_recipe(const std::string& text, std::optional<int> layer);

PageShape page_shape(const tune::CacheRecipe& tuned, const kv::CacheGeometry& geometry,
                     int block_size);

// A layer's tables: a tuned recipe's, with K's block offsets for sequences of max_tokens, or given,
// which a tuned recipe refuses.
kv::LayerCalibration page_tables(const tune::CacheRecipe& recipe, const PageShape& shape,
                                 int64_t max_tokens, kv::LayerCalibration given);

}  // namespace kvx::python

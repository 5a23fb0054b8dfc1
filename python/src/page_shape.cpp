#include "python/src/page_shape.hpp"

#include "python/src/arguments.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

void check_takes_tensor_scales(const char* name, const std::vector<float>& scales,
                               const kv::SideRecipe& side) {
  if (scales.empty() || side.spec.facts->has_tensor_scale) return;
  throw CoreError(invalid_argument("{} is given; {} has no tensor scale (nvfp4 has one)", name,
                                   side.spec.facts->name));
}

kv::LayerCalibration tuned_tables(const tune::CacheRecipe& tuned, const PageShape& shape,
                                  int64_t max_tokens, const kv::LayerCalibration& given) {
  const auto is_given = [](const kv::StaticScales& scales) {
    return !scales.group_scales.empty() || !scales.tensor_scales.empty();
  };
  if (is_given(given.k) || is_given(given.v)) {
    throw CoreError(invalid_argument(
        "steps or tensor scales are given; the tuned recipe '{}' has its own", tuned.recipe.text));
  }
  kv::LayerCalibration tables = tuned.calibration().front();
  if (!tables.k_rope_mean.empty() || max_tokens != 0) {
    check_range("max_tokens", max_tokens, 1, kv::kMaxTokens);
  }
  return value_of(kv::with_block_offsets(shape.geometry, tuned.first_layer,
                                         static_cast<int>(shape.layout.block_size), max_tokens,
                                         std::move(tables)));
}

}  // namespace

tune::CacheRecipe layer_recipe(const std::string& text, std::optional<int> layer) {
  auto recipe = value_of(tune::read_recipe(text));
  if (!recipe.file) return recipe;
  if (!layer) {
    throw CoreError(invalid_argument(
        "recipe is '{}'; expected layer=N with it, which of the model's layers this is", text));
  }
  return value_of(tune::layers_of(std::move(recipe), *layer, 1));
}

PageShape page_shape(const tune::CacheRecipe& tuned, const kv::CacheGeometry& geometry,
                     int block_size) {
  const kv::Recipe& recipe = tuned.recipe;
  if (recipe.has_full_precision_window) {
    throw CoreError(
        invalid_argument("recipe is '{}'; an engine's pages have no full-precision window (add "
                         "immediate, or leave auto, sink and recent out)",
                         recipe.text));
  }
  check_range("head_dim", geometry.k_head_dim, 1, format::kMaxHeadDim);
  PageShape shape;
  shape.geometry = geometry;
  throw_if_error(kv::check_geometry(shape.geometry));
  throw_if_error(tune::check_geometry(tuned, shape.geometry, block_size));
  shape.plan = value_of(kv::plan_layers(shape.geometry, recipe, tuned.overrides)).front();
  for (const kv::HeadRunPlan& run : shape.plan.runs) {
    for (const format::FormatSpec& spec : {run.k.spec, run.v.spec, run.rotary}) {
      if (geometry.is_latent) throw_if_error(format::check_rows_alone(spec));
      throw_if_error(format::check_block_size(spec, block_size));
    }
  }
  const cache::GroupBytes bytes{
      block_size, {kv::packed_bytes(shape.geometry, shape.plan)}, recipe.order};
  shape.layout = value_of(cache::layout_block(bytes));
  const auto window_spec = value_of(format::make_spec(kWindowFormat));
  shape.window_layout = value_of(
      cache::layout_block({block_size, {kv::full_precision_bytes(shape.geometry, window_spec)}}));
  return shape;
}

kv::LayerCalibration page_tables(const tune::CacheRecipe& recipe, const PageShape& shape,
                                 int64_t max_tokens, kv::LayerCalibration given) {
  if (recipe.file) return tuned_tables(recipe, shape, max_tokens, given);
  const kv::HeadRunPlan& run = shape.plan.runs.front();  // a recipe has one
  check_takes_tensor_scales("k_tensor_scales", given.k.tensor_scales, run.k);
  check_takes_tensor_scales("v_tensor_scales", given.v.tensor_scales, run.v);
  return given;
}

}  // namespace kvx::python

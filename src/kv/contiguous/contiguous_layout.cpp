// Checks of a contiguous cache's configuration, and its sizes.
#include "kv/contiguous/contiguous_layout.hpp"

#include <algorithm>

#include "core/checked.hpp"
#include "kv/plan/layer_store.hpp"

namespace kvx::kv {
namespace {

Status check_count(std::string_view field, int value) {
  if (value >= 1) return {};
  return invalid_argument("{} is {}; expected 1 or more", field, value);
}

// What blocks can do and one array a sequence cannot.
Status check_recipe(const Recipe& recipe) {
  if (recipe.has_full_precision_window) {
    return invalid_argument("recipe {} has full-precision window; a contiguous cache has none",
                            recipe.text);
  }
  if (recipe.order != cache::BlockOrder::kHeads) {
    return invalid_argument("recipe {} has order={}; a contiguous cache has no blocks", recipe.text,
                            name_of(recipe.order));
  }
  for (const SideRecipe* side : {&recipe.k, &recipe.v}) {
    KVX_RETURN_IF_ERROR(format::check_rows_alone(side->spec));
    if (side->spec.scale_source != format::ScaleSource::kPageShared) continue;
    return invalid_argument("recipe {} shares scales by page; a contiguous cache has no pages",
                            recipe.text);
  }
  return {};
}

Status check_calibration(const ContiguousConfig& config) {
  const size_t count = config.calibration.size();
  if (count != 0 && count != static_cast<size_t>(config.geometry.num_layers)) {
    return invalid_argument("calibration has {} layers; expected none or num_layers = {}", count,
                            config.geometry.num_layers);
  }
  for (size_t layer = 0; layer < count; ++layer) {
    const LayerCalibration& tables = config.calibration[layer];
    if (tables.k_block_offset.empty() && tables.k_rope_mean.empty()) continue;
    return invalid_argument("layer {} {} is given; a contiguous cache has no blocks", layer,
                            tables.k_rope_mean.empty() ? "k_block_offset" : "k_rope_mean");
  }
  return {};
}

Status check_fields(const ContiguousConfig& config) {
  const CacheGeometry& geometry = config.geometry;
  KVX_RETURN_IF_ERROR(check_count("v_head_dim", geometry.v_head_dim));
  KVX_RETURN_IF_ERROR(check_count("batch_size", config.batch_size));
  KVX_RETURN_IF_ERROR(check_count("num_q_heads", config.num_q_heads));
  KVX_RETURN_IF_ERROR(check_count("max_seq_len", config.max_seq_len));
  KVX_RETURN_IF_ERROR(check_count("max_append", config.max_append));
  if (geometry.is_latent) {
    return unsupported("geometry is latent; a contiguous cache stores V beside K");
  }
  if (config.num_q_heads % geometry.num_kv_heads != 0) {
    return invalid_argument("num_q_heads is {}; expected a multiple of num_kv_heads = {}",
                            config.num_q_heads, geometry.num_kv_heads);
  }
  if (std::ranges::any_of(geometry.layer_sinks, [](int sinks) { return sinks > 0; })) {
    return unsupported("layer_sinks are given; a contiguous cache's ring keeps its window alone");
  }
  if (config.cuda) {
    constexpr int kMaxSequences = 65535;  // of attend on CUDA
    if (config.batch_size > kMaxSequences) {
      return invalid_argument("batch_size is {}; expected 1 to {} on a GPU", config.batch_size,
                              kMaxSequences);
    }
    if (config.cuda->max_step_tokens < config.batch_size) {
      return invalid_argument("cuda.max_step_tokens is {}; expected at least batch_size, {}",
                              config.cuda->max_step_tokens, config.batch_size);
    }
  }
  const bool has_ring = std::ranges::any_of(geometry.layer_windows, [](int w) { return w > 0; });
  if (has_ring && config.overflow == Overflow::kEvict) {
    return invalid_argument(
        "overflow is evict and a layer has a window; a window evicts by itself");
  }
  return {};
}

int64_t kept_tokens(const ContiguousConfig& config, int layer) {
  const int window = config.geometry.window_of(layer);
  const int64_t ring = int64_t{window} + config.max_append - 1;
  return window == 0 ? config.max_seq_len : std::min<int64_t>(ring, config.max_seq_len);
}

int64_t block_tokens(const ContiguousConfig& config, int layer) {
  constexpr int64_t kTiles = 64;  // of 4-bit rows, in bulk copies
  const int64_t tokens = kept_tokens(config, layer);
  return config.cuda ? round_up(tokens, kTiles) : tokens;
}

CheckedSize position_bytes(const ContiguousConfig& config, const LayerPlan& plan) {
  CheckedSize bytes = 0;
  for (const cache::HeadRunBytes& run : packed_bytes(config.geometry, plan).runs) {
    const int64_t row =
        run.k.row_code_bytes + run.k.row_scale_bytes + run.v.row_code_bytes + run.v.row_scale_bytes;
    bytes = bytes + CheckedSize(run.num_heads) * row;
  }
  return bytes * config.batch_size;
}

Result<int64_t> total_bytes(const ContiguousConfig& config, const std::vector<LayerPlan>& plans) {
  CheckedSize total = 0;
  for (int layer = 0; layer < config.geometry.num_layers; ++layer) {
    const int64_t tokens = kept_tokens(config, layer);
    if (tokens > kMaxContiguousTokens) {
      return out_of_range("layer {} is to hold {} tokens a sequence; at most {} can be", layer,
                          tokens, kMaxContiguousTokens);
    }
    total = total + position_bytes(config, plans[layer]) * block_tokens(config, layer);
  }
  if (const auto bytes = total.get()) return *bytes;
  return out_of_range(
      "num_layers {} x batch_size {} x num_kv_heads {} x max_seq_len {} passes "
      "2^63 bytes",
      config.geometry.num_layers, config.batch_size, config.geometry.num_kv_heads,
      config.max_seq_len);
}

}  // namespace

int ContiguousConfig::kept_tokens(int layer) const {
  return static_cast<int>(kv::kept_tokens(*this, layer));
}

int ContiguousConfig::capacity(int layer) const {
  return geometry.window_of(layer) > 0 ? block_tokens(layer) : kept_tokens(layer);
}

int ContiguousConfig::block_tokens(int layer) const {
  return static_cast<int>(kv::block_tokens(*this, layer));
}

Result<std::vector<LayerPlan>> plan_contiguous(const ContiguousConfig& config) {
  KVX_RETURN_IF_ERROR(check_geometry(config.geometry));
  KVX_RETURN_IF_ERROR(check_fields(config));
  KVX_RETURN_IF_ERROR(check_recipe(config.recipe));
  for (const RecipeOverride& change : config.overrides) {
    KVX_RETURN_IF_ERROR(check_recipe(change.recipe));
  }
  KVX_RETURN_IF_ERROR(check_calibration(config));
  KVX_ASSIGN_OR_RETURN(std::vector<LayerPlan> plans,
                       plan_layers(config.geometry, config.recipe, config.overrides));
  KVX_RETURN_IF_ERROR(total_bytes(config, plans));
  return plans;
}

int64_t bytes_per_position(const ContiguousConfig& config, const LayerPlan& plan) {
  return *position_bytes(config, plan).get();
}

Result<int64_t> contiguous_bytes(const ContiguousConfig& config) {
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans, plan_contiguous(config));
  return total_bytes(config, plans);
}

}  // namespace kvx::kv

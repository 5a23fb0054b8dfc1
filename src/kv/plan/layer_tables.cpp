// LayerTables::create checks a layer's calibration and stores given scales in their type.
#include "kv/plan/layer_tables.hpp"

#include <cmath>
#include <string>

#include "cache/pool/memory_copy.hpp"
#include "core/checked.hpp"
#include "format/feedback.hpp"

namespace kvx::kv {
namespace {

using format::FormatSpec;
using format::ScaleSource;

// A table's name in messages: "layer 3 k_mean".
std::string table_name(int layer, std::string_view side, std::string_view table) {
  return fmt::format("layer {} {}_{}", layer, side, table);
}

Status check_table(const std::string& name, const std::vector<float>& table, size_t expected,
                   bool must_be_positive) {
  if (table.size() != expected) {
    return invalid_argument("{} has {} numbers; expected {}", name, table.size(), expected);
  }
  for (size_t i = 0; i < table.size(); ++i) {
    if (!format::is_finite(table[i]) || (must_be_positive && !(table[i] > 0))) {
      return invalid_argument("{}[{}] is {}; expected a {}finite number", name, i, table[i],
                              must_be_positive ? "positive " : "");
    }
  }
  return {};
}

// What create() needs to know of one side, K or V.
struct SideInput {
  std::string_view name;  // "k" or "v"
  int layer;
  int num_kv_heads;
  int head_dim;
  const StaticScales* scales;
  const std::vector<float>* mean;
  const std::vector<float>* factor;
};

const SideRecipe& recipe_of(const HeadRunPlan& run, bool is_k) {
  return is_k ? run.k : run.v;
}

// group_scales of all heads in order; heads of other sources have none.
int64_t given_groups(const HeadRunPlan& run, bool is_k, int head_dim) {
  const FormatSpec& spec = recipe_of(run, is_k).spec;
  if (head_dim == 0 || !spec.has_scale() || spec.scale_source != ScaleSource::kGiven) return 0;
  return format::groups_per_row(spec, head_dim);
}

Status check_side(const SideInput& side, const LayerPlan& plan, bool is_k) {
  const size_t per_head = static_cast<size_t>(side.num_kv_heads) * side.head_dim;
  const auto name = [&](std::string_view table) {
    return table_name(side.layer, side.name, table);
  };
  if (!side.mean->empty()) {
    KVX_RETURN_IF_ERROR(check_table(name("mean"), *side.mean, per_head, false));
  }
  if (!side.factor->empty()) {
    KVX_RETURN_IF_ERROR(check_table(name("factor"), *side.factor, per_head, true));
  }
  const StaticScales& scales = *side.scales;
  if (!scales.tensor_scales.empty()) {
    KVX_RETURN_IF_ERROR(
        check_table(name("tensor_scales"), scales.tensor_scales, side.num_kv_heads, true));
    for (float scale : scales.tensor_scales) KVX_RETURN_IF_ERROR(format::check_tensor_scale(scale));
  }
  int64_t expected = 0;
  bool has_default = true;  // fp8 alone: a scale of 1 is what engines do without calibration
  for (const HeadRunPlan& run : plan.runs) {
    const int64_t groups = given_groups(run, is_k, side.head_dim);
    expected += groups * run.num_heads;
    const FormatSpec& spec = recipe_of(run, is_k).spec;
    if (groups > 0) has_default &= spec.facts->scale_sources.preferred() == ScaleSource::kGiven;
  }
  if (scales.group_scales.empty() && expected > 0 && !has_default) {
    return invalid_argument("{} is missing; source=given needs {} calibrated scales",
                            name("group_scales"), expected);
  }
  if (scales.group_scales.empty()) return {};
  return check_table(name("group_scales"), scales.group_scales, static_cast<size_t>(expected),
                     true);
}

// The run's given scales in their stored type, [heads of the run, groups].
Result<std::vector<uint8_t>> store_given(const SideInput& side, const FormatSpec& spec,
                                         const float* scales, int64_t count) {
  std::vector<uint8_t> stored(count * format::scale_bytes_per_group(spec));
  for (int64_t i = 0; i < count; ++i) {
    const float scale = scales == nullptr ? 1.0f : scales[i];
    const Result<format::StoredScale> converted = format::given_scale(spec.scale_type, scale);
    if (!converted.ok()) {
      return invalid_argument("{}[{}]: {}", table_name(side.layer, side.name, "group_scales"), i,
                              converted.error().message);
    }
    format::store_scale(spec.scale_type, converted.value(),
                        stored.data() + i * format::scale_bytes_per_group(spec));
  }
  return stored;
}

const float* data_or_null(const std::vector<float>& table) {
  return table.empty() ? nullptr : table.data();
}

Status check_offsets(const CacheGeometry& geometry, int layer, const std::vector<float>& offsets) {
  if (offsets.empty()) return {};
  const size_t per_block = static_cast<size_t>(geometry.num_kv_heads) * geometry.k_head_dim;
  const size_t whole_blocks = offsets.size() / per_block * per_block;
  return check_table(table_name(layer, "k", "block_offset"), offsets, whole_blocks, false);
}

// Weights as docs/numbers.md, section 8, bounds them.
Status check_feedback(const CacheGeometry& geometry, int layer, const std::vector<float>& table) {
  if (table.empty()) return {};
  const int64_t n = geometry.k_head_dim;
  const std::string name = table_name(layer, "k", "feedback");
  KVX_RETURN_IF_ERROR(
      check_table(name, table, static_cast<size_t>(geometry.num_kv_heads * n * n), false));
  for (size_t i = 0; i < table.size(); ++i) {
    const int64_t from = static_cast<int64_t>(i) / n % n;
    const int64_t to = static_cast<int64_t>(i) % n;
    if (to == from && table[i] < 0) {
      return invalid_argument("{}[{}] is {}; expected 0 or more: an error's weight", name, i,
                              table[i]);
    }
    if (to < from && table[i] != 0) {
      return invalid_argument("{}[{}] is {}; expected 0: number {} is rounded before number {}",
                              name, i, table[i], to, from);
    }
    if (std::abs(table[i]) > format::kMaxFeedback) {
      return invalid_argument("{}[{}] is {}; expected at most {}", name, i, table[i],
                              format::kMaxFeedback);
    }
  }
  return {};
}

// V's part of a table of K, [num_kv_heads, head_dim]: each head's first v_head_dim numbers.
std::vector<float> prefix_of_rows(const CacheGeometry& geometry, const std::vector<float>& table) {
  std::vector<float> prefixes;
  for (size_t row = 0; row < table.size(); row += static_cast<size_t>(geometry.k_head_dim)) {
    const auto first = table.begin() + static_cast<std::ptrdiff_t>(row);
    prefixes.insert(prefixes.end(), first, first + geometry.v_head_dim);
  }
  return prefixes;
}

// What is done to the rows of a latent cache is done to its V too.
Status share_tables(const CacheGeometry& geometry, int layer, LayerCalibration& tables) {
  const LayerCalibration& given = tables;
  for (const auto& [name, table] :
       {std::pair("mean", &given.v_mean), std::pair("factor", &given.v_factor),
        std::pair("group_scales", &given.v.group_scales),
        std::pair("tensor_scales", &given.v.tensor_scales)}) {
    if (table->empty()) continue;
    return invalid_argument("{} has {} numbers; expected none: a latent cache's V has K's tables",
                            table_name(layer, "v", name), table->size());
  }
  if (!given.k_block_offset.empty()) {
    return unsupported("{} is given; a latent cache's V would need it too: expected none",
                       table_name(layer, "k", "block_offset"));
  }
  tables.v_mean = prefix_of_rows(geometry, tables.k_mean);
  tables.v_factor = prefix_of_rows(geometry, tables.k_factor);
  return {};
}

// One table a run of the plan.
Result<std::vector<std::vector<uint8_t>>> store_given_runs(const SideInput& side,
                                                           const LayerPlan& plan, bool is_k) {
  std::vector<std::vector<uint8_t>> runs;
  const float* next = data_or_null(side.scales->group_scales);
  for (const HeadRunPlan& run : plan.runs) {
    const int64_t count = given_groups(run, is_k, side.head_dim) * run.num_heads;
    KVX_ASSIGN_OR_RETURN(std::vector<uint8_t> stored,
                         store_given(side, recipe_of(run, is_k).spec, next, count));
    runs.push_back(std::move(stored));
    if (next != nullptr) next += count;
  }
  return runs;
}

template <class T>
Result<const T*> copy_to(cache::Memory& device, std::vector<cache::Region>& regions, const T* table,
                         size_t count) {
  if (table == nullptr || count == 0) return table;
  const auto bytes = static_cast<int64_t>(count * sizeof(T));
  KVX_ASSIGN_OR_RETURN(cache::Region region, device.allocate(bytes, "a layer's calibration"));
  KVX_RETURN_IF_ERROR(
      cache::copy_device_memory(region.data(), reinterpret_cast<const uint8_t*>(table), bytes));
  const auto* copied = reinterpret_cast<const T*>(region.data());
  regions.push_back(std::move(region));
  return copied;
}

std::vector<const uint8_t*> places_of(const std::vector<std::vector<uint8_t>>& given) {
  std::vector<const uint8_t*> places;
  for (const std::vector<uint8_t>& run : given)
    places.push_back(run.empty() ? nullptr : run.data());
  return places;
}

}  // namespace

Result<LayerCalibration> with_block_offsets(const CacheGeometry& geometry, int layer,
                                            int block_size, int64_t num_tokens,
                                            LayerCalibration calibration) {
  if (calibration.k_rope_mean.empty()) return calibration;
  if (!calibration.k_block_offset.empty()) {
    return invalid_argument("layer {} k_block_offset and k_rope_mean are both given; expected one",
                            layer);
  }
  const int heads = geometry.num_kv_heads;
  const int head_dim = geometry.k_head_dim;
  KVX_RETURN_IF_ERROR(check_table(table_name(layer, "k", "rope_mean"), calibration.k_rope_mean,
                                  static_cast<size_t>(heads) * head_dim, false));
  KVX_RETURN_IF_ERROR(check_rope(table_name(layer, "k", "rope"), calibration.k_rope, head_dim));
  calibration.k_block_offset =
      rope_block_offsets(calibration.k_rope, calibration.k_rope_mean, heads, head_dim, block_size,
                         ceil_div<int64_t>(num_tokens, block_size));
  calibration.k_rope_mean.clear();
  return calibration;
}

Result<LayerTables> LayerTables::create(const CacheGeometry& of_rows, int layer,
                                        const LayerPlan& plan,
                                        const LayerCalibration& calibration) {
  CacheGeometry geometry = of_rows;
  if (plan.has_segments) geometry.k_head_dim = geometry.v_head_dim;
  if (!calibration.k_rope_mean.empty()) {
    return internal_error("{} has no block size yet; with_block_offsets() comes first",
                          table_name(layer, "k", "rope_mean"));
  }
  LayerTables result;
  result.calibration_ = calibration;
  const LayerCalibration& tables = result.calibration_;
  const SideInput k{"k",       layer,          geometry.num_kv_heads, geometry.k_head_dim,
                    &tables.k, &tables.k_mean, &tables.k_factor};
  const SideInput v{"v",       layer,          geometry.num_kv_heads, geometry.stored_v_head_dim(),
                    &tables.v, &tables.v_mean, &tables.v_factor};
  KVX_RETURN_IF_ERROR(check_side(k, plan, true));
  if (geometry.is_latent) {
    KVX_RETURN_IF_ERROR(share_tables(geometry, layer, result.calibration_));
  } else {
    KVX_RETURN_IF_ERROR(check_side(v, plan, false));
  }
  KVX_RETURN_IF_ERROR(check_offsets(geometry, layer, tables.k_block_offset));
  KVX_RETURN_IF_ERROR(check_feedback(geometry, layer, tables.k_feedback));

  const int64_t offset_numbers = int64_t{geometry.num_kv_heads} * geometry.k_head_dim;
  const int64_t num_offset_blocks =
      static_cast<int64_t>(tables.k_block_offset.size()) / offset_numbers;
  result.transform_.k = {data_or_null(tables.k_mean), data_or_null(tables.k_factor),
                         data_or_null(tables.k_block_offset), num_offset_blocks, plan.k_hadamard};
  result.transform_.v = {data_or_null(tables.v_mean), data_or_null(tables.v_factor), nullptr, 0,
                         plan.v_hadamard};
  KVX_ASSIGN_OR_RETURN(result.given_k_, store_given_runs(k, plan, true));
  KVX_ASSIGN_OR_RETURN(result.given_v_, store_given_runs(v, plan, false));
  result.k_scales_ = {data_or_null(tables.k.tensor_scales), places_of(result.given_k_)};
  result.v_scales_ = {data_or_null(tables.v.tensor_scales), places_of(result.given_v_)};
  result.k_feedback_ = data_or_null(tables.k_feedback);
  return result;
}

Status LayerTables::place_in(cache::Memory& device) {
  const auto place = [&](auto& table, size_t count) -> Status {
    KVX_ASSIGN_OR_RETURN(table, copy_to(device, on_device_, table, count));
    return {};
  };
  const LayerCalibration& tables = calibration_;
  KVX_RETURN_IF_ERROR(place(transform_.k.mean, tables.k_mean.size()));
  KVX_RETURN_IF_ERROR(place(transform_.v.mean, tables.v_mean.size()));
  KVX_RETURN_IF_ERROR(place(transform_.k.factor, tables.k_factor.size()));
  KVX_RETURN_IF_ERROR(place(transform_.v.factor, tables.v_factor.size()));
  KVX_RETURN_IF_ERROR(place(transform_.k.block_offset, tables.k_block_offset.size()));
  KVX_RETURN_IF_ERROR(place(k_feedback_, tables.k_feedback.size()));
  KVX_RETURN_IF_ERROR(place(k_scales_.tensor, tables.k.tensor_scales.size()));
  KVX_RETURN_IF_ERROR(place(v_scales_.tensor, tables.v.tensor_scales.size()));
  for (size_t run = 0; run < given_k_.size(); ++run) {
    KVX_RETURN_IF_ERROR(place(k_scales_.given[run], given_k_[run].size()));
    KVX_RETURN_IF_ERROR(place(v_scales_.given[run], given_v_[run].size()));
  }
  return {};
}

void LayerTables::attach_side(const ScalesPlace& scales, size_t run, int first_head,
                              ops::SideView& side) {
  if (side.head_dim == 0) return;
  if (side.spec.facts->has_tensor_scale && scales.tensor != nullptr) {
    side.tensor_scales = scales.tensor + first_head;
  }
  if (scales.given[run] == nullptr) return;
  const int64_t scale_bytes = format::scale_bytes_per_group(side.spec);
  const int64_t groups = format::groups_per_row(side.spec, side.head_dim);
  // append only reads given scales; an address has one pointer type for both.
  side.scales = {const_cast<uint8_t*>(scales.given[run]), 0, 0, groups * scale_bytes, scale_bytes};
}

void LayerTables::attach(size_t run, ops::HeadRun& view) const {
  attach_side(k_scales_, run, view.first_head, view.k);
  attach_side(v_scales_, run, view.first_head, view.v);
  if (k_feedback_ != nullptr && view.k.spec.has_scale()) {
    view.k.feedback = k_feedback_ + int64_t{view.first_head} * view.k.head_dim * view.k.head_dim;
  }
}

}  // namespace kvx::kv

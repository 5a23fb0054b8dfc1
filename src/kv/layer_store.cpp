// LayerStore::create checks a layer's calibration and joins layout, memory and tables into the
// verbs' views.
#include "kv/layer_store.hpp"

#include <string>

namespace kvx::kv {
namespace {

using format::FormatSpec;
using format::ScaleSource;

cache::SideBytes side_bytes(const FormatSpec& spec, int head_dim) {
  if (head_dim == 0) return {};
  const int scale_bytes = format::scale_bytes_per_row(spec, head_dim);
  cache::SideBytes bytes;
  bytes.row_code_bytes = format::code_bytes_per_row(spec, head_dim);
  if (spec.scale_source == ScaleSource::kComputed) bytes.row_scale_bytes = scale_bytes;
  if (spec.scale_source == ScaleSource::kPageShared) bytes.page_scale_bytes = scale_bytes;
  return bytes;
}

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

ops::SideView side_view(const FormatSpec& spec, int head_dim, const LayerMemory& memory,
                        const cache::RunPlace& run, const cache::SidePlace& place) {
  ops::SideView view;
  view.spec = spec;
  view.head_dim = place.is_stored ? head_dim : 0;
  if (!place.is_stored) return view;
  const int64_t block_bytes = memory.layout->block_bytes;
  view.codes = {memory.base + place.codes_offset, block_bytes, place.code_token_stride,
                run.head_stride};
  if (place.has_scales) {
    view.scales = {memory.base + place.scales_offset, block_bytes, place.scale_token_stride,
                   run.head_stride, format::scale_bytes_per_group(spec)};
  }
  return view;
}

ops::LayerView layer_view(const CacheGeometry& geometry, const LayerMemory& memory,
                          std::span<const ops::HeadRun> runs) {
  return {memory.num_blocks, static_cast<int>(memory.layout->block_size), geometry.num_kv_heads,
          runs};
}

const float* data_or_null(const std::vector<float>& table) {
  return table.empty() ? nullptr : table.data();
}

}  // namespace

cache::LayerBytes packed_bytes(const CacheGeometry& geometry, const LayerPlan& plan) {
  cache::LayerBytes layer;
  for (const HeadRunPlan& run : plan.runs) {
    layer.runs.push_back({run.num_heads, side_bytes(run.k.spec, geometry.k_head_dim),
                          side_bytes(run.v.spec, geometry.v_head_dim)});
  }
  return layer;
}

cache::LayerBytes wide_bytes(const CacheGeometry& geometry, const FormatSpec& wide) {
  return {{{geometry.num_kv_heads, side_bytes(wide, geometry.k_head_dim),
            side_bytes(wide, geometry.v_head_dim)}}};
}

Result<std::unique_ptr<LayerStore>> LayerStore::create(
    const CacheGeometry& geometry, int layer, const LayerPlan& plan, const FormatSpec& wide_spec,
    const LayerCalibration& calibration, const LayerMemory& packed, const LayerMemory& wide) {
  std::unique_ptr<LayerStore> store(new LayerStore);
  store->calibration_ = calibration;
  const LayerCalibration& tables = store->calibration_;
  const SideInput k{"k",       layer,          geometry.num_kv_heads, geometry.k_head_dim,
                    &tables.k, &tables.k_mean, &tables.k_factor};
  const SideInput v{"v",       layer,          geometry.num_kv_heads, geometry.v_head_dim,
                    &tables.v, &tables.v_mean, &tables.v_factor};
  KVX_RETURN_IF_ERROR(check_side(k, plan, true));
  KVX_RETURN_IF_ERROR(check_side(v, plan, false));
  const size_t offsets_per_block = static_cast<size_t>(k.num_kv_heads) * k.head_dim;
  const size_t num_offset_blocks = tables.k_block_offset.size() / offsets_per_block;
  if (!tables.k_block_offset.empty()) {
    KVX_RETURN_IF_ERROR(check_table(table_name(layer, "k", "block_offset"), tables.k_block_offset,
                                    num_offset_blocks * offsets_per_block, false));
  }

  store->transform_.k = {data_or_null(tables.k_mean), data_or_null(tables.k_factor),
                         data_or_null(tables.k_block_offset),
                         static_cast<int64_t>(num_offset_blocks), plan.k_hadamard};
  store->transform_.v = {data_or_null(tables.v_mean), data_or_null(tables.v_factor), nullptr, 0,
                         plan.v_hadamard};

  const cache::LayerPlace& place = packed.layout->layers[packed.layer_in_group];
  int64_t scales_before[2] = {0, 0};  // numbers of K's and V's group_scales that earlier runs took
  for (size_t r = 0; r < plan.runs.size(); ++r) {
    const HeadRunPlan& run = plan.runs[r];
    ops::HeadRun view{run.first_head, run.num_heads,
                      side_view(run.k.spec, k.head_dim, packed, place.runs[r], place.runs[r].k),
                      side_view(run.v.spec, v.head_dim, packed, place.runs[r], place.runs[r].v)};
    for (const bool is_k : {true, false}) {
      const SideInput& side = is_k ? k : v;
      ops::SideView& target = is_k ? view.k : view.v;
      if (target.spec.facts->has_tensor_scale && !side.scales->tensor_scales.empty()) {
        target.tensor_scales = side.scales->tensor_scales.data() + run.first_head;
      }
      const int64_t groups = given_groups(run, is_k, side.head_dim);
      if (groups == 0) continue;
      const float* given = data_or_null(side.scales->group_scales);
      if (given != nullptr) given += scales_before[is_k];
      scales_before[is_k] += groups * run.num_heads;
      KVX_ASSIGN_OR_RETURN(std::vector<uint8_t> stored,
                           store_given(side, target.spec, given, groups * run.num_heads));
      const int64_t scale_bytes = format::scale_bytes_per_group(target.spec);
      store->given_scales_.push_back(std::move(stored));
      target.scales = {store->given_scales_.back().data(), 0, 0, groups * scale_bytes, scale_bytes};
    }
    store->packed_runs_.push_back(view);
  }
  store->packed_ = layer_view(geometry, packed, store->packed_runs_);

  if (wide.layout != nullptr) {
    const cache::RunPlace& run = wide.layout->layers[wide.layer_in_group].runs.front();
    store->wide_runs_.push_back({0, geometry.num_kv_heads,
                                 side_view(wide_spec, k.head_dim, wide, run, run.k),
                                 side_view(wide_spec, v.head_dim, wide, run, run.v)});
    store->wide_ = layer_view(geometry, wide, store->wide_runs_);
  }
  return store;
}

}  // namespace kvx::kv

// Reads a layer that a v1 cache descriptor describes, with the scales of F8.
#include "api/checks/cache_layer.hpp"

#include <cmath>
#include <string>

#include "api/checks/check_cache.hpp"
#include "api/checks/check_index.hpp"
#include "api/guard.hpp"
#include "format/spec.hpp"
#include "ops/cuda/convert/widen_scales.hpp"

namespace kvx::boundary {
namespace {

// The format of a v1 tensor's elements. The scales of 8-bit floats are the caller's.
Result<format::FormatSpec> format_of_element(Element element) {
  using format::FormatId;
  format::SpecOptions given;
  given.scale_source = format::ScaleSource::kGiven;
  switch (element) {
    case Element::kE4M3:
      return format::make_spec(FormatId::kFp8E4M3, given);
    case Element::kE5M2:
      return format::make_spec(FormatId::kFp8E5M2, given);
    case Element::kF16:
      return format::make_spec(FormatId::kF16);
    case Element::kBF16:
      return format::make_spec(FormatId::kBF16);
    case Element::kF32:
      break;
  }
  return format::make_spec(FormatId::kF32);
}

// The verbs read F32: other scales become that, in `converted`. Scales that blocks or heads share
// stay shared.
void convert_scales(const ScaleView& scales, const ops::ScaleCounts& counts,
                    std::vector<float>& converted) {
  converted.clear();
  for (int64_t block = 0; block < counts.blocks; ++block) {
    for (int64_t head = 0; head < counts.heads; ++head) {
      converted.push_back(scales.at(block, head));
    }
  }
}

// Where converted scales, [counts.blocks, counts.heads], lie.
ops::ScaleAddress converted_address(const ScaleView& scales, const ops::ScaleCounts& counts,
                                    float* converted) {
  constexpr int64_t kBytes = sizeof(float);
  return {reinterpret_cast<uint8_t*>(converted),
          scales.block_stride == 0 ? 0 : counts.heads * kBytes, 0,
          scales.head_stride == 0 ? 0 : kBytes, 0};
}

// The bytes from the first scale to the end of the last.
MemoryRange range_of_scales(const ScaleView& scales, const CacheView& cache) {
  const int64_t last =
      (cache.num_blocks - 1) * scales.block_stride + (cache.num_heads - 1) * scales.head_stride;
  return {scales.data, last + bytes_of(scales.dtype)};
}

// Sets the scales of an F8 side. desc: the layer's k_scale or v_scale; side: K 0, V 1.
Status read_cache_scales(const kvx_scale_desc_t* desc, const CacheView& cache,
                         const std::string& name, size_t side, ops::SideView& view,
                         LayerOfCaller& result) {
  if (!view.spec.has_scale()) {
    if (desc == nullptr) return {};
    return invalid_argument("{} is set; its side of the cache is {}, which has no scales", name,
                            view.spec.facts->name);
  }
  if (desc == nullptr || desc->data == nullptr) {
    return invalid_argument(
        "{}{} is null; its side of the cache is F8: pass its scales, as in kvx_write_desc_t", name,
        desc == nullptr ? "" : ".data");
  }
  KVX_RETURN_IF_ERROR(check_scale_size(*desc, name));
  DeferredErrors deferred_errors;
  KVX_ASSIGN_OR_RETURN(const ScaleView scales,
                       check_scale(*desc, nullptr, cache, name, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  result.memory.push_back(range_of_scales(scales, cache));
  if (scales.dtype == DType::kF32) {
    // Verbs only read given scales.
    view.scales = {const_cast<uint8_t*>(scales.data), scales.block_stride, 0, scales.head_stride,
                   0};
    return {};
  }
  const ops::ScaleCounts counts = ops::scale_counts(scales, cache.num_blocks, cache.num_heads);
  if (result.is_on_device()) {  // the call converts them, where it has a stream
    result.narrow_scales[side] = scales;
    view.scales = converted_address(scales, counts, nullptr);
    return {};
  }
  convert_scales(scales, counts, result.cache_scales[side]);
  view.scales = converted_address(scales, counts, result.cache_scales[side].data());
  return {};
}

Result<ops::SideView> view_of_cache_side(const CacheSide& side, int head_dim, const char* name) {
  const RowShape& row = side.row;
  const bool has_gaps = row.element_stride != bytes_of(side.element);
  if (row.num_runs != 1 && has_gaps) {
    return unsupported(
        "{} has rows in fragments with gaps between their elements; expected fragments without "
        "gaps",
        name);
  }
  ops::SideView view;
  KVX_ASSIGN_OR_RETURN(view.spec, format_of_element(side.element));
  KVX_RETURN_IF_ERROR(format::check_head_dim(view.spec, head_dim));
  view.head_dim = head_dim;
  view.codes = {side.data, side.block_stride, side.token_stride, side.head_stride};
  if (row.num_runs != 1 || has_gaps) {
    const int64_t elements = has_gaps ? 1 : row.run_length;
    view.codes.fragment_bytes = static_cast<int>(elements * bytes_of(side.element));
    view.codes.fragment_stride = has_gaps ? row.element_stride : row.run_stride;
  }
  return view;
}

}  // namespace

Status read_cache_layer(const kvx_layer_t& layer, const std::string& name, LayerOfCaller& result) {
  if (layer.num_runs != 0 || layer.num_blocks != 0 || layer.block_size != 0 ||
      layer.num_kv_heads != 0) {
    return invalid_argument("{} has a cache and runs or counts; expected one of the two", name);
  }
  DeferredErrors deferred_errors;
  KVX_ASSIGN_OR_RETURN(const CacheView cache, check_cache(layer.cache, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  if (cache.k.memory != cache.v.memory) {
    return unsupported("{}.cache has K and V in memory of different kinds; expected one", name);
  }
  result.kind = cache.k.memory;
  if (cache.num_heads > kMostHeads || cache.head_dim > format::kMaxHeadDim ||
      cache.block_size > INT32_MAX / 2 || cache.num_blocks > INT32_MAX) {
    return unsupported(
        "{}.cache has {} heads of {}, {} blocks of {}; expected at most {} heads of "
        "{} and 31-bit blocks",
        name, cache.num_heads, cache.head_dim, cache.num_blocks, cache.block_size, kMostHeads,
        format::kMaxHeadDim);
  }
  ops::HeadRun run = {
      .first_head = 0, .num_heads = static_cast<int>(cache.num_heads), .k = {}, .v = {}};
  const int head_dim = static_cast<int>(cache.head_dim);
  KVX_ASSIGN_OR_RETURN(run.k, view_of_cache_side(cache.k, head_dim, "cache.k"));
  KVX_ASSIGN_OR_RETURN(run.v, view_of_cache_side(cache.v, head_dim, "cache.v"));
  result.memory.assign({{cache.k.data, cache.k.total_bytes}, {cache.v.data, cache.v.total_bytes}});
  KVX_RETURN_IF_ERROR(read_cache_scales(layer.k_scale, cache, name + ".k_scale", 0, run.k, result));
  KVX_RETURN_IF_ERROR(read_cache_scales(layer.v_scale, cache, name + ".v_scale", 1, run.v, result));
  result.runs.assign(1, run);
  result.rest_runs.clear();
  for (const ops::SideView* side : {&run.k, &run.v}) {
    if (side->spec.has_scale() && !result.is_on_device()) {
      KVX_RETURN_IF_ERROR(check_given_scales(*side, run.num_heads,
                                             name + (side == &run.k ? ".k_scale" : ".v_scale")));
    }
  }
  result.view = {cache.num_blocks, static_cast<int>(cache.block_size), run.num_heads, result.runs};
  return {};
}

Status check_given_scales(const ops::SideView& side, int num_heads, const std::string& name) {
  if (side.spec.scale_source != format::ScaleSource::kGiven || side.spec.is_affine()) return {};
  if (side.scales.block_stride != 0 || side.scales.token_stride != 0) return {};
  const int groups = format::groups_per_row(side.spec, side.head_dim);
  for (int head = 0; head < num_heads; ++head) {
    for (int group = 0; group < groups; ++group) {
      const uint8_t* source = side.scales.at(0, 0, head) + group * side.scales.group_stride;
      const float step = format::decode_scale(side.spec.scale_type,
                                              format::load_scale(side.spec.scale_type, source));
      if (step > 0 && std::isfinite(step)) continue;
      return invalid_argument("{} of head {}, group {} is {}; expected a positive finite number",
                              name, head, group, step);
    }
  }
  return {};
}

}  // namespace kvx::boundary

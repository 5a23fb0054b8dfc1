// The list of a layer's tables.
#include "tune/table_list.hpp"

namespace kvx::tune {
namespace {

using kv::CacheGeometry;
using kv::LayerCalibration;
using Shape = std::vector<int64_t>;

Shape k_row(const CacheGeometry& g, int64_t) {
  return {g.num_kv_heads, g.k_head_dim};
}
Shape v_row(const CacheGeometry& g, int64_t) {
  return {g.num_kv_heads, g.v_head_dim};
}
Shape k_square(const CacheGeometry& g, int64_t) {
  return {g.num_kv_heads, g.k_head_dim, g.k_head_dim};
}
Shape k_blocks(const CacheGeometry& g, int64_t count) {
  return {count / (int64_t{g.num_kv_heads} * g.k_head_dim), g.num_kv_heads, g.k_head_dim};
}
Shape heads(const CacheGeometry& g, int64_t) {
  return {g.num_kv_heads};
}
// Heads of several formats have different numbers of groups.
Shape flat(const CacheGeometry&, int64_t count) {
  return {count};
}

#define KVX_TABLE(name, field, shape)                                                       \
  {                                                                                         \
    name, [](LayerCalibration& layer) -> std::vector<float>& { return layer.field; }, shape \
  }

constexpr TableField kFields[] = {
    KVX_TABLE("k.block_offset", k_block_offset, k_blocks),
    KVX_TABLE("k.factor", k_factor, k_row),
    KVX_TABLE("k.feedback", k_feedback, k_square),
    KVX_TABLE("k.group_scales", k.group_scales, flat),
    KVX_TABLE("k.mean", k_mean, k_row),
    KVX_TABLE("k.rope_mean", k_rope_mean, k_row),
    KVX_TABLE("k.tensor_scales", k.tensor_scales, heads),
    KVX_TABLE("v.factor", v_factor, v_row),
    KVX_TABLE("v.group_scales", v.group_scales, flat),
    KVX_TABLE("v.mean", v_mean, v_row),
    KVX_TABLE("v.tensor_scales", v.tensor_scales, heads),
};

#undef KVX_TABLE

}  // namespace

std::span<const TableField> table_fields() {
  return kFields;
}

}  // namespace kvx::tune

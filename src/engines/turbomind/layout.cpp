// TurboMind's block sizes and addresses, and views of its layers for the verbs.
#include "engines/turbomind/layout.hpp"

#include <limits>

#include "core/checked.hpp"

namespace kvx::engines::turbomind {
namespace {

constexpr int kSides = 2;   // K and V
constexpr int kParams = 2;  // scale and zero

Status check_count(std::string_view field, int64_t value) {
  if (value >= 1) return {};
  return invalid_argument("{} is {}; expected 1 or more", field, value);
}

Status check_geometry(const Geometry& geometry, const format::FormatSpec& spec) {
  KVX_RETURN_IF_ERROR(check_count("num_layers", geometry.num_layers));
  KVX_RETURN_IF_ERROR(check_count("num_kv_heads", geometry.num_kv_heads));
  KVX_RETURN_IF_ERROR(check_count("block_len", geometry.block_len));
  return format::check_head_dim(spec, geometry.head_dim);
}

// Where a row's K scales begin in a scale block; V's follow them. All other functions use this one.
constexpr int64_t scale_row_offset(int layer, int head, int head_num, int block_len, int head_dim,
                                   int64_t token) {
  const int64_t row = (int64_t{layer} * head_num + head) * block_len + token;
  return row * kSides * (head_dim / kFp4Group);
}

int64_t head_side(int head, KvSide side) {
  return int64_t{head} * kSides + (side == KvSide::kValue ? 1 : 0);
}

Status check_pools(const PoolLayout& layout, const Pools& pools) {
  KVX_RETURN_IF_ERROR(check_count("num_blocks", pools.num_blocks));
  if (!pools.data) return invalid_argument("the data pool is null; expected num_blocks blocks");
  if (pools.data_stride < (pools.is_scattered ? 1 : layout.block_bytes)) {
    return invalid_argument("data_stride is {}; a block takes {} bytes", pools.data_stride,
                            layout.block_bytes);
  }
  if (!(CheckedSize(pools.num_blocks) * pools.data_stride).get()) {
    return out_of_range("num_blocks is {}; at {} bytes a block the data pool passes 2^63 bytes",
                        pools.num_blocks, pools.data_stride);
  }
  if (layout.scale_block_bytes == 0) return {};
  if (!pools.scales) {
    return invalid_argument("the scale pool is null; {} keeps its scales there",
                            name_of(layout.geometry.mode));
  }
  if (pools.scale_stride < (pools.is_scattered ? 1 : layout.scale_block_bytes)) {
    return invalid_argument("scale_stride is {}; a scale block takes {} bytes", pools.scale_stride,
                            layout.scale_block_bytes);
  }
  if (!(CheckedSize(pools.num_blocks) * pools.scale_stride).get()) {
    return out_of_range("num_blocks is {}; at {} bytes a block the scale pool passes 2^63 bytes",
                        pools.num_blocks, pools.scale_stride);
  }
  return {};
}

Status check_global_scales(const Geometry& geometry, std::string_view field, const float* scales,
                           int layer) {
  if (!scales) return {};
  if (geometry.mode != KvCacheMode::kFp4Nv) {
    return invalid_argument("{} is given; only fp4 nv has global scales, and the mode is {}", field,
                            name_of(geometry.mode));
  }
  for (int head = 0; head < geometry.num_kv_heads; ++head) {
    const float scale = scales[int64_t{layer} * geometry.num_kv_heads + head];
    const Status status = format::check_tensor_scale(scale);
    if (!status.ok()) {
      return invalid_argument("{}[{}][{}]: {}", field, layer, head, status.error().message);
    }
  }
  return {};
}

// K or V of a layer: codes in the data pool, scales behind them or in the scale pool.
ops::SideView side_view(const PoolLayout& layout, const Pools& pools, int layer, KvSide side,
                        const float* global_scales) {
  const Geometry& geometry = layout.geometry;
  ops::SideView view;
  view.spec = layout.spec;
  view.head_dim = geometry.head_dim;
  view.codes = {.base = pools.data + layout.data_offset(layer, 0, side, 0),
                .block_stride = pools.data_stride,
                .token_stride = layout.token_data_bytes,
                .head_stride = kSides * layout.head_data_bytes};
  if (layout.token_param_bytes > 0) {
    view.scales = {.base = pools.data + layout.param_offset(layer, 0, side, 0),
                   .block_stride = pools.data_stride,
                   .token_stride = layout.token_param_bytes,
                   .head_stride = kSides * layout.head_param_bytes,
                   .group_stride = layout.token_param_bytes};
  }
  if (layout.token_scale_bytes > 0) {
    const int64_t token_stride = kSides * layout.token_scale_bytes;
    view.scales = {.base = pools.scales + layout.scale_offset(layer, 0, side, 0),
                   .block_stride = pools.scale_stride,
                   .token_stride = token_stride,
                   .head_stride = geometry.block_len * token_stride,
                   .group_stride = 1};
  }
  if (global_scales) view.tensor_scales = global_scales + int64_t{layer} * geometry.num_kv_heads;
  return view;
}

}  // namespace

int64_t PoolLayout::data_offset(int layer, int head, KvSide side, int token) const {
  return layer * layer_bytes + head_side(head, side) * head_data_bytes + token * token_data_bytes;
}

int64_t PoolLayout::param_offset(int layer, int head, KvSide side, int token) const {
  const int64_t all_data = int64_t{geometry.num_kv_heads} * kSides * head_data_bytes;
  return layer * layer_bytes + all_data + head_side(head, side) * head_param_bytes +
         token * token_param_bytes;
}

int64_t PoolLayout::scale_offset(int layer, int head, KvSide side, int token) const {
  return scale_row_offset(layer, head, geometry.num_kv_heads, geometry.block_len, geometry.head_dim,
                          token) +
         (side == KvSide::kValue ? token_scale_bytes : 0);
}

Result<PoolLayout> make_pool_layout(const Geometry& geometry) {
  PoolLayout layout;
  layout.geometry = geometry;
  KVX_ASSIGN_OR_RETURN(layout.spec, format_of(geometry.mode, geometry.dtype));
  KVX_RETURN_IF_ERROR(check_geometry(geometry, layout.spec));

  const int q = q_bits(geometry.mode, geometry.dtype);
  const int t = t_bits(geometry.mode, geometry.dtype);
  layout.token_data_bytes = int64_t{q} * geometry.head_dim / 8;
  layout.token_param_bytes = t * kParams / 8;
  layout.token_scale_bytes = is_fp4(geometry.mode) ? geometry.head_dim / kFp4Group : 0;

  const CheckedSize rows =
      CheckedSize(geometry.num_layers) * geometry.num_kv_heads * kSides * geometry.block_len;
  const CheckedSize block = rows * (layout.token_data_bytes + layout.token_param_bytes);
  const CheckedSize scale_block = rows * layout.token_scale_bytes;
  if (!(block + scale_block).get()) {
    return out_of_range(
        "num_layers {} x num_kv_heads {} x block_len {} x head_dim {} passes 2^63 bytes a block",
        geometry.num_layers, geometry.num_kv_heads, geometry.block_len, geometry.head_dim);
  }
  // Each is at most block_bytes.
  layout.head_data_bytes = geometry.block_len * layout.token_data_bytes;
  layout.head_param_bytes = geometry.block_len * layout.token_param_bytes;
  layout.block_bytes = *block.get();
  layout.layer_bytes = layout.block_bytes / geometry.num_layers;
  layout.scale_block_bytes = *scale_block.get();
  return layout;
}

Result<int64_t> get_cache_block_size(DType dtype, KvCacheMode kvtype, int layer_num, int head_num,
                                     int head_dim, int block_seq_len) {
  KVX_ASSIGN_OR_RETURN(
      const PoolLayout layout,
      make_pool_layout({kvtype, dtype, layer_num, head_num, head_dim, block_seq_len}));
  return layout.block_bytes;
}

Result<int64_t> get_cache_scale_block_size(DType dtype, KvCacheMode kvtype, int layer_num,
                                           int head_num, int head_dim, int block_seq_len) {
  KVX_ASSIGN_OR_RETURN(
      const PoolLayout layout,
      make_pool_layout({kvtype, dtype, layer_num, head_num, head_dim, block_seq_len}));
  return layout.scale_block_bytes;
}

int64_t blocks_within_budget(const PoolLayout& layout, int64_t budget_bytes) {
  return budget_bytes / layout.bytes_per_block();
}

uint8_t* get_fp4_mx_scale_base(uint8_t* const* scale_blocks_seq, int layer, int head, int head_num,
                               int block_len, int head_dim, int64_t local_ti) {
  return scale_blocks_seq[local_ti / block_len] +
         scale_row_offset(layer, head, head_num, block_len, head_dim, local_ti % block_len);
}

uint8_t* get_fp4_nv_scale_base(uint8_t* const* scale_blocks_seq, int layer, int head, int head_num,
                               int block_len, int head_dim, int64_t local_ti) {
  return get_fp4_mx_scale_base(scale_blocks_seq, layer, head, head_num, block_len, head_dim,
                               local_ti);
}

Status block_ids_of(const Pools& pools, std::span<const uint8_t* const> block_ptrs,
                    std::span<int32_t> ids) {
  for (size_t i = 0; i < block_ptrs.size(); ++i) {
    // Compared as integers, because the pointer may belong to other memory.
    const uint64_t offset =
        reinterpret_cast<uintptr_t>(block_ptrs[i]) - reinterpret_cast<uintptr_t>(pools.data);
    const uint64_t stride = static_cast<uint64_t>(pools.data_stride);
    const uint64_t id = offset / stride;
    if (offset % stride != 0 || id >= static_cast<uint64_t>(pools.num_blocks) ||
        id > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return out_of_range(
          "block_ptrs[{}] begins no block of the data pool, which has {} of {} bytes", i,
          pools.num_blocks, pools.data_stride);
    }
    ids[i] = static_cast<int32_t>(id);
  }
  return {};
}

Result<LayerBlocks> layer_blocks(const PoolLayout& layout, const Pools& pools, int layer,
                                 const GlobalScales& global_scales) {
  const Geometry& geometry = layout.geometry;
  if (layer < 0 || layer >= geometry.num_layers) {
    return invalid_argument("layer is {}; expected 0 to {}", layer, geometry.num_layers - 1);
  }
  KVX_RETURN_IF_ERROR(check_pools(layout, pools));
  KVX_RETURN_IF_ERROR(check_global_scales(geometry, "global_k_scales", global_scales.k, layer));
  KVX_RETURN_IF_ERROR(check_global_scales(geometry, "global_v_scales", global_scales.v, layer));

  LayerBlocks blocks;
  blocks.num_blocks_ = pools.num_blocks;
  blocks.block_len_ = geometry.block_len;
  blocks.run_ = {.first_head = 0,
                 .num_heads = geometry.num_kv_heads,
                 .k = side_view(layout, pools, layer, KvSide::kKey, global_scales.k),
                 .v = side_view(layout, pools, layer, KvSide::kValue, global_scales.v)};
  return blocks;
}

}  // namespace kvx::engines::turbomind

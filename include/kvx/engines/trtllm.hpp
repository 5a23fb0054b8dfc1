// Layers of TensorRT-LLM's block pools (1.3): [blocks, layers, 2, heads * tokens * head_dim].
//
// A block of a KV_OFFSETS table is one K or V block of one layer: the engine's offsets are taken as
// they are, and a layer has the pool's address of its first block.
#pragma once

#include <algorithm>

#include "kvx/engines/nvfp4.hpp"
#include "kvx/engines/tensor.hpp"

namespace kvx::api::trtllm {

struct Pool {
  engines::Tensor data;  // [blocks, layers, 2, heads * tokens_per_block * head_dim], dense
  int64_t num_kv_heads = 0;
  int64_t tokens_per_block = 0;  // a power of two
  int64_t head_dim = 0;
  const float* kv_scale = nullptr;  // of F8: kv_scale_quant_orig
};

namespace detail {

// Bytes of a K or V block of a dense pool whose rows have so many elements.
inline Result<int64_t> block_bytes(const engines::Tensor& pool, const std::string& name,
                                   const Pool& sizes, int64_t row_elements,
                                   int64_t layer_idx_in_pool) {
  auto strides = engines::detail::byte_strides(pool, 4, name);
  if (!strides) return strides.failure();
  const int64_t tokens = sizes.tokens_per_block;
  const int64_t num_elements = sizes.num_kv_heads * tokens * row_elements;
  const std::vector<int64_t>& shape = pool.shape;
  if (num_elements < 1 || shape[2] != 2 || shape[3] != num_elements) {
    return engines::detail::bad(name +
                                " has another shape than [blocks, layers, 2, num_kv_heads * "
                                "tokens_per_block * " +
                                std::to_string(row_elements) + "]");
  }
  if ((tokens & (tokens - 1)) != 0) {
    return engines::detail::bad("tokens_per_block is " + std::to_string(tokens) +
                                "; expected a power of two");
  }
  const int64_t item = engines::detail::bytes_of(pool.dtype);
  const int64_t bytes = num_elements * item;
  const bool is_dense = (*strides)[3] == item && (*strides)[2] == bytes &&
                        (*strides)[1] == 2 * bytes && (*strides)[0] == shape[1] * 2 * bytes;
  if (!is_dense) return engines::detail::bad(name + " has gaps; expected a dense tensor");
  if (layer_idx_in_pool < 0 || layer_idx_in_pool >= shape[1]) {
    return engines::detail::bad("layer_idx_in_pool is " + std::to_string(layer_idx_in_pool) +
                                "; the pool has " + std::to_string(shape[1]) + " layers");
  }
  return bytes;
}

inline LayerShape shape_of(const Pool& pool) {
  const int64_t num_indices = (pool.data.shape[0] - 1) * pool.data.shape[1] * 2 + 1;
  return engines::detail::layer_shape(num_indices, pool.tokens_per_block, pool.num_kv_heads);
}

}  // namespace detail

inline Result<Layer> layer(const Pool& pool, int64_t layer_idx_in_pool) {
  auto block = detail::block_bytes(pool.data, "pool", pool, pool.head_dim, layer_idx_in_pool);
  if (!block) return block.failure();
  const int64_t row = pool.head_dim * engines::detail::bytes_of(pool.data.dtype);
  const auto side = [&](int64_t is_v) {
    return engines::detail::float_side(pool.data, "pool", pool.head_dim,
                                       (2 * layer_idx_in_pool + is_v) * *block,
                                       {*block, row, pool.tokens_per_block * row}, pool.kv_scale);
  };
  auto k = side(0);
  if (!k) return k.failure();
  auto v = side(1);
  if (!v) return v.failure();
  return Layer(detail::shape_of(pool), *k, *v);
}

// An NVFP4 pool and its block-scale pool.
struct Nvfp4Pool {
  // data: U8 [blocks, layers, 2, heads * tokens_per_block * head_dim / 2], two elements a byte;
  // kv_scale is not used
  Pool codes;
  engines::Tensor scales;  // U8 [blocks, layers, 2, heads * tokens_per_block * head_dim / 16]
  const float* k_scales = nullptr;  // tensor scales [heads], where the pool lies; null: 1
  const float* v_scales = nullptr;
};

namespace detail {

// K's scales of the layer in blocks of the table's indices; V's lie one block behind.
inline Result<engines::nvfp4::Scales> nvfp4_scales(const Nvfp4Pool& pool, int64_t layer_idx) {
  auto head_dim =
      engines::nvfp4::detail::checked_head_dim(pool.scales, "scale_pool", pool.codes.head_dim);
  if (!head_dim) return head_dim.failure();
  const int64_t groups = *head_dim / engines::nvfp4::kGroup, tokens = pool.codes.tokens_per_block;
  auto bytes = block_bytes(pool.scales, "scale_pool", pool.codes, groups, layer_idx);
  if (!bytes) return bytes.failure();
  auto* data = static_cast<uint8_t*>(pool.scales.data) + 2 * layer_idx * *bytes;
  return engines::nvfp4::Scales{
      data,  pool.scales.shape[0], pool.codes.num_kv_heads, tokens, groups, *bytes, tokens * groups,
      groups};
}

}  // namespace detail

// The layer reads and writes linear scales of V; engines::nvfp4 turns what trtllm-gen reads.
inline Result<Layer> nvfp4_layer(const Nvfp4Pool& pool, int64_t layer_idx_in_pool) {
  const Pool& codes = pool.codes;
  auto head_dim = engines::nvfp4::detail::checked_head_dim(codes.data, "pool", codes.head_dim);
  if (!head_dim) return head_dim.failure();
  const int64_t row = *head_dim / 2;
  auto block = detail::block_bytes(codes.data, "pool", codes, row, layer_idx_in_pool);
  if (!block) return block.failure();
  auto k = detail::nvfp4_scales(pool, layer_idx_in_pool);
  if (!k) return k.failure();
  if (!std::equal(codes.data.shape.begin(), codes.data.shape.begin() + 2,
                  pool.scales.shape.begin())) {
    return engines::detail::bad("scale_pool has other blocks or layers than pool");
  }
  engines::nvfp4::Scales v = *k;
  v.data += k->block_stride;
  auto* first = static_cast<uint8_t*>(codes.data.data) + 2 * layer_idx_in_pool * *block;
  const std::array<int64_t, 3> strides = {*block, row, codes.tokens_per_block * row};
  return Layer(detail::shape_of(codes),
               engines::nvfp4::detail::side(first, strides, *k, pool.k_scales),
               engines::nvfp4::detail::side(first + *block, strides, v, pool.v_scales));
}

// Where the pool has a layer's scales of V, for engines::nvfp4::linear_scales and swizzled_scales.
inline Result<engines::nvfp4::Scales> nvfp4_v_scales(const Nvfp4Pool& pool,
                                                     int64_t layer_idx_in_pool) {
  auto scales = detail::nvfp4_scales(pool, layer_idx_in_pool);
  if (!scales) return scales.failure();
  engines::nvfp4::Scales v = *scales;
  v.data += v.block_stride;
  v.block_stride *= 2 * pool.scales.shape[1];  // blocks of the pool, not of the table
  return v;
}

// The engine's offsets of one pool, [sequences, beams, 2, max_blocks_per_seq], where the pool lies.
inline kvx_block_table_t offsets_table(const int32_t* offsets, uint32_t num_sequences,
                                       uint32_t beam_width, uint32_t max_blocks_per_seq) {
  auto table = sized<kvx_block_table_t>();
  table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  table.index_dtype = KVX_DTYPE_S32;
  table.seq_count = num_sequences;
  table.beam_width = beam_width;
  table.max_blocks_per_seq = max_blocks_per_seq;
  table.indices = offsets;
  table.indices_count = num_sequences * beam_width * 2 * max_blocks_per_seq;
  table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  return table;
}

// The index that KVCacheManager writes for K of a block; V's is the next one.
inline int64_t block_index(int64_t block, int64_t num_layers) {
  return block * num_layers * 2;
}

}  // namespace kvx::api::trtllm

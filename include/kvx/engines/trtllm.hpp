// Layers of TensorRT-LLM's block pools (1.3): [blocks, layers, 2, heads * tokens * head_dim].
//
// A block of a KV_OFFSETS table is one K or V block of one layer: the engine's offsets are taken as
// they are, and a layer has the pool's address of its first block.
#pragma once

#include "kvx/engines/tensor.hpp"

namespace kvx::api::trtllm {

struct Pool {
  engines::Tensor data;  // [blocks, layers, 2, heads * tokens_per_block * head_dim], dense
  int64_t num_kv_heads = 0;
  int64_t tokens_per_block = 0;  // a power of two
  int64_t head_dim = 0;
  const float* kv_scale = nullptr;  // of F8: kv_scale_quant_orig
};

inline Result<Layer> layer(const Pool& pool, int64_t layer_idx_in_pool) {
  auto strides = engines::detail::byte_strides(pool.data, 4, "pool");
  if (!strides) return strides.failure();
  const int64_t tokens = pool.tokens_per_block;
  const int64_t num_elements = pool.num_kv_heads * tokens * pool.head_dim;
  const std::vector<int64_t>& shape = pool.data.shape;
  if (num_elements < 1 || shape[2] != 2 || shape[3] != num_elements) {
    return engines::detail::bad(
        "pool has another shape than [blocks, layers, 2, num_kv_heads * tokens_per_block * "
        "head_dim]");
  }
  if ((tokens & (tokens - 1)) != 0) {
    return engines::detail::bad("tokens_per_block is " + std::to_string(tokens) +
                                "; expected a power of two");
  }
  const int64_t item = engines::detail::bytes_of(pool.data.dtype);
  const int64_t block_bytes = num_elements * item;
  const bool is_dense = (*strides)[3] == item && (*strides)[2] == block_bytes &&
                        (*strides)[1] == 2 * block_bytes &&
                        (*strides)[0] == shape[1] * 2 * block_bytes;
  if (!is_dense) return engines::detail::bad("pool has gaps; expected a dense tensor");
  if (layer_idx_in_pool < 0 || layer_idx_in_pool >= shape[1]) {
    return engines::detail::bad("layer_idx_in_pool is " + std::to_string(layer_idx_in_pool) +
                                "; the pool has " + std::to_string(shape[1]) + " layers");
  }
  const int64_t row = pool.head_dim * item;
  const auto side = [&](int64_t is_v) {
    return engines::detail::float_side(pool.data, "pool", pool.head_dim,
                                       (2 * layer_idx_in_pool + is_v) * block_bytes,
                                       {block_bytes, row, tokens * row}, pool.kv_scale);
  };
  auto k = side(0);
  if (!k) return k.failure();
  auto v = side(1);
  if (!v) return v.failure();
  const int64_t num_indices = (shape[0] - 1) * shape[1] * 2 + 1;
  return Layer(engines::detail::layer_shape(num_indices, tokens, pool.num_kv_heads), *k, *v);
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

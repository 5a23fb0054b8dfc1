// TurboMind's block layout: all offsets inside its blocks are computed here.
//
//   data block       layer 0 | layer 1 | ... | layer num_layers - 1
//   a layer, L(H2SDQ+H2S2T):
//     data    head 0: [K: block_len rows][V: block_len rows] | head 1: ... | ...
//     params  head 0: [K: block_len x {scale, zero}][V: likewise] | head 1: ...    int4, int8 only
//
//   scale block      [layer][head][token][K scales: head_dim / 16 bytes][V scales: the same]
//                    fp4 only, in a pool of its own with the same block ids
#pragma once

#include <span>

#include "engines/turbomind/policy.hpp"
#include "ops/cache_view.hpp"

namespace kvx::engines::turbomind {

inline constexpr int kFp4Group = 16;  // values that share an fp4 scale

enum class KvSide : uint8_t { kKey, kValue };

struct Geometry {
  KvCacheMode mode = KvCacheMode::kNone;
  DType dtype = DType::kF16;  // the engine's compute type: f16 or bf16
  int num_layers = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int block_len = 0;  // tokens per block
};

// Byte sizes and offsets of a block. make_pool_layout() creates one in which nothing overflows.
struct PoolLayout {
  Geometry geometry;
  format::FormatSpec spec;

  int64_t token_data_bytes = 0;   // one row: q_bits * head_dim / 8
  int64_t token_param_bytes = 0;  // its scale and zero: t_bits * 2 / 8
  int64_t head_data_bytes = 0;    // K or V rows of a head in a block
  int64_t head_param_bytes = 0;
  int64_t layer_bytes = 0;
  int64_t block_bytes = 0;        // of the data pool
  int64_t token_scale_bytes = 0;  // one row's fp4 scales: head_dim / 16
  int64_t scale_block_bytes = 0;  // of the scale pool; 0 without one

  // Bytes of a block in both pools, by which a memory budget is divided.
  int64_t bytes_per_block() const { return block_bytes + scale_block_bytes; }

  // Offsets of a row's codes and of its params in a data block. Requires: arguments in range.
  int64_t data_offset(int layer, int head, KvSide side, int token) const;
  int64_t param_offset(int layer, int head, KvSide side, int token) const;
  // Offset of a row's fp4 scales in a scale block. Requires: arguments in range.
  int64_t scale_offset(int layer, int head, KvSide side, int token) const;
};

// INVALID_ARGUMENT: a count below 1, a head_dim that the mode can't store (fp4: a multiple of 16),
// or a dtype that TurboMind does not have. OUT_OF_RANGE: a block of 2^63 bytes or more.
Result<PoolLayout> make_pool_layout(const Geometry& geometry);

// Bytes of a block of the data pool, and of the scale pool (0 without one), under TurboMind's
// names for the arguments. Errors as above.
Result<int64_t> get_cache_block_size(DType dtype, KvCacheMode kvtype, int layer_num, int head_num,
                                     int head_dim, int block_seq_len);
Result<int64_t> get_cache_scale_block_size(DType dtype, KvCacheMode kvtype, int layer_num,
                                           int head_num, int head_dim, int block_seq_len);

// Blocks that fit in a budget, both pools counted. Requires: budget_bytes >= 0.
int64_t blocks_within_budget(const PoolLayout& layout, int64_t budget_bytes);

// The scales of token local_ti of a sequence for one layer and head: K's head_dim / 16 bytes, then
// V's. scale_blocks_seq: the sequence's scale blocks in order. Requires: arguments in range.
uint8_t* get_fp4_mx_scale_base(uint8_t* const* scale_blocks_seq, int layer, int head, int head_num,
                               int block_len, int head_dim, int64_t local_ti);
// The same address: MX and NV differ in what a byte means, not in where it lies.
uint8_t* get_fp4_nv_scale_base(uint8_t* const* scale_blocks_seq, int layer, int head, int head_num,
                               int block_len, int head_dim, int64_t local_ti);

// The memory of both pools. Block b is data + b * data_stride and, with the same id, scales + b *
// scale_stride. TurboMind itself keeps tables of pointers into such memory; block_ids_of turns a
// row of one into ids.
struct Pools {
  uint8_t* data = nullptr;
  int64_t data_stride = 0;  // bytes, at least block_bytes
  uint8_t* scales = nullptr;
  int64_t scale_stride = 0;  // bytes, at least scale_block_bytes
  int64_t num_blocks = 0;
  bool is_scattered =
      false;  // strides are units of ids, perhaps shorter than a block: find_pools()
};

// Requires: block_id in [0, num_blocks).
inline uint8_t* get_block_ptr(const Pools& pools, int64_t block_id) {
  return pools.data + block_id * pools.data_stride;
}
inline uint8_t* get_scale_block_ptr(const Pools& pools, int64_t block_id) {
  return pools.scales + block_id * pools.scale_stride;
}

// OUT_OF_RANGE, ids unspecified: a pointer that begins no block of the data pool.
// Requires: ids.size() == block_ptrs.size().
Status block_ids_of(const Pools& pools, std::span<const uint8_t* const> block_ptrs,
                    std::span<int32_t> ids);

// nvfp4's second-level scales, [num_layers, num_kv_heads] each; null means 1.
struct GlobalScales {
  const float* k = nullptr;
  const float* v = nullptr;
};

// A view of one layer of the pools, on which append, gather and attend work in place.
class LayerBlocks {
 public:
  // The view points into this object.
  ops::LayerView view() const { return {num_blocks_, block_len_, run_.num_heads, {&run_, 1}}; }

 private:
  friend Result<LayerBlocks> layer_blocks(const PoolLayout&, const Pools&, int,
                                          const GlobalScales&);
  int64_t num_blocks_ = 0;
  int block_len_ = 0;
  ops::HeadRun run_;
};

// INVALID_ARGUMENT: a missing pool (fp4 needs its scale pool), a stride smaller than a block, a
// layer out of range, global scales with a mode other than fp4 nv, or one that is not positive and
// finite.
Result<LayerBlocks> layer_blocks(const PoolLayout& layout, const Pools& pools, int layer,
                                 const GlobalScales& global_scales = {});

}  // namespace kvx::engines::turbomind

// The order of codes that a block in a GPU's pool has, and what it has in files.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/cache_view.hpp"

namespace kvx::kv {

// Rows of a layer's blocks whose codes lie in interleaved order (format/interleaved_order.hpp), as
// offsets in a block.
struct InterleavedRows {
  int64_t offset = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  int num_tokens = 0;
  int num_heads = 0;
  int row_bytes = 0;
};

// Empty: none are. layer: of the block's pool, whose first byte is pool.
std::vector<InterleavedRows> interleaved_rows(const ops::LayerView& layer, const uint8_t* pool);

// These rows become nibbles, or nibbles interleaved, in a copy of one block on the host; all else
// stays.
void deinterleave_nibbles(std::span<const InterleavedRows> rows, std::span<uint8_t> block);
void interleave_nibbles(std::span<const InterleavedRows> rows, std::span<uint8_t> block);

}  // namespace kvx::kv

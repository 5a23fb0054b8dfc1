// The order of codes that a block in a GPU's pool has, and what it has in files.
#pragma once

#include <span>

#include "ops/cache_view.hpp"

namespace kvx::kv {

// Codes that lie in interleaved order (format/interleaved.hpp) become nibbles, or nibbles
// interleaved, in a copy of one block on the host; all else stays. layer: of the block's pool,
// whose first byte is pool.
void deinterleave_nibbles(const ops::LayerView& layer, const uint8_t* pool,
                          std::span<uint8_t> block);
void interleave_nibbles(const ops::LayerView& layer, const uint8_t* pool, std::span<uint8_t> block);

}  // namespace kvx::kv

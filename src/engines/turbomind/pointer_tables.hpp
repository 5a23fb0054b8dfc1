// Pointer tables of an engine: block ids for blocks that lie anywhere.
#pragma once

#include <span>

#include "engines/turbomind/layout.hpp"

namespace kvx::engines::turbomind {

// Pools in which every block of the tables has an id: a block's distance from the lowest one, in
// units of the greatest common divisor of all distances. scale_block_ptrs: as many as block_ptrs in
// fp4 modes, none in others. is_scattered is set unless the blocks follow each other without gaps.
// INVALID_ARGUMENT: no block, a null pointer, blocks that overlap, tables of different lengths.
// UNSUPPORTED: ids beyond 2^31, or scale blocks that lie in another order than the data blocks.
Result<Pools> find_pools(const PoolLayout& layout, std::span<const uint8_t* const> block_ptrs,
                         std::span<const uint8_t* const> scale_block_ptrs);

// block_ids_of() of both tables. OUT_OF_RANGE: also a scale block with another id than its block.
Status block_ids_of_both(const Pools& pools, std::span<const uint8_t* const> block_ptrs,
                         std::span<const uint8_t* const> scale_block_ptrs, std::span<int32_t> ids);

}  // namespace kvx::engines::turbomind

// How the tensor cores' kernels copy K's or V's rows: whether they can, and by which addresses.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/attend/cuda/common/params.hpp"

namespace kvx::ops::cuda {

// Whether the tiles' copies can take the rows as they lie. is_padded: by instances for longer rows,
// which copy rows of four bits on 8 bytes too.
bool can_copy(const SideView& side, int block_size, int num_heads, bool is_padded);

// Whether each row's only scale is copied as a word of four bytes: one in binary32, or two
// neighbour heads' in f16, as in [tokens, heads].
bool has_word_scale(const SideView& side);

// Rows of a head follow each other inside a block, and so do their scales, all on 16 bytes.
bool is_dense(const SideView& side);

// Whether bulk copies can take a dual-scale format's rows, scales and channels as they lie: without
// gaps, all on 16 bytes.
bool can_copy_blocks(const SideView& side, int block_size, int num_heads);

// Rows of a token's heads are nearer to each other than those of a head's tokens.
bool is_nhd(const SideView& side);

// One scale a head (or for all heads), the same for all blocks and tokens.
bool has_shared_scale(const SideView& side);

// tiles_at_once: of a warp's step.
TileSide tile_side(const SideView& side, int block_size, int tiles_at_once);

}  // namespace kvx::ops::cuda

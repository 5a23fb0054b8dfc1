// draw_row, draw_dual_block: stored bytes as an ASCII picture.
#pragma once

#include <string>

#include "format/spec.hpp"

namespace kvx::tool {

// Boxes in the order of the bytes, with the offset of each box's first byte below its left edge and
// the row's size below the right edge. Under them the first bytes of the codes, where two codes
// share a byte. Requires: check_head_dim(spec, head_dim).
std::string draw_row(const format::FormatSpec& spec, int head_dim);

// One head's K or V of a block of a dual-scale format.
std::string draw_dual_block(const format::FormatSpec& spec, int head_dim, int block_size);

}  // namespace kvx::tool

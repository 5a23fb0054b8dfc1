// copy_blocks: whole blocks of one layer from one place to another, byte for byte where both store
// alike, converted where not.
#pragma once

#include <span>

#include "ops/cache_view.hpp"
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops {

struct BlockCopy {
  int64_t from_block = 0;
  int64_t to_block = 0;
  int num_tokens = 0;  // the first tokens of the block; the rest of the target is left alone
};

// from and to have the same block_size, heads and head_dims; formats and addresses may differ, and
// the runs may be cut differently. Rows are copied as stored where both sides' specs are equal
// (scales too; a page-shared scale, and the channels' steps and zeros, with their block); otherwise
// decoded and encoded by the target's rule. Transforms are not touched: both sides hold transformed
// rows. Returns the non-finite inputs that the target's codes could not express (AppendReport).
// OUT_OF_RANGE or INVALID_ARGUMENT, nothing written: a block id or num_tokens out of range, or
// geometries that differ.
Result<int64_t> copy_blocks(const CpuContext& context, const LayerView& from, const LayerView& to,
                            std::span<const BlockCopy> copies);

}  // namespace kvx::ops

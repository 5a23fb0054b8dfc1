// gather: stored rows of one layer back to floats, for whole sequences or ranges of tokens,
// transforms undone.
#pragma once

#include <span>

#include "ops/cache_view.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/transform.hpp"

namespace kvx::ops {

// Tokens [first_token, first_token + num_tokens) of a sequence, written to rows first_row,
// first_row + 1, ... of the output.
struct GatherRange {
  int sequence = 0;
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  int64_t first_row = 0;
};

struct GatherArgs {
  LayerView cache;
  LayerTransform transform;
  BlockTable block_table;
  int64_t max_blocks_per_sequence = 0;  // valid entries of a block table row
  int num_sequences = 0;
  std::span<const GatherRange> ranges;
  MutableFloatRows k;            // [rows, num_kv_heads, k head_dim]; data null: not wanted
  MutableFloatRows v;            // [rows, num_kv_heads, v head_dim]; data null: not wanted
  int64_t num_rows = INT64_MAX;  // of k and v
};

// What gather refuses. The API boundary calls it first, because it bounds rows by checked ranges.
Status check_gather(const GatherArgs& args);

// OUT_OF_RANGE, nothing written: a range beyond its block table row or beyond num_rows, or a block
// id outside [0, num_blocks).
Status gather(const CpuContext& context, const GatherArgs& args);

}  // namespace kvx::ops

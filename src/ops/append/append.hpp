// append: new K and V rows of one layer into the slots of a paged cache, transformed and quantised
// on the way.
#pragma once

#include <optional>
#include <span>

#include "core/dtype.hpp"
#include "ops/cache_view.hpp"
#include "ops/cpu/kernel_table.hpp"
#include "ops/transform.hpp"

namespace kvx::ops {

struct AppendArgs {
  LayerView cache;
  LayerTransform transform;
  FloatRows k;  // [num_tokens, num_kv_heads, k head_dim]
  FloatRows v;  // [num_tokens, num_kv_heads, v head_dim]; ignored where the layer stores no V
  // [num_tokens]; a negative slot skips its token.
  std::span<const int64_t> slot_mapping;
  // [num_tokens], absolute positions; needed only with a block_offset transform.
  std::span<const int64_t> positions;
  // The type of the full-precision window beside dual-scale blocks: rows of such a block are
  // rounded to it before they are quantised, so that a block has the same bytes by way of the
  // window.
  std::optional<DType> window_dtype = std::nullopt;
};

struct AppendReport {
  int64_t tokens_written = 0;
  // NaN or infinite inputs that a given or page-shared scale could not express (they are stored as
  // code 0).
  int64_t nonfinite_inputs = 0;
};

// OUT_OF_RANGE, nothing written: a slot >= num_blocks * block_size. INVALID_ARGUMENT, nothing
// written: positions missing or outside the block_offset table, or a part of a dual-scale block,
// whose tokens all come in one call, in order. Consecutive tokens in consecutive slots of one block
// are handled as one run; a page-shared scale takes a block's tokens [0, first slot of the run) as
// live and requantises them when it grows. Duplicate slots: the later token wins. Same bytes for
// any number of threads.
Status check_append(const AppendArgs& args);  // the same errors, nothing written
Result<AppendReport> append(const CpuContext& context, const AppendArgs& args);

}  // namespace kvx::ops

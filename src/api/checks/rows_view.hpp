// A caller's rows of floats, checked, in the form that the verbs take.
#pragma once

#include "api/checks/layer_view.hpp"
#include "core/rows.hpp"

namespace kvx::boundary {

// Reads a caller's floats [tokens, num_heads, head_dim]. INVALID_ARGUMENT names the field.
Result<MutableFloatRows> read_rows(const kvx_rows_t* rows, int num_heads, int head_dim,
                                   std::string_view name);

// INVALID_ARGUMENT: the rows [num_rows, num_heads, head_dim] overlap the layer's codes or scales,
// or reach beyond 64-bit addresses.
Status check_apart(const LayerOfCaller& layer, const MutableFloatRows& rows, int64_t num_rows,
                   int num_heads, int head_dim, std::string_view name);

inline FloatRows as_input(const MutableFloatRows& rows) {
  return {rows.data, rows.dtype, rows.token_stride, rows.head_stride};
}

}  // namespace kvx::boundary

// EncodeRow: where one row of a run comes from and goes to.
#pragma once

#include "ops/cpu/kernel_table.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

struct EncodeRow {
  const float* x;   // [head_dim]
  uint8_t* codes;   // the row's packed codes
  uint8_t* scales;  // of its group 0
};

// Row i of the run.
KVX_INLINE const float* source_row(const EncodeParams& params, int i) {
  return params.rows + i * (params.row_stride != 0 ? params.row_stride : params.head_dim);
}

// token counts inside the block.
KVX_INLINE EncodeRow encode_row(const EncodeParams& params, int token) {
  return {source_row(params, token - params.first_token),
          params.codes + token * params.token_stride,
          params.scales + token * params.scale_token_stride};
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

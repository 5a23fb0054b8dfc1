// EncodeRow: where one row of an encode job comes from and goes to.
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

// Row i of the job's.
KVX_INLINE const float* source_row(const EncodeJob& job, int i) {
  return job.rows + i * (job.row_stride != 0 ? job.row_stride : job.head_dim);
}

// token counts inside the block.
KVX_INLINE EncodeRow encode_row(const EncodeJob& job, int token) {
  return {source_row(job, token - job.first_token), job.codes + token * job.token_stride,
          job.scales + token * job.scale_token_stride};
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

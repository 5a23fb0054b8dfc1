// pack_table: an engine's block table and lengths on a GPU, turned there into what kernels read.
#pragma once

#include "ops/copy_rows/views.hpp"
#include "ops/cuda/context.hpp"

namespace kvx::ops {

// All arrays are on the device.
struct PackTable {
  copy_rows::TableView table;
  copy_rows::IndexArray lengths;  // [sequences]; beams share one
  int64_t row_stride = 0;         // entries of a PACKED table's row
  int block_size = 1;             // tokens; of a RAGGED table's blocks
};

// ids: [rows, max_blocks]; lengths: [rows]. An entry that names no block of the primary pool, one
// of RAGGED that changes inside a block, a V of KV_OFFSETS that is not the block after its K, and a
// length of more than 31 bits become -1, which verbs count as out of range.
Status pack_table(const CudaContext& context, const PackTable& from, int32_t* ids,
                  int32_t* lengths);

}  // namespace kvx::ops

// A caller's block table and lengths, checked, in the form that the verbs take: block ids
// [num_sequences, max_blocks] and lengths, both in 32 bits.
#pragma once

#include <vector>

#include "core/result.hpp"
#include "kvx/kvx_abi.h"
#include "ops/cache_view.hpp"

namespace kvx::boundary {

// The pointers are the caller's own where its arrays already have this shape. Otherwise they point
// into the vectors, which keep their memory from call to call.
struct TableOfCaller {
  ops::BlockTable table;
  int64_t max_blocks = 0;
  int num_sequences = 0;
  const int32_t* seq_lens = nullptr;
  std::vector<int32_t> ids;
  std::vector<int32_t> lengths;
};

// What a stride of 0 stands for: the rows of a PACKED table follow each other. INVALID_ARGUMENT:
// rows that overlap, or the stride of a table that is not PACKED.
Result<int64_t> read_table_stride(const kvx_block_table_t& table, int64_t stride);

// Reads any table. row_stride: entries from a PACKED table's row to the next; 0: its
// max_blocks_per_seq. An id that no layer can have becomes -1, which a verb refuses when it reads
// it. Zero sequences are allowed. KV_OFFSETS: each beam is a sequence with the length of its own,
// and K's index is the block's; UNSUPPORTED: a V that is not the block after K, a block of the
// secondary pool.
Status read_table(const kvx_block_table_t* table, const kvx_seq_lens_t* seq_lens, int block_size,
                  TableOfCaller& result, int64_t row_stride = 0);

}  // namespace kvx::boundary

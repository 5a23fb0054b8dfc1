// A caller's block table and lengths as the verbs take them: block ids [sequences, blocks] and
// lengths in 32 bits.
#pragma once

#include <vector>

#include "core/result.hpp"
#include "kvx/kvx_abi.h"
#include "ops/cache_view.hpp"

namespace kvx::boundary {

// The pointers are the caller's where its arrays have the right shape already, else they point into
// the vectors, which keep their memory from call to call.
struct TableOfCaller {
  ops::BlockTable table;
  int64_t max_blocks = 0;
  int num_sequences = 0;
  const int32_t* seq_lens = nullptr;
  std::vector<int32_t> ids;
  std::vector<int32_t> lengths;
};

// PACKED and RAGGED. An id that no layer can have becomes -1, which the verbs refuse where they
// read it. Zero sequences are allowed.
Status read_table(const kvx_block_table_t* table, const kvx_seq_lens_t* seq_lens, int block_size,
                  TableOfCaller& result);

}  // namespace kvx::boundary

// A v1 gather over a test's cache, with tables of every format.
#pragma once

#include "tests/api/v1_cache.hpp"

namespace kvx::api_test {

// A gather of num_rows rows of at most max_seq_len tokens.
struct Gather {
  Gather(const Cache& cache, int64_t rows, int64_t most, bool is_dense = false, int64_t gap = 0,
         kvx_dtype_t k = KVX_DTYPE_INVALID, kvx_dtype_t v = KVX_DTYPE_INVALID)
      : io(cache.shape(), rows * most, k == KVX_DTYPE_INVALID ? cache.desc.k.dtype : k,
           v == KVX_DTYPE_INVALID ? cache.desc.v.dtype : v, is_dense ? 0 : rows, gap) {
    desc.size = sizeof desc;
    desc.io = io.desc;
    desc.max_seq_len = static_cast<uint32_t>(most);
    desc.block_table.size = sizeof desc.block_table;
    desc.block_table.beam_width = 1;
    desc.block_table.index_dtype = KVX_DTYPE_S32;
    desc.seq_lens.size = sizeof desc.seq_lens;
  }

  // block ids [sequences, width]
  void set_packed(const std::vector<int32_t>& ids, uint32_t width) {
    indices = ids;
    desc.block_table.format = KVX_BLOCK_TABLE_PACKED;
    desc.block_table.max_blocks_per_seq = width;
    desc.block_table.seq_count = static_cast<uint32_t>(ids.size()) / width;
    set_indices();
  }
  void set_ragged(const std::vector<int32_t>& ids, const std::vector<int64_t>& sums,
                  uint32_t flags) {
    indices = ids;
    indptr = sums;
    desc.block_table.format = KVX_BLOCK_TABLE_RAGGED;
    desc.block_table.max_blocks_per_seq = 8;
    desc.block_table.seq_count = static_cast<uint32_t>(sums.size() - 1);
    desc.block_table.indptr_dtype = KVX_DTYPE_S64;
    desc.block_table.indptr = indptr.data();
    desc.block_table.indptr_count = static_cast<uint32_t>(sums.size());
    desc.block_table.flags = flags;
    set_indices();
  }
  // [sequences, beams, 2, width]
  void set_kv_offsets(const std::vector<int32_t>& entries, uint32_t beams, uint32_t width) {
    indices = entries;
    desc.block_table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
    desc.block_table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
    desc.block_table.beam_width = beams;
    desc.block_table.max_blocks_per_seq = width;
    desc.block_table.seq_count = static_cast<uint32_t>(entries.size()) / (2 * beams * width);
    set_indices();
  }
  void set_lengths(const std::vector<int64_t>& values) {
    lengths = values;
    desc.seq_lens.dtype = KVX_DTYPE_S64;
    desc.seq_lens.lengths = lengths.data();
    desc.seq_lens.seq_count = static_cast<uint32_t>(values.size());
  }
  void set_indices() {
    desc.block_table.indices = indices.data();
    desc.block_table.indices_count = static_cast<uint32_t>(indices.size());
  }

  Io io;
  kvx_gather_desc_t desc{};
  std::vector<int32_t> indices;
  std::vector<int64_t> indptr;
  std::vector<int64_t> lengths;
};

}  // namespace kvx::api_test

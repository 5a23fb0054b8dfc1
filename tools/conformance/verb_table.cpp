// Block tables of the verbs of 1.2, in every format.
#include <algorithm>

#include "tools/conformance/numbers.hpp"
#include "tools/conformance/verb_layer.hpp"

namespace kvx::conformance {
namespace {

// Entries of PACKED, padded to the width.
std::vector<int64_t> packed(const std::vector<std::vector<int64_t>>& rows, size_t width) {
  std::vector<int64_t> indices;
  for (const std::vector<int64_t>& row : rows) {
    indices.insert(indices.end(), row.begin(), row.end());
    indices.resize(indices.size() + width - row.size(), -1);
  }
  return indices;
}

// Each row's K, then its V, which is the index behind K's.
std::vector<int64_t> kv_offsets(const std::vector<std::vector<int64_t>>& rows, size_t width) {
  std::vector<std::vector<int64_t>> sides;
  for (const std::vector<int64_t>& row : rows) {
    sides.push_back(row);
    sides.push_back(row);
    for (int64_t& index : sides.back()) ++index;
  }
  return packed(sides, width);
}

// Entries of RAGGED, one a page or one a token, and the prefix sums of their numbers.
std::vector<int64_t> ragged(const TableCase& given, int64_t block_size,
                            std::vector<int64_t>& sums) {
  std::vector<int64_t> indices;
  for (size_t s = 0; s < given.blocks.size(); ++s) {
    const std::vector<int64_t>& row = given.blocks[s];
    const int64_t num_tokens = given.pages ? 0 : given.lengths[s];
    if (given.pages) indices.insert(indices.end(), row.begin(), row.end());
    for (int64_t t = 0; t < num_tokens; ++t) {
      indices.push_back(row[static_cast<size_t>(t / block_size)]);
    }
    sums.push_back(static_cast<int64_t>(indices.size()));
  }
  return indices;
}

}  // namespace

Features TableCase::needs() const {
  Features needs;
  needs.add(kTableFormats, format).add(kIndexDtypes, dtype);
  if (pages) needs.add_flags(kTableFlags, KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES);
  if (format == KVX_BLOCK_TABLE_KV_OFFSETS) {
    needs.add_flags(kTableFlags, KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX);
  }
  if (beams > 1) needs.add_flags(kTraits, KVX_TRAIT_BEAMS);
  return needs;
}

VerbTable::VerbTable(Memory& memory, const TableCase& given, int64_t block_size) {
  size_t width = 1;
  for (const std::vector<int64_t>& row : given.blocks) width = std::max(width, row.size());
  const bool is_ragged = given.format == KVX_BLOCK_TABLE_RAGGED;
  const bool is_kv_offsets = given.format == KVX_BLOCK_TABLE_KV_OFFSETS;
  std::vector<int64_t> sums = {0};
  const std::vector<int64_t> indices = is_ragged       ? ragged(given, block_size, sums)
                                       : is_kv_offsets ? kv_offsets(given.blocks, width)
                                                       : packed(given.blocks, width);
  table.size = sizeof table;
  table.format = given.format;
  table.index_dtype = given.dtype;
  table.seq_count = static_cast<uint32_t>(given.blocks.size()) / given.beams;
  table.beam_width = given.beams;
  table.indices = add_indices(memory, "table", indices, given.dtype);
  table.indices_count = static_cast<uint32_t>(indices.size());
  if (is_kv_offsets) table.flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  if (is_ragged) {
    table.indptr_dtype = given.dtype;
    table.indptr = add_indices(memory, "prefix sums", sums, given.dtype);
    table.indptr_count = static_cast<uint32_t>(sums.size());
    table.flags = given.pages ? KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES : 0;
  }
  table.max_blocks_per_seq = static_cast<uint32_t>(width);
  std::vector<int64_t> lengths;
  for (size_t row = 0; row < given.lengths.size(); row += given.beams) {
    lengths.push_back(given.lengths[row]);
  }
  seq_lens.size = sizeof seq_lens;
  seq_lens.dtype = given.dtype;
  seq_lens.seq_count = table.seq_count;
  seq_lens.lengths = add_indices(memory, "lengths", lengths, given.dtype);
}

}  // namespace kvx::conformance

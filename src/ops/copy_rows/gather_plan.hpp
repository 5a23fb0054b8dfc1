// GatherPlan: the checked arguments of kvx_gather_kv. The functions here find the blocks that its
// table names, on the host and on the GPU.
#pragma once

#include "ops/copy_rows/views.hpp"

namespace kvx::ops::copy_rows {

struct GatherPlan {
  CacheView cache;
  IoView io;
  TableView table;
  IndexArray seq_lens;
  int64_t max_seq_len = 0;

  KVX_INLINE bool reads_pools() const { return table.kind == TableView::Kind::kKvOffsets; }
  bool is_on_device() const { return io.k.memory != MemoryType::kHost; }

  // How many tokens a row of the output receives. A row is a sequence, or a beam of a sequence.
  int64_t length(int64_t row) const { return length_of_sequence(row / table.num_beams); }
  KVX_INLINE int64_t length_of_sequence(int64_t sequence) const {
    const int64_t length = seq_lens.at(sequence);
    return length < max_seq_len ? length : max_seq_len;
  }
};

// The table's entries for one token of a row.
struct TokenEntries {
  int64_t k = 0;
  int64_t v = 0;
};

// block: the index in its row of the block that the token is in. Requires: the table has entries
// for the token.
KVX_INLINE TokenEntries entries_of(const TableView& table, int64_t row, int64_t token,
                                   int64_t block) {
  int64_t place = row * table.max_blocks + block;
  switch (table.kind) {
    case TableView::Kind::kPacked:
      break;
    case TableView::Kind::kRaggedPages:
      place = table.indptr.at(row) + block;
      break;
    case TableView::Kind::kRaggedTokens:
      place = table.indptr.at(row) + token;
      break;
    case TableView::Kind::kKvOffsets: {
      const int64_t k_row = row * 2;  // [rows, 2 (K, V), max_blocks]
      return {table.indices.at(k_row * table.max_blocks + block),
              table.indices.at((k_row + 1) * table.max_blocks + block)};
    }
  }
  const int64_t entry = table.indices.at(place);
  return {entry, entry};
}

// Whether the table has entries for a token. Any prefix sums are safe.
KVX_INLINE bool has_entries(const TableView& table, int64_t row, int64_t token, int64_t block) {
  if (table.indptr.data == nullptr) return block < table.max_blocks;
  const int64_t first = table.indptr.at(row);
  const int64_t end = table.indptr.at(row + 1);
  if (first < 0 || end < first || end > table.num_indices) return false;
  return (table.kind == TableView::Kind::kRaggedPages ? block : token) < end - first;
}

// Bits of a KVCacheIndex.
inline constexpr uint32_t kSecondaryPool = 0x80000000u;
inline constexpr uint32_t kNullIndex = 0xFFFFFFFFu;

// Returns the first byte of the block that an entry names, or null for an entry without a block;
// the output's rows of such an entry stay unchanged. Requires: a block id below num_blocks.
KVX_INLINE uint8_t* block_of(const TableView& table, const CacheSide& side, int64_t entry) {
  if (table.kind != TableView::Kind::kKvOffsets) {
    return entry < 0 ? nullptr : side.data + entry * side.block_stride;
  }
  const auto index = static_cast<uint32_t>(entry);
  uint8_t* pool = (index & kSecondaryPool) != 0 ? table.secondary : table.primary;
  if (index == kNullIndex || pool == nullptr) return nullptr;
  return pool + int64_t{index & ~kSecondaryPool} * table.bytes_per_block;
}

}  // namespace kvx::ops::copy_rows

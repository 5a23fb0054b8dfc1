// Reads a caller's block table and lengths into the form that the verbs take.
#include "api/checks/table_view.hpp"

#include "api/checks/check_index.hpp"
#include "api/guard.hpp"
#include "core/checked.hpp"

namespace kvx::boundary {
namespace {

using ops::copy_rows::block_id_of;

// How many blocks the entries of a sequence name.
int64_t blocks_held(const TableView& table, int64_t sequence, int64_t block_size) {
  const int64_t entries = table.indptr.at(sequence + 1) - table.indptr.at(sequence);
  return table.kind == TableView::Kind::kRaggedPages ? entries : ceil_div(entries, block_size);
}

// RAGGED without pages names a block once for each of its tokens.
Status read_ragged_sequence(const TableView& table, int64_t s, int64_t block_size, int32_t* row) {
  const int64_t first = table.indptr.at(s);
  const int64_t entries = table.indptr.at(s + 1) - first;
  const int64_t step = table.kind == TableView::Kind::kRaggedPages ? 1 : block_size;
  for (int64_t i = 0; i < entries; ++i) {
    const int64_t entry = table.indices.at(first + i);
    int32_t& id = row[i / step];
    if (i % step == 0) {
      id = block_id_of(entry);
    } else if (id != block_id_of(entry)) {
      return unsupported(
          "block_table.indices changes from {} to {} inside a block of {} tokens; only "
          "kvx_gather_kv "
          "supports that",
          id, entry, block_size);
    }
  }
  return {};
}

Status read_ragged(const TableView& table, int64_t block_size, TableOfCaller& result) {
  KVX_RETURN_IF_ERROR(check_prefix_sums(table));
  int64_t width = 1;
  for (int64_t s = 0; s < table.num_sequences; ++s) {
    width = std::max(width, blocks_held(table, s, block_size));
  }
  result.ids.assign(static_cast<size_t>(table.num_sequences * width), -1);
  for (int64_t s = 0; s < table.num_sequences; ++s) {
    KVX_RETURN_IF_ERROR(read_ragged_sequence(table, s, block_size, result.ids.data() + s * width));
  }
  result.max_blocks = width;
  result.table = {result.ids.data(), width};
  return {};
}

void read_packed(const TableView& table, int64_t row_stride, TableOfCaller& result) {
  result.max_blocks = table.max_blocks;
  if (!table.indices.is_64_bit) {
    result.table = {static_cast<const int32_t*>(table.indices.data), row_stride};
    return;
  }
  result.ids.resize(static_cast<size_t>(table.num_indices));
  for (int64_t s = 0; s < table.num_sequences; ++s) {
    int32_t* row = result.ids.data() + s * table.max_blocks;
    for (int64_t i = 0; i < table.max_blocks; ++i)
      row[i] = block_id_of(table.indices.at(s * row_stride + i));
  }
  result.table = {result.ids.data(), table.max_blocks};
}

// Beams are rows. Null entries are below 0 in K and V.
Status read_kv_offsets(const TableView& table, TableOfCaller& result) {
  constexpr int64_t kSecondary = INT32_MIN;  // bit 31
  const int64_t width = table.max_blocks;
  result.ids.resize(static_cast<size_t>(table.num_rows() * width));
  for (int64_t row = 0; row < table.num_rows(); ++row) {
    for (int64_t i = 0; i < width; ++i) {
      const int64_t k = table.indices.at(2 * row * width + i);
      const int64_t v = table.indices.at((2 * row + 1) * width + i);
      if (k != -1 && k < 0) {
        return unsupported(
            "block_table.indices has K {} of row {} in the secondary pool, block {}; "
            "expected it in the primary one",
            i, row, k - kSecondary);
      }
      if (k >= 0 && v != k + 1) {
        return unsupported(
            "block_table.indices has K {} of row {} at {} and its V at {}; expected V "
            "in the block after K",
            i, row, k, v);
      }
      result.ids[row * width + i] = block_id_of(k);
    }
  }
  result.max_blocks = width;
  result.table = {result.ids.data(), width};
  return {};
}

// num_beams rows share a length.
Status read_lengths(const IndexArray& lengths, int64_t num_sequences, int64_t num_beams,
                    TableOfCaller& result) {
  for (int64_t s = 0; s < num_sequences; ++s) {
    const int64_t length = lengths.at(s);
    if (length >= 0 && length <= INT32_MAX) continue;
    return invalid_argument("seq_lens[{}] is {}; expected 0 to {}", s, length, INT32_MAX);
  }
  if (!lengths.is_64_bit && num_beams == 1) {
    result.seq_lens = static_cast<const int32_t*>(lengths.data);
    return {};
  }
  result.lengths.resize(static_cast<size_t>(num_sequences * num_beams));
  for (int64_t row = 0; row < std::ssize(result.lengths); ++row) {
    result.lengths[row] = static_cast<int32_t>(lengths.at(row / num_beams));
  }
  result.seq_lens = result.lengths.data();
  return {};
}

}  // namespace

Result<int64_t> read_table_stride(const kvx_block_table_t& table, int64_t stride) {
  const int64_t width = table.max_blocks_per_seq;
  if (stride == 0) return width;
  if (number_of(table.format) != KVX_BLOCK_TABLE_PACKED) {
    return invalid_argument(
        "args.block_table_stride is {}; expected 0 for a table that is not PACKED", stride);
  }
  // Entries then have addresses of 64 bits, as many sequences as there are.
  constexpr int64_t kMost = INT32_MAX;
  if (stride >= width && stride <= kMost) return stride;
  return invalid_argument(
      "args.block_table_stride is {}; expected 0, or max_blocks_per_seq, {}, to {} entries", stride,
      width, kMost);
}

Status read_table(const kvx_block_table_t* table, const kvx_seq_lens_t* seq_lens, int block_size,
                  TableOfCaller& result, int64_t row_stride) {
  KVX_RETURN_IF_ERROR(check_top_level(table, "block_table"));
  KVX_RETURN_IF_ERROR(check_top_level(seq_lens, "seq_lens"));
  result.num_sequences = 0;
  if (table->seq_count == 0 && seq_lens->seq_count == 0) return {};
  if (table->seq_count > INT32_MAX) {
    return invalid_argument("block_table.seq_count is {}; expected at most {}", table->seq_count,
                            INT32_MAX);
  }
  DeferredErrors deferred_errors;
  KVX_ASSIGN_OR_RETURN(const TableView view, check_table(*table, deferred_errors));
  if (view.num_rows() > INT32_MAX) {
    return invalid_argument("block_table has {} sequences of {} beams; expected at most {} rows",
                            view.num_sequences, view.num_beams, INT32_MAX);
  }
  KVX_ASSIGN_OR_RETURN(const IndexArray lengths,
                       check_seq_lens(*seq_lens, view.num_sequences, deferred_errors));
  KVX_RETURN_IF_ERROR(deferred_errors.status());
  KVX_RETURN_IF_ERROR(read_lengths(lengths, view.num_sequences, view.num_beams, result));
  KVX_ASSIGN_OR_RETURN(const int64_t stride, read_table_stride(*table, row_stride));
  if (view.kind == TableView::Kind::kPacked) {
    read_packed(view, stride, result);
  } else if (view.kind == TableView::Kind::kKvOffsets) {
    KVX_RETURN_IF_ERROR(read_kv_offsets(view, result));
  } else {
    KVX_RETURN_IF_ERROR(read_ragged(view, block_size, result));
  }
  result.num_sequences = static_cast<int>(view.num_rows());
  return {};
}

}  // namespace kvx::boundary

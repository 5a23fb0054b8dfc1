// Checks of slot mappings, block tables and sequence lengths.
#include "api/checks/check_index.hpp"

#include <bit>

#include "api/checks/check_tensor.hpp"
#include "api/guard.hpp"
#include "core/checked.hpp"

namespace kvx::boundary {
namespace {

Result<TableView::Kind> kind_of(const kvx_block_table_t& table) {
  constexpr uint32_t kSupportedFlags =
      KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX | KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES;
  if ((table.flags & ~kSupportedFlags) != 0) {
    return Error{ErrorCode::kIncompatible,
                 fmt::format("block_table.flags is {:#x}; this library supports {:#x}", table.flags,
                             kSupportedFlags)};
  }
  const bool has_pages = (table.flags & KVX_BLOCK_TABLE_FLAG_RAGGED_PAGES) != 0;
  const bool has_kv_index = (table.flags & KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX) != 0;
  const uint32_t format = number_of(table.format);
  if (format != KVX_BLOCK_TABLE_RAGGED && has_pages) {
    return invalid_argument("block_table.flags has RAGGED_PAGES; format {} is not RAGGED", format);
  }
  if (format != KVX_BLOCK_TABLE_KV_OFFSETS && has_kv_index) {
    return invalid_argument("block_table.flags has KVCACHEINDEX; format {} is not KV_OFFSETS",
                            format);
  }
  switch (format) {
    case KVX_BLOCK_TABLE_PACKED:
      return TableView::Kind::kPacked;
    case KVX_BLOCK_TABLE_RAGGED:
      return has_pages ? TableView::Kind::kRaggedPages : TableView::Kind::kRaggedTokens;
    case KVX_BLOCK_TABLE_KV_OFFSETS:
      if (!has_kv_index) {
        return invalid_argument("block_table.flags is {}; KV_OFFSETS needs KVCACHEINDEX 1",
                                table.flags);
      }
      return TableView::Kind::kKvOffsets;
    default:
      return invalid_argument(
          "block_table.format is {}; expected PACKED 1, RAGGED 2 or KV_OFFSETS 3", format);
  }
}

// RAGGED has prefix sums; the other formats have none.
Status check_indptr(const kvx_block_table_t& table, TableView& view,
                    DeferredErrors& deferred_errors) {
  const bool is_ragged =
      view.kind == TableView::Kind::kRaggedTokens || view.kind == TableView::Kind::kRaggedPages;
  if (!is_ragged) {
    if (table.indptr == nullptr && table.indptr_count == 0) return {};
    return invalid_argument("block_table.indptr has {} entries at {}; only RAGGED has an indptr",
                            table.indptr_count, table.indptr);
  }
  const int64_t expected = view.num_sequences + 1;
  if (table.indptr_count != expected) {
    return invalid_argument("block_table.indptr_count is {}; expected {} (seq_count + 1)",
                            table.indptr_count, expected);
  }
  KVX_ASSIGN_OR_RETURN(view.indptr, check_indices(table.indptr_dtype, table.indptr, expected,
                                                  "block_table.indptr_dtype", "block_table.indptr",
                                                  deferred_errors));
  return {};
}

// A block of a pool has the layout of a block of cache.k or cache.v.
Status check_kv_offsets(const kvx_cache_desc_t& cache, const CacheView& geometry, TableView& view,
                        DeferredErrors& deferred_errors) {
  if (!std::has_single_bit(cache.block_size)) {
    return invalid_argument("cache.block_size is {}; KV_OFFSETS needs a power of two",
                            cache.block_size);
  }
  if (cache.pool.primary == nullptr || cache.pool.bytes_per_block == 0) {
    return invalid_argument(
        "cache.pool has primary {} and bytes_per_block {}; KV_OFFSETS needs both",
        cache.pool.primary, cache.pool.bytes_per_block);
  }
  view.pool_memory = memory_type(number_of(cache.pool.memory));
  view.primary = static_cast<uint8_t*>(cache.pool.primary);
  view.secondary = static_cast<uint8_t*>(cache.pool.secondary);
  view.bytes_per_block = cache.pool.bytes_per_block;
  if (!deferred_errors.status().ok()) return {};
  for (const CacheSide* side : {&geometry.k, &geometry.v}) {
    const char* name = side == &geometry.k ? "k" : "v";
    if (view.bytes_per_block < side->block_bytes) {
      return invalid_argument("cache.pool.bytes_per_block is {}; a block of {} takes {}",
                              view.bytes_per_block, name, side->block_bytes);
    }
    const int bytes = bytes_of(side->element);
    check_alignment(view.primary, bytes, "cache.pool.primary", deferred_errors);
    check_alignment(view.secondary, bytes, "cache.pool.secondary", deferred_errors);
    if (view.bytes_per_block % bytes != 0) {
      deferred_errors.add(
          unsupported("cache.pool.bytes_per_block is {}; expected a multiple of {}'s {} "
                      "bytes an element",
                      view.bytes_per_block, name, bytes));
    }
  }
  return {};
}

Status check_indices_count(const kvx_block_table_t& table, const TableView& view) {
  if (view.kind == TableView::Kind::kRaggedTokens || view.kind == TableView::Kind::kRaggedPages) {
    return {};  // check_prefix_sums() compares it with the last prefix sum
  }
  const int64_t sides = view.kind == TableView::Kind::kKvOffsets ? 2 : 1;
  const auto expected = (CheckedSize(view.num_sequences) * CheckedSize(view.num_beams) *
                         CheckedSize(sides) * CheckedSize(view.max_blocks))
                            .get();
  if (expected == int64_t{table.indices_count}) return {};
  return invalid_argument(
      "block_table.indices_count is {}; expected {} ({} sequences x {} beams x "
      "{} sides x {} blocks)",
      table.indices_count, expected.value_or(-1), view.num_sequences, view.num_beams, sides,
      view.max_blocks);
}

}  // namespace

Result<SlotView> check_slot_mapping(const kvx_slot_mapping_t& mapping, int64_t num_tokens,
                                    DeferredErrors& deferred_errors) {
  if (mapping.token_count != num_tokens) {
    return invalid_argument("slots.token_count is {}; io.num_tokens is {}", mapping.token_count,
                            num_tokens);
  }
  KVX_ASSIGN_OR_RETURN(const IndexArray slots,
                       check_indices(mapping.dtype, mapping.slots, num_tokens, "slots.dtype",
                                     "slots.slots", deferred_errors));
  return SlotView{slots, num_tokens, mapping.invalid_slot};
}

namespace {

template <class Slot>
Status check_slots_of(const Slot* list, const SlotView& slots, const CacheView& cache) {
  const int64_t num_slots = cache.num_slots();
  for (int64_t t = 0; t < slots.num_tokens; ++t) {
    if (list[t] < num_slots || list[t] == slots.invalid_slot) continue;
    return out_of_range("slots[{}] is {}; the cache has {} slots ({} blocks of {})", t, slots.at(t),
                        num_slots, cache.num_blocks, cache.block_size);
  }
  return {};
}

}  // namespace

Status check_slots(const SlotView& slots, const CacheView& cache) {
  const void* list = slots.slots.data;
  return slots.slots.is_64_bit ? check_slots_of(static_cast<const int64_t*>(list), slots, cache)
                               : check_slots_of(static_cast<const int32_t*>(list), slots, cache);
}

Result<TableView> check_table(const kvx_block_table_t& table, DeferredErrors& deferred_errors) {
  TableView view;
  KVX_ASSIGN_OR_RETURN(view.kind, kind_of(table));
  if (table.seq_count == 0 || table.max_blocks_per_seq == 0) {
    return invalid_argument(
        "block_table has seq_count {} and max_blocks_per_seq {}; expected at least 1",
        table.seq_count, table.max_blocks_per_seq);
  }
  view.num_sequences = table.seq_count;
  view.max_blocks = table.max_blocks_per_seq;
  view.num_beams = table.beam_width;
  const bool may_have_beams = view.kind == TableView::Kind::kKvOffsets;
  if (table.beam_width == 0 || (table.beam_width != 1 && !may_have_beams)) {
    return invalid_argument("block_table.beam_width is {}; expected {}", table.beam_width,
                            may_have_beams ? "at least 1" : "1");
  }
  view.num_indices = table.indices_count;
  KVX_RETURN_IF_ERROR(check_indices_count(table, view));
  KVX_ASSIGN_OR_RETURN(view.indices, check_indices(table.index_dtype, table.indices,
                                                   table.indices_count, "block_table.index_dtype",
                                                   "block_table.indices", deferred_errors));
  KVX_RETURN_IF_ERROR(check_indptr(table, view, deferred_errors));
  if (may_have_beams && view.indices.is_64_bit) {
    return invalid_argument("block_table.index_dtype is {}; KV_OFFSETS has S32 6",
                            number_of(table.index_dtype));
  }
  return view;
}

Result<TableView> check_table(const kvx_block_table_t& table, const kvx_cache_desc_t& cache,
                              const CacheView& geometry, DeferredErrors& deferred_errors) {
  KVX_ASSIGN_OR_RETURN(TableView view, check_table(table, deferred_errors));
  if (view.kind == TableView::Kind::kKvOffsets) {
    KVX_RETURN_IF_ERROR(check_kv_offsets(cache, geometry, view, deferred_errors));
  }
  return view;
}

Status check_prefix_sums(const TableView& table) {
  if (table.indptr.data == nullptr) return {};
  int64_t previous = 0;
  for (int64_t s = 0; s <= table.num_sequences; ++s) {
    const int64_t sum = table.indptr.at(s);
    if (sum < previous || (s == 0 && sum != 0)) {
      return invalid_argument("block_table.indptr[{}] is {}; expected {}", s, sum,
                              s == 0 ? "0" : "no less than the entry before it");
    }
    previous = sum;
  }
  if (previous == table.num_indices) return {};
  return invalid_argument("block_table.indptr[{}] is {}; expected indices_count {}",
                          table.num_sequences, previous, table.num_indices);
}

Result<IndexArray> check_seq_lens(const kvx_seq_lens_t& seq_lens, int64_t num_sequences,
                                  DeferredErrors& deferred_errors) {
  if (seq_lens.seq_count != num_sequences) {
    return invalid_argument("seq_lens.seq_count is {}; block_table.seq_count is {}",
                            seq_lens.seq_count, num_sequences);
  }
  return check_indices(seq_lens.dtype, seq_lens.lengths, num_sequences, "seq_lens.dtype",
                       "seq_lens.lengths", deferred_errors);
}

}  // namespace kvx::boundary

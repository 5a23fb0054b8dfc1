// Checks of slot mappings, block tables, sequence lengths and scales: first the descriptors, later,
// when nothing was found, what the arrays hold.
#pragma once

#include "abi/findings.hpp"
#include "abi/views.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::abi {

struct SlotView {
  IndexArray slots;
  int64_t num_tokens = 0;
  int64_t invalid_slot = -1;

  // Negative when the token is not to be written.
  int64_t at(int64_t token) const {
    const int64_t slot = slots.at(token);
    return slot == invalid_slot ? -1 : slot;
  }
};

Result<SlotView> check_slot_mapping(const kvx_slot_mapping_t& mapping, int64_t num_tokens,
                                    Findings& findings);
// OUT_OF_RANGE: a slot beyond the cache.
Status check_slots(const SlotView& slots, const CacheView& cache);

// A rectangle [rows, width] of block ids, or a list of them with prefix sums.
struct TableView {
  enum class Kind : uint8_t { kPacked, kRaggedTokens, kRaggedPages, kKvOffsets };
  Kind kind = Kind::kPacked;
  int64_t num_sequences = 0;
  int64_t num_beams = 1;
  int64_t max_blocks = 0;
  IndexArray indices;
  int64_t num_indices = 0;
  IndexArray indptr;  // [num_sequences + 1]; ragged only
  uint8_t* primary = nullptr;
  uint8_t* secondary = nullptr;
  int64_t bytes_per_block = 0;

  int64_t num_rows() const { return num_sequences * num_beams; }
};

Result<TableView> check_table(const kvx_block_table_t& table, const kvx_cache_desc_t& cache,
                              const CacheView& view, Findings& findings);
// INVALID_ARGUMENT: prefix sums that do not begin at 0, decrease or do not end at indices_count.
Status check_prefix_sums(const TableView& table);

Result<IndexArray> check_seq_lens(const kvx_seq_lens_t& seq_lens, int64_t num_sequences,
                                  Findings& findings);

// The scales of K or V in a write. All-zero descriptors and null data leave `fallback`, one f32, or
// nothing.
Status check_scale_size(const kvx_scale_desc_t& desc, std::string_view name);
Result<ScaleView> check_scale(const kvx_scale_desc_t& desc, const void* fallback,
                              const CacheView& cache, std::string_view name, Findings& findings);

}  // namespace kvx::abi

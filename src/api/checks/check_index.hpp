// Checks of slot mappings, block tables, sequence lengths and scales: first the descriptors and,
// when those are right, the contents of the arrays.
#pragma once

#include "api/checks/deferred_errors.hpp"
#include "api/checks/v1_views.hpp"
#include "kvx/kvx_abi.h"

namespace kvx::boundary {

Result<SlotView> check_slot_mapping(const kvx_slot_mapping_t& mapping, int64_t num_tokens,
                                    DeferredErrors& deferred_errors);
// OUT_OF_RANGE: a slot is beyond the cache.
Status check_slots(const SlotView& slots, const CacheView& cache);

// The table by itself.
Result<TableView> check_table(const kvx_block_table_t& table, DeferredErrors& deferred_errors);
// With the pool of KV_OFFSETS, which v1's calls take from their cache.
Result<TableView> check_table(const kvx_block_table_t& table, const kvx_cache_desc_t& cache,
                              const CacheView& view, DeferredErrors& deferred_errors);
// INVALID_ARGUMENT: prefix sums that do not begin at 0, decrease or do not end at indices_count.
Status check_prefix_sums(const TableView& table);

Result<IndexArray> check_seq_lens(const kvx_seq_lens_t& seq_lens, int64_t num_sequences,
                                  DeferredErrors& deferred_errors);

// Checks the scales of K or V in a write. A descriptor with null data selects `fallback`, which is
// one f32, or null for a scale of 1.
Status check_scale_size(const kvx_scale_desc_t& desc, std::string_view name);
Result<ScaleView> check_scale(const kvx_scale_desc_t& desc, const void* fallback,
                              const CacheView& cache, std::string_view name,
                              DeferredErrors& deferred_errors);

}  // namespace kvx::boundary

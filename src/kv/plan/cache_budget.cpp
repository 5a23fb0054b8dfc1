// A block's bytes are a whole sequence's, divided by its blocks.
#include "kv/plan/cache_budget.hpp"

#include "cache/pool/memory_budget.hpp"
#include "core/checked.hpp"

namespace kvx::kv {
namespace {

Result<int64_t> bytes_of_block(const KvCacheConfig& config) {
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans,
                       plan_layers(config.geometry, config.recipe, config.overrides));
  KVX_ASSIGN_OR_RETURN(const std::vector<GroupPlan> groups,
                       plan_groups(config.geometry, plans, config.recipe, config.block_size));
  int64_t bytes = 0;
  for (const GroupPlan& group : groups) {
    const cache::BlockCounts blocks = cache::count_blocks(
        group.full_precision_window, config.max_tokens_per_sequence, config.block_size);
    bytes += blocks.packed * group.packed.block_bytes +
             blocks.full_precision * group.full_precision.block_bytes;
  }
  return ceil_div(bytes, cache::blocks_for(config.max_tokens_per_sequence, config.block_size));
}

}  // namespace

Result<int64_t> cache_budget_bytes(const KvCacheConfig& config, std::string_view budget,
                                   int64_t available_bytes) {
  KVX_ASSIGN_OR_RETURN(const cache::MemoryBudget parsed, cache::parse_memory_budget(budget));
  KVX_ASSIGN_OR_RETURN(const int64_t block_bytes, bytes_of_block(config));
  return cache::resolve_budget(parsed, available_bytes, block_bytes);
}

}  // namespace kvx::kv

// kvx_turbomind_sequence_blocks: pointer tables into a cache that owns blocks in TurboMind's order.
#include <mutex>

#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

Status check_order(const kv::CacheStorage& storage, uint32_t layer_group, bool wants_scales) {
  if (storage.config.recipe.order != cache::BlockOrder::kTurbomind) {
    return invalid_argument(
        "cache has blocks in order=heads; expected a recipe with order=turbomind");
  }
  if (storage.has_full_precision_window()) {
    return unsupported(
        "cache has a full-precision window, whose blocks TurboMind does not read; expected a "
        "recipe "
        "without sink and recent");
  }
  if (layer_group >= storage.groups.size()) {
    return invalid_argument("layer_group is {}; the cache has {}", layer_group,
                            storage.groups.size());
  }
  if (wants_scales && storage.groups[layer_group].packed.scale_block_bytes == 0) {
    return unsupported("scale_block_ptrs is set; the recipe '{}' has no scale blocks",
                       storage.config.recipe.text);
  }
  return {};
}

Status sequence_blocks(kvx_cache_t handle, int32_t sequence, uint32_t layer_group,
                       void** block_ptrs, void** scale_block_ptrs, int64_t capacity,
                       int64_t* num_blocks) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  const kv::SequenceTable& table = owned->cache->table();
  KVX_RETURN_IF_ERROR(check_order(table.storage, layer_group, scale_block_ptrs != nullptr));
  if (num_blocks == nullptr) return invalid_argument("num_blocks is null");
  if (capacity < 0 || (capacity > 0 && block_ptrs == nullptr)) {
    return invalid_argument("block_ptrs is {} with capacity {}; expected room for that many",
                            static_cast<const void*>(block_ptrs), capacity);
  }
  const auto group = static_cast<int>(layer_group);
  const cache::BlockLayout& layout = table.storage.groups[layer_group].packed;
  const std::lock_guard lock(table.mutex);
  const cache::BlockTable& ids = table.sequences[index].table(group);
  for (int64_t b = 0; b < std::min(capacity, ids.size()); ++b) {
    // Null: a sliding window has left the block behind.
    uint8_t* const block =
        ids[b] == cache::kNoBlock
            ? nullptr
            : table.storage.block_bytes(table.storage.packed_class(group), ids[b]).data();
    block_ptrs[b] = block;
    if (scale_block_ptrs == nullptr) continue;
    scale_block_ptrs[b] = block == nullptr ? nullptr : block + layout.scale_block_offset;
  }
  *num_blocks = ids.size();
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_turbomind_sequence_blocks(kvx_cache_t cache, int32_t sequence,
                                                      uint32_t layer_group, void** block_ptrs,
                                                      void** scale_block_ptrs, int64_t capacity,
                                                      int64_t* num_blocks) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::sequence_blocks(cache, sequence, layer_group, block_ptrs,
                                          scale_block_ptrs, capacity, num_blocks);
  });
}

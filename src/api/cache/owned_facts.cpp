// kvx_cache_snapshot, kvx_cache_head_counts, kvx_cache_block_class and kvx_cache_set_listener:
// facts and events of a cache.
#include "api/cache/owned_cache.hpp"
#include "api/call.hpp"

namespace kvx::boundary {
namespace {

uint32_t tier_number(cache::Tier tier) {
  static_assert(static_cast<int>(cache::Tier::kFirst) == KVX_CACHE_TIER_POOL);
  static_assert(static_cast<int>(cache::Tier::kHost) == KVX_CACHE_TIER_HOST);
  static_assert(static_cast<int>(cache::Tier::kDisk) == KVX_CACHE_TIER_DISK);
  static_assert(static_cast<int>(cache::Tier::kStore) == KVX_CACHE_TIER_STORE);
  return static_cast<uint32_t>(tier);
}

Status snapshot(kvx_cache_t handle, kvx_cache_snapshot_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  const kv::KvCacheSnapshot seen = owned->cache->snapshot();
  kvx_cache_snapshot_t answer{};
  answer.num_classes = static_cast<uint32_t>(seen.classes.size());
  answer.num_sequences = seen.num_sequences;
  for (const cache::BlockClassSnapshot& one : seen.classes) {
    answer.allocated_bytes += (one.num_active + one.num_cached + one.num_free) * one.block_bytes;
  }
  answer.metadata_bytes = seen.metadata_bytes;
  answer.nonfinite_inputs = owned->cache->nonfinite_inputs();
  answer.prefix_queries = seen.prefix.num_queries;
  answer.prefix_hit_blocks = seen.prefix.num_hit_blocks;
  answer.prefix_miss_blocks = seen.prefix.num_miss_blocks;
  answer.prefix_stored = seen.prefix.num_stored;
  answer.prefix_removed = seen.prefix.num_removed;
  answer.prefix_refused = seen.prefix.num_refused;
  answer.prefix_nodes = seen.prefix.num_nodes;
  for (const tier::HostTierSnapshot& one : seen.tiers) {
    answer.host_allocated_bytes += one.allocated_bytes;
    answer.host_held_bytes += one.held_bytes;
    answer.host_metadata_bytes += one.metadata_bytes;
    answer.host_stored += one.num_stored;
    answer.host_loaded += one.num_loaded;
    answer.host_bad += one.num_bad;
    answer.host_dropped += one.num_dropped;
    answer.host_stores_queued += one.stores_queued;
    answer.host_loads_queued += one.loads_queued;
  }
  answer.num_tiers = static_cast<uint32_t>(seen.tiers.size());
  answer.saturated_inputs = owned->cache->saturated_inputs().value_or(-1);
  return write_struct(answer, caller, "snapshot");
}

Status head_counts(kvx_cache_t handle, uint32_t layer, uint32_t kv_head,
                   kvx_head_counts_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const std::vector<kv::LayerCounts> layers, owned->cache->head_counts());
  if (layer >= layers.size()) {
    return out_of_range("layer is {}; the cache has layers 0 to {}", layer, layers.size() - 1);
  }
  const kv::LayerCounts& counts = layers[layer];
  if (kv_head >= counts.k.size()) {
    return out_of_range("kv_head is {}; the cache has KV heads 0 to {}", kv_head,
                        counts.k.size() - 1);
  }
  kvx_head_counts_t answer{};
  answer.k_saturated = counts.k[kv_head].saturated;
  answer.k_nonfinite = counts.k[kv_head].nonfinite;
  answer.v_saturated = counts.v[kv_head].saturated;
  answer.v_nonfinite = counts.v[kv_head].nonfinite;
  return write_struct(answer, caller, "counts");
}

Status tier_facts(kvx_cache_t handle, uint32_t index, kvx_cache_tier_facts_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  const kv::KvCacheSnapshot seen = owned->cache->snapshot();
  if (index >= seen.tiers.size()) {
    return out_of_range("index is {}; the cache has {} tiers behind its pool", index,
                        seen.tiers.size());
  }
  const tier::HostTierSnapshot& one = seen.tiers[index];
  kvx_cache_tier_facts_t answer{};
  answer.tier = tier_number(one.tier);
  answer.allocated_bytes = one.allocated_bytes;
  answer.held_bytes = one.held_bytes;
  answer.metadata_bytes = one.metadata_bytes;
  answer.num_stored = one.num_stored;
  answer.num_loaded = one.num_loaded;
  answer.num_moved_down = one.num_moved_down;
  for (const cache::BlockClassSnapshot& blocks : one.classes) {
    answer.num_evicted += blocks.num_evicted;
  }
  answer.num_dropped = one.num_dropped;
  answer.num_bad = one.num_bad;
  answer.stores_queued = one.stores_queued;
  answer.loads_queued = one.loads_queued;
  answer.hit_blocks = one.prefix.num_hit_blocks;
  answer.miss_blocks = one.prefix.num_miss_blocks;
  answer.store_median_us = one.store_latency.quantile(0.5);
  answer.store_p99_us = one.store_latency.quantile(0.99);
  answer.load_median_us = one.load_latency.quantile(0.5);
  answer.load_p99_us = one.load_latency.quantile(0.99);
  answer.num_failed_calls = one.num_failed_calls;
  return write_struct(answer, caller, "facts");
}

Status block_class(kvx_cache_t handle, uint32_t index, kvx_block_class_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  const kv::KvCacheSnapshot seen = owned->cache->snapshot();
  if (index >= seen.classes.size()) {
    return out_of_range("index is {}; the cache has {} classes", index, seen.classes.size());
  }
  const cache::BlockClassSnapshot& one = seen.classes[index];
  const kv::BlockClassFacts facts = owned->cache->facts_of_class(static_cast<int>(index));
  kvx_block_class_t answer{};
  answer.layer_group = static_cast<uint32_t>(facts.group);
  answer.name = facts.name.c_str();
  answer.is_full_precision = facts.is_full_precision ? 1 : 0;
  answer.block_size = static_cast<uint32_t>(owned->cache->config().block_size);
  answer.window = facts.window;
  answer.sinks = facts.sinks;
  answer.block_bytes = one.block_bytes;
  answer.num_blocks = one.num_active + one.num_cached + one.num_free;
  answer.num_active = one.num_active;
  answer.num_cached = one.num_cached;
  answer.num_free = one.num_free;
  answer.num_evicted = one.num_evicted;
  answer.num_revived = one.num_revived;
  return write_struct(answer, caller, "block_class");
}

// ---- events

static_assert(sizeof(cache::ContentHash) == 16);

void call_listener(const kvx_cache_listener_t& listener, const cache::PrefixEvent& event) {
  kvx_cache_event_t callers_event{};
  callers_event.size = sizeof callers_event;
  callers_event.tier = tier_number(event.tier);
  if (event.kind == cache::PrefixEvent::Kind::kAllCleared) {
    callers_event.kind = KVX_CACHE_EVENT_ALL_CLEARED;
  } else {
    callers_event.kind = event.kind == cache::PrefixEvent::Kind::kStored ? KVX_CACHE_EVENT_STORED
                                                                         : KVX_CACHE_EVENT_REMOVED;
    callers_event.hash = event.hash.bytes.data();
    callers_event.parent = event.parent.bytes.data();
    callers_event.tokens = event.tokens.data();
    callers_event.num_tokens = static_cast<int64_t>(event.tokens.size());
  }
  listener.on_event(listener.user, &callers_event);
}

Status set_listener(kvx_cache_t handle, const kvx_cache_listener_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (caller == nullptr) {
    owned->cache->set_prefix_listener({});
    return {};
  }
  KVX_ASSIGN_OR_RETURN(const kvx_cache_listener_t args, read_struct(caller, "listener"));
  if (args.reserved != 0)
    return invalid_argument("listener.reserved is {}; expected 0", args.reserved);
  if (args.on_event == nullptr) return invalid_argument("listener.on_event is null");
  owned->cache->set_prefix_listener([owned, args](const cache::PrefixEvent& event) {
    owned->is_in_listener = true;
    call_listener(args, event);
    owned->is_in_listener = false;
  });
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_cache_snapshot(kvx_cache_t cache, kvx_cache_snapshot_t* snapshot) {
  return kvx::boundary::run_call([&] { return kvx::boundary::snapshot(cache, snapshot); });
}

extern "C" kvx_status_t kvx_cache_head_counts(kvx_cache_t cache, uint32_t layer, uint32_t kv_head,
                                              kvx_head_counts_t* counts) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::head_counts(cache, layer, kv_head, counts); });
}

extern "C" kvx_status_t kvx_cache_tier_facts(kvx_cache_t cache, uint32_t index,
                                             kvx_cache_tier_facts_t* facts) {
  return kvx::boundary::run_call([&] { return kvx::boundary::tier_facts(cache, index, facts); });
}

extern "C" kvx_status_t kvx_cache_block_class(kvx_cache_t cache, uint32_t index,
                                              kvx_block_class_t* block_class) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::block_class(cache, index, block_class); });
}

extern "C" kvx_status_t kvx_cache_set_listener(kvx_cache_t cache,
                                               const kvx_cache_listener_t* listener) {
  return kvx::boundary::run_call([&] { return kvx::boundary::set_listener(cache, listener); });
}

// KvCache: what sequences share. Prefixes, forks, and cutting back.
#include <algorithm>

#include "kv/kv_cache.hpp"

namespace kvx::kv {

// ---- prefixes

Result<int> KvCache::create_sequence_from(const cache::PrefixKeys& keys,
                                          std::span<const int32_t> tokens, std::string_view session,
                                          tier::LoadOrder order) {
  if (!table_->prefixes) return prefixes_are_off();
  const LatencyTimer timer(table_->latencies.lookup);
  std::unique_lock lock(table_->mutex);
  table_->collect();
  KVX_ASSIGN_OR_RETURN(const int sequence, table_->acquire_sequence());
  KVX_RETURN_IF_ERROR(table_->prefixes->begin(sequence, keys, session));
  const int64_t max_blocks = most_cached_blocks(tokens);
  tier::Promotion promotion;
  if (table_->tiers) {
    table_->uses[sequence] = SequenceUse::kInStep;  // nobody else's while the lock is open
    promotion = bring_back(lock, sequence, tokens, max_blocks, order);
  }
  const auto adopted = table_->prefixes->adopt(sequence, table_->sequences[sequence], tokens,
                                               max_blocks, promotion.coming);
  if (adopted.ok() && !promotion.layers.empty()) {
    table_->loads[sequence] = std::make_shared<tier::Promotion>(std::move(promotion));
  } else if (table_->tiers) {
    finish_layers(lock, promotion);
    table_->tiers->release(promotion);
  }
  table_->uses[sequence] = adopted.ok() ? SequenceUse::kIdle : SequenceUse::kFree;
  if (!adopted.ok()) {
    table_->prefixes->end(sequence);
    return adopted.error();
  }
  return sequence;
}

Status KvCache::record_tokens(int sequence, std::span<const int32_t> tokens) {
  const std::lock_guard lock(table_->mutex);
  KVX_RETURN_IF_ERROR(table_->check_sequence(sequence));
  if (!table_->prefixes) return {};
  table_->collect();
  return table_->prefixes->record(sequence, table_->sequences[sequence], tokens);
}

Status KvCache::clear_prefixes() {
  const auto lock = table_->lock_drained();
  if (table_->tiers) KVX_RETURN_IF_ERROR(table_->tiers->clear());
  return table_->prefixes ? table_->prefixes->index().clear() : Status{};
}

Result<int64_t> KvCache::evict_blocks(int64_t num_blocks) {
  const auto lock = table_->lock_drained();
  if (num_blocks < 0) return invalid_argument("num_blocks is {}; expected 0 or more", num_blocks);
  int64_t num_evicted = 0;
  for (int c = 0; c < storage().pool->num_classes(); ++c)
    num_evicted += storage().pool->evict(c, num_blocks);
  return num_evicted;
}

BlockClassFacts KvCache::facts_of_class(int block_class) const {
  const int group = storage().has_full_precision_window() ? block_class / 2 : block_class;
  const bool is_full_precision =
      storage().has_full_precision_window() && block_class == storage().full_precision_class(group);
  return {storage().pool->name(block_class), group, is_full_precision,
          storage().groups[group].window, storage().groups[group].sinks};
}

void KvCache::set_prefix_listener(PrefixListener listener) {
  const std::lock_guard lock(table_->mutex);
  table_->listener = std::move(listener);
  table_->connect_listeners();
}

Status KvCache::set_event_publisher(PrefixListener publisher, const PrefixListener& tell_stored) {
  if (!table_->prefixes) return prefixes_are_off();
  const std::lock_guard lock(table_->mutex);
  table_->publisher = std::move(publisher);
  table_->connect_listeners();
  if (!tell_stored) return {};
  table_->prefixes->index().for_each_stored(tell_stored);
  for (int i = 0; table_->tiers && i < table_->tiers->num_tiers(); ++i) {
    const tier::HostTier& one = table_->tiers->tier(i);
    one.nodes().for_each_stored([&](cache::PrefixEvent event) {
      event.tier = one.tier();
      tell_stored(event);
    });
  }
  return {};
}

KvCacheSnapshot KvCache::snapshot() const {
  const std::lock_guard lock(table_->mutex);
  table_->collect();
  KvCacheSnapshot snapshot;
  for (int c = 0; c < storage().pool->num_classes(); ++c)
    snapshot.classes.push_back(storage().pool->snapshot(c));
  snapshot.num_sequences =
      storage().config.max_sequences -
      static_cast<int>(std::count(table_->uses.begin(), table_->uses.end(), SequenceUse::kFree));
  if (!table_->prefixes) return snapshot;
  snapshot.prefix = table_->prefixes->index().counters();
  snapshot.metadata_bytes = table_->prefixes->index().metadata_bytes();
  if (table_->tiers) snapshot.tiers = table_->tiers->snapshot();
  return snapshot;
}

// ---- forks and cuts

Result<int> KvCache::fork_sequence(int sequence) {
  const std::lock_guard lock(table_->mutex);
  KVX_RETURN_IF_ERROR(table_->check_sequence(sequence));
  KVX_ASSIGN_OR_RETURN(const int fork, table_->acquire_sequence());
  KVX_RETURN_IF_ERROR(table_->sequences[fork].share(*storage().pool, table_->sequences[sequence]));
  if (table_->prefixes) table_->prefixes->fork(sequence, fork);
  table_->uses[fork] = SequenceUse::kIdle;
  return fork;
}

Status KvCache::truncate_sequence(int sequence, int64_t num_tokens) {
  const std::lock_guard lock(table_->mutex);
  KVX_RETURN_IF_ERROR(table_->check_sequence(sequence));
  const int64_t num_before = table_->sequences[sequence].num_tokens();
  if (num_tokens < 0 || num_tokens > num_before) {
    return out_of_range("num_tokens is {}; expected 0 to {}", num_tokens, num_before);
  }
  KVX_RETURN_IF_ERROR(table_->check_cut(sequence, num_tokens, num_before));
  table_->abandon_outgoing(sequence, "the sequence was cut before its last layer");
  const Status done = table_->cut(*verbs_, sequence, num_tokens, num_before);
  // The recorded tokens follow the sequence, also where its last page could not be restored.
  if (!done.ok() && table_->sequences[sequence].num_tokens() != num_tokens) return done;
  if (!table_->speculations.empty()) table_->speculations[sequence].release(*storage().pool);
  if (table_->prefixes) table_->prefixes->truncate(sequence, num_tokens);
  return done;
}

Status KvCache::release_expired(int sequence) {
  const std::lock_guard lock(table_->mutex);
  KVX_RETURN_IF_ERROR(table_->check_sequence(sequence));
  return table_->sequences[sequence].release_expired(*storage().pool);
}

}  // namespace kvx::kv

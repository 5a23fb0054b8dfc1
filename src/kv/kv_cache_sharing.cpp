// KvCache: what sequences share. Prefixes, forks, and cutting back.
#include <algorithm>

#include "kv/files/fingerprint.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::kv {

Status KvCache::create_prefix_cache(std::span<const LayerPlan> plans) {
  if (!config_.prefix.is_on) return {};
  const FingerprintFacts facts{&config_.geometry,
                               plans,
                               config_.calibration,
                               full_precision_window_,
                               &config_.recipe.full_precision_spec,
                               config_.block_size,
                               config_.prefix.model};
  KVX_ASSIGN_OR_RETURN(prefixes_,
                       PrefixCache::create(*pool_, sequence_shape(), config_.prefix,
                                           fingerprint_of(facts), config_.max_sequences));
  return {};
}

// ---- prefixes

Result<int> KvCache::create_sequence_from(const cache::PrefixKeys& keys,
                                          std::span<const int32_t> tokens) {
  if (!prefixes_) return prefixes_are_off();
  std::unique_lock lock(state_mutex_);
  collect();
  KVX_ASSIGN_OR_RETURN(const int sequence, acquire_sequence());
  KVX_RETURN_IF_ERROR(prefixes_->begin(sequence, keys));
  const int64_t max_blocks = most_cached_blocks(tokens);
  tier::Promotion promotion;
  if (host_) {
    uses_[sequence] = Use::kInStep;  // nobody else's while the lock is open
    promotion = bring_back(lock, sequence, tokens, max_blocks);
  }
  const auto adopted = prefixes_->adopt(sequence, sequences_[sequence], tokens, max_blocks);
  if (host_) host_->release(promotion);
  uses_[sequence] = adopted.ok() ? Use::kIdle : Use::kFree;
  if (!adopted.ok()) {
    prefixes_->end(sequence);
    return adopted.error();
  }
  return sequence;
}

Status KvCache::record_tokens(int sequence, std::span<const int32_t> tokens) {
  const std::lock_guard lock(state_mutex_);
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  if (!prefixes_) return {};
  collect();
  return prefixes_->record(sequence, sequences_[sequence], tokens);
}

Status KvCache::clear_prefixes() {
  const auto lock = lock_drained();
  if (host_) KVX_RETURN_IF_ERROR(host_->clear());
  return prefixes_ ? prefixes_->index().clear() : Status{};
}

Result<int64_t> KvCache::evict_blocks(int64_t num_blocks) {
  const auto lock = lock_drained();
  if (num_blocks < 0) return invalid_argument("num_blocks is {}; expected 0 or more", num_blocks);
  int64_t num_evicted = 0;
  for (int c = 0; c < pool_->num_classes(); ++c) num_evicted += pool_->evict(c, num_blocks);
  return num_evicted;
}

BlockClassFacts KvCache::facts_of_class(int block_class) const {
  const int group = has_full_precision_window() ? block_class / 2 : block_class;
  const bool is_full_precision =
      has_full_precision_window() && block_class == full_precision_class(group);
  return {pool_->name(block_class), group, is_full_precision, groups_[group].window,
          groups_[group].sinks};
}

void KvCache::set_prefix_listener(std::function<void(const cache::PrefixEvent&)> listener) {
  const std::lock_guard lock(state_mutex_);
  if (host_) host_->set_listener(listener);
  if (prefixes_) prefixes_->index().set_listener(std::move(listener));
}

KvCacheSnapshot KvCache::snapshot() const {
  const std::lock_guard lock(state_mutex_);
  collect();
  KvCacheSnapshot snapshot;
  for (int c = 0; c < pool_->num_classes(); ++c) snapshot.classes.push_back(pool_->snapshot(c));
  snapshot.num_sequences =
      config_.max_sequences - static_cast<int>(std::count(uses_.begin(), uses_.end(), Use::kFree));
  if (!prefixes_) return snapshot;
  snapshot.prefix = prefixes_->index().counters();
  snapshot.metadata_bytes = prefixes_->index().metadata_bytes();
  if (host_) snapshot.host = host_->snapshot();
  return snapshot;
}

// ---- forks and cuts

Result<int> KvCache::fork_sequence(int sequence) {
  const std::lock_guard lock(state_mutex_);
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  KVX_ASSIGN_OR_RETURN(const int fork, acquire_sequence());
  KVX_RETURN_IF_ERROR(sequences_[fork].share(*pool_, sequences_[sequence]));
  if (prefixes_) prefixes_->fork(sequence, fork);
  uses_[fork] = Use::kIdle;
  return fork;
}

Status KvCache::truncate_sequence(int sequence, int64_t num_tokens) {
  const std::lock_guard lock(state_mutex_);
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  const int64_t num_before = sequences_[sequence].num_tokens();
  if (num_tokens < 0 || num_tokens > num_before) {
    return out_of_range("num_tokens is {}; expected 0 to {}", num_tokens, num_before);
  }
  KVX_RETURN_IF_ERROR(check_cut(sequence, num_tokens, num_before));
  const Status done = cut(*verbs_, sequence, num_tokens, num_before);
  // The books follow the sequence, also where its last page could not be restored.
  if (!done.ok() && sequences_[sequence].num_tokens() != num_tokens) return done;
  if (!speculations_.empty()) speculations_[sequence].let_go(*pool_);
  if (prefixes_) prefixes_->truncate(sequence, num_tokens);
  return done;
}

Status KvCache::release_expired(int sequence) {
  const std::lock_guard lock(state_mutex_);
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  return sequences_[sequence].release_expired(*pool_);
}

std::vector<LayerCopy> KvCache::layer_copies(int group, CopyKind kind) const {
  std::vector<LayerCopy> copies;
  for (int layer : groups_[group].layers) {
    const LayerStore& store = *layers_[layer];
    const ops::LayerView& full_precision = store.full_precision_in_packed_runs();
    copies.push_back({kind == CopyKind::kPacked ? &store.packed() : &full_precision,
                      kind == CopyKind::kFullPrecision ? &full_precision : &store.packed()});
  }
  return copies;
}

}  // namespace kvx::kv

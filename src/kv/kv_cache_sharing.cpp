// KvCache: what sequences share. Prefixes, forks, and cutting back.
#include <algorithm>

#include "kv/fingerprint.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::kv {

Status KvCache::create_prefix_cache(std::span<const LayerPlan> plans) {
  if (!config_.prefix.is_on) return {};
  const FingerprintFacts facts{&config_.geometry,         plans,
                               config_.calibration,       wide_ends_,
                               &config_.recipe.wide_spec, config_.block_size,
                               config_.prefix.model};
  KVX_ASSIGN_OR_RETURN(prefixes_,
                       PrefixCache::create(*pool_, sequence_shape(), config_.prefix,
                                           fingerprint_of(facts), config_.max_sequences));
  return {};
}

// ---- prefixes

Result<int> KvCache::create_sequence_from(const cache::PrefixKeys& keys,
                                          std::span<const int32_t> tokens) {
  if (!prefixes_) return unsupported("prefix caching is off; expected config.prefix.is_on");
  if (step_.is_open) return invalid_argument("a step is open; call end_step first");
  KVX_ASSIGN_OR_RETURN(const int sequence, take_sequence());
  KVX_RETURN_IF_ERROR(prefixes_->begin(sequence, keys));
  const auto num_wanted = static_cast<int64_t>(tokens.size()) - 1;
  const int64_t num_most = std::min(num_wanted, config_.max_tokens_per_sequence);
  const int64_t max_blocks = std::max<int64_t>(num_most, 0) / config_.block_size;
  const auto adopted = prefixes_->adopt(sequence, sequences_[sequence], tokens, max_blocks);
  if (!adopted.ok()) {
    prefixes_->end(sequence);
    return adopted.error();
  }
  in_use_[sequence] = true;
  return sequence;
}

Status KvCache::record_tokens(int sequence, std::span<const int32_t> tokens) {
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  if (!prefixes_) return {};
  return prefixes_->record(sequence, sequences_[sequence], tokens);
}

Status KvCache::clear_prefixes() {
  if (step_.is_open) return invalid_argument("a step is open; call end_step first");
  return prefixes_ ? prefixes_->index().clear() : Status{};
}

Result<int64_t> KvCache::evict_blocks(int64_t num_blocks) {
  if (step_.is_open) return invalid_argument("a step is open; call end_step first");
  if (num_blocks < 0) return invalid_argument("num_blocks is {}; expected 0 or more", num_blocks);
  int64_t num_evicted = 0;
  for (int c = 0; c < pool_->num_classes(); ++c) num_evicted += pool_->evict(c, num_blocks);
  return num_evicted;
}

BlockClassFacts KvCache::facts_of_class(int block_class) const {
  const int group = has_wide_ends() ? block_class / 2 : block_class;
  const bool is_wide = has_wide_ends() && block_class == wide_class(group);
  return {pool_->name(block_class), group, is_wide, groups_[group].window};
}

void KvCache::set_prefix_listener(std::function<void(const cache::PrefixEvent&)> listener) {
  if (prefixes_) prefixes_->index().set_listener(std::move(listener));
}

KvCacheSnapshot KvCache::snapshot() const {
  KvCacheSnapshot snapshot;
  for (int c = 0; c < pool_->num_classes(); ++c) snapshot.classes.push_back(pool_->snapshot(c));
  snapshot.num_sequences = static_cast<int>(std::count(in_use_.begin(), in_use_.end(), true));
  if (!prefixes_) return snapshot;
  snapshot.prefix = prefixes_->index().counters();
  snapshot.metadata_bytes = prefixes_->index().metadata_bytes();
  return snapshot;
}

// ---- forks and cuts

Result<int> KvCache::fork_sequence(int sequence) {
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  KVX_ASSIGN_OR_RETURN(const int twin, take_sequence());
  KVX_RETURN_IF_ERROR(sequences_[twin].share(*pool_, sequences_[sequence]));
  if (prefixes_) prefixes_->fork(sequence, twin);
  in_use_[twin] = true;
  return twin;
}

// Requires: 0 <= num_tokens <= num_tokens_before.
Status KvCache::check_cut(int sequence, int64_t num_tokens, int64_t num_tokens_before) const {
  const bool has_page_scales =
      std::any_of(groups_.begin(), groups_.end(),
                  [](const GroupPlan& group) { return group.packed.page_scale_bytes > 0; });
  const bool cuts_block = num_tokens % config_.block_size != 0 && num_tokens < num_tokens_before;
  if (has_wide_ends() || !has_page_scales || !cuts_block) return {};
  return unsupported(
      "sequence {} would be cut to {} tokens, inside a page whose shared scale may have grown; "
      "expected a multiple of block_size {}, or a fork made before the append",
      sequence, num_tokens, config_.block_size);
}

Status KvCache::truncate_sequence(int sequence, int64_t num_tokens) {
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  KVX_RETURN_IF_ERROR(check_cut(sequence, num_tokens, sequences_[sequence].num_tokens()));
  KVX_RETURN_IF_ERROR(sequences_[sequence].truncate(*pool_, num_tokens));
  if (prefixes_) prefixes_->truncate(sequence, num_tokens);
  return {};
}

Status KvCache::end_step(std::span<const int> kept_tokens) {
  if (!step_.is_open) return invalid_argument("no step is open; call begin_step first");
  if (kept_tokens.size() != step_.entries.size()) {
    return invalid_argument("kept_tokens has {} counts; the step has {} entries",
                            kept_tokens.size(), step_.entries.size());
  }
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const StepEntry& entry = step_.entries[i];
    if (kept_tokens[i] < 0 || kept_tokens[i] > entry.num_tokens) {
      return invalid_argument("kept_tokens[{}] is {}; expected 0 to {}", i, kept_tokens[i],
                              entry.num_tokens);
    }
    const int64_t before = sequences_[entry.sequence].num_tokens();
    KVX_RETURN_IF_ERROR(
        check_cut(entry.sequence, before + kept_tokens[i], before + entry.num_tokens));
  }
  KVX_RETURN_IF_ERROR(end_step());
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const StepEntry& entry = step_.entries[i];
    cache::Sequence& sequence = sequences_[entry.sequence];
    const int64_t kept = sequence.num_tokens() - entry.num_tokens + kept_tokens[i];
    KVX_RETURN_IF_ERROR(sequence.truncate(*pool_, kept));
  }
  return {};
}

// An open block that another sequence or the prefix index needs as it is gets a copy, in all layers
// of its group.
Status KvCache::copy_open_blocks(const StepEntry& entry) {
  cache::Sequence& sequence = sequences_[entry.sequence];
  open_copies_.clear();
  KVX_RETURN_IF_ERROR(sequence.take_copies(*pool_, open_copies_));
  for (const cache::OpenBlockCopy& copy : open_copies_) {
    const bool is_wide = has_wide_ends() && copy.block_class == wide_class(copy.group);
    KVX_RETURN_IF_ERROR(
        copy_block(copy.group, is_wide, {copy.from_id, copy.to_id, copy.num_tokens}));
  }
  return sequence.finish_copies(*pool_, open_copies_);
}

// The first tokens of a block to another of its class, as they are stored.
Status KvCache::copy_block(int group, bool is_wide, const ops::BlockCopy& copy) {
  copies_.assign(1, copy);
  for (int layer : groups_[group].layers) {
    const ops::LayerView& view = is_wide ? layers_[layer]->wide() : layers_[layer]->packed();
    KVX_RETURN_IF_ERROR(ops::copy_blocks(context_, view, view, copies_));
  }
  return {};
}

}  // namespace kvx::kv

// SequenceTable: creation, use of sequences, and what is under way between tiers.
#include "kv/sequence_table.hpp"

#include <algorithm>

#include "core/log.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/verbs/cpu_verbs.hpp"
#include "kv/verbs/cuda_verbs.hpp"

namespace kvx::kv {

Result<std::unique_ptr<SequenceTable>> SequenceTable::create(CacheStorage storage) {
  std::unique_ptr<SequenceTable> table(new SequenceTable(std::move(storage)));
  KVX_RETURN_IF_ERROR(table->create_sequences());
  KVX_RETURN_IF_ERROR(table->create_speculations());
  KVX_RETURN_IF_ERROR(table->create_prefix_cache());
  KVX_RETURN_IF_ERROR(table->create_host_tier());
  return table;
}

Status SequenceTable::create_sequences() {
  const cache::SequenceShape shape = storage.sequence_shape();
  for (int s = 0; s < storage.config.max_sequences; ++s) {
    KVX_ASSIGN_OR_RETURN(cache::Sequence sequence, cache::Sequence::create(shape));
    sequences.push_back(std::move(sequence));
  }
  uses.assign(storage.config.max_sequences, SequenceUse::kFree);
  return {};
}

Status SequenceTable::create_prefix_cache() {
  if (!storage.config.prefix.is_on) return {};
  const FingerprintFacts facts{&storage.config.geometry,
                               storage.plans,
                               storage.config.calibration,
                               storage.full_precision_window,
                               &storage.config.recipe.full_precision_spec,
                               storage.config.block_size,
                               storage.config.prefix.model};
  KVX_ASSIGN_OR_RETURN(
      prefixes, PrefixCache::create(*storage.pool, storage.sequence_shape(), storage.config.prefix,
                                    fingerprint_of(facts), storage.config.max_sequences));
  return {};
}

Status SequenceTable::create_host_tier() {
  const tier::HostTierConfig& config = storage.config.host_tier;
  if (config.budget_bytes == 0) {
    if (config.folder.empty()) return {};
    return invalid_argument("host_tier.folder is '{}'; expected budget_bytes above 0 with it",
                            config.folder);
  }
  if (!prefixes) {
    return invalid_argument("host_tier.budget_bytes is {}; expected 0 while prefixes are off",
                            config.budget_bytes);
  }
  tier::TierLink link = tier::host_link();
  if (storage.place) {
    const ops::CudaContext& context = storage.place->context;
    KVX_ASSIGN_OR_RETURN(
        link, tier::cuda_link(context.device.index, context.stream, *storage.place->pinned));
  }
  KVX_ASSIGN_OR_RETURN(
      host, tier::HostTier::create(*storage.pool, prefixes->index(), storage.sequence_shape(),
                                   prefixes->fingerprint(), storage.config.prefix.hash, config,
                                   std::move(link)));
  prefixes->set_host_tier(host.get());
  return {};
}

Result<std::unique_ptr<Verbs>> SequenceTable::create_verbs() {
  if (!storage.place)
    return std::unique_ptr<Verbs>(new CpuVerbs(storage.context, nonfinite_inputs));
  CudaVerbLimits limits;
  limits.max_step_tokens = storage.config.cuda->max_step_tokens;
  limits.max_entries = storage.config.max_sequences;
  limits.max_blocks =
      cache::blocks_for(storage.config.max_tokens_per_sequence, storage.config.block_size);
  limits.num_groups = static_cast<int64_t>(storage.groups.size());
  limits.max_block_bytes = storage.pool->max_block_bytes();
  KVX_ASSIGN_OR_RETURN(auto verbs, CudaVerbs::create(*storage.place, limits));
  return std::unique_ptr<Verbs>(std::move(verbs));
}

// ---- sequences

int64_t SequenceTable::max_step_tokens(int sequence) const {
  const int64_t most = sequences[sequence].max_tokens() - sequences[sequence].num_tokens();
  const std::optional<CudaPlacement>& cuda = storage.config.cuda;
  return cuda ? std::min<int64_t>(most, cuda->max_step_tokens) : most;
}

Result<int> SequenceTable::acquire_sequence() const {
  const auto unused = std::find(uses.begin(), uses.end(), SequenceUse::kFree);
  if (unused == uses.end()) {
    return out_of_range("all {} sequences are in use; free one or raise max_sequences",
                        storage.config.max_sequences);
  }
  return static_cast<int>(unused - uses.begin());
}

Status SequenceTable::check_sequence(int sequence) const {
  if (!holds(sequence)) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  if (uses[sequence] == SequenceUse::kInStep) {
    return invalid_argument("a step is open with sequence {}; end or cancel it first", sequence);
  }
  return {};
}

// Once a cache: a model that makes one NaN makes many. A GPU's are counted when they are read.
void SequenceTable::warn_of_nonfinite_inputs() {
  if (nonfinite_inputs == 0 || has_warned_of_nonfinite) return;
  has_warned_of_nonfinite = true;
  log(LogLevel::kWarning, "{} NaN or infinite inputs are stored as zeros", nonfinite_inputs.load());
}

// ---- blocks between tiers

void SequenceTable::collect() const {
  if (host) host->collect();
}

void SequenceTable::drain(std::unique_lock<std::mutex>& lock) const {
  while (!is_drained()) {
    lock.unlock();
    host->wait_for_all();
    lock.lock();
    collect();
  }
}

std::unique_lock<std::mutex> SequenceTable::lock_drained() const {
  std::unique_lock lock(mutex);
  drain(lock);
  return lock;
}

}  // namespace kvx::kv

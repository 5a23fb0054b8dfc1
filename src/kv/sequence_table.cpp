// SequenceTable: creation, use of sequences, and what is under way between tiers.
#include "kv/sequence_table.hpp"

#include <algorithm>
#include <chrono>

#include "core/log.hpp"
#include "kv/files/fingerprint.hpp"
#include "kv/files/outgoing_sequence.hpp"
#include "kv/verbs/cpu_verbs.hpp"
#include "kv/verbs/cuda_verbs.hpp"

namespace kvx::kv {

Result<std::unique_ptr<SequenceTable>> SequenceTable::create(CacheStorage storage) {
  std::unique_ptr<SequenceTable> table(new SequenceTable(std::move(storage)));
  KVX_RETURN_IF_ERROR(table->create_sequences());
  KVX_RETURN_IF_ERROR(table->create_speculations());
  KVX_RETURN_IF_ERROR(table->create_prefix_cache());
  KVX_RETURN_IF_ERROR(table->create_tiers());
  return table;
}

Status SequenceTable::create_sequences() {
  const cache::SequenceShape shape = storage.sequence_shape();
  for (int s = 0; s < storage.config.max_sequences; ++s) {
    KVX_ASSIGN_OR_RETURN(cache::Sequence sequence, cache::Sequence::create(shape));
    sequences.push_back(std::move(sequence));
  }
  uses.assign(storage.config.max_sequences, SequenceUse::kFree);
  outgoing.resize(sequences.size());
  loads.resize(sequences.size());
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
                               storage.config.prefix.model,
                               storage.config.recipe.order};
  KVX_ASSIGN_OR_RETURN(
      prefixes, PrefixCache::create(*storage.pool, storage.sequence_shape(), storage.config.prefix,
                                    fingerprint_of(facts), storage.config.max_sequences));
  return {};
}

Status SequenceTable::create_tiers() {
  if (storage.config.tiers.empty()) return {};
  if (!prefixes) {
    return invalid_argument("tiers has {} tiers; expected none while prefixes are off",
                            storage.config.tiers.size());
  }
  const auto make_link = [this]() -> Result<tier::TierLink> {
    if (!storage.place) return tier::host_link();
    const ops::CudaContext& context = storage.place->context;
    return tier::cuda_link(context.device.index, context.stream, *storage.place->pinned);
  };
  parts = storage.block_parts();
  const tier::FirstTier first{storage.pool.get(), &prefixes->index(), &prefixes->shape(), &parts};
  KVX_ASSIGN_OR_RETURN(
      tiers, tier::TierChain::create(first, storage.pool_fingerprint(prefixes->fingerprint()),
                                     storage.config.prefix.hash, storage.config.tiers, make_link));
  prefixes->set_tiers(tiers.get());
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

Status SequenceTable::check_idle(int sequence) const {
  if (!holds(sequence)) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  if (uses[sequence] == SequenceUse::kInStep) {
    return invalid_argument("a step is open with sequence {}; end or cancel it first", sequence);
  }
  return {};
}

Status SequenceTable::check_sequence(int sequence) const {
  KVX_RETURN_IF_ERROR(check_idle(sequence));
  if (is_loading(sequence)) return still_loads(sequence);
  return {};
}

// ---- loads layer by layer

Error SequenceTable::still_loads(int sequence) {
  return invalid_argument(
      "sequence {} is still loading layer by layer; expected the end of its first step, or "
      "kvx_sequence_end_loading, before this call",
      sequence);
}

Status SequenceTable::wait_for_layer(const tier::Promotion& load, int layer) const {
  tier::wait_for_layer(load, layer);
  const std::lock_guard lock(mutex);
  collect();
  if (load.problem->empty()) return {};
  return internal_error(
      "{}: the sequence does not begin with all that it was to load; cancel its step and call "
      "kvx_sequence_end_loading, which leaves it what came whole",
      *load.problem);
}

void SequenceTable::commit_load(int sequence) {
  if (!loads[sequence]) return;
  tier::Promotion& load = *loads[sequence];
  if (!tier::is_layer_there(load, tier::num_layers(load) - 1)) return;
  collect();
  if (!load.problem->empty()) return;
  prefixes->store_blocks(sequence);
  tiers->release(load);
  loads[sequence].reset();
}

Status SequenceTable::end_load(std::unique_lock<std::mutex>& lock, int sequence) {
  KVX_RETURN_IF_ERROR(check_idle(sequence));
  if (!loads[sequence]) return {};
  const std::shared_ptr<tier::Promotion> load = loads[sequence];
  uses[sequence] = SequenceUse::kInStep;
  lock.unlock();
  tier::wait_for_layer(*load, tier::num_layers(*load) - 1);
  lock.lock();
  uses[sequence] = SequenceUse::kIdle;
  commit_load(sequence);
  if (!loads[sequence]) return {};
  const std::span<const int32_t> recorded = prefixes->tokens(sequence);
  const std::vector<int32_t> tokens(recorded.begin(), recorded.end());
  prefixes->truncate(sequence, 0);
  Status status = sequences[sequence].clear(*storage.pool);
  if (status.ok()) {
    const auto num_blocks = std::ssize(tokens) / storage.config.block_size;
    const auto adopted = prefixes->adopt(sequence, sequences[sequence], tokens, num_blocks);
    if (!adopted.ok()) status = adopted.error();
  }
  tiers->release(*load);
  loads[sequence].reset();
  return status;
}

void SequenceTable::abandon_outgoing(int sequence, std::string why) {
  if (!outgoing[sequence]) return;
  outgoing[sequence]->abandon(std::move(why));
  outgoing[sequence].reset();
}

// Once a cache: a model that makes one NaN makes many. A GPU's are counted when they are read.
void SequenceTable::connect_listeners() {
  PrefixListener both = listener ? listener : publisher;
  if (listener && publisher) {
    both = [this](const cache::PrefixEvent& event) {
      publisher(event);
      listener(event);
    };
  }
  if (tiers) tiers->set_listener(both);
  if (prefixes) prefixes->index().set_listener(std::move(both));
}

void SequenceTable::warn_of_nonfinite_inputs() {
  if (nonfinite_inputs == 0 || has_warned_of_nonfinite) return;
  has_warned_of_nonfinite = true;
  log(LogLevel::kWarning, "{} NaN or infinite inputs are stored as zeros", nonfinite_inputs.load());
}

// ---- blocks between tiers

void SequenceTable::collect() const {
  storage.pool->expire();
  if (tiers) tiers->collect();
}

void SequenceTable::drain(std::unique_lock<std::mutex>& lock) const {
  while (!is_drained()) {
    lock.unlock();
    tiers->wait_for_all();
    lock.lock();
    collect();
  }
}

void SequenceTable::drain_stores(std::unique_lock<std::mutex>& lock) const {
  if (!tiers) return;
  constexpr auto kMostWait = std::chrono::milliseconds(100);
  auto end = std::chrono::steady_clock::now() + kMostWait;
  tiers->cancel_late_loads();
  while (tiers->num_stores() > 0) {
    const bool wait_for_room = tiers->has_stores_without_room();
    lock.unlock();
    const bool are_there =
        wait_for_room ? tiers->wait_for_room_until(end) : tiers->wait_for_stores_until(end);
    lock.lock();
    collect();
    if (are_there) continue;
    tiers->make_room_for_stores();
    tiers->cancel_waiting_stores();  // what is under way is one batch
    end = std::chrono::steady_clock::time_point::max();
  }
}

std::unique_lock<std::mutex> SequenceTable::lock_drained() const {
  std::unique_lock lock(mutex);
  drain(lock);
  return lock;
}

std::unique_lock<std::mutex> SequenceTable::lock_at_rest() const {
  std::unique_lock lock = lock_drained();
  while (tiers && !tiers->is_at_rest()) {
    lock.unlock();
    tiers->wait_for_stores();
    lock = lock_drained();
  }
  return lock;
}

}  // namespace kvx::kv

// SequenceTable: the sequences of a cache, their users, and the lock that guards them: what the
// cache (kv_cache.hpp) and the steps of its writers (kv_step.hpp) share.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/latency_histogram.hpp"
#include "kv/cache_storage.hpp"
#include "kv/speculation.hpp"

namespace kvx::kv {

// How long calls took, since creation.
struct Latencies {
  LatencyHistogram step;        // from begin to end; steps that were cancelled do not count
  LatencyHistogram step_begin;  // of it, until the step has its blocks
  LatencyHistogram lookup;      // KvCache::create_sequence_from
  LatencyHistogram save;        // to a file
  LatencyHistogram load;        // from one
};

using PrefixListener = std::function<void(const cache::PrefixEvent&)>;

enum class SequenceUse : uint8_t { kFree, kIdle, kInStep };

class OutgoingSequence;

struct SequenceTable {
  // Errors as KvCache::create.
  static Result<std::unique_ptr<SequenceTable>> create(CacheStorage storage);

  // KvCache's. Its writer calls it.
  int64_t max_step_tokens(int sequence) const;

  // What one writer moves bytes with.
  Result<std::unique_ptr<Verbs>> create_verbs();

  // The lock, when no block is under way between tiers.
  std::unique_lock<std::mutex> lock_drained() const;
  // The lock, when nothing waits for a store either.
  std::unique_lock<std::mutex> lock_at_rest() const;

  // The lock is held by who calls these.

  // OUT_OF_RANGE: all sequences are in use.
  Result<int> acquire_sequence() const;
  // Whether the sequence is in use.
  bool holds(int sequence) const {
    return sequence >= 0 && sequence < storage.config.max_sequences &&
           uses[sequence] != SequenceUse::kFree;
  }
  // INVALID_ARGUMENT: the sequence is not in use, or in an open step.
  Status check_idle(int sequence) const;
  // The same, or the sequence still loads.
  Status check_sequence(int sequence) const;
  static Error still_loads(int sequence);
  // Requires: the sequence's writer calls it.
  bool is_loading(int sequence) const { return loads[sequence] != nullptr; }
  // Ends a load whose layers are all there: its blocks are as any that the cache holds, and stores
  // get them. Does nothing where layers are missing, or a block did not come whole.
  void commit_load(int sequence);
  // Ends a load when its layers are there. The lock is open while this waits, and nobody else may
  // use the sequence. Where a block did not come whole the sequence begins with what did, as if it
  // were made anew. Does nothing to a sequence that does not load. Errors as check_idle().
  Status end_load(std::unique_lock<std::mutex>& lock, int sequence);
  // Commits what has moved between the tiers by now.
  void collect() const;
  // Without the lock: waits until a load's layers [0, layer] are there. INTERNAL_ERROR: a block did
  // not come whole.
  Status wait_for_layer(const tier::Promotion& load, int layer) const;
  bool is_drained() const { return !tiers || tiers->is_idle(); }
  // Whether blocks of the pool are on their way to a tier, or wait for loads that are late.
  bool has_stores() const { return tiers && (tiers->num_stores() > 0 || tiers->has_late_loads()); }
  // Opens the lock while it waits until no block is under way between tiers.
  void drain(std::unique_lock<std::mutex>& lock) const;
  // Opens the lock while it waits until no block of the pool is on its way out. A slow tier holds
  // nobody up for more than 100 ms: after that, those that have not begun their way to a disk or a
  // store stay in the pool alone, and those that wait for room in memory take others' places.
  // Loads that are late give their blocks back.
  void drain_stores(std::unique_lock<std::mutex>& lock) const;
  void warn_of_nonfinite_inputs();
  // A sequence that is on its way to another process will not be complete. Nothing where it is not.
  void abandon_outgoing(int sequence, std::string why);
  // The indexes of all tiers tell those of the listeners that are set.
  void connect_listeners();

  // ---- cuts (sequence_table_speculation.cpp)

  // KvCache::truncate_sequence's errors of a page whose shared scale may have grown. Requires:
  // 0 <= num_tokens <= num_tokens_before.
  Status check_cut(int sequence, int64_t num_tokens, int64_t num_tokens_before) const;
  // The sequence ends after num_tokens, of num_written that its blocks hold. Requires: check_cut().
  Status cut(Verbs& verbs, int sequence, int64_t num_tokens, int64_t num_written);

  CacheStorage storage;
  // Guards what follows and the storage's pool; bytes of blocks and a sequence in a step are its
  // writer's.
  mutable std::mutex mutex;
  std::vector<cache::Sequence> sequences;
  std::vector<SequenceUse> uses;                            // [sequences]
  std::vector<Speculation> speculations;                    // [sequences], or none
  std::vector<std::shared_ptr<OutgoingSequence>> outgoing;  // [sequences], null: it is not
  std::vector<std::shared_ptr<tier::Promotion>> loads;      // [sequences], null: all is there
  std::unique_ptr<PrefixCache> prefixes;                    // null while they are off
  bool has_warned_of_nonfinite = false;
  std::atomic<int64_t> nonfinite_inputs = 0;
  tier::BlockParts parts;
  std::unique_ptr<tier::TierChain> tiers;  // null without any
  PrefixListener listener;                 // the caller's
  PrefixListener publisher;
  mutable Latencies latencies;  // needs no lock

 private:
  explicit SequenceTable(CacheStorage made) : storage(std::move(made)) {}
  Status create_sequences();
  Status create_speculations();
  Status create_prefix_cache();
  Status create_tiers();
  bool cuts_growing_page(int64_t num_tokens, int64_t num_tokens_before) const {
    return storage.has_growing_pages() && num_tokens % storage.config.block_size != 0 &&
           num_tokens < num_tokens_before;
  }
  Status restore_page(Verbs& verbs, int sequence);
  Status append_again(Verbs& verbs, int sequence, int64_t first_token);
};

}  // namespace kvx::kv

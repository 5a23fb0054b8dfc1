// RemoteTier: blocks of a pool in a store that outlives this process and may be another machine's.
//
//   pool ── copy ──▶ staging ── record ──▶ store      every block that can be found, unless it is
//   there
//     ◀──── copy ─── staging ◀── record ──            after a lookup
//
// Nobody waits for the store longer than its timeout: a block of the pool is free again when its
// copy has been taken, the queues are bounded, a failed call makes the store unreachable for a
// while that doubles from failure to failure, and a load that comes too late is of use to the next.
//
// One thread at a time (the cache's lock), but for the waits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "tier/block_copier.hpp"
#include "tier/chain/promotion.hpp"
#include "tier/latency.hpp"
#include "tier/store/block_name.hpp"
#include "tier/store/record.hpp"
#include "tier/store/remote_store.hpp"

namespace kvx::tier {

struct RemoteTierOptions {
  std::chrono::milliseconds timeout{1000};        // of whoever waits for a lookup or a load
  int64_t max_queued_bytes = int64_t{256} << 20;  // of blocks that wait to be stored
  std::optional<RecordKey> key;                   // records are enciphered with it
};

// Blocks that a store was asked for, and which of them it has.
class StoreLookup {
 public:
  // Requires: a name for each block that is asked for once.
  StoreLookup(int64_t num_blocks, int num_groups)
      : num_groups_(num_groups), slots_(static_cast<size_t>(num_blocks) * num_groups * 2, -1) {}

  void ask(int64_t block, BlockName name) {
    slots_[slot_of(block, name.group, name.kind)] = static_cast<int32_t>(names_.size());
    names_.push_back(std::move(name));
    has_.push_back(0);
  }
  // Null: the store has not got it, or was not asked. Requires: it has answered.
  const BlockName* find(int64_t block, int group, cache::BlockKind kind) const {
    const int32_t slot = slots_[slot_of(block, group, kind)];
    return slot >= 0 && has_[slot] != 0 ? &names_[slot] : nullptr;
  }
  int64_t num_blocks() const { return std::ssize(slots_) / (2 * num_groups_); }
  bool is_empty() const { return names_.empty(); }

 private:
  friend class RemoteTier;
  size_t slot_of(int64_t block, int group, cache::BlockKind kind) const {
    return (static_cast<size_t>(block) * num_groups_ + group) * 2 + static_cast<size_t>(kind);
  }

  int num_groups_;
  std::vector<int32_t> slots_;  // [blocks, groups, kinds]: places in names_, or -1
  std::vector<BlockName> names_;
  std::vector<uint8_t> has_;
  bool is_answered_ = false;  // guarded by the tier's lock
};

struct RemoteCounters {
  int64_t num_stored = 0;
  int64_t num_present = 0;  // not stored, because the store had them
  int64_t num_loaded = 0;
  int64_t num_missed = 0;  // asked for and not there
  int64_t num_bad = 0;
  int64_t num_dropped = 0;
  int64_t num_failed_calls = 0;
  int64_t stored_bytes = 0;
  int64_t loaded_bytes = 0;
  Latency store_latency;
  Latency load_latency;
  std::string last_problem;
};

class RemoteTier {
 public:
  // first's parts outlive it; a link for each of its two threads. OUT_OF_RANGE: memory is short.
  static Result<std::unique_ptr<RemoteTier>> create(const FirstTier& first,
                                                    std::shared_ptr<RemoteStore> store,
                                                    const RemoteTierOptions& options,
                                                    TierLink store_link, TierLink load_link);
  // Waits for the calls of the store under way.
  ~RemoteTier();
  RemoteTier(const RemoteTier&) = delete;
  RemoteTier& operator=(const RemoteTier&) = delete;

  // The pool's block sets out for the store, unless it was sent before. It has one more user until
  // its copy is taken.
  void store(const StoreScope& scope, int group, cache::BlockKind kind, int32_t first_id);

  void begin_lookup(std::shared_ptr<StoreLookup> lookup);
  bool is_answered(const StoreLookup& lookup) const;
  // Up to the timeout; whether it has answered.
  bool wait_for(const StoreLookup& lookup) const;

  // The store's block sets out for the pool's that the load names. From `end` on, when nobody waits
  // for its group any more, cancel_late_loads() takes that block from it.
  void start_load(const TierLoad& load, BlockName name, std::shared_ptr<TransferGroup> group,
                  std::chrono::steady_clock::time_point end);
  bool is_done(const TransferGroup& group) const;
  // Up to the moment.
  void wait_until(const TransferGroup& group, std::chrono::steady_clock::time_point end) const;

  // Commits what has finished.
  void collect();
  // Whether no block of the pool is under way.
  bool is_idle() const { return num_holding_ == 0; }
  void wait_until_idle() const;
  // Until nothing waits for the store any more.
  void wait_for_all() const;
  // Whether a block of the pool waits to be copied, or is being copied.
  int64_t num_stores() const;
  // Blocks whose copy has not begun stay in the pool alone: dropped and counted.
  void cancel_waiting_stores();
  bool wait_for_stores_until(std::chrono::steady_clock::time_point end) const;
  // Loads that nobody waits for any more give their blocks back to the pool.
  bool has_late_loads() const;
  void cancel_late_loads();

  // Whether nothing waits for the store. Requires: the cache's lock, so that it stays so.
  bool is_at_rest() const {
    return num_queued(Direction::kStore) + num_queued(Direction::kLoad) == 0;
  }
  // Zeros to memory that blocks have passed through. Requires: is_at_rest().
  void scrub();
  // From any thread, without the cache's lock: the store may take its time.
  RemoteStore& its_store() const { return *store_; }

  RemoteCounters counters() const;
  int64_t num_queued(Direction direction) const;
  int64_t staging_bytes() const { return store_side_.staging.bytes() + load_side_.staging.bytes(); }
  std::chrono::milliseconds timeout() const { return options_.timeout; }

 private:
  using Clock = std::chrono::steady_clock;
  // A user of a pool's block, and of a load the pin of its node.
  struct Held {
    int block_class = 0;
    int32_t id = cache::kNoBlock;
    int32_t node = cache::kNoNode;
  };
  // Jobs and users go from list to list by splicing, which no lack of memory can stop: nothing is
  // lost on the way.
  struct Job {
    BlockName name;
    TierLoad load;  // its node and block; from_id is not used
    uint32_t birth = 0;
    std::shared_ptr<TransferGroup> group;  // of a load
    std::list<Held> held;                  // of a store until its copy is taken; or none any more
    Clock::time_point pushed;
    Clock::time_point end;  // of a load: it is late from here on
    bool is_done = false;   // stored, or loaded
  };
  using Jobs = std::list<Job>;
  // What a thread of its own copies by.
  struct Side {
    std::unique_ptr<BlockCopier> copier;
    cache::Region staging;
  };

  RemoteTier(const FirstTier& first, std::shared_ptr<RemoteStore> store,
             const RemoteTierOptions& options, Side store_side, Side load_side);
  int64_t block_bytes(const Job& job) const;
  uint8_t* block_of(const Job& job) const;
  int64_t record_bytes_of(const Job& job) const;
  RecordFacts facts_of(const Job& job) const;
  const RecordKey* key() const { return options_.key ? &*options_.key : nullptr; }
  void stop();
  void give_back(const Held& held);
  static bool is_late(const Job& job) { return Clock::now() >= job.end; }
  uint32_t& known_birth(const TierLoad& load);
  Jobs take_batch(Jobs& queue, const Side& side) const;
  void run_stores();
  void store_batch(Jobs& jobs);
  Status copy_out(const Jobs& jobs);
  Status put_batch(Jobs& jobs);
  void run_loads();
  void answer(StoreLookup& lookup);
  Status load_batch();
  Status copy_back(std::vector<BlockTransfer>& transfers, std::vector<Job*>& jobs);
  std::vector<std::span<uint8_t>> records_of(const Jobs& jobs, const Side& side) const;
  bool is_reachable() const;
  void note_call(const Status& status) noexcept;
  void note_problem(const std::string& problem);

  const FirstTier first_;
  const std::shared_ptr<RemoteStore> store_;
  const RemoteTierOptions options_;
  Side store_side_;
  Side load_side_;
  // The cache's lock guards these two.
  std::vector<uint32_t> known_;  // [nodes, groups, kinds]: the birth of a node that the store has
  int64_t num_holding_ = 0;      // jobs with a user of a pool's block

  mutable std::mutex mutex_;  // guards all below
  mutable std::condition_variable progress_;
  std::condition_variable wake_;
  bool is_stopping_ = false;
  Jobs stores_;
  Jobs loads_;
  Jobs loading_;                  // the batch that the store was asked for
  bool is_copying_back_ = false;  // it writes to the pool's blocks
  std::deque<std::shared_ptr<StoreLookup>> lookups_;
  int64_t queued_bytes_ = 0;
  int64_t num_copying_ = 0;   // stores whose copy is being taken
  int64_t num_open_[2] = {};  // by direction, until the store has answered
  std::list<Held> returned_;  // by jobs that need their pool's block no more
  Jobs failed_;               // stores that the store has not got
  Jobs loaded_;
  Clock::time_point retry_at_ = {};
  std::chrono::milliseconds backoff_{0};
  RemoteCounters counters_;
  std::thread storer_;  // these last: they use all of the above
  std::thread loader_;
};

}  // namespace kvx::tier

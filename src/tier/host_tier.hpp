// HostTier: a copy in host memory, or in files, of every block that can be found, kept when the
// first tier's pool needs the room. It is a pool and a prefix index of its own, with its own budget
// and policy, and a queue between the two.
//
//   first tier (host or device)      host tier
//   pool, index   ── store() ─────▶  pool, index, a checksum a block
//                 ◀── promote() ──
//
// A block's record travels whole, scales with codes, and its node names the format, so neither can
// be mistaken. What comes back must have the checksum that it left with; else it is a miss:
// counted, forgotten, never served.
//
// One thread at a time (the cache's lock), but for wait(), is_done() and wait_for_all(). The
// queue's thread touches bytes alone; collect() commits what has finished.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "cache/prefix/erasure.hpp"
#include "cache/prefix/prefix_index.hpp"
#include "tier/block_parts.hpp"
#include "tier/chain/promotion.hpp"
#include "tier/chain/tier_config.hpp"
#include "tier/job_list.hpp"
#include "tier/latency.hpp"
#include "tier/transfer_queue.hpp"

namespace kvx::tier {

struct HostTierSnapshot {
  cache::Tier tier = cache::Tier::kHost;
  std::vector<cache::BlockClassSnapshot> classes;
  cache::PrefixCounters prefix;
  int64_t allocated_bytes = 0;
  int64_t held_bytes = 0;        // of blocks that can be found or are under way
  int64_t metadata_bytes = 0;    // index and checksums
  int64_t num_stored = 0;        // blocks that came
  int64_t num_loaded = 0;        // blocks that went back
  int64_t num_bad = 0;           // blocks whose bytes had changed
  int64_t num_dropped = 0;       // blocks that found no room, or that the disk did not take
  int64_t num_moved_down = 0;    // blocks that left for the tier below
  int64_t num_failed_calls = 0;  // of a store
  int64_t stores_queued = 0;
  int64_t loads_queued = 0;
  Latency store_latency;     // of blocks that came from the pool
  Latency load_latency;      // of blocks that went back
  std::string last_problem;  // empty: none
};

class HostTier final : public cache::EvictionListener {
 public:
  // pool and index are the first tier's, made for this shape; they outlive this one. The link joins
  // it to that pool's memory. OUT_OF_RANGE: a budget smaller than a block of each class (the
  // message names the bytes), or memory or the disk is short; UNSUPPORTED: blocks in several
  // regions; INVALID_ARGUMENT: a folder that may not be written.
  static Result<std::unique_ptr<HostTier>> create(
      cache::BlockPool& pool, cache::PrefixIndex& index, const cache::SequenceShape& shape,
      std::string fingerprint, cache::HashAlgorithm algorithm, const TierConfig& config,
      TierLink link = host_link(), BlockParts parts = {});
  ~HostTier() override;

  // Nodes of a sequence's way: pin_scope(), insert(), pin(), unpin().
  cache::PrefixIndex& nodes() { return index_; }
  const cache::PrefixIndex& nodes() const { return index_; }

  // A copy of the first tier's block sets out, unless there is one: then it has been useful. Room
  // is made by the policy, or by the tier below when blocks move down. The first tier's block has
  // one more user until the copy is there.
  // Requires: node is pinned or has a pinned descendant; the block is full and never written again.
  void store(int32_t node, int group, cache::BlockKind kind, int32_t first_id);

  // This tier's block sets out for the node and block of the first tier that the load names.
  // Requires: the first tier's block has a user until the group is done and collect() was called.
  void start_load(const TierLoad& load, std::shared_ptr<TransferGroup> group);
  // One part of it, after those before it; the block can be found when the last one has come, if
  // all have come whole. Requires: start_load()'s until then; the parts share one `block`.
  void start_part(const TierLoad& load, int part, std::shared_ptr<BlockInParts> block,
                  std::shared_ptr<TransferGroup> group);
  // Blocks of a match are wanted here.
  void touch(int block_class, int32_t id) { (void)pool_.touch(block_class, id); }

  // Commits what has finished.
  void collect();
  void wait(const TransferGroup& group) const { queue_->wait(group); }
  bool is_done(const TransferGroup& group) const { return queue_->is_done(group); }
  // Blocks that have not begun their way here stay where they are: they are dropped and counted.
  void cancel_waiting_stores();
  // From now on a block that finds no free one waits until blocks have moved down.
  void set_moves_down() { moves_down_ = true; }
  // Blocks that wait for room set out, as far as blocks are free; `by_policy`: all of them, in the
  // place of others.
  void start_waiting(bool by_policy);
  // Until there is something to collect, or nothing under way.
  void wait_for_some() const { queue_->wait_for_some(); }
  // Until nothing is under way.
  void wait_for_all() const { queue_->wait_for_all(); }
  bool wait_for_all_until(std::chrono::steady_clock::time_point end) const {
    return queue_->wait_for_all_until(end);
  }
  bool is_idle() const { return jobs_.is_empty() && waiting_.empty(); }
  // Whether blocks wait until others have moved down.
  bool has_waiting_stores() const { return !waiting_.empty(); }
  // Blocks that are under way to this tier.
  int64_t num_stores() const { return static_cast<int64_t>(stores_under_way_.size()); }

  // Forgets everything. Requires: is_idle().
  Status clear() { return index_.clear(); }
  // Forgets what is meant, and leaves no bytes of it; how many blocks. Requires: is_idle().
  int64_t erase(const cache::Erasure& erasure);

  HostTierSnapshot snapshot() const;
  TierKind kind() const { return kind_; }
  cache::Tier tier() const {
    return kind_ == TierKind::kDisk ? cache::Tier::kDisk : cache::Tier::kHost;
  }
  // Where a block of this tier lies.
  uint8_t* block_bytes(int block_class, int32_t id) const {
    return pool_.region(block_class) + id * pool_.block_bytes(block_class);
  }
  // Events of this tier, marked as such. It must not call back.
  void set_listener(const std::function<void(const cache::PrefixEvent&)>& listener);

  void on_evict(int block_class, int32_t id) override { index_.on_evict(block_class, id); }

 private:
  // A block under way. node: of this tier when it is stored, of the first one when it is loaded.
  struct Job {
    int group = 0;
    cache::BlockKind kind = cache::BlockKind::kPacked;
    int block_class = 0;
    int32_t node = cache::kNoNode;
    int32_t first_id = cache::kNoBlock;
    int32_t host_id = cache::kNoBlock;
    int part = -1;  // of a load in parts
    std::shared_ptr<BlockInParts> block = nullptr;
  };
  friend class Demotion;  // its pool, index and checksums are what it moves
  HostTier(TierKind kind, cache::BlockPool& first_pool, cache::PrefixIndex& first_index,
           const cache::SequenceShape& shape, cache::BlockPool pool, std::string fingerprint,
           cache::HashAlgorithm algorithm, TierLink link, BlockParts parts);
  int class_of(int group, cache::BlockKind kind) const;
  int64_t key_of(const Job& job) const;
  void start_store(Job job);
  void drop_store(const Job& job);
  void push(Direction direction, const Job& job, std::shared_ptr<TransferGroup> group);
  void finish_store(const Job& job, const FinishedTransfer& done);
  void finish_load(const Job& job, const FinishedTransfer& done);
  void finish_part(const Job& job, const FinishedTransfer& done);
  void note_bad(const Job& job, bool is_copied);
  void forget(const Job& job);
  // Each part of a block of this tier has a checksum.
  std::span<cache::ContentHash> checksums_of(int block_class, int32_t id) {
    const int64_t num_parts = parts_.num_parts(block_class);
    return std::span(checksums_[block_class])
        .subspan(static_cast<size_t>(id * num_parts), static_cast<size_t>(num_parts));
  }

  const TierKind kind_;
  cache::BlockPool* first_pool_;
  cache::PrefixIndex* first_index_;
  cache::SequenceShape shape_;
  std::unique_ptr<cache::Memory> own_memory_;  // the pool's, where the link brought one
  FileMemory* files_;                          // the same, where it lies in files; else null
  cache::BlockPool pool_;
  cache::PrefixIndex index_;
  BlockParts parts_;
  std::vector<std::vector<cache::ContentHash>> checksums_;  // [classes][blocks * parts]
  JobList<Job> jobs_;
  bool moves_down_ = false;
  std::deque<Job> waiting_;           // stores without a block of this tier
  std::vector<int64_t> num_waiting_;  // [classes]
  int64_t waiting_bytes_ = 0;
  std::unordered_set<int64_t> stores_under_way_;
  std::vector<FinishedTransfer> finished_;  // scratch of collect()
  int64_t num_stored_ = 0;
  int64_t num_loaded_ = 0;
  int64_t num_bad_ = 0;
  int64_t num_dropped_ = 0;
  int64_t num_moved_down_ = 0;
  Latency store_latency_;
  Latency load_latency_;
  std::string last_problem_;
  std::unique_ptr<TransferQueue> queue_;  // last: its thread reads and writes the pools' bytes
};

}  // namespace kvx::tier

// TransferQueue: blocks on their way between tiers, copied by threads of its own while others
// compute. Every copy takes the checksum of what it copied along.
//
//   push ──▶ [waiting] ── starter ──▶ [under way] ── finisher ──▶ drain_finished
//
// Where the copier has one batch under way at a time, one thread does both.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tier/block_copier.hpp"

namespace kvx::tier {

// Several transfers that somebody waits for together.
struct TransferGroup {
  int num_open = 0;  // guarded by the queue's lock
};

struct Transfer {
  Direction direction = Direction::kStore;
  BlockTransfer block;
  int64_t tag = 0;                                    // the caller's
  std::shared_ptr<TransferGroup> group;               // null: nobody waits
  std::chrono::steady_clock::time_point pushed = {};  // the queue's
};

struct FinishedTransfer {
  Direction direction = Direction::kStore;
  int64_t tag = 0;
  CopiedBlock block;
  int64_t microseconds = 0;  // since it was pushed
};

// Every call may come from any thread.
class TransferQueue {
 public:
  explicit TransferQueue(std::unique_ptr<BlockCopier> copier);
  // Waits for the transfers under way; the others are dropped.
  ~TransferQueue();
  TransferQueue(const TransferQueue&) = delete;
  TransferQueue& operator=(const TransferQueue&) = delete;

  // Loads go before stores: somebody waits for them. Bytes of both sides stay where they are until
  // the transfer is finished.
  void push(Transfer transfer);
  // Those of this direction that no batch has taken yet leave the queue; their tags are added.
  // Requires: nobody waits for them.
  void cancel_waiting(Direction direction, std::vector<int64_t>& tags);
  // Adds those that have finished since the last call.
  void drain_finished(std::vector<FinishedTransfer>& finished);
  void wait(const TransferGroup& group);
  bool is_done(const TransferGroup& group) const;
  void wait_for_all();
  // The same up to a moment; whether nothing is under way.
  bool wait_for_all_until(std::chrono::steady_clock::time_point end);
  // Until there is something for drain_finished(), or nothing under way.
  void wait_for_some();
  // Waiting and under way.
  int64_t depth(Direction direction) const;
  // BlockCopier::scrub(). Requires: nothing is waiting or under way.
  void scrub() { copier_->scrub(); }

 private:
  // Transfers of one direction.
  struct Batch {
    std::vector<Transfer> transfers;
    std::vector<BlockTransfer> blocks;
    bool is_started = false;
  };

  void stop();
  void start_batches();
  void finish_batches();
  bool has_waiting() const { return !loads_.empty() || !stores_.empty(); }
  bool can_start() const {
    return has_waiting() && static_cast<int>(batches_.size()) < copier_->max_started();
  }
  bool can_finish() const { return !batches_.empty() && batches_.front().is_started; }
  void start_batch(std::unique_lock<std::mutex>& lock);
  void finish_batch(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable wake_;      // the starter: there is work and room for it, or the end
  std::condition_variable started_;   // the finisher: a batch is under way, or the end
  std::condition_variable progress_;  // something has finished
  std::deque<Transfer> stores_;
  std::deque<Transfer> loads_;
  std::vector<FinishedTransfer> finished_;
  int64_t num_open_[2] = {};  // by direction
  bool is_stopping_ = false;
  bool has_stopped_starting_ = false;
  std::deque<Batch> batches_;  // under way, the last one perhaps on the point of it
  std::unique_ptr<BlockCopier> copier_;
  std::vector<CopiedBlock> copied_;  // the finisher's
  std::thread starter_;              // these last: they use all of the above
  std::thread finisher_;
};

}  // namespace kvx::tier

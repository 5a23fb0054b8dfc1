// Demotion: blocks that a tier would evict next move to the tier below, ahead of the need: a tier
// keeps some blocks free, and a block that must make room at once is lost rather than waited for.
//
//   upper tier: its policy's next ── copy, checksum ──▶ lower tier: found there from now on
//               free when it is there
//
// One thread at a time (the cache's lock), but for wait_for_all(). Its own thread touches bytes
// alone; collect() commits what has finished.
#pragma once

#include <memory>
#include <vector>

#include "tier/host_tier.hpp"

namespace kvx::tier {

class Demotion {
 public:
  // Both outlive it.
  Demotion(HostTier& upper, HostTier& lower);
  ~Demotion();

  // Blocks set out for the lower tier until enough of the upper one are free or on their way.
  void fill();
  void collect();
  void wait_for_all() const { queue_->wait_for_all(); }
  bool wait_for_all_until(std::chrono::steady_clock::time_point end) const {
    return queue_->wait_for_all_until(end);
  }
  bool is_idle() const { return jobs_.is_empty(); }
  // Zeros to memory that blocks have passed through. Requires: is_idle().
  void scrub() { queue_->scrub(); }

 private:
  struct Job {
    int group = 0;
    cache::BlockKind kind = cache::BlockKind::kPacked;
    int block_class = 0;
    int32_t upper_id = cache::kNoBlock;
    int32_t lower_id = cache::kNoBlock;
    int32_t lower_node = cache::kNoNode;
  };
  // The node of the lower tier that stands for the same tokens as a node of the upper one: still
  // right while both births are the same.
  struct Counterpart {
    uint32_t upper_birth = 0;
    uint32_t lower_birth = 0;
    int32_t lower = cache::kNoNode;
  };
  struct ClassFacts {
    int group = 0;
    cache::BlockKind kind = cache::BlockKind::kPacked;
    int64_t least_free = 0;
    int64_t num_under_way = 0;
  };

  bool send_next(int block_class);
  int32_t pin_counterpart(int32_t upper_node);
  int32_t known_counterpart(int32_t upper_node) const;
  void leave(const Job& job, bool is_below);
  void finish(const Job& job, const FinishedTransfer& done);

  HostTier& upper_;
  HostTier& lower_;
  std::vector<ClassFacts> classes_;
  std::vector<Counterpart> counterparts_;  // [the upper tier's nodes]
  JobList<Job> jobs_;
  std::vector<int32_t> path_;               // scratch of pin_counterpart()
  std::vector<FinishedTransfer> finished_;  // scratch of collect()
  std::unique_ptr<TransferQueue> queue_;    // last: its thread reads and writes the tiers' bytes
};

}  // namespace kvx::tier

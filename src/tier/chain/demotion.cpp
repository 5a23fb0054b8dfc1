// Demotion: the copies between two tiers of the host, and the bookkeeping on both sides.
#include "tier/chain/demotion.hpp"

#include <algorithm>
#include <span>

#include "tier/block_checksum.hpp"
#include "tier/block_copier.hpp"

namespace kvx::tier {
namespace {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;

// A sixteenth of a class, at most this much, is kept free or is on its way down.
constexpr int64_t kMostFreeBytes = int64_t{128} << 20;

int64_t least_free_of(const cache::BlockPool& pool, int block_class) {
  const int64_t most = kMostFreeBytes / pool.block_bytes(block_class);
  return std::max<int64_t>(std::min<int64_t>(pool.num_blocks(block_class) / 16, most), 1);
}

}  // namespace

Demotion::Demotion(HostTier& upper, HostTier& lower)
    : upper_(upper),
      lower_(lower),
      counterparts_(static_cast<size_t>(upper.index_.max_nodes())),
      queue_(std::make_unique<TransferQueue>(make_host_copier(upper.files_, lower.files_))) {
  upper.set_moves_down();
  classes_.resize(static_cast<size_t>(upper.pool_.num_classes()));
  for (int group = 0; group < static_cast<int>(upper.shape_.groups.size()); ++group) {
    const cache::LayerGroup& facts = upper.shape_.groups[group];
    classes_[facts.packed_class] = {group, BlockKind::kPacked, 0, 0};
    if (!facts.full_precision_window.is_on()) continue;
    classes_[facts.full_precision_class] = {group, BlockKind::kFullPrecision, 0, 0};
  }
  for (int c = 0; c < upper.pool_.num_classes(); ++c) {
    classes_[c].least_free = least_free_of(upper.pool_, c);
  }
}

Demotion::~Demotion() = default;

// ---- the way down

void Demotion::fill() {
  for (int c = 0; c < static_cast<int>(classes_.size()); ++c) {
    const ClassFacts& facts = classes_[c];
    const int64_t num_wanted = facts.least_free + upper_.num_waiting_[c];
    while (upper_.pool_.num_free(c) + facts.num_under_way < num_wanted) {
      if (!send_next(c)) break;
    }
  }
}

// False when nothing more can leave.
bool Demotion::send_next(int block_class) {
  Job job{classes_[block_class].group,
          classes_[block_class].kind,
          block_class,
          upper_.pool_.acquire_next_evicted(block_class),
          kNoBlock,
          kNoNode};
  if (job.upper_id == kNoBlock) return false;
  const int32_t upper_node = upper_.index_.node_of(job.group, job.kind, job.upper_id);
  job.lower_node = pin_counterpart(upper_node);
  if (job.lower_node == kNoNode) {  // the lower tier's index, which counts it, has no room
    leave(job, false);
    return true;
  }
  const int32_t present = lower_.index_.block_of(job.lower_node, job.group, job.kind);
  if (present != kNoBlock) {
    lower_.touch(block_class, present);
    leave(job, true);
    return true;
  }
  if (!lower_.pool_.allocate(block_class, std::span(&job.lower_id, 1)).ok()) {
    lower_.index_.unpin(job.lower_node);
    (void)upper_.pool_.release(block_class, job.upper_id);  // it stays, and is asked again later
    return false;
  }
  ++classes_[block_class].num_under_way;
  const BlockTransfer block{
      upper_.block_bytes(block_class, job.upper_id), lower_.block_bytes(block_class, job.lower_id),
      upper_.pool_.block_bytes(block_class), lower_.parts_.ends_of(block_class),
      lower_.checksums_of(block_class, job.lower_id).data()};
  queue_->push({Direction::kStore, block, jobs_.add(job), nullptr});
  return true;
}

// The lower tier's node for the same tokens, made when it is new and pinned for the caller; kNoNode
// when there is no room.
int32_t Demotion::pin_counterpart(int32_t upper_node) {
  path_.clear();
  int32_t up = upper_node;
  while (!upper_.index_.is_scope(up) && known_counterpart(up) == kNoNode) {
    path_.push_back(up);
    up = upper_.index_.parent(up);
  }
  int32_t low = known_counterpart(up);
  if (low != kNoNode) {
    lower_.index_.pin(low);
  } else {
    const Result<int32_t> scope = lower_.index_.pin_scope(upper_.index_.keys(up));
    if (!scope.ok()) return kNoNode;
    low = scope.value();
  }
  for (; !path_.empty(); path_.pop_back()) {
    const int32_t next = lower_.index_.insert_copy(low, upper_.index_, path_.back());
    if (next != kNoNode) lower_.index_.pin(next);
    lower_.index_.unpin(low);
    if (next == kNoNode) return kNoNode;
    low = next;
    counterparts_[path_.back()] = {upper_.index_.birth(path_.back()), lower_.index_.birth(low),
                                   low};
  }
  return low;
}

int32_t Demotion::known_counterpart(int32_t upper_node) const {
  const Counterpart& known = counterparts_[upper_node];
  const bool is_right = known.lower != kNoNode &&
                        known.upper_birth == upper_.index_.birth(upper_node) &&
                        known.lower_birth == lower_.index_.birth(known.lower);
  return is_right ? known.lower : kNoNode;
}

// The upper tier's block goes; it may still be on its way to the pool, then its last user frees it.
void Demotion::leave(const Job& job, bool is_below) {
  upper_.pool_.forget(job.block_class, job.upper_id);
  (void)upper_.pool_.release(job.block_class, job.upper_id);
  if (job.lower_node != kNoNode) lower_.index_.unpin(job.lower_node);
  if (is_below) {
    ++upper_.num_moved_down_;
  } else {
    ++upper_.num_dropped_;
  }
}

// ---- what has finished

void Demotion::collect() {
  finished_.clear();
  queue_->drain_finished(finished_);
  for (const FinishedTransfer& done : finished_) {
    finish(jobs_.take(done.tag), done);
  }
}

void Demotion::finish(const Job& job, const FinishedTransfer& done) {
  --classes_[job.block_class].num_under_way;
  const bool is_whole =
      done.block.is_copied &&
      done.block.checksum == join_checksums(upper_.checksums_of(job.block_class, job.upper_id));
  if (done.block.is_copied && !is_whole) {
    ++upper_.num_bad_;
    upper_.last_problem_ =
        fmt::format("block {} of class '{}' has another checksum than when it came", job.upper_id,
                    upper_.pool_.name(job.block_class));
  }
  const bool is_below =
      is_whole && lower_.index_.attach(job.lower_node, job.group, job.kind, job.lower_id).ok();
  if (is_below) {
    ++lower_.num_stored_;
    lower_.store_latency_.add(done.microseconds);
  }
  (void)lower_.pool_.release(job.block_class, job.lower_id);
  leave(job, is_below);
}

}  // namespace kvx::tier

// HostTier: bookkeeping before and after each copy.
#include "tier/host_tier.hpp"

#include <algorithm>
#include <limits>

#include "tier/block_checksum.hpp"

namespace kvx::tier {

using cache::BlockKind;
using cache::kNoBlock;
using cache::kNoNode;

// Of the pool's blocks that may wait for room in a tier.
constexpr int64_t kMostWaitingBytes = int64_t{256} << 20;

// ---- creation

namespace {

// The budget is shared in the first tier's proportions; every class gets a block at least.
Result<std::vector<cache::BlockClassSpec>> plan_classes(const cache::BlockPool& first,
                                                        const TierConfig& config) {
  const int64_t budget_bytes = config.budget_bytes;
  double first_bytes = 0;
  int64_t least_bytes = 0;
  for (int c = 0; c < first.num_classes(); ++c) {
    if (first.num_regions(c) != 1) {
      return unsupported("class '{}' has {} regions; expected 1: a tier moves whole records",
                         first.name(c), first.num_regions(c));
    }
    first_bytes += static_cast<double>(first.block_bytes(c)) * first.num_blocks(c);
    least_bytes += first.block_bytes(c);
  }
  if (budget_bytes < least_bytes) {
    return out_of_range("budget_bytes of the {} tier is {}; one block of each class needs {}",
                        name_of(config.kind), budget_bytes, least_bytes);
  }
  const double scale = static_cast<double>(budget_bytes - least_bytes) / std::max(first_bytes, 1.0);
  std::vector<cache::BlockClassSpec> classes;
  for (int c = 0; c < first.num_classes(); ++c) {
    const auto num_more = static_cast<int64_t>(scale * first.num_blocks(c));
    constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();
    classes.push_back(
        {first.name(c) + (config.kind == TierKind::kHost ? " in host memory" : " in files"),
         std::min(1 + num_more, kMostBlocks),
         {first.block_bytes(c)}});
  }
  return classes;
}

}  // namespace

Result<std::unique_ptr<HostTier>> HostTier::create(
    cache::BlockPool& pool, cache::PrefixIndex& index, const cache::SequenceShape& shape,
    std::string fingerprint, cache::HashAlgorithm algorithm, const TierConfig& config,
    TierLink link, BlockParts parts) {
  KVX_ASSIGN_OR_RETURN(const auto classes, plan_classes(pool, config));
  if (config.kind == TierKind::kDisk) {
    KVX_ASSIGN_OR_RETURN(link, file_link(config.folder, std::move(link), pool.max_block_bytes()));
  }
  const cache::BlockPoolOptions options{config.eviction, pool.zeroes_on_free()};
  KVX_ASSIGN_OR_RETURN(cache::BlockPool own,
                       cache::BlockPool::create(*link.memory, classes, options));
  return std::unique_ptr<HostTier>(new HostTier(config.kind, pool, index, shape, std::move(own),
                                                std::move(fingerprint), algorithm, std::move(link),
                                                std::move(parts)));
}

HostTier::HostTier(TierKind kind, cache::BlockPool& first_pool, cache::PrefixIndex& first_index,
                   const cache::SequenceShape& shape, cache::BlockPool pool,
                   std::string fingerprint, cache::HashAlgorithm algorithm, TierLink link,
                   BlockParts parts)
    : kind_(kind),
      first_pool_(&first_pool),
      first_index_(&first_index),
      shape_(shape),
      own_memory_(std::move(link.own_memory)),
      files_(link.files),
      pool_(std::move(pool)),
      index_(cache::PrefixIndex::create(pool_, shape, std::move(fingerprint), algorithm).value()),
      parts_(std::move(parts)),
      queue_(std::make_unique<TransferQueue>(std::move(link.copier))) {
  pool_.set_eviction_listener(this);
  num_waiting_.resize(static_cast<size_t>(pool_.num_classes()));
  for (int c = 0; c < pool_.num_classes(); ++c) {
    checksums_.emplace_back(static_cast<size_t>(pool_.num_blocks(c) * parts_.num_parts(c)));
  }
}

HostTier::~HostTier() = default;

int HostTier::class_of(int group, BlockKind kind) const {
  const cache::LayerGroup& facts = shape_.groups[group];
  return kind == BlockKind::kFullPrecision ? facts.full_precision_class : facts.packed_class;
}

// ---- the way out

int64_t HostTier::key_of(const Job& job) const {
  const auto num_groups = static_cast<int64_t>(shape_.groups.size());
  return (int64_t{job.node} * 2 + static_cast<int64_t>(job.kind)) * num_groups + job.group;
}

void HostTier::store(int32_t node, int group, BlockKind kind, int32_t first_id) {
  const int block_class = class_of(group, kind);
  const int32_t present = index_.block_of(node, group, kind);
  if (present != kNoBlock) {
    (void)pool_.touch(block_class, present);
    return;
  }
  const Job job{group, kind, block_class, node, first_id, kNoBlock};
  if (stores_under_way_.contains(key_of(job))) return;
  if (!first_pool_->retain(block_class, first_id).ok()) {
    ++num_dropped_;
    return;
  }
  index_.pin(node);
  stores_under_way_.insert(key_of(job));
  const bool waits =
      moves_down_ && pool_.num_free(block_class) == 0 && waiting_bytes_ < kMostWaitingBytes;
  if (!waits) return start_store(job);
  waiting_.push_back(job);
  ++num_waiting_[block_class];
  waiting_bytes_ += pool_.block_bytes(block_class);
}

void HostTier::start_store(Job job) {
  if (!pool_.allocate(job.block_class, std::span(&job.host_id, 1)).ok()) return drop_store(job);
  push(Direction::kStore, job, nullptr);
}

void HostTier::start_waiting(bool by_policy) {
  while (!waiting_.empty()) {
    const Job job = waiting_.front();
    if (!by_policy && pool_.num_free(job.block_class) == 0) return;
    waiting_.pop_front();
    --num_waiting_[job.block_class];
    waiting_bytes_ -= pool_.block_bytes(job.block_class);
    start_store(job);
  }
}

// Gives up storing a block whose copy has not begun.
void HostTier::drop_store(const Job& job) {
  ++num_dropped_;
  stores_under_way_.erase(key_of(job));
  (void)first_pool_->release(job.block_class, job.first_id);
  index_.unpin(job.node);
}

void HostTier::push(Direction direction, const Job& job, std::shared_ptr<TransferGroup> group) {
  const int64_t bytes = pool_.block_bytes(job.block_class);
  uint8_t* const first = first_pool_->region(job.block_class) + job.first_id * bytes;
  uint8_t* const host = block_bytes(job.block_class, job.host_id);
  const std::span<const int64_t> ends = parts_.ends_of(job.block_class);
  BlockTransfer block{host, first, bytes, ends};
  if (direction == Direction::kStore) {
    block = {first, host, bytes, ends, checksums_of(job.block_class, job.host_id).data()};
  } else if (job.part >= 0 && !ends.empty()) {
    const int64_t begin = parts_.begin_of(job.block_class, job.part);
    block = {host + begin, first + begin, ends[static_cast<size_t>(job.part)] - begin};
  }
  queue_->push({direction, block, jobs_.add(job), std::move(group)});
}

void HostTier::collect() {
  finished_.clear();
  queue_->drain_finished(finished_);
  for (const FinishedTransfer& done : finished_) {
    const Job job = jobs_.take(done.tag);
    if (done.direction == Direction::kStore) {
      finish_store(job, done);
    } else {
      finish_load(job, done);
    }
  }
}

void HostTier::cancel_waiting_stores() {
  std::vector<int64_t> tags;
  queue_->cancel_waiting(Direction::kStore, tags);
  for (const int64_t tag : tags) finish_store(jobs_.take(tag), {});
}

void HostTier::finish_store(const Job& job, const FinishedTransfer& done) {
  stores_under_way_.erase(key_of(job));
  if (done.block.is_copied && index_.attach(job.node, job.group, job.kind, job.host_id).ok()) {
    ++num_stored_;
    store_latency_.add(done.microseconds);
  } else {
    ++num_dropped_;
  }
  (void)pool_.release(job.block_class, job.host_id);
  (void)first_pool_->release(job.block_class, job.first_id);
  index_.unpin(job.node);
}

// ---- the way back

void HostTier::start_load(const TierLoad& load, std::shared_ptr<TransferGroup> group) {
  (void)pool_.retain(load.block_class, load.from_id);
  touch(load.block_class, load.from_id);
  push(Direction::kLoad,
       {load.group, load.kind, load.block_class, load.node, load.first_id, load.from_id},
       std::move(group));
}

void HostTier::start_part(const TierLoad& load, int part, std::shared_ptr<BlockInParts> block,
                          std::shared_ptr<TransferGroup> group) {
  if (part == 0) {
    (void)pool_.retain(load.block_class, load.from_id);
    touch(load.block_class, load.from_id);
  }
  push(Direction::kLoad,
       {load.group, load.kind, load.block_class, load.node, load.first_id, load.from_id, part,
        std::move(block)},
       std::move(group));
}

void HostTier::finish_load(const Job& job, const FinishedTransfer& done) {
  if (job.part >= 0) return finish_part(job, done);
  if (done.block.is_copied &&
      done.block.checksum == join_checksums(checksums_of(job.block_class, job.host_id))) {
    if (first_index_->attach(job.node, job.group, job.kind, job.first_id).ok()) ++num_loaded_;
    load_latency_.add(done.microseconds);
  } else {
    note_bad(job, done.block.is_copied);
    forget(job);
  }
  (void)pool_.release(job.block_class, job.host_id);
}

// The queue keeps their order: the last part is the last one to finish.
void HostTier::finish_part(const Job& job, const FinishedTransfer& done) {
  const std::span<const cache::ContentHash> expected = checksums_of(job.block_class, job.host_id);
  const auto part = static_cast<size_t>(job.part);
  const bool is_whole = done.block.is_copied && done.block.checksum == expected[part];
  if (!is_whole && !job.block->is_bad) {
    note_bad(job, done.block.is_copied);
    job.block->is_bad = true;
    if (job.block->problem->empty()) *job.block->problem = last_problem_;
  }
  if (part + 1 < expected.size()) return;
  if (job.block->is_bad) {
    forget(job);
  } else {
    if (first_index_->attach(job.node, job.group, job.kind, job.first_id).ok()) ++num_loaded_;
    load_latency_.add(done.microseconds);
  }
  (void)pool_.release(job.block_class, job.host_id);
}

void HostTier::note_bad(const Job& job, bool is_copied) {
  ++num_bad_;
  last_problem_ = fmt::format(
      "block {} of class '{}' {}", job.host_id, pool_.name(job.block_class),
      is_copied ? "has another checksum than when it came" : "could not be copied back");
}

// Nobody finds the block here any more.
void HostTier::forget(const Job& job) {
  index_.on_evict(job.block_class, job.host_id);
  (void)pool_.discard(job.block_class, job.host_id);
}

// ---- what there is

int64_t HostTier::erase(const cache::Erasure& erasure) {
  const int64_t num_erased =
      cache::forget_blocks(pool_, index_, shape_, cache::nodes_of(index_, erasure));
  cache::clear_free_blocks(pool_);
  queue_->scrub();
  return num_erased;
}

HostTierSnapshot HostTier::snapshot() const {
  HostTierSnapshot snapshot;
  snapshot.tier = tier();
  for (int c = 0; c < pool_.num_classes(); ++c) {
    const cache::BlockClassSnapshot one = pool_.snapshot(c);
    snapshot.held_bytes += (one.num_active + one.num_cached) * one.block_bytes;
    snapshot.metadata_bytes +=
        static_cast<int64_t>(checksums_[c].size() * sizeof(cache::ContentHash));
    snapshot.classes.push_back(one);
  }
  snapshot.prefix = index_.counters();
  snapshot.allocated_bytes = pool_.allocated_bytes();
  snapshot.metadata_bytes += index_.metadata_bytes();
  snapshot.num_stored = num_stored_;
  snapshot.num_loaded = num_loaded_;
  snapshot.num_bad = num_bad_;
  snapshot.num_dropped = num_dropped_;
  snapshot.num_moved_down = num_moved_down_;
  snapshot.store_latency = store_latency_;
  snapshot.load_latency = load_latency_;
  snapshot.stores_queued = queue_->depth(Direction::kStore);
  snapshot.loads_queued = queue_->depth(Direction::kLoad);
  snapshot.last_problem = last_problem_;
  return snapshot;
}

void HostTier::set_listener(const std::function<void(const cache::PrefixEvent&)>& listener) {
  if (!listener) return index_.set_listener({});
  index_.set_listener([listener, tier = tier()](cache::PrefixEvent event) {
    event.tier = tier;
    listener(event);
  });
}

}  // namespace kvx::tier

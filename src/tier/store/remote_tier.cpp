// RemoteTier: its queues, and what the cache's calls do. The threads: remote_tier_threads.cpp.
#include "tier/store/remote_tier.hpp"

#include <algorithm>

namespace kvx::tier {

using cache::BlockKind;

namespace {

// A batch of records; one that is larger is a batch by itself.
constexpr int64_t kStagingBytes = int64_t{8} << 20;

}  // namespace

// ---- creation

Result<std::unique_ptr<RemoteTier>> RemoteTier::create(const FirstTier& first,
                                                       std::shared_ptr<RemoteStore> store,
                                                       const RemoteTierOptions& options,
                                                       TierLink store_link, TierLink load_link) {
  for (int c = 0; c < first.pool->num_classes(); ++c) {
    if (first.pool->num_regions(c) == 1) continue;
    return unsupported("class '{}' has {} regions; expected 1: a tier moves whole records",
                       first.pool->name(c), first.pool->num_regions(c));
  }
  const int64_t one_record = record_bytes(first.shape->block_size, first.pool->max_block_bytes());
  const int64_t bytes = std::max(kStagingBytes, one_record);
  KVX_ASSIGN_OR_RETURN(cache::Region store_staging,
                       store_link.memory->allocate(bytes, "records on their way to a store"));
  KVX_ASSIGN_OR_RETURN(cache::Region load_staging,
                       load_link.memory->allocate(bytes, "records on their way from a store"));
  return std::unique_ptr<RemoteTier>(new RemoteTier(
      first, std::move(store), options, {std::move(store_link.copier), std::move(store_staging)},
      {std::move(load_link.copier), std::move(load_staging)}));
}

RemoteTier::RemoteTier(const FirstTier& first, std::shared_ptr<RemoteStore> store,
                       const RemoteTierOptions& options, Side store_side, Side load_side)
    : first_(first),
      store_(std::move(store)),
      options_(options),
      store_side_(std::move(store_side)),
      load_side_(std::move(load_side)),
      known_(static_cast<size_t>(first.index->max_nodes()) * first.shape->groups.size() * 2),
      storer_([this] { run_stores(); }) {
  loader_ = std::thread([this] { run_loads(); });
}

RemoteTier::~RemoteTier() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  storer_.join();
  loader_.join();
}

// ---- what a job is

int64_t RemoteTier::block_bytes(const Job& job) const {
  return first_.pool->block_bytes(job.load.block_class);
}

uint8_t* RemoteTier::block_of(const Job& job) const {
  return first_.pool->region(job.load.block_class) + job.load.first_id * block_bytes(job);
}

int64_t RemoteTier::record_bytes_of(const Job& job) const {
  return record_bytes(std::ssize(job.name.tokens), block_bytes(job));
}

RecordFacts RemoteTier::facts_of(const Job& job) const {
  return {job.name.scope.hash, job.name.parent, job.name.hash,   job.name.group,
          job.name.kind,       job.name.tokens, block_bytes(job)};
}

uint32_t& RemoteTier::known_birth(const Job& job) {
  const size_t num_groups = first_.shape->groups.size();
  return known_[(static_cast<size_t>(job.load.node) * num_groups + job.load.group) * 2 +
                static_cast<size_t>(job.load.kind)];
}

// ---- the cache's calls

void RemoteTier::store(const StoreScope& scope, int group, BlockKind kind, int32_t first_id) {
  const int32_t node = first_.index->node_of(group, kind, first_id);
  if (node == cache::kNoNode) return;
  const cache::LayerGroup& facts = first_.shape->groups[group];
  const int block_class =
      kind == BlockKind::kFullPrecision ? facts.full_precision_class : facts.packed_class;
  Job job;
  job.load = {group, kind, block_class, node, first_id, cache::kNoBlock};
  job.birth = first_.index->birth(node);
  if (known_birth(job) == job.birth) return;
  const std::span<const int32_t> tokens = first_.index->tokens(node);
  job.name = {scope,
              first_.index->hash(first_.index->parent(node)),
              first_.index->hash(node),
              {tokens.begin(), tokens.end()},
              group,
              kind};
  job.pushed = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (!is_reachable() || queued_bytes_ + block_bytes(job) > options_.max_queued_bytes ||
        !first_.pool->retain(block_class, first_id).ok()) {
      ++counters_.num_dropped;
      return;
    }
    known_birth(job) = job.birth;
    ++num_holding_;
    ++num_open_[static_cast<int>(Direction::kStore)];
    queued_bytes_ += block_bytes(job);
    stores_.push_back(std::move(job));
  }
  wake_.notify_all();
}

void RemoteTier::begin_lookup(std::shared_ptr<StoreLookup> lookup) {
  {
    const std::lock_guard lock(mutex_);
    lookups_.push_back(std::move(lookup));
  }
  wake_.notify_all();
}

bool RemoteTier::is_answered(const StoreLookup& lookup) const {
  const std::lock_guard lock(mutex_);
  return lookup.is_answered_;
}

bool RemoteTier::wait_for(const StoreLookup& lookup) const {
  std::unique_lock lock(mutex_);
  return progress_.wait_for(lock, options_.timeout, [&] { return lookup.is_answered_; });
}

// The job has a user of the pool's block and a pin of the node of its own: the promotion may be
// released before it has finished.
void RemoteTier::start_load(const TierLoad& load, BlockName name,
                            std::shared_ptr<TransferGroup> group) {
  if (!first_.pool->retain(load.block_class, load.first_id).ok()) return;
  first_.index->pin(load.node);
  ++num_holding_;
  {
    const std::lock_guard lock(mutex_);
    ++group->num_open;
    ++num_open_[static_cast<int>(Direction::kLoad)];
    Job job;
    job.name = std::move(name);
    job.load = load;
    job.birth = first_.index->birth(load.node);
    job.group = std::move(group);
    job.pushed = Clock::now();
    loads_.push_back(std::move(job));
  }
  wake_.notify_all();
}

void RemoteTier::collect() {
  std::vector<Job> copied, failed, loaded;
  {
    const std::lock_guard lock(mutex_);
    copied.swap(copied_);
    failed.swap(failed_);
    loaded.swap(loaded_);
  }
  for (const Job& job : copied) {
    (void)first_.pool->release(job.load.block_class, job.load.first_id);
    --num_holding_;
  }
  for (const Job& job : failed) {
    if (known_birth(job) == job.birth) known_birth(job) = 0;
  }
  for (const Job& job : loaded) {
    if (job.is_done) {
      (void)first_.index->attach(job.load.node, job.load.group, job.load.kind, job.load.first_id);
      known_birth(job) = job.birth;
    }
    (void)first_.pool->release(job.load.block_class, job.load.first_id);
    first_.index->unpin(job.load.node);
    --num_holding_;
  }
}

void RemoteTier::cancel_waiting_stores() {
  {
    const std::lock_guard lock(mutex_);
    for (Job& job : stores_) {
      copied_.push_back(job);
      failed_.push_back(std::move(job));
      ++counters_.num_dropped;
      --num_open_[static_cast<int>(Direction::kStore)];
    }
    stores_.clear();
    queued_bytes_ = 0;
  }
  progress_.notify_all();
  collect();
}

// ---- waiting

bool RemoteTier::is_done(const TransferGroup& group) const {
  const std::lock_guard lock(mutex_);
  return group.num_open == 0;
}

void RemoteTier::wait_until(const TransferGroup& group, Clock::time_point end) const {
  std::unique_lock lock(mutex_);
  progress_.wait_until(lock, end, [&] { return group.num_open == 0; });
}

void RemoteTier::wait_until_idle() const {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this] {
    return stores_.empty() && num_copying_ == 0 &&
           num_open_[static_cast<int>(Direction::kLoad)] == 0;
  });
}

void RemoteTier::wait_for_all() const {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this] { return num_open_[0] + num_open_[1] == 0; });
}

int64_t RemoteTier::num_stores() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(stores_) + num_copying_ + std::ssize(copied_);
}

bool RemoteTier::wait_for_stores_until(Clock::time_point end) const {
  std::unique_lock lock(mutex_);
  return progress_.wait_until(lock, end, [this] { return stores_.empty() && num_copying_ == 0; });
}

RemoteCounters RemoteTier::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

int64_t RemoteTier::num_queued(Direction direction) const {
  const std::lock_guard lock(mutex_);
  return num_open_[static_cast<int>(direction)];
}

}  // namespace kvx::tier

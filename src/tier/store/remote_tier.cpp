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
  try {
    loader_ = std::thread([this] { run_loads(); });
  } catch (...) {
    stop();
    throw;
  }
}

RemoteTier::~RemoteTier() {
  stop();
}

void RemoteTier::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  storer_.join();
  if (loader_.joinable()) loader_.join();
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

uint32_t& RemoteTier::known_birth(const TierLoad& load) {
  const size_t num_groups = first_.shape->groups.size();
  return known_[(static_cast<size_t>(load.node) * num_groups + load.group) * 2 +
                static_cast<size_t>(load.kind)];
}

// ---- the cache's calls

void RemoteTier::store(const StoreScope& scope, int group, BlockKind kind, int32_t first_id) {
  const int32_t node = first_.index->node_of(group, kind, first_id);
  if (node == cache::kNoNode) return;
  const cache::LayerGroup& facts = first_.shape->groups[group];
  const int block_class =
      kind == BlockKind::kFullPrecision ? facts.full_precision_class : facts.packed_class;
  const TierLoad block{group, kind, block_class, node, first_id, cache::kNoBlock};
  if (known_birth(block) == first_.index->birth(node)) return;
  Jobs one(1);  // all memory is taken before there is anything to give back
  Job& job = one.front();
  job.load = block;
  job.birth = first_.index->birth(node);
  const std::span<const int32_t> tokens = first_.index->tokens(node);
  job.name = {scope,
              first_.index->hash(first_.index->parent(node)),
              first_.index->hash(node),
              {tokens.begin(), tokens.end()},
              group,
              kind};
  job.held.push_back({block_class, first_id});
  job.pushed = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (!is_reachable() || queued_bytes_ + block_bytes(job) > options_.max_queued_bytes ||
        !first_.pool->retain(block_class, first_id).ok()) {
      ++counters_.num_dropped;
      return;
    }
    known_birth(job.load) = job.birth;
    ++num_holding_;
    ++num_open_[static_cast<int>(Direction::kStore)];
    queued_bytes_ += block_bytes(job);
    stores_.splice(stores_.end(), one);
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
                            std::shared_ptr<TransferGroup> group, Clock::time_point end) {
  Jobs one(1);
  Job& job = one.front();
  job.name = std::move(name);
  job.load = load;
  job.birth = first_.index->birth(load.node);
  job.group = std::move(group);
  job.held.push_back({load.block_class, load.first_id, load.node});
  job.pushed = Clock::now();
  job.end = end;
  if (!first_.pool->retain(load.block_class, load.first_id).ok()) return;
  first_.index->pin(load.node);
  ++num_holding_;
  {
    const std::lock_guard lock(mutex_);
    ++job.group->num_open;
    ++num_open_[static_cast<int>(Direction::kLoad)];
    loads_.splice(loads_.end(), one);
  }
  wake_.notify_all();
}

void RemoteTier::collect() {
  std::list<Held> returned;
  Jobs failed, loaded;
  {
    const std::lock_guard lock(mutex_);
    returned.swap(returned_);
    failed.swap(failed_);
    loaded.swap(loaded_);
  }
  for (const Held& held : returned) give_back(held);
  for (const Job& job : failed) {
    if (known_birth(job.load) == job.birth) known_birth(job.load) = 0;
  }
  for (const Job& job : loaded) {
    if (job.is_done) {
      (void)first_.index->attach(job.load.node, job.load.group, job.load.kind, job.load.first_id);
      known_birth(job.load) = job.birth;
    }
    for (const Held& held : job.held) give_back(held);
  }
}

void RemoteTier::give_back(const Held& held) {
  (void)first_.pool->release(held.block_class, held.id);
  if (held.node != cache::kNoNode) first_.index->unpin(held.node);
  --num_holding_;
}

bool RemoteTier::has_late_loads() const {
  const std::lock_guard lock(mutex_);
  const auto holds_late = [](const Job& job) { return !job.held.empty() && is_late(job); };
  return std::ranges::any_of(loads_, holds_late) || std::ranges::any_of(loading_, holds_late);
}

void RemoteTier::cancel_late_loads() {
  {
    std::unique_lock lock(mutex_);
    progress_.wait(lock, [this] { return !is_copying_back_; });  // as long as memory takes
    for (Jobs* jobs : {&loads_, &loading_}) {
      for (Job& job : *jobs) {
        if (is_late(job)) returned_.splice(returned_.end(), job.held);
      }
    }
  }
  collect();
}

void RemoteTier::cancel_waiting_stores() {
  {
    const std::lock_guard lock(mutex_);
    for (Job& job : stores_) {
      returned_.splice(returned_.end(), job.held);
      ++counters_.num_dropped;
      --num_open_[static_cast<int>(Direction::kStore)];
    }
    failed_.splice(failed_.end(), stores_);
    queued_bytes_ = 0;
  }
  progress_.notify_all();
  collect();
}

void RemoteTier::scrub() {
  for (const Side* side : {&store_side_, &load_side_}) {
    const std::span bytes(side->staging.data(), static_cast<size_t>(side->staging.bytes()));
    std::ranges::fill(bytes, uint8_t{0});
    side->copier->scrub();
  }
  store_->scrub();
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
  return std::ssize(stores_) + num_copying_ + std::ssize(returned_);
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

// RemoteTier: the two threads that copy blocks, make and open records, and call the store.
#include <algorithm>

#include "core/log.hpp"
#include "tier/store/remote_tier.hpp"

namespace kvx::tier {
namespace {

constexpr std::chrono::milliseconds kFirstBackoff{100};
constexpr std::chrono::milliseconds kMostBackoff{30'000};
constexpr int64_t kRecordAlignment = 64;

int64_t aligned(int64_t bytes) {
  return (bytes + kRecordAlignment - 1) / kRecordAlignment * kRecordAlignment;
}

}  // namespace

// ---- both

// As many jobs as the staging memory holds records. Requires: the lock.
std::vector<RemoteTier::Job> RemoteTier::take_batch(std::deque<Job>& queue,
                                                    const Side& side) const {
  std::vector<Job> jobs;
  int64_t bytes = 0;
  while (!queue.empty()) {
    bytes += aligned(record_bytes_of(queue.front()));
    if (!jobs.empty() && bytes > side.staging.bytes()) break;
    jobs.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  return jobs;
}

std::vector<std::span<uint8_t>> RemoteTier::records_of(std::span<const Job> jobs,
                                                       const Side& side) const {
  std::vector<std::span<uint8_t>> records;
  uint8_t* at = side.staging.data();
  for (const Job& job : jobs) {
    const int64_t bytes = record_bytes_of(job);
    records.emplace_back(at, static_cast<size_t>(bytes));
    at += aligned(bytes);
  }
  return records;
}

// Requires: the lock.
bool RemoteTier::is_reachable() const {
  return Clock::now() >= retry_at_;
}

void RemoteTier::note_call(const Status& status) {
  const std::lock_guard lock(mutex_);
  if (status.ok()) {
    backoff_ = std::chrono::milliseconds(0);
    return;
  }
  ++counters_.num_failed_calls;
  counters_.last_problem = status.error().message;
  backoff_ = std::clamp(2 * backoff_, kFirstBackoff, kMostBackoff);
  retry_at_ = Clock::now() + backoff_;
  log(LogLevel::kWarning, "a store is left alone for {} ms: {}", backoff_.count(),
      status.error().message);
}

void RemoteTier::note_problem(const std::string& problem) {
  log(LogLevel::kWarning, "a record of a store is refused: {}", problem);
  const std::lock_guard lock(mutex_);
  ++counters_.num_bad;
  counters_.last_problem = problem;
}

// ---- to the store

void RemoteTier::run_stores() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return is_stopping_ || !stores_.empty(); });
    if (is_stopping_) return;
    std::vector<Job> jobs = take_batch(stores_, store_side_);
    for (const Job& job : jobs) queued_bytes_ -= block_bytes(job);
    num_copying_ += std::ssize(jobs);
    lock.unlock();
    store_batch(jobs);
    lock.lock();
    num_open_[static_cast<int>(Direction::kStore)] -= std::ssize(jobs);
    for (Job& job : jobs) {
      if (!job.is_done) failed_.push_back(std::move(job));
    }
    progress_.notify_all();
  }
}

void RemoteTier::store_batch(std::vector<Job>& jobs) {
  const std::vector<std::span<uint8_t>> records = records_of(jobs, store_side_);
  std::vector<BlockTransfer> transfers;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int64_t at = record_payload_offset(std::ssize(jobs[i].name.tokens));
    transfers.push_back({block_of(jobs[i]), records[i].data() + at, block_bytes(jobs[i])});
  }
  std::vector<CopiedBlock> copies(jobs.size());
  store_side_.copier->start(Direction::kStore, transfers);
  store_side_.copier->finish(Direction::kStore, transfers, copies);
  bool is_reached = false;
  {
    const std::lock_guard lock(mutex_);
    num_copying_ -= std::ssize(jobs);
    copied_.insert(copied_.end(), jobs.begin(), jobs.end());
    is_reached = is_reachable();
  }
  progress_.notify_all();
  const bool are_copied = std::ranges::all_of(copies, &CopiedBlock::is_copied);
  if (is_reached && are_copied) note_call(put_batch(jobs, records));
  const std::lock_guard lock(mutex_);
  for (const Job& job : jobs) counters_.num_dropped += job.is_done ? 0 : 1;
}

// Puts what the store has not got.
Status RemoteTier::put_batch(std::vector<Job>& jobs, std::span<const std::span<uint8_t>> records) {
  std::vector<std::string> keys;
  for (const Job& job : jobs) keys.push_back(job.name.key());
  std::vector<uint8_t> has(jobs.size());
  KVX_RETURN_IF_ERROR(store_->exists(keys, has));
  std::vector<StorePut> puts;
  std::vector<size_t> places;
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].is_done = has[i] != 0;
    if (has[i] != 0) continue;
    KVX_RETURN_IF_ERROR(seal_record(facts_of(jobs[i]), key(), records[i]));
    puts.push_back({keys[i], records[i]});
    places.push_back(i);
  }
  const Status status = puts.empty() ? Status{} : store_->put(puts);
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  counters_.num_present += std::ssize(jobs) - std::ssize(puts);
  for (size_t i = 0; status.ok() && i < puts.size(); ++i) {
    Job& job = jobs[places[i]];
    job.is_done = puts[i].is_stored;
    if (!job.is_done) continue;
    ++counters_.num_stored;
    counters_.stored_bytes += std::ssize(puts[i].value);
    counters_.store_latency.add(
        std::chrono::duration_cast<std::chrono::microseconds>(now - job.pushed).count());
  }
  return status;
}

// ---- from the store

void RemoteTier::run_loads() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return is_stopping_ || !lookups_.empty() || !loads_.empty(); });
    if (is_stopping_) return;
    if (!lookups_.empty()) {
      const std::shared_ptr<StoreLookup> lookup = std::move(lookups_.front());
      lookups_.pop_front();
      lock.unlock();
      answer(*lookup);
      lock.lock();
      lookup->is_answered_ = true;
    } else {
      std::vector<Job> jobs = take_batch(loads_, load_side_);
      lock.unlock();
      load_batch(jobs);
      lock.lock();
      num_open_[static_cast<int>(Direction::kLoad)] -= std::ssize(jobs);
      for (Job& job : jobs) {
        --job.group->num_open;
        loaded_.push_back(std::move(job));
      }
    }
    progress_.notify_all();
  }
}

// The answer of a store that cannot be reached is that it has nothing.
void RemoteTier::answer(StoreLookup& lookup) {
  {
    const std::lock_guard lock(mutex_);
    if (!is_reachable()) return;
  }
  std::vector<std::string> keys;
  for (const BlockName& name : lookup.names_) keys.push_back(name.key());
  const Status status = store_->exists(keys, lookup.has_);
  if (!status.ok()) std::ranges::fill(lookup.has_, uint8_t{0});
  note_call(status);
  const std::lock_guard lock(mutex_);
  counters_.num_missed += std::ranges::count(lookup.has_, uint8_t{0});
}

void RemoteTier::load_batch(std::vector<Job>& jobs) {
  const std::vector<std::span<uint8_t>> records = records_of(jobs, load_side_);
  std::vector<StoreGet> gets;
  for (size_t i = 0; i < jobs.size(); ++i) gets.push_back({jobs[i].name.key(), records[i]});
  {
    const std::lock_guard lock(mutex_);
    if (!is_reachable()) return;
  }
  const Status status = store_->get(gets);
  note_call(status);
  if (!status.ok()) return;
  std::vector<BlockTransfer> transfers;
  std::vector<size_t> places;
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (gets[i].num_bytes < 0) continue;  // gone since it was looked up
    const auto bytes = std::min(static_cast<size_t>(gets[i].num_bytes), records[i].size());
    const auto payload = open_record(facts_of(jobs[i]), key(), records[i].first(bytes));
    if (!payload.ok()) {
      note_problem(payload.error().message);
      continue;
    }
    transfers.push_back({payload.value().data(), block_of(jobs[i]), block_bytes(jobs[i])});
    places.push_back(i);
  }
  if (transfers.empty()) return;
  std::vector<CopiedBlock> copies(transfers.size());
  load_side_.copier->start(Direction::kLoad, transfers);
  load_side_.copier->finish(Direction::kLoad, transfers, copies);
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < places.size(); ++i) {
    Job& job = jobs[places[i]];
    job.is_done = copies[i].is_copied;
    if (!job.is_done) continue;
    ++counters_.num_loaded;
    counters_.loaded_bytes += record_bytes_of(job);
    counters_.load_latency.add(
        std::chrono::duration_cast<std::chrono::microseconds>(now - job.pushed).count());
  }
}

}  // namespace kvx::tier

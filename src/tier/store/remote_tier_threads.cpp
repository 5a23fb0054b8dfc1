// RemoteTier: the two threads that copy blocks, make and open records, and call the store.
#include <algorithm>

#include "core/caught.hpp"
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
RemoteTier::Jobs RemoteTier::take_batch(Jobs& queue, const Side& side) const {
  int64_t bytes = 0;
  auto end = queue.begin();
  for (; end != queue.end(); ++end) {
    bytes += aligned(record_bytes_of(*end));
    if (end != queue.begin() && bytes > side.staging.bytes()) break;
  }
  Jobs jobs;
  jobs.splice(jobs.end(), queue, queue.begin(), end);
  return jobs;
}

std::vector<std::span<uint8_t>> RemoteTier::records_of(const Jobs& jobs, const Side& side) const {
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

void RemoteTier::note_call(const Status& status) noexcept {
  const std::lock_guard lock(mutex_);
  if (status.ok()) {
    backoff_ = std::chrono::milliseconds(0);
    return;
  }
  ++counters_.num_failed_calls;
  backoff_ = std::clamp(2 * backoff_, kFirstBackoff, kMostBackoff);
  retry_at_ = Clock::now() + backoff_;
  (void)caught([&]() -> Status {  // where memory is short, the counter alone says it
    counters_.last_problem = status.error().message;
    log(LogLevel::kWarning, "a store is left alone for {} ms: {}", backoff_.count(),
        status.error().message);
    return {};
  });
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
    Jobs jobs = take_batch(stores_, store_side_);
    for (const Job& job : jobs) queued_bytes_ -= block_bytes(job);
    num_copying_ += std::ssize(jobs);
    lock.unlock();
    store_batch(jobs);
    lock.lock();
    num_open_[static_cast<int>(Direction::kStore)] -= std::ssize(jobs);
    for (auto job = jobs.begin(); job != jobs.end();) {
      const auto one = job++;
      if (one->is_done) continue;
      ++counters_.num_dropped;
      failed_.splice(failed_.end(), jobs, one);
    }
    progress_.notify_all();
  }
}

void RemoteTier::store_batch(Jobs& jobs) {
  Status status = caught([&] { return copy_out(jobs); });
  bool is_reached = false;
  {
    const std::lock_guard lock(mutex_);
    num_copying_ -= std::ssize(jobs);
    for (Job& job : jobs) returned_.splice(returned_.end(), job.held);
    is_reached = is_reachable();
  }
  progress_.notify_all();
  if (!is_reached) return;
  if (status.ok()) status = caught([&] { return put_batch(jobs); });
  note_call(status);
}

// The pool's blocks to the places of their records.
Status RemoteTier::copy_out(const Jobs& jobs) {
  const std::vector<std::span<uint8_t>> records = records_of(jobs, store_side_);
  std::vector<BlockTransfer> transfers;
  for (const Job& job : jobs) {
    const int64_t at = record_payload_offset(std::ssize(job.name.tokens));
    transfers.push_back({block_of(job), records[transfers.size()].data() + at, block_bytes(job)});
  }
  std::vector<CopiedBlock> copies(jobs.size());
  store_side_.copier->start(Direction::kStore, transfers);
  store_side_.copier->finish(Direction::kStore, transfers, copies);
  if (std::ranges::all_of(copies, &CopiedBlock::is_copied)) return {};
  return internal_error("blocks could not be copied on their way to a store");
}

// Puts what the store has not got.
Status RemoteTier::put_batch(Jobs& jobs) {
  const std::vector<std::span<uint8_t>> records = records_of(jobs, store_side_);
  std::vector<std::string> keys;
  for (const Job& job : jobs) keys.push_back(job.name.key());
  std::vector<uint8_t> has(jobs.size());
  KVX_RETURN_IF_ERROR(store_->exists(keys, has));
  std::vector<StorePut> puts;
  std::vector<Job*> put_jobs;
  size_t i = 0;
  for (Job& job : jobs) {
    const size_t place = i++;
    job.is_done = has[place] != 0;
    if (job.is_done) continue;
    KVX_RETURN_IF_ERROR(seal_record(facts_of(job), key(), records[place]));
    puts.push_back({keys[place], records[place]});
    put_jobs.push_back(&job);
  }
  const Status status = puts.empty() ? Status{} : store_->put(puts);
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  counters_.num_present += std::ssize(jobs) - std::ssize(puts);
  for (i = 0; status.ok() && i < puts.size(); ++i) {
    Job& job = *put_jobs[i];
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
      loading_ = take_batch(loads_, load_side_);
      const bool is_reached = is_reachable();
      lock.unlock();
      if (is_reached) note_call(caught([this] { return load_batch(); }));
      lock.lock();
      is_copying_back_ = false;
      num_open_[static_cast<int>(Direction::kLoad)] -= std::ssize(loading_);
      for (const Job& job : loading_) --job.group->num_open;
      loaded_.splice(loaded_.end(), loading_);
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
  const Status status = caught([&] {
    std::vector<std::string> keys;
    for (const BlockName& name : lookup.names_) keys.push_back(name.key());
    return store_->exists(keys, lookup.has_);
  });
  if (!status.ok()) std::ranges::fill(lookup.has_, uint8_t{0});
  note_call(status);
  const std::lock_guard lock(mutex_);
  counters_.num_missed += std::ranges::count(lookup.has_, uint8_t{0});
}

// Its thread alone changes the batch; only what its jobs hold may be taken by others meanwhile.
Status RemoteTier::load_batch() {
  const std::vector<std::span<uint8_t>> records = records_of(loading_, load_side_);
  std::vector<StoreGet> gets;
  for (const Job& job : loading_) gets.push_back({job.name.key(), records[gets.size()]});
  // Each record is checked when it arrives, while others are on their way.
  std::vector<Result<std::span<const uint8_t>>> payloads(gets.size(), std::span<const uint8_t>());
  std::vector<const Job*> jobs;
  for (const Job& job : loading_) jobs.push_back(&job);
  const auto open = [&](size_t i) {
    const StoreGet& got = gets[i];
    payloads[i] = std::span<const uint8_t>();
    if (got.num_bytes < 0) return;  // gone since it was looked up
    const auto bytes = std::min(static_cast<size_t>(got.num_bytes), got.buffer.size());
    payloads[i] = open_record(facts_of(*jobs[i]), key(), got.buffer.first(bytes));
  };
  KVX_RETURN_IF_ERROR(store_->get_each(gets, open));
  std::vector<BlockTransfer> transfers;
  std::vector<Job*> opened;
  size_t i = 0;
  for (Job& job : loading_) {
    const auto& payload = payloads[i++];
    if (!payload.ok()) {
      note_problem(payload.error().message);
    } else if (!payload.value().empty()) {
      transfers.push_back({payload.value().data(), block_of(job), block_bytes(job)});
      opened.push_back(&job);
    }
  }
  return copy_back(transfers, opened);
}

// Blocks that were given back meanwhile are another's.
Status RemoteTier::copy_back(std::vector<BlockTransfer>& transfers, std::vector<Job*>& jobs) {
  std::vector<CopiedBlock> copies(jobs.size());
  {
    const std::lock_guard lock(mutex_);
    size_t count = 0;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (jobs[i]->held.empty()) continue;
      transfers[count] = transfers[i];
      jobs[count++] = jobs[i];
    }
    transfers.resize(count);
    jobs.resize(count);
    is_copying_back_ = count > 0;
  }
  if (jobs.empty()) return {};
  copies.resize(jobs.size());
  load_side_.copier->start(Direction::kLoad, transfers);
  load_side_.copier->finish(Direction::kLoad, transfers, copies);
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = *jobs[i];
    job.is_done = copies[i].is_copied;
    if (!job.is_done) continue;
    ++counters_.num_loaded;
    counters_.loaded_bytes += record_bytes_of(job);
    counters_.load_latency.add(
        std::chrono::duration_cast<std::chrono::microseconds>(now - job.pushed).count());
  }
  return {};
}

}  // namespace kvx::tier

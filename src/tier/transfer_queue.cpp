// TransferQueue: one thread starts batches, loads first, another waits for them.
#include "tier/transfer_queue.hpp"

namespace kvx::tier {

TransferQueue::TransferQueue(std::unique_ptr<BlockCopier> copier)
    : copier_(std::move(copier)), starter_([this] { start_batches(); }) {
  if (copier_->max_started() == 1) return;
  try {
    finisher_ = std::thread([this] { finish_batches(); });
  } catch (...) {
    stop();
    throw;
  }
}

TransferQueue::~TransferQueue() {
  stop();
}

void TransferQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  starter_.join();
  if (finisher_.joinable()) finisher_.join();
}

void TransferQueue::push(Transfer transfer) {
  transfer.pushed = std::chrono::steady_clock::now();
  {
    const std::lock_guard lock(mutex_);
    ++num_open_[static_cast<int>(transfer.direction)];
    if (transfer.group) ++transfer.group->num_open;
    (transfer.direction == Direction::kLoad ? loads_ : stores_).push_back(std::move(transfer));
  }
  wake_.notify_one();
}

// As many batches as the copier likes are under way.
void TransferQueue::start_batches() {
  const bool finishes_too = copier_->max_started() == 1;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return is_stopping_ || can_start(); });
    if (is_stopping_) break;
    start_batch(lock);
    if (finishes_too) finish_batch(lock);
  }
  has_stopped_starting_ = true;
  started_.notify_one();
}

void TransferQueue::finish_batches() {
  std::unique_lock lock(mutex_);
  while (true) {
    started_.wait(lock, [this] { return has_stopped_starting_ || can_finish(); });
    if (!can_finish()) return;
    finish_batch(lock);
    wake_.notify_one();
  }
}

// The lock is open while the copier works. Requires: can_start().
void TransferQueue::start_batch(std::unique_lock<std::mutex>& lock) {
  std::deque<Transfer>& queue = loads_.empty() ? stores_ : loads_;
  Batch& batch = batches_.emplace_back();
  int64_t bytes = 0;
  while (!queue.empty() && bytes < copier_->batch_bytes()) {
    bytes += queue.front().block.bytes;
    batch.blocks.push_back(queue.front().block);
    batch.transfers.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  lock.unlock();
  copier_->start(batch.transfers.front().direction, batch.blocks);
  lock.lock();
  batch.is_started = true;
  started_.notify_one();
}

// Requires: can_finish().
void TransferQueue::finish_batch(std::unique_lock<std::mutex>& lock) {
  Batch& batch = batches_.front();
  lock.unlock();
  copied_.resize(batch.blocks.size());
  copier_->finish(batch.transfers.front().direction, batch.blocks, copied_);
  lock.lock();
  const auto now = std::chrono::steady_clock::now();
  for (size_t i = 0; i < batch.transfers.size(); ++i) {
    const Transfer& transfer = batch.transfers[i];
    const auto taken = now - transfer.pushed;
    finished_.push_back({transfer.direction, transfer.tag, copied_[i],
                         std::chrono::duration_cast<std::chrono::microseconds>(taken).count()});
    --num_open_[static_cast<int>(transfer.direction)];
    if (transfer.group) --transfer.group->num_open;
  }
  batches_.pop_front();
  progress_.notify_all();
}

void TransferQueue::cancel_waiting(Direction direction, std::vector<int64_t>& tags) {
  const std::lock_guard lock(mutex_);
  std::deque<Transfer>& queue = direction == Direction::kLoad ? loads_ : stores_;
  for (const Transfer& transfer : queue) tags.push_back(transfer.tag);
  num_open_[static_cast<int>(direction)] -= std::ssize(queue);
  queue.clear();
  progress_.notify_all();
}

void TransferQueue::drain_finished(std::vector<FinishedTransfer>& finished) {
  const std::lock_guard lock(mutex_);
  finished.insert(finished.end(), finished_.begin(), finished_.end());
  finished_.clear();
}

void TransferQueue::wait(const TransferGroup& group) {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&group] { return group.num_open == 0; });
}

bool TransferQueue::is_done(const TransferGroup& group) const {
  const std::lock_guard lock(mutex_);
  return group.num_open == 0;
}

void TransferQueue::wait_for_all() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this] { return num_open_[0] + num_open_[1] == 0; });
}

bool TransferQueue::wait_for_all_until(std::chrono::steady_clock::time_point end) {
  std::unique_lock lock(mutex_);
  return progress_.wait_until(lock, end, [this] { return num_open_[0] + num_open_[1] == 0; });
}

void TransferQueue::wait_for_some() {
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [this] { return !finished_.empty() || num_open_[0] + num_open_[1] == 0; });
}

int64_t TransferQueue::depth(Direction direction) const {
  const std::lock_guard lock(mutex_);
  return num_open_[static_cast<int>(direction)];
}

}  // namespace kvx::tier

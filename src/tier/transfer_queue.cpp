// TransferQueue: one worker, loads first.
#include "tier/transfer_queue.hpp"

namespace kvx::tier {

TransferQueue::TransferQueue(std::unique_ptr<BlockCopier> copier)
    : copier_(std::move(copier)), worker_([this] { work(); }) {}

TransferQueue::~TransferQueue() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_all();
  worker_.join();
}

void TransferQueue::push(Transfer transfer) {
  {
    const std::lock_guard lock(mutex_);
    ++num_open_[static_cast<int>(transfer.direction)];
    if (transfer.group) ++transfer.group->num_open;
    (transfer.direction == Direction::kLoad ? loads_ : stores_).push_back(std::move(transfer));
  }
  wake_.notify_one();
}

void TransferQueue::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return is_stopping_ || !loads_.empty() || !stores_.empty(); });
    if (is_stopping_) return;
    take_batch();
    lock.unlock();
    blocks_.clear();
    for (const Transfer& transfer : batch_) blocks_.push_back(transfer.block);
    copied_.resize(batch_.size());
    copier_->copy(batch_.front().direction, blocks_, copied_);
    lock.lock();
    finish_batch();
  }
}

// As many as the copier likes. Requires: there are some.
void TransferQueue::take_batch() {
  std::deque<Transfer>& queue = loads_.empty() ? stores_ : loads_;
  batch_.clear();
  int64_t bytes = 0;
  while (!queue.empty() && bytes < copier_->batch_bytes()) {
    bytes += queue.front().block.bytes;
    batch_.push_back(std::move(queue.front()));
    queue.pop_front();
  }
}

void TransferQueue::finish_batch() {
  bool ends_group = false;
  for (size_t i = 0; i < batch_.size(); ++i) {
    const Transfer& transfer = batch_[i];
    finished_.push_back({transfer.direction, transfer.tag, copied_[i]});
    --num_open_[static_cast<int>(transfer.direction)];
    ends_group |= transfer.group && --transfer.group->num_open == 0;
  }
  if (ends_group || num_open_[0] + num_open_[1] == 0) progress_.notify_all();
}

void TransferQueue::take_finished(std::vector<FinishedTransfer>& finished) {
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

int64_t TransferQueue::depth(Direction direction) const {
  const std::lock_guard lock(mutex_);
  return num_open_[static_cast<int>(direction)];
}

}  // namespace kvx::tier

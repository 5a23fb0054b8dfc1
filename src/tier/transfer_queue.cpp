// TransferQueue: one worker, loads first.
#include "tier/transfer_queue.hpp"

#include "cache/memory_copy.hpp"

namespace kvx::tier {
namespace {

FinishedTransfer copy(const Transfer& transfer) {
  FinishedTransfer done{transfer.direction, transfer.tag, true, {}};
  const auto bytes = static_cast<size_t>(transfer.bytes);
  const std::span<uint8_t> to(transfer.to, bytes);
  const std::span<const uint8_t> from(transfer.from, bytes);
  if (transfer.first_tier == cache::MemoryKind::kHost) {
    done.checksum = cache::copy_with_checksum(to, from);
    return done;
  }
  // The host's side is what can be read here: it is hashed, after or before the device's copy.
  if (transfer.direction == Direction::kLoad) done.checksum = cache::checksum(from);
  done.is_copied = cache::copy_device_memory(to.data(), from.data(), transfer.bytes).ok();
  if (transfer.direction == Direction::kStore) done.checksum = cache::checksum(to);
  return done;
}

}  // namespace

TransferQueue::TransferQueue() : worker_([this] { work(); }) {}

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
    std::deque<Transfer>& queue = loads_.empty() ? stores_ : loads_;
    const Transfer transfer = std::move(queue.front());
    queue.pop_front();
    lock.unlock();
    const FinishedTransfer done = copy(transfer);
    lock.lock();
    finished_.push_back(done);
    --num_open_[static_cast<int>(transfer.direction)];
    const bool ends_group = transfer.group && --transfer.group->num_open == 0;
    if (ends_group || num_open_[0] + num_open_[1] == 0) progress_.notify_all();
  }
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

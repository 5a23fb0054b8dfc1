// Blocks over the bus of a CUDA device: many at once, on a stream of their own, and hashed by some
// threads of the host while others are on their way.
//
//   store   copy c0 | copy c1 | copy c2 | ...      c: a chunk of the batch
//                     hash c0 | hash c1 | hash c2
//   load    copy c0 | copy c1 | copy c2 | ...
//           hash c0 c1 c2 ...
#include <algorithm>
#include <thread>
#include <vector>

#include "core/executor.hpp"
#include "core/log.hpp"
#include "device/cuda_async.hpp"
#include "device/cuda_caller.hpp"
#include "tier/block_copier.hpp"

namespace kvx::tier {
namespace {

constexpr int64_t kChunkBytes = int64_t{4} << 20;  // at least, and a block a thread
constexpr int64_t kBatchBytes = int64_t{128} << 20;
constexpr int kMostHashThreads = 8;  // they outrun a PCIe 5 bus

int num_hash_threads() {
  const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(num_cores / 2, 1, kMostHashThreads);
}

class CudaCopier final : public BlockCopier {
 public:
  CudaCopier(int device, device::CudaStream compute, device::OwnedCudaStream stream,
             device::CudaEvent ready)
      : device_(device),
        compute_(compute),
        stream_(std::move(stream)),
        ready_(std::move(ready)),
        executor_(make_thread_pool(num_hash_threads())) {}

  int64_t batch_bytes() const override { return kBatchBytes; }

  void copy(Direction direction, std::span<const BlockTransfer> transfers,
            std::span<CopiedBlock> results) override {
    const Status done = try_copy(direction, transfers, results);
    if (done.ok()) return;
    log(LogLevel::kWarning, "{} blocks did not pass between the tiers: {}", transfers.size(),
        done.error().message);
    for (CopiedBlock& result : results) result.is_copied = false;
  }

 private:
  struct Chunk {
    size_t first = 0;
    size_t count = 0;
  };

  Status try_copy(Direction direction, std::span<const BlockTransfer> transfers,
                  std::span<CopiedBlock> results);
  Status send(std::span<const BlockTransfer> transfers);
  void hash(Direction direction, std::span<const BlockTransfer> transfers,
            std::span<CopiedBlock> results);
  void cut(std::span<const BlockTransfer> transfers);

  int device_;
  device::CudaStream compute_;
  device::OwnedCudaStream stream_;
  device::CudaEvent ready_;  // what compute was given
  std::unique_ptr<Executor> executor_;
  std::vector<Chunk> chunks_;
  std::vector<device::CudaEvent> arrived_;  // [chunks]
  std::vector<device::CudaCopy> copies_;
};

Status CudaCopier::try_copy(Direction direction, std::span<const BlockTransfer> transfers,
                            std::span<CopiedBlock> results) {
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  KVX_RETURN_IF_ERROR(ready_.record(compute_));
  KVX_RETURN_IF_ERROR(ready_.hold_back(stream_.get()));
  cut(transfers);
  while (arrived_.size() < chunks_.size()) {
    KVX_ASSIGN_OR_RETURN(device::CudaEvent event, device::CudaEvent::create());
    arrived_.push_back(std::move(event));
  }
  for (size_t c = 0; c < chunks_.size(); ++c) {
    KVX_RETURN_IF_ERROR(send(transfers.subspan(chunks_[c].first, chunks_[c].count)));
    KVX_RETURN_IF_ERROR(arrived_[c].record(stream_.get()));
  }
  if (direction == Direction::kLoad) {
    hash(direction, transfers, results);
    return arrived_[chunks_.size() - 1].wait();
  }
  for (size_t c = 0; c < chunks_.size(); ++c) {
    KVX_RETURN_IF_ERROR(arrived_[c].wait());
    hash(direction, transfers.subspan(chunks_[c].first, chunks_[c].count),
         results.subspan(chunks_[c].first, chunks_[c].count));
  }
  return {};
}

void CudaCopier::cut(std::span<const BlockTransfer> transfers) {
  const auto num_threads = static_cast<size_t>(executor_->num_threads());
  chunks_.assign(1, {});
  int64_t bytes = 0;
  for (size_t i = 0; i < transfers.size(); ++i) {
    if (bytes >= kChunkBytes && chunks_.back().count >= num_threads) {
      chunks_.push_back({i, 0});
      bytes = 0;
    }
    ++chunks_.back().count;
    bytes += transfers[i].bytes;
  }
}

// Neighbours on both sides go as one.
Status CudaCopier::send(std::span<const BlockTransfer> transfers) {
  copies_.clear();
  for (const BlockTransfer& next : transfers) {
    const bool is_neighbour = !copies_.empty() &&
                              copies_.back().to + copies_.back().bytes == next.to &&
                              copies_.back().from + copies_.back().bytes == next.from;
    if (is_neighbour) {
      copies_.back().bytes += next.bytes;
    } else {
      copies_.push_back({next.to, next.from, next.bytes});
    }
  }
  return device::cuda_copy_batch(copies_, stream_.get());
}

// The host's side is what can be read here.
void CudaCopier::hash(Direction direction, std::span<const BlockTransfer> transfers,
                      std::span<CopiedBlock> results) {
  executor_->parallel_for(static_cast<int>(transfers.size()), [&](int i) {
    const BlockTransfer& one = transfers[i];
    const uint8_t* on_host = direction == Direction::kLoad ? one.from : one.to;
    results[i] = {true, cache::checksum({on_host, static_cast<size_t>(one.bytes)})};
  });
}

}  // namespace

Result<TierLink> cuda_link(int device, device::CudaStream compute, cache::Memory& pinned) {
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device));
  KVX_ASSIGN_OR_RETURN(auto stream, device::OwnedCudaStream::create());
  KVX_ASSIGN_OR_RETURN(auto ready, device::CudaEvent::create());
  return TierLink{
      &pinned, std::make_unique<CudaCopier>(device, compute, std::move(stream), std::move(ready))};
}

}  // namespace kvx::tier

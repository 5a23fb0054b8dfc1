// Blocks over the bus of a CUDA device: many by one call, on a stream of their own, and hashed by
// some threads of the host when they have passed, while others are on their way.
//
//   bus       batch 0 | batch 1 | batch 2 | ...
//   threads             hash 0  | hash 1  | hash 2     of what is on the host
//
// A load is hashed behind the bus too: what changes on the host before or while it passes is seen,
// and threads that read in step with the bus hold it up.
#include <algorithm>
#include <thread>
#include <vector>

#include "core/checked.hpp"
#include "core/executor.hpp"
#include "core/log.hpp"
#include "device/cuda_async.hpp"
#include "device/cuda_caller.hpp"
#include "tier/block_checksum.hpp"
#include "tier/block_copier.hpp"

namespace kvx::tier {
namespace {

constexpr int64_t kBatchBytes = int64_t{16} << 20;  // 0.3 ms of PCIe 5
constexpr int kMaxStarted = 4;
constexpr int kMostHashThreads = 12;  // outrun the bus

// Threads that compute leave the device's own caller room.
int num_hash_threads() {
  const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::clamp(num_cores - 2, 1, kMostHashThreads);
}

struct Started {
  device::CudaEvent arrived;
  Status status;
};

class CudaCopier final : public BlockCopier {
 public:
  CudaCopier(int device, device::CudaStream compute, device::OwnedCudaStream stream,
             device::CudaEvent ready, std::vector<Started> started)
      : device_(device),
        compute_(compute),
        stream_(std::move(stream)),
        ready_(std::move(ready)),
        started_(std::move(started)),
        executor_(make_thread_pool(num_hash_threads())) {}

  int64_t batch_bytes() const override { return kBatchBytes; }
  int max_started() const override { return kMaxStarted; }

  void start(Direction, std::span<const BlockTransfer> transfers) override {
    Started& batch = started_[next_start_++ % started_.size()];
    batch.status = send(transfers, batch.arrived);
  }

  void finish(Direction direction, std::span<const BlockTransfer> transfers,
              std::span<CopiedBlock> results) override {
    const Started& batch = started_[next_finish_++ % started_.size()];
    Status status = batch.status;
    if (status.ok()) status = batch.arrived.wait();
    if (status.ok()) hash(direction, transfers, results);
    if (status.ok()) return;
    log(LogLevel::kWarning, "{} blocks did not pass between the tiers: {}", transfers.size(),
        status.error().message);
    for (CopiedBlock& result : results) result.is_copied = false;
  }

 private:
  Status send(std::span<const BlockTransfer> transfers, const device::CudaEvent& arrived);
  void join_neighbours(std::span<const BlockTransfer> transfers);
  void hash(Direction direction, std::span<const BlockTransfer> transfers,
            std::span<CopiedBlock> results);

  int device_;
  device::CudaStream compute_;
  device::OwnedCudaStream stream_;
  device::CudaEvent ready_;  // what compute was given
  std::vector<Started> started_;
  size_t next_start_ = 0;
  size_t next_finish_ = 0;
  std::unique_ptr<Executor> executor_;
  std::vector<device::CudaCopy> copies_;                // start()'s
  std::vector<std::span<const uint8_t>> block_copies_;  // finish()'s
  std::vector<cache::ContentHash> hashes_;              // [block copies]
};

Status CudaCopier::send(std::span<const BlockTransfer> transfers,
                        const device::CudaEvent& arrived) {
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device_));
  KVX_RETURN_IF_ERROR(ready_.record(compute_));
  KVX_RETURN_IF_ERROR(ready_.hold_back(stream_.get()));
  join_neighbours(transfers);
  KVX_RETURN_IF_ERROR(device::cuda_copy_batch(copies_, stream_.get()));
  return arrived.record(stream_.get());
}

void CudaCopier::join_neighbours(std::span<const BlockTransfer> transfers) {
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
}

void CudaCopier::hash(Direction direction, std::span<const BlockTransfer> transfers,
                      std::span<CopiedBlock> results) {
  block_copies_.clear();
  for (const BlockTransfer& one : transfers) {
    const uint8_t* const on_host = direction == Direction::kLoad ? one.from : one.to;
    for_each_part(one, [&](size_t begin, size_t bytes) {
      for (size_t at = 0; at < bytes; at += kChecksumPieceBytes) {
        block_copies_.push_back(
            {on_host + begin + at, std::min<size_t>(kChecksumPieceBytes, bytes - at)});
      }
    });
  }
  hashes_.resize(block_copies_.size());
  executor_->parallel_for(static_cast<int>(block_copies_.size()),
                          [&](int i) { hashes_[i] = cache::checksum(block_copies_[i]); });
  auto next = std::span<const cache::ContentHash>(hashes_);
  const auto join_part = [&next](size_t, size_t bytes) {
    const auto own = next.first(ceil_div<size_t>(bytes, kChecksumPieceBytes));
    next = next.subspan(own.size());
    return join_checksums(own);
  };
  for (size_t i = 0; i < transfers.size(); ++i) {
    results[i] = {true, checksum_by_parts(transfers[i], join_part)};
  }
}

}  // namespace

Result<TierLink> cuda_link(int device, device::CudaStream compute, cache::Memory& pinned) {
  KVX_ASSIGN_OR_RETURN(const auto current, device::CurrentCudaDevice::set(device));
  KVX_ASSIGN_OR_RETURN(auto stream, device::OwnedCudaStream::create());
  KVX_ASSIGN_OR_RETURN(auto ready, device::CudaEvent::create());
  std::vector<Started> started;
  for (int i = 0; i < kMaxStarted; ++i) {
    KVX_ASSIGN_OR_RETURN(auto arrived, device::CudaEvent::create());
    started.push_back({std::move(arrived), {}});
  }
  return TierLink{&pinned, std::make_unique<CudaCopier>(device, compute, std::move(stream),
                                                        std::move(ready), std::move(started))};
}

}  // namespace kvx::tier

// Blocks to files and back. From a device they go by way of memory that it is joined to already:
// each batch has a block copy of it. From host memory they take no such way (host_copier.cpp).
//
//   first tier ── another copier ──▶ staging ── write ──▶ files
//              ◀─ another copier ──          ◀─ read ───
#include <algorithm>
#include <vector>

#include "core/log.hpp"
#include "tier/block_copier.hpp"
#include "tier/file_memory.hpp"

namespace kvx::tier {
namespace {

struct StagedBatch {
  std::vector<BlockTransfer> transfers;  // between the first tier and the staging memory
  std::vector<Status> read;              // of a load: what became of each block
};

class FileCopier final : public BlockCopier {
 public:
  FileCopier(FileMemory& files, std::unique_ptr<BlockCopier> inner, cache::Region staging)
      : files_(files),
        inner_(std::move(inner)),
        staging_(std::move(staging)),
        batches_(static_cast<size_t>(inner_->max_started())) {}

  int64_t batch_bytes() const override { return inner_->batch_bytes(); }
  int max_started() const override { return inner_->max_started(); }

  void start(Direction direction, std::span<const BlockTransfer> transfers) override {
    const size_t slot = next_start_++ % batches_.size();
    StagedBatch& batch = batches_[slot];
    batch.transfers.clear();
    batch.read.clear();
    uint8_t* staged = staging_.data() + static_cast<int64_t>(slot) * block_copy_bytes();
    for (const BlockTransfer& one : transfers) {
      if (direction == Direction::kStore) {
        batch.transfers.push_back({one.from, staged, one.bytes, one.part_ends, one.checksums});
      } else {
        batch.read.push_back(files_.read(one.from, {staged, static_cast<size_t>(one.bytes)}));
        batch.transfers.push_back({staged, one.to, one.bytes, one.part_ends, one.checksums});
      }
      staged += one.bytes;
    }
    inner_->start(direction, batch.transfers);
  }

  void finish(Direction direction, std::span<const BlockTransfer> transfers,
              std::span<CopiedBlock> results) override {
    const StagedBatch& batch = batches_[next_finish_++ % batches_.size()];
    inner_->finish(direction, batch.transfers, results);
    for (size_t i = 0; i < transfers.size(); ++i) {
      if (!results[i].is_copied) continue;
      const BlockTransfer& staged = batch.transfers[i];
      const Status status =
          direction == Direction::kLoad
              ? batch.read[i]
              : files_.write(transfers[i].to, {staged.to, static_cast<size_t>(staged.bytes)});
      if (status.ok()) continue;
      log(LogLevel::kWarning, "a block did not pass between the tiers: {}", status.error().message);
      results[i].is_copied = false;
    }
  }

  void scrub() override {
    std::ranges::fill(std::span(staging_.data(), static_cast<size_t>(staging_.bytes())),
                      uint8_t{0});
    inner_->scrub();
  }

 private:
  int64_t block_copy_bytes() const { return staging_.bytes() / std::ssize(batches_); }

  FileMemory& files_;
  std::unique_ptr<BlockCopier> inner_;
  cache::Region staging_;
  std::vector<StagedBatch> batches_;
  size_t next_start_ = 0;
  size_t next_finish_ = 0;
};

}  // namespace

Result<TierLink> file_link(const std::string& folder, TierLink staging, int64_t max_block_bytes) {
  KVX_ASSIGN_OR_RETURN(auto files, FileMemory::create(folder));
  FileMemory* const memory = files.get();
  if (staging.is_on_host) {
    return TierLink{memory, make_host_copier(nullptr, memory), std::move(files), memory};
  }
  // A batch is full with the block that reaches batch_bytes().
  const int64_t block_copy_bytes = staging.copier->batch_bytes() + max_block_bytes;
  KVX_ASSIGN_OR_RETURN(cache::Region region,
                       staging.memory->allocate(block_copy_bytes * staging.copier->max_started(),
                                                "blocks on their way to files"));
  auto copier = std::make_unique<FileCopier>(*files, std::move(staging.copier), std::move(region));
  return TierLink{memory, std::move(copier), std::move(files), memory};
}

}  // namespace kvx::tier

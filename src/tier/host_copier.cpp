// Blocks between two places of the host: memory, or files. Between memories they are copied and
// hashed in one pass; to and from files piece by piece, so that a piece is hashed while the nearest
// caches have it, and by threads of which one hashes while another one writes.
#include "tier/block_copier.hpp"

#include <algorithm>
#include <vector>

#include "core/executor.hpp"
#include "core/log.hpp"
#include "tier/block_checksum.hpp"
#include "tier/file_memory.hpp"

namespace kvx::tier {
namespace {

class HostCopier final : public BlockCopier {
 public:
  HostCopier(FileMemory* first, FileMemory* second) : first_(first), second_(second) {
    if ((first == nullptr) != (second == nullptr)) executor_ = make_thread_pool(kNumFileThreads);
  }

  // Who waits is woken once a batch: that takes as long as copying some 50 KiB. A batch has work
  // for each of the threads.
  int64_t batch_bytes() const override { return executor_ ? 4 << 20 : 1 << 20; }
  int max_started() const override { return 1; }
  void start(Direction, std::span<const BlockTransfer>) override {}
  void finish(Direction direction, std::span<const BlockTransfer> transfers,
              std::span<CopiedBlock> results) override {
    Executor& executor = executor_ ? *executor_ : serial_executor();
    executor.parallel_for(static_cast<int>(transfers.size()), [&](int i) {
      const Status status = copy(direction, transfers[i], results[i].checksum);
      results[i].is_copied = status.ok();
      if (status.ok()) return;
      log(LogLevel::kWarning, "a block did not pass between the tiers: {}", status.error().message);
    });
  }

  void scrub() override { std::ranges::fill(staged_, uint8_t{0}); }

 private:
  Status copy(Direction direction, const BlockTransfer& block, cache::ContentHash& checksum) {
    FileMemory* const from = direction == Direction::kStore ? first_ : second_;
    FileMemory* const to = direction == Direction::kStore ? second_ : first_;
    Status status;
    checksum = checksum_by_parts(block, [&](size_t begin, size_t bytes) {
      return checksum_by_pieces(bytes, [&](size_t at, size_t count) {
        const Piece piece{block.from + begin + at, block.to + begin + at, count};
        return copy_piece(from, to, piece, status);
      });
    });
    return status;
  }

  struct Piece {
    const uint8_t* from;
    uint8_t* to;
    size_t bytes;
  };
  // Once a status is an error nothing more is read or written.
  cache::ContentHash copy_piece(FileMemory* from, FileMemory* to, const Piece& piece,
                                Status& status) {
    std::span<const uint8_t> source(piece.from, piece.bytes);
    if (from == nullptr && to == nullptr) {
      return cache::copy_with_checksum({piece.to, piece.bytes}, source);
    }
    if (from != nullptr) {
      if (to != nullptr) staged_.resize(kChecksumPieceBytes);
      const std::span<uint8_t> read(to == nullptr ? piece.to : staged_.data(), piece.bytes);
      if (status.ok()) status = from->read(piece.from, read);
      source = read;
    }
    const cache::ContentHash checksum = cache::checksum(source);
    if (to != nullptr && status.ok()) status = to->write(piece.to, source);
    return checksum;
  }

  // A file system lets one thread at a time write to a file.
  static constexpr int kNumFileThreads = 2;

  FileMemory* first_;
  FileMemory* second_;
  std::unique_ptr<Executor> executor_;  // null: the calling thread alone
  std::vector<uint8_t> staged_;         // from files to files, which one thread copies
};

}  // namespace

std::unique_ptr<BlockCopier> make_host_copier(FileMemory* first, FileMemory* second) {
  return std::make_unique<HostCopier>(first, second);
}

TierLink host_link() {
  return {.memory = &cache::host_memory(),
          .copier = make_host_copier(nullptr, nullptr),
          .is_on_host = true};
}

}  // namespace kvx::tier

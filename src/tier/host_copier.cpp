// Blocks from host memory to host memory: copied and hashed in one pass.
#include "tier/block_checksum.hpp"
#include "tier/block_copier.hpp"

namespace kvx::tier {
namespace {

class HostCopier final : public BlockCopier {
 public:
  // Who waits is woken once a batch: that takes as long as copying some 50 KiB.
  int64_t batch_bytes() const override { return 1 << 20; }
  int max_started() const override { return 1; }
  void start(Direction, std::span<const BlockTransfer>) override {}
  void finish(Direction, std::span<const BlockTransfer> transfers,
              std::span<CopiedBlock> results) override {
    for (size_t i = 0; i < transfers.size(); ++i) {
      const BlockTransfer& one = transfers[i];
      const auto copy_part = [&one](size_t at, size_t bytes) {
        return copy_with_block_checksum({one.to + at, bytes}, {one.from + at, bytes});
      };
      results[i] = {true, checksum_by_parts(one, copy_part)};
    }
  }
};

}  // namespace

TierLink host_link() {
  return {&cache::host_memory(), std::make_unique<HostCopier>()};
}

}  // namespace kvx::tier

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
      const auto bytes = static_cast<size_t>(transfers[i].bytes);
      results[i] = {true,
                    copy_with_block_checksum({transfers[i].to, bytes}, {transfers[i].from, bytes})};
    }
  }
};

}  // namespace

TierLink host_link() {
  return {&cache::host_memory(), std::make_unique<HostCopier>()};
}

}  // namespace kvx::tier

// CpuVerbs: blocks in the host's memory, the CPU's verbs.
#pragma once

#include <atomic>

#include "kv/verbs/verbs.hpp"

namespace kvx::kv {

class CpuVerbs final : public Verbs {
 public:
  // The counter is the cache's, for all of its writers.
  CpuVerbs(const ops::CpuContext& context, std::atomic<int64_t>& nonfinite_inputs)
      : context_(context), nonfinite_inputs_(nonfinite_inputs) {}

  Status place(StepTables&) override { return {}; }
  Status append(const ops::AppendArgs& args) override;
  Status attend(const ops::AttendArgs& args, const StepTables& tables) override;
  Status copy_blocks(std::span<const LayerCopy> layers,
                     std::span<const ops::BlockCopy> copies) override;
  Status gather(ops::GatherArgs args, std::span<const GatherPart> parts) override;
  Status copy_rows(FloatRows from, MutableFloatRows to, const RowsShape& shape) override;
  Status copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes) override;
  Result<std::span<const uint8_t>> readable(std::span<const uint8_t> block) override {
    return block;
  }
  Result<std::span<uint8_t>> writable(std::span<uint8_t> block) override { return block; }
  Status written(std::span<uint8_t>) override { return {}; }
  Status copy_runs(std::span<const BytesCopy> copies) override;
  Result<OwnBytes> allocate_host(int64_t bytes) override;
  Result<OwnBytes> allocate_for_peers(int64_t) override { return on_the_host(); }
  Result<std::unique_ptr<PeerBytes>> open_peer(std::span<const uint8_t>) override {
    return on_the_host();
  }
  Result<Fence> copy_beside(std::span<const BytesCopy> copies) override {
    KVX_RETURN_IF_ERROR(copy_runs(copies));
    return Fence([] { return Status(); });
  }
  Status join_copies() override { return {}; }
  Result<int64_t> nonfinite_inputs() override { return nonfinite_inputs_.load(); }
  Status synchronize() override { return {}; }

 private:
  static Error on_the_host() {
    return unsupported("the cache's blocks lie on the host; expected a cache on a GPU");
  }
  ops::CpuContext context_;
  std::atomic<int64_t>& nonfinite_inputs_;
};

}  // namespace kvx::kv

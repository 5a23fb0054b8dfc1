// CudaVerbs: blocks in a GPU's memory, CUDA's verbs on the cache's stream.
#pragma once

#include <mutex>
#include <optional>

#include "device/cuda_caller.hpp"
#include "kv/verbs/cuda_place.hpp"
#include "kv/verbs/verbs.hpp"

namespace kvx::kv {

// The largest of what one writer's calls bring along.
struct CudaVerbLimits {
  int64_t max_step_tokens = 0;
  int64_t max_entries = 0;  // of a step
  int64_t max_blocks = 0;   // of a sequence
  int64_t num_groups = 0;
  int64_t max_block_bytes = 0;
};

class CudaVerbs final : public Verbs {
 public:
  // Allocates all but attend's workspace, which grows with the first calls of a size. place
  // outlives it.
  static Result<std::unique_ptr<CudaVerbs>> create(const CudaPlace& place,
                                                   const CudaVerbLimits& limits);
  // Waits: its memory is in use until then.
  ~CudaVerbs() override;

  Status place(StepTables& tables) override;
  Status append(const ops::AppendArgs& args) override;
  Status attend(const ops::AttendArgs& args, const StepTables& tables) override;
  Status copy_blocks(std::span<const LayerCopy> layers,
                     std::span<const ops::BlockCopy> copies) override;
  Status gather(ops::GatherArgs args, std::span<const GatherPart> parts) override;
  Status copy_rows(FloatRows from, MutableFloatRows to, const RowsShape& shape) override;
  Status copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes) override;
  Result<std::span<const uint8_t>> readable(std::span<const uint8_t> block) override;
  Result<std::span<uint8_t>> writable(std::span<uint8_t> block) override;
  Status written(std::span<uint8_t> block) override;
  Status copy_runs(std::span<const BytesCopy> copies) override;
  Result<OwnBytes> allocate_host(int64_t bytes) override;
  Result<OwnBytes> allocate_for_peers(int64_t bytes) override;
  Result<std::unique_ptr<PeerBytes>> open_peer(std::span<const uint8_t> ipc_handle) override;
  Result<Fence> copy_beside(std::span<const BytesCopy> copies) override;
  Status join_copies() override;
  Result<int64_t> nonfinite_inputs() override;
  Status synchronize() override;

 private:
  CudaVerbs(const CudaPlace& place, int64_t max_copies, CudaUpload tables, CudaUpload lists,
            cache::Region block)
      : place_(place),
        max_copies_(max_copies),
        tables_(std::move(tables)),
        lists_(std::move(lists)),
        block_(std::move(block)) {}
  Result<device::CurrentCudaDevice> use_device() const;
  Status copy_some_blocks(std::span<const LayerCopy> layers,
                          std::span<const ops::BlockCopy> copies);
  Status grow_workspace(int64_t bytes);
  Result<device::CudaEvent> send_beside(std::span<const BytesCopy> copies);

  const CudaPlace& place_;
  int64_t max_copies_;   // in a list; longer ones go in parts
  CudaUpload tables_;    // of a step
  CudaUpload lists_;     // of copies and gathers
  cache::Region block_;  // pinned: one block on its way
  cache::Region workspace_;
  std::optional<device::OwnedCudaStream> beside_;  // of copy_beside(), once it was called
  std::mutex gathers_;  // guards lists_: gather() may be called by any thread
};

}  // namespace kvx::kv

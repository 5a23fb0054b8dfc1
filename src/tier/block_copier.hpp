// BlockCopier: copies blocks between a first tier and a host tier, with the checksum of what it
// copied; how depends on where the two lie.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cache/pool/memory.hpp"
#include "cache/prefix/content_hash.hpp"
#include "device/cuda.hpp"

namespace kvx::tier {

class FileMemory;

enum class Direction : uint8_t { kStore, kLoad };  // away from the first tier, back to it

// Both sides stay where they are until it is done, and so do the places of the checksums.
struct BlockTransfer {
  const uint8_t* from = nullptr;
  uint8_t* to = nullptr;
  int64_t bytes = 0;
  std::span<const int64_t> part_ends = {};  // of parts with checksums of their own; none: it is one
  cache::ContentHash* checksums = nullptr;  // [parts] that were copied, or null: they are not kept
};

struct CopiedBlock {
  bool is_copied = false;  // false: a device or disk refused, the target's bytes are unspecified
  cache::ContentHash checksum;  // its parts', joined
};

// One thread starts and one finishes; they are the same where max_started() is 1. Batches are
// finished in the order in which they were started.
class BlockCopier {
 public:
  virtual ~BlockCopier() = default;
  // Bytes that it likes to have in a batch.
  virtual int64_t batch_bytes() const = 0;
  // Batches that may be started before the first of them is finished.
  virtual int max_started() const = 0;
  // The transfers stay as they are until they are finished.
  virtual void start(Direction direction, std::span<const BlockTransfer> transfers) = 0;
  // Waits until all are there. Requires: the first batch that was started and not finished, as many
  // results.
  virtual void finish(Direction direction, std::span<const BlockTransfer> transfers,
                      std::span<CopiedBlock> results) = 0;
  // Zeros to memory of its own that blocks have passed through. Requires: nothing is under way.
  virtual void scrub() {}
};

// Copies between two places of the host: from the first one to the second one when blocks are
// stored, and back. A place is the memory of files, which outlives the copier, or where it is null,
// memory.
std::unique_ptr<BlockCopier> make_host_copier(FileMemory* first, FileMemory* second);

// How a host tier is joined to its first tier.
struct TierLink {
  cache::Memory* memory = nullptr;  // of the host tier's blocks; outlives it
  std::unique_ptr<BlockCopier> copier;
  std::unique_ptr<cache::Memory> own_memory = nullptr;  // `memory`, where the link made it
  FileMemory* files = nullptr;                          // `memory`, where it lies in files
  bool is_on_host = false;  // the first tier's blocks and `memory` are the host's own
};

// The first tier lies in host memory.
TierLink host_link();

// The first tier lies in the device's memory and is written and read in compute's order. Copies run
// on a stream of their own beside what compute is given later; pinned: host memory that the device
// copies from and to. Errors as device::OwnedCudaStream's.
Result<TierLink> cuda_link(int device, device::CudaStream compute, cache::Memory& pinned);

// The host tier's blocks lie in unnamed files of a folder. From a device they pass through memory
// of `staging`, by its copier. Requires: no block is larger. Errors as FileMemory::create's;
// OUT_OF_RANGE when memory is short.
Result<TierLink> file_link(const std::string& folder, TierLink staging, int64_t max_block_bytes);

}  // namespace kvx::tier

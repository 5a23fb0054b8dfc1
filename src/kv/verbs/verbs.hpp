// Verbs: what moves or reads the bytes of a cache's blocks, where they lie: the CPU's verbs
// (cpu_verbs.hpp), or CUDA's on a stream (cuda_verbs.hpp). All else of a cache is bookkeeping and
// does not know the difference.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "cache/pool/memory.hpp"
#include "ops/append/append.hpp"
#include "ops/attend/attend.hpp"
#include "ops/copy_blocks/copy_blocks.hpp"
#include "ops/gather/gather.hpp"

namespace kvx::kv {

// What the verbs read of a step in one layer group.
struct GroupTables {
  std::span<const int64_t> slots;               // [tokens]
  std::span<const int32_t> block_ids;           // [entries, row_stride]
  std::span<const int32_t> num_sink_blocks;     // [entries]
  std::span<const int32_t> first_recent_block;  // [entries]
  int64_t row_stride = 0;
};

// What the verbs read of a step.
struct StepTables {
  std::span<const int64_t> positions;  // [tokens]
  std::span<const int32_t> q_starts;   // [entries + 1]
  std::span<const int32_t> seq_lens;   // [entries]
  std::vector<GroupTables> groups;
  int max_q_len = 0;       // of an entry
  int64_t max_tokens = 0;  // of a sequence, the step's own with them
};

// One layer's part of copies between blocks.
struct LayerCopy {
  const ops::LayerView* from = nullptr;
  const ops::LayerView* to = nullptr;
};

// Tokens of a sequence that lie in blocks of one kind.
struct GatherPart {
  const ops::LayerView* view = nullptr;
  ops::GatherRange range;
};

// Dense or not, rows of so many tokens.
struct RowsShape {
  int num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
};

// Bytes that lie together on both sides.
struct BytesCopy {
  uint8_t* to = nullptr;
  const uint8_t* from = nullptr;
  int64_t bytes = 0;
};

// Memory beside a cache's blocks that they are copied to and from: the host's, where the blocks lie
// on a GPU pinned, or the GPU's own. It does not need the cache.
struct OwnBytes {
  std::unique_ptr<cache::Memory> memory;  // null: the host's own
  cache::Region region;
  std::vector<uint8_t> ipc_handle = {};  // of a GPU's, for other processes (device/cuda_ipc.hpp)
  // Of a GPU's: bytes from `offset` on, to the host. Waits; in any thread, one at a time.
  std::function<Status(int64_t offset, std::span<uint8_t> to)> read = nullptr;

  bool is_on_host() const { return read == nullptr; }
};

// Memory of another process's cache on a GPU, as long as this lives.
class PeerBytes {
 public:
  virtual ~PeerBytes() = default;
  virtual const uint8_t* data() const = 0;
};

// Rows (k, v, q, out) and attention's sinks lie where the blocks lie; lists, tables and ranges are
// the host's. One writer's at a time, but for gather(). On a device calls return when the work is
// on its way, in the stream's order; what fails there is an error of a later call.
class Verbs {
 public:
  virtual ~Verbs() = default;

  // Makes the tables' spans point to where append and attend can read them, until the next call.
  virtual Status place(StepTables& tables) = 0;
  virtual Status append(const ops::AppendArgs& args) = 0;
  // Requires: args are made of these tables.
  virtual Status attend(const ops::AttendArgs& args, const StepTables& tables) = 0;
  // The same copies in all these layers.
  virtual Status copy_blocks(std::span<const LayerCopy> layers,
                             std::span<const ops::BlockCopy> copies) = 0;
  // args.cache and args.ranges are each part's; its table has one row.
  virtual Status gather(ops::GatherArgs args, std::span<const GatherPart> parts) = 0;

  // Rows of one type from place to place, as they are.
  virtual Status copy_rows(FloatRows from, MutableFloatRows to, const RowsShape& shape) = 0;

  // Bytes of blocks, or of memory that lies where they do.
  virtual Status copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes) = 0;

  // A block's bytes for the host to read, and a place to write them to, until the next call of
  // either; written() is called when they are complete.
  virtual Result<std::span<const uint8_t>> readable(std::span<const uint8_t> block) = 0;
  virtual Result<std::span<uint8_t>> writable(std::span<uint8_t> block) = 0;
  virtual Status written(std::span<uint8_t> block) = 0;

  // Parts of blocks on their way to or from memory of these.
  virtual Status copy_runs(std::span<const BytesCopy> copies) = 0;
  virtual Result<OwnBytes> allocate_host(int64_t bytes) = 0;
  // UNSUPPORTED: the blocks lie on the host, or the system has no handles of a GPU's memory.
  virtual Result<OwnBytes> allocate_for_peers(int64_t bytes) = 0;
  // UNSUPPORTED: the blocks lie on the host, or the memory cannot be mapped here.
  virtual Result<std::unique_ptr<PeerBytes>> open_peer(std::span<const uint8_t> ipc_handle) = 0;
  // Waits, in any thread and as often as it is called, until something is done; it does not need
  // the verbs. INTERNAL_ERROR: some of it failed.
  using Fence = std::function<Status()>;
  // copy_runs() behind what was given so far and beside what is given next, which leaves alone what
  // is read until join_copies(). The fence waits for these copies. After an error none of them is
  // under way.
  virtual Result<Fence> copy_beside(std::span<const BytesCopy> copies) = 0;
  // What is given from now on comes after the copies of copy_beside().
  virtual Status join_copies() = 0;

  // Since the cache's creation: AppendReport's.
  virtual Result<int64_t> nonfinite_inputs() = 0;
  // Waits until all that was launched is done. INTERNAL_ERROR: some of it failed.
  virtual Status synchronize() = 0;
};

}  // namespace kvx::kv

// CudaVerbs: tables go up in one copy, then each call is the verb's own.
#include "kv/verbs/cuda_verbs.hpp"

#include <algorithm>

#include "core/checked.hpp"
#include "device/cuda_ipc.hpp"
#include "kv/verbs/line_runs.hpp"
#include "ops/append/append_cuda.hpp"
#include "ops/attend/attend_cuda.hpp"
#include "ops/copy_blocks/copy_blocks_cuda.hpp"
#include "ops/gather/gather_cuda.hpp"

namespace kvx::kv {
namespace {

constexpr int64_t kMaxGatherParts = 3;  // full-precision sinks, packed blocks, recent blocks

int64_t bytes_of_tables(const CudaVerbLimits& limits) {
  const auto table = [](int64_t count, int64_t bytes) { return CudaUpload::padded(count * bytes); };
  const int64_t slots = table(limits.max_step_tokens, sizeof(int64_t));
  const int64_t entries = table(limits.max_entries + 1, sizeof(int32_t));
  const int64_t ids = table(limits.max_entries * limits.max_blocks, sizeof(int32_t));
  return slots + 2 * entries + limits.num_groups * (slots + ids + 2 * entries);
}

int64_t bytes_of_lists(const CudaVerbLimits& limits) {
  const int64_t copies = CudaUpload::padded(limits.max_entries * sizeof(ops::BlockCopy));
  const int64_t gather = CudaUpload::padded(limits.max_blocks * sizeof(int32_t)) +
                         CudaUpload::padded(kMaxGatherParts * sizeof(ops::GatherRange));
  return std::max(copies, gather);
}

}  // namespace

Result<std::unique_ptr<CudaVerbs>> CudaVerbs::create(const CudaPlace& place,
                                                     const CudaVerbLimits& limits) {
  KVX_ASSIGN_OR_RETURN(const auto current,
                       device::CurrentCudaDevice::set(place.context.device.index));
  KVX_ASSIGN_OR_RETURN(CudaUpload tables, CudaUpload::create(place, bytes_of_tables(limits)));
  KVX_ASSIGN_OR_RETURN(CudaUpload lists, CudaUpload::create(place, bytes_of_lists(limits)));
  KVX_ASSIGN_OR_RETURN(cache::Region block,
                       place.pinned->allocate(limits.max_block_bytes, "a block on its way"));
  return std::unique_ptr<CudaVerbs>(new CudaVerbs(place, limits.max_entries, std::move(tables),
                                                  std::move(lists), std::move(block)));
}

CudaVerbs::~CudaVerbs() {
  const Result<device::CurrentCudaDevice> current = use_device();
  (void)device::cuda_synchronize(place_.context.stream);
  if (beside_) (void)device::cuda_synchronize(beside_->get());
}

Result<device::CurrentCudaDevice> CudaVerbs::use_device() const {
  return device::CurrentCudaDevice::set(place_.context.device.index);
}

// ---- a step

Status CudaVerbs::place(StepTables& tables) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  KVX_RETURN_IF_ERROR(tables_.begin());
  tables.positions = tables_.add(tables.positions);
  tables.q_starts = tables_.add(tables.q_starts);
  tables.seq_lens = tables_.add(tables.seq_lens);
  for (GroupTables& group : tables.groups) {
    group.slots = tables_.add(group.slots);
    group.block_ids = tables_.add(group.block_ids);
    group.num_sink_blocks = tables_.add(group.num_sink_blocks);
    group.first_recent_block = tables_.add(group.first_recent_block);
  }
  return tables_.send();
}

Status CudaVerbs::append(const ops::AppendArgs& args) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  return ops::append(place_.context, args, place_.counters());
}

Status CudaVerbs::attend(const ops::AttendArgs& args, const StepTables& tables) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  ops::CudaAttendLimits limits;
  limits.max_q_len = tables.max_q_len;
  limits.total_q = static_cast<int64_t>(tables.positions.size());
  limits.max_tokens = tables.max_tokens;
  KVX_RETURN_IF_ERROR(ops::check_attend(args, limits));
  KVX_ASSIGN_OR_RETURN(const ops::AttendPlan* plan,
                       ops::AttendPlan::of_thread(place_.context, args, limits));
  KVX_RETURN_IF_ERROR(grow_workspace(plan->workspace_bytes()));
  return ops::attend(place_.context, args, *plan, workspace_.data(), place_.counters());
}

Status CudaVerbs::grow_workspace(int64_t bytes) {
  if (bytes <= workspace_.bytes()) return {};
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(place_.context.stream));  // it is in use
  const int64_t grown = std::max(bytes, 2 * workspace_.bytes());
  workspace_ = {};
  KVX_ASSIGN_OR_RETURN(workspace_, place_.memory->allocate(grown, "workspace of attention"));
  return {};
}

// ---- blocks

Status CudaVerbs::copy_blocks(std::span<const LayerCopy> layers,
                              std::span<const ops::BlockCopy> copies) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  const std::lock_guard lock(gathers_);
  const auto most = static_cast<size_t>(max_copies_);
  for (size_t first = 0; first < copies.size(); first += most) {
    const size_t count = std::min(most, copies.size() - first);
    KVX_RETURN_IF_ERROR(copy_some_blocks(layers, copies.subspan(first, count)));
  }
  return {};
}

// Requires: the lock on lists_; at most max_copies_.
Status CudaVerbs::copy_some_blocks(std::span<const LayerCopy> layers,
                                   std::span<const ops::BlockCopy> copies) {
  KVX_RETURN_IF_ERROR(lists_.begin());
  const auto list = lists_.add(copies);
  KVX_RETURN_IF_ERROR(lists_.send());
  for (const LayerCopy& layer : layers) {
    KVX_RETURN_IF_ERROR(ops::copy_blocks(place_.context, *layer.from, *layer.to, list.data(),
                                         std::ssize(list), place_.counters()));
  }
  return {};
}

Status CudaVerbs::gather(ops::GatherArgs args, std::span<const GatherPart> parts) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  std::vector<ops::GatherRange> ranges;
  for (const GatherPart& part : parts) ranges.push_back(part.range);
  const std::lock_guard lock(gathers_);
  KVX_RETURN_IF_ERROR(lists_.begin());
  const std::span table(args.block_table.ids, static_cast<size_t>(args.max_blocks_per_sequence));
  args.block_table.ids = lists_.add(table).data();
  const auto on_device = lists_.add(std::span<const ops::GatherRange>(ranges));
  KVX_RETURN_IF_ERROR(lists_.send());
  for (size_t i = 0; i < parts.size(); ++i) {
    args.cache = *parts[i].view;
    args.ranges = on_device.subspan(i, 1);
    KVX_RETURN_IF_ERROR(ops::gather(place_.context, args, ranges[i].num_tokens, place_.counters()));
  }
  return {};
}

Status CudaVerbs::copy_rows(FloatRows from, MutableFloatRows to, const RowsShape& shape) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  const int64_t bytes = bytes_of(from.dtype);
  for (int h = 0; h < shape.num_heads; ++h) {
    KVX_RETURN_IF_ERROR(device::cuda_copy_lines_async(
        to.row(0, h), to.token_stride * bytes, from.row(0, h), from.token_stride * bytes,
        shape.head_dim * bytes, shape.num_tokens, place_.context.stream));
  }
  return {};
}

Status CudaVerbs::copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  return device::cuda_copy_async(to, from, bytes, place_.context.stream);
}

// ---- bytes for the host

Result<std::span<const uint8_t>> CudaVerbs::readable(std::span<const uint8_t> block) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  const device::CudaStream stream = place_.context.stream;
  KVX_RETURN_IF_ERROR(
      device::cuda_copy_async(block_.data(), block.data(), std::ssize(block), stream));
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(stream));
  return std::span<const uint8_t>(block_.data(), block.size());
}

Result<std::span<uint8_t>> CudaVerbs::writable(std::span<uint8_t> block) {
  return std::span<uint8_t>(block_.data(), block.size());
}

Status CudaVerbs::written(std::span<uint8_t> block) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  const device::CudaStream stream = place_.context.stream;
  KVX_RETURN_IF_ERROR(
      device::cuda_copy_async(block.data(), block_.data(), std::ssize(block), stream));
  return device::cuda_synchronize(stream);
}

namespace {

// Pages of neighbouring blocks by one call, since one by one they take 3 to 5 us each; the others
// by one call together, where the stream is not the default one.
Status copy_lines(std::span<const BytesCopy> copies, device::CudaStream stream) {
  std::vector<device::CudaCopy> apart;
  for (const LineRun& run : join_lines(copies)) {
    const BytesCopy& first = run.first;
    if (run.num_lines < kLeastLinesOfCall && stream != nullptr) {
      for_each_line(run, [&apart](const BytesCopy& one) {
        apart.push_back({one.to, one.from, one.bytes});
      });
    } else if (run.num_lines == 1) {
      KVX_RETURN_IF_ERROR(device::cuda_copy_async(first.to, first.from, first.bytes, stream));
    } else {
      KVX_RETURN_IF_ERROR(device::cuda_copy_lines_async(first.to, run.to_stride, first.from,
                                                        run.from_stride, first.bytes, run.num_lines,
                                                        stream));
    }
  }
  return apart.empty() ? Status() : device::cuda_copy_batch(apart, stream);
}

}  // namespace

// Behind what the stream was given before, and before what it is given next: a block that another
// step overwrites has left by then.
Status CudaVerbs::copy_runs(std::span<const BytesCopy> copies) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  return copy_lines(copies, place_.context.stream);
}

Result<OwnBytes> CudaVerbs::allocate_host(int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<cache::Memory> memory,
                       cache::pinned_memory(place_.context.device.index));
  KVX_ASSIGN_OR_RETURN(cache::Region region, memory->allocate(bytes, "a sequence on its way"));
  return OwnBytes{std::move(memory), std::move(region)};
}

Result<OwnBytes> CudaVerbs::allocate_for_peers(int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  const int device = place_.context.device.index;
  KVX_ASSIGN_OR_RETURN(std::unique_ptr<cache::Memory> memory, cache::cuda_memory(device));
  KVX_ASSIGN_OR_RETURN(cache::Region region,
                       memory->allocate(round_up(bytes, device::kCudaIpcBytes),
                                        "a sequence on its way to other processes"));
  KVX_ASSIGN_OR_RETURN(std::vector<uint8_t> handle, device::cuda_ipc_handle(region.data()));
  KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
  const auto own = std::make_shared<device::OwnedCudaStream>(std::move(stream));
  const auto read = [device, own, from = region.data()](int64_t offset,
                                                        std::span<uint8_t> to) -> Status {
    KVX_ASSIGN_OR_RETURN(const auto chosen, device::CurrentCudaDevice::set(device));
    KVX_RETURN_IF_ERROR(
        device::cuda_copy_async(to.data(), from + offset, std::ssize(to), own->get()));
    return device::cuda_synchronize(own->get());
  };
  return OwnBytes{std::move(memory), std::move(region), std::move(handle), read};
}

namespace {

class CudaPeerBytes final : public PeerBytes {
 public:
  explicit CudaPeerBytes(device::CudaIpcMemory memory) : memory_(std::move(memory)) {}
  const uint8_t* data() const override { return memory_.data(); }

 private:
  device::CudaIpcMemory memory_;
};

}  // namespace

Result<std::unique_ptr<PeerBytes>> CudaVerbs::open_peer(std::span<const uint8_t> ipc_handle) {
  KVX_ASSIGN_OR_RETURN(device::CudaIpcMemory memory,
                       device::CudaIpcMemory::open(place_.context.device.index, ipc_handle));
  return std::unique_ptr<PeerBytes>(std::make_unique<CudaPeerBytes>(std::move(memory)));
}

// A stream of their own takes a layer's pages while the cache's stream computes the next layer:
// page by page in that one, copies of a sequence of 8192 tokens took as long as its attention.
Result<Verbs::Fence> CudaVerbs::copy_beside(std::span<const BytesCopy> copies) {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  if (!beside_) {
    KVX_ASSIGN_OR_RETURN(device::OwnedCudaStream stream, device::OwnedCudaStream::create());
    beside_.emplace(std::move(stream));
  }
  Result<device::CudaEvent> done = send_beside(copies);
  if (!done.ok()) {
    (void)device::cuda_synchronize(beside_->get());
    return done.error();
  }
  const auto shared = std::make_shared<device::CudaEvent>(std::move(done).value());
  return Fence([shared] { return shared->wait(); });
}

// The event after which the copies are done.
Result<device::CudaEvent> CudaVerbs::send_beside(std::span<const BytesCopy> copies) {
  KVX_ASSIGN_OR_RETURN(device::CudaEvent computed, device::CudaEvent::create());
  KVX_RETURN_IF_ERROR(computed.record(place_.context.stream));
  KVX_RETURN_IF_ERROR(computed.hold_back(beside_->get()));
  KVX_RETURN_IF_ERROR(copy_lines(copies, beside_->get()));
  KVX_ASSIGN_OR_RETURN(device::CudaEvent done, device::CudaEvent::create());
  KVX_RETURN_IF_ERROR(done.record(beside_->get()));
  return done;
}

Status CudaVerbs::join_copies() {
  if (!beside_) return {};
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  const auto join = [this]() -> Status {
    KVX_ASSIGN_OR_RETURN(device::CudaEvent done, device::CudaEvent::create());
    KVX_RETURN_IF_ERROR(done.record(beside_->get()));
    return done.hold_back(place_.context.stream);
  };
  const Status joined = join();
  return joined.ok() ? joined : device::cuda_synchronize(beside_->get());
}

// ---- what has become of it

Result<int64_t> CudaVerbs::nonfinite_inputs() {
  KVX_ASSIGN_OR_RETURN(const auto current, use_device());
  KVX_RETURN_IF_ERROR(device::cuda_synchronize(place_.context.stream));
  ops::DeviceCounters found;
  KVX_RETURN_IF_ERROR(device::cuda_copy(&found, place_.counters(), sizeof found));
  if (found.out_of_range != 0) {
    return internal_error("kernels met {} slots, blocks or lengths that are out of range",
                          found.out_of_range);
  }
  return static_cast<int64_t>(found.nonfinite_inputs);
}

Status CudaVerbs::synchronize() {
  const Result<int64_t> counted = nonfinite_inputs();
  return counted.ok() ? Status() : Status(counted.error());
}

}  // namespace kvx::kv

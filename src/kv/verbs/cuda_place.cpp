// CudaPlace and CudaUpload: memory of both sides, and one copy between them.
#include "kv/verbs/cuda_place.hpp"

#include <cassert>
#include <cstring>

namespace kvx::kv {

Result<std::unique_ptr<CudaPlace>> CudaPlace::create(const ops::CudaContext& context) {
  auto place = std::make_unique<CudaPlace>();
  place->context = context;
  KVX_ASSIGN_OR_RETURN(place->memory, cache::cuda_memory(context.device.index, context.stream));
  KVX_ASSIGN_OR_RETURN(place->pinned, cache::pinned_memory(context.device.index));
  KVX_ASSIGN_OR_RETURN(place->counters_region,
                       place->memory->allocate(sizeof(ops::DeviceCounters), "counters of kernels"));
  return place;
}

Result<CudaUpload> CudaUpload::create(const CudaPlace& place, int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(cache::Region on_device, place.memory->allocate(bytes, "tables of a step"));
  std::vector<Turn> turns;
  for (int i = 0; i < kNumTurns; ++i) {
    KVX_ASSIGN_OR_RETURN(cache::Region pinned, place.pinned->allocate(bytes, "tables of a step"));
    KVX_ASSIGN_OR_RETURN(device::CudaEvent sent, device::CudaEvent::create());
    turns.push_back({std::move(pinned), std::move(sent)});
  }
  return CudaUpload(place.context.stream, std::move(on_device), std::move(turns));
}

Status CudaUpload::begin() {
  turn_ = (turn_ + 1) % kNumTurns;
  used_bytes_ = 0;
  return turns_[turn_].sent.wait();
}

const uint8_t* CudaUpload::add_bytes(const void* table, size_t bytes) {
  assert(used_bytes_ + static_cast<int64_t>(bytes) <= on_device_.bytes());
  const int64_t at = used_bytes_;
  if (bytes > 0) std::memcpy(turns_[turn_].pinned.data() + at, table, bytes);
  used_bytes_ += padded(static_cast<int64_t>(bytes));
  return on_device_.data() + at;
}

Status CudaUpload::send() {
  const Turn& turn = turns_[turn_];
  if (used_bytes_ > 0) {
    KVX_RETURN_IF_ERROR(
        device::cuda_copy_async(on_device_.data(), turn.pinned.data(), used_bytes_, stream_));
  }
  return turn.sent.record(stream_);
}

}  // namespace kvx::kv

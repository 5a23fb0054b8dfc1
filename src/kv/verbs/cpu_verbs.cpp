// CpuVerbs: each call is the verb's own.
#include "kv/verbs/cpu_verbs.hpp"

#include <cstring>

namespace kvx::kv {

Status CpuVerbs::append(const ops::AppendArgs& args) {
  KVX_ASSIGN_OR_RETURN(const ops::AppendReport report, ops::append(context_, args));
  nonfinite_inputs_ += report.nonfinite_inputs;
  return {};
}

Status CpuVerbs::attend(const ops::AttendArgs& args, const StepTables&) {
  return ops::attend(context_, args);
}

Status CpuVerbs::copy_blocks(std::span<const LayerCopy> layers,
                             std::span<const ops::BlockCopy> copies) {
  for (const LayerCopy& layer : layers) {
    KVX_ASSIGN_OR_RETURN(const int64_t nonfinite,
                         ops::copy_blocks(context_, *layer.from, *layer.to, copies));
    nonfinite_inputs_ += nonfinite;
  }
  return {};
}

Status CpuVerbs::gather(ops::GatherArgs args, std::span<const GatherPart> parts) {
  for (const GatherPart& part : parts) {
    args.cache = *part.view;
    args.ranges = {&part.range, 1};
    KVX_RETURN_IF_ERROR(ops::gather(context_, args));
  }
  return {};
}

Status CpuVerbs::copy_rows(FloatRows from, MutableFloatRows to, const RowsShape& shape) {
  const auto bytes = static_cast<size_t>(shape.head_dim * bytes_of(from.dtype));
  for (int t = 0; t < shape.num_tokens; ++t) {
    for (int h = 0; h < shape.num_heads; ++h) std::memcpy(to.row(t, h), from.row(t, h), bytes);
  }
  return {};
}

Status CpuVerbs::copy_bytes(const uint8_t* from, uint8_t* to, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return {};
}

Status CpuVerbs::copy_runs(std::span<const BytesCopy> copies) {
  for (const BytesCopy& copy : copies) {
    std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  }
  return {};
}

Result<OwnBytes> CpuVerbs::allocate_host(int64_t bytes) {
  KVX_ASSIGN_OR_RETURN(cache::Region region,
                       cache::host_memory().allocate(bytes, "a sequence on offer"));
  return OwnBytes{nullptr, std::move(region)};
}

}  // namespace kvx::kv

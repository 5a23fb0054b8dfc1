// What verbs need to know about a side beside its addresses, and their scratch.
#include "ops/side_rows.hpp"

#include <algorithm>
#include <vector>

namespace kvx::ops {

std::optional<DType> stored_dtype(const format::FormatSpec& spec) {
  switch (spec.facts->id) {
    case format::FormatId::kF32:
      return DType::kF32;
    case format::FormatId::kF16:
      return DType::kF16;
    case format::FormatId::kBF16:
      return DType::kBF16;
    default:
      return std::nullopt;
  }
}

int tokens_encoded_at_once(const LayerView& layer) {
  for (const HeadRun& run : layer.runs) {
    for (const SideView* side : {&run.k, &run.v}) {
      if (side->spec.scale_source == format::ScaleSource::kPageShared) return layer.block_size;
    }
  }
  return std::min(layer.block_size, kTokensAtOnce);
}

float* scratch_floats(int64_t num_floats) {
  thread_local std::vector<float> scratch;
  if (scratch.size() < static_cast<size_t>(num_floats)) scratch.resize(num_floats);
  return scratch.data();
}

}  // namespace kvx::ops

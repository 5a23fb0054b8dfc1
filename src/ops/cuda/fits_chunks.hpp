// Whether rows lie so that kernels can take them by chunks, sixteen neighbours of a row
// (chunk.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/rows.hpp"
#include "ops/cache_view.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

inline constexpr int kChunk = 16;

// Base and strides that are all multiples of `bytes`.
inline bool lies_on(int64_t bytes, const void* base, std::initializer_list<int64_t> strides) {
  bool lies = reinterpret_cast<intptr_t>(base) % bytes == 0;
  for (const int64_t stride : strides) lies = lies && stride % bytes == 0;
  return lies;
}

// Whether rows of this side can go by chunks: a format that has such kernels, whole chunks, groups
// that are whole lanes, rows without gaps, codes and scales where vectors can reach them.
inline bool fits_chunks(const SideView& side) {
  const int dim = side.head_dim;
  const int group = format::group_length(side.spec, dim);
  const bool groups_fit =
      !side.spec.has_scale() || group >= dim || (group % kChunk == 0 && (group & (group - 1)) == 0);
  const int code_bytes = std::min(16, kChunk * side.spec.facts->element_bits / 8);
  const int scale_bytes = std::max(format::scale_bytes_per_group(side.spec), 1);
  const CodeAddress& c = side.codes;
  const ScaleAddress& s = side.scales;
  return side.spec.facts->kernels == format::Kernels::kAll && dim % kChunk == 0 &&
         dim <= kChunk * kWarp && groups_fit && !c.is_fragmented() &&
         lies_on(code_bytes, c.base, {c.block_stride, c.token_stride, c.head_stride}) &&
         lies_on(scale_bytes, s.base,
                 {s.block_stride, s.token_stride, s.head_stride, s.group_stride});
}
// Whether rows can be encoded by chunks into this side, too: without a choice among scales and
// without error feedback.
inline bool encodes_by_chunks(const SideView& side) {
  return fits_chunks(side) && side.spec.scale_choice == format::ScaleChoice::kAmax &&
         side.feedback == nullptr;
}
template <class Rows>
bool fits_chunks(const Rows& rows) {
  const int64_t bytes = bytes_of(rows.dtype);
  return lies_on(16, rows.data, {rows.token_stride * bytes, rows.head_stride * bytes});
}

}  // namespace kvx::ops::cuda

// visit_format: one branch from a format's number to its type, so that K and V of any two formats
// share a kernel. Dual-scale formats are not rows that a kernel can take one by one: the host keeps
// them away.
#pragma once

#include "format/list.hpp"
#include "format/traits.hpp"

namespace kvx::ops::cuda {

template <class Visitor>
__device__ __forceinline__ void visit_format(format::FormatId id, const Visitor& visitor) {
  switch (id) {
#define KVX_FORMAT_CASE(Format)                         \
  case format::Format::kFacts.id:                       \
    if constexpr (!format::is_dual<format::Format>()) { \
      visitor.template operator()<format::Format>();    \
    }                                                   \
    break;
    KVX_FOR_EACH_FORMAT(KVX_FORMAT_CASE)
#undef KVX_FORMAT_CASE
  }
}

// The same among the formats that kernels take by chunks. Requires: the host found that the side
// fits_chunks, which no other format does.
template <class Visitor>
__device__ __forceinline__ void visit_chunk_format(format::FormatId id, const Visitor& visitor) {
  switch (id) {
#define KVX_FORMAT_CASE(Format)                                 \
  case format::Format::kFacts.id:                               \
    if constexpr (format::has_fast_kernels<format::Format>()) { \
      visitor.template operator()<format::Format>();            \
    }                                                           \
    break;
    KVX_FOR_EACH_FORMAT(KVX_FORMAT_CASE)
#undef KVX_FORMAT_CASE
  }
}

}  // namespace kvx::ops::cuda

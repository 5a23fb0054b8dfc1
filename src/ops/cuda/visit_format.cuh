// One branch from a format's number to its type, so that K and V of any two formats share a kernel.
// visitor.operator()<Format>() is compiled for the formats that a visit is of, and called for one
// of them: the host keeps the others away.
#pragma once

#include "format/list.hpp"
#include "format/traits.hpp"

namespace kvx::ops::cuda {

struct AnyFormat {
  template <class Format>
  static constexpr bool accepts() {
    return true;
  }
};
struct RowFormat {
  template <class Format>
  static constexpr bool accepts() {
    return !format::is_dual<Format>();
  }
};
struct ChunkFormat {
  template <class Format>
  static constexpr bool accepts() {
    return format::has_fast_kernels<Format>();
  }
};
struct DualFormat {
  template <class Format>
  static constexpr bool accepts() {
    return format::is_dual<Format>();
  }
};

template <class Formats, class Visitor>
__device__ __forceinline__ void visit_format_of(format::FormatId id, const Visitor& visitor) {
  switch (id) {
#define KVX_FORMAT_CASE(Format)                                  \
  case format::Format::kFacts.id:                                \
    if constexpr (Formats::template accepts<format::Format>()) { \
      visitor.template operator()<format::Format>();             \
    }                                                            \
    break;
    KVX_FOR_EACH_FORMAT(KVX_FORMAT_CASE)
#undef KVX_FORMAT_CASE
  }
}

// What kernels read row by row.
template <class Visitor>
__device__ __forceinline__ void visit_any_format(format::FormatId id, const Visitor& visitor) {
  visit_format_of<AnyFormat>(id, visitor);
}

// What kernels write row by row.
template <class Visitor>
__device__ __forceinline__ void visit_format(format::FormatId id, const Visitor& visitor) {
  visit_format_of<RowFormat>(id, visitor);
}

// What kernels take by chunks. Requires: the host found that the side fits_chunks, which no other
// format does.
template <class Visitor>
__device__ __forceinline__ void visit_chunk_format(format::FormatId id, const Visitor& visitor) {
  visit_format_of<ChunkFormat>(id, visitor);
}

// What kernels write by whole blocks.
template <class Visitor>
__device__ __forceinline__ void visit_dual_format(format::FormatId id, const Visitor& visitor) {
  visit_format_of<DualFormat>(id, visitor);
}

}  // namespace kvx::ops::cuda

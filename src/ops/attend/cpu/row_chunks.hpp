// Packed kernels take rows in chunks.
#pragma once

#include "ops/attend/cpu/prefetcher.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Rows that share a pass over a tile, their sums in registers.
inline constexpr int kRowChunk = 4;

// Calls body.operator()<n>(row) for rows [row, row + n), n = kRowChunk and what is left.
template <int Rows = kRowChunk, class Body>
KVX_INLINE void for_row_chunks(int num_rows, const Body& body, int row = 0) {
  for (; row + Rows <= num_rows; row += Rows) body.template operator()<Rows>(row);
  if constexpr (Rows > 1) {
    if (row < num_rows) for_row_chunks<Rows - 1>(num_rows, body, row);
  }
}

constexpr int num_row_chunks(int num_rows) {
  return (num_rows + kRowChunk - 1) / kRowChunk;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

// What packed kernels have in common: rows in chunks, and the Prefetcher, which asks for the lines
// of a tile in the order in which they lie, one at a time, so that the requests spread over the
// work on the tile before it.
#pragma once

#include "ops/attend/cpu/packed_kernels.hpp"
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

class Prefetcher {
 public:
  explicit Prefetcher(const PackedTile& tile)
      : tile_(tile),
        row_bytes_(tile.num_tokens > 0 ? format::code_bytes_per_row(*tile.spec, tile.head_dim)
                                       : 0) {}

  KVX_INLINE void next_line() {
    if (token_ == tile_.num_tokens) return;
    __builtin_prefetch(tile_.codes[token_] + byte_);
    byte_ += kLine;
    if (byte_ < row_bytes_) return;
    __builtin_prefetch(tile_.scales[token_]);
    byte_ = 0;
    ++token_;
  }
  KVX_INLINE void rest() {
    while (token_ < tile_.num_tokens) next_line();
  }

 private:
  static constexpr int kLine = 64;
  const PackedTile& tile_;
  int row_bytes_;
  int token_ = 0;
  int byte_ = 0;
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

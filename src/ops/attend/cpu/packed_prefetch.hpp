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
  explicit Prefetcher(const PackedTile& tile) : tile_(tile) {
    if (tile.num_tokens == 0) return;
    row_bytes_ = format::code_bytes_per_row(*tile.spec, tile.head_dim);
    scale_bytes_ = format::scale_bytes_per_row(*tile.spec, tile.head_dim);
    rows_ = {tile.codes, row_bytes_};
    start_run();
  }

  KVX_INLINE void next_line() {
    if (at_ < end_) {
      __builtin_prefetch(at_);
      at_ += kLine;
    } else if (token_ < tile_.num_tokens) {
      start_run();
    }
  }
  KVX_INLINE void next_lines(int n) {
    for (; n > 0; --n) next_line();
  }
  // How many lines to ask for at each of a number of steps, so that they are enough for the tile.
  int lines_per_step(int num_steps) const {
    const int lines = tile_.num_tokens * (row_bytes_ + scale_bytes_) / kLine + 2;
    return (lines + num_steps - 1) / num_steps;
  }
  KVX_INLINE void rest() {
    while (at_ < end_ || token_ < tile_.num_tokens) next_line();
  }

 private:
  static constexpr int kLine = 64;

  // Codes, then scales.
  struct Rows {
    const uint8_t* const* of_token = nullptr;
    int bytes = 0;
  };

  // All rows in one go where they lie side by side, else the next token's.
  void start_run() {
    const int left = tile_.num_tokens - token_;
    const uint8_t* first = rows_.of_token[token_];
    const bool is_dense =
        rows_.of_token[tile_.num_tokens - 1] - first == int64_t{left - 1} * rows_.bytes;
    at_ = first;
    end_ = first + (is_dense ? left : 1) * rows_.bytes;
    token_ += is_dense ? left : 1;
    if (token_ < tile_.num_tokens || rows_.of_token == tile_.scales || scale_bytes_ == 0) return;
    rows_ = {tile_.scales, scale_bytes_};
    token_ = 0;
  }

  const PackedTile& tile_;
  int row_bytes_ = 0;
  int scale_bytes_ = 0;
  Rows rows_;
  const uint8_t* at_ = nullptr;  // what is left of the run
  const uint8_t* end_ = nullptr;
  int token_ = 0;  // where the next run begins
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

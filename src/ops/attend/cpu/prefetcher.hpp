// Prefetcher requests the lines of the next tile's rows in the order in which they lie, a few at
// every step of the work on this tile, so that memory is never idle: what reads it in bursts waits
// for it, and what computes between two bursts leaves it waiting.
#pragma once

#include "core/host_device.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"

namespace kvx::ops::cpu {

// How a tile's time divides among its phases, percent: their share of the next tile's lines.
struct PhaseShares {
  static constexpr int kUnpackKeys = 12;
  static constexpr int kScore = 28;
  static constexpr int kSoftmax = 12;
  static constexpr int kUnpackValues = 18;
  static constexpr int kAddValues = 30;
};

// Members are inlined: a level's object shares no code with others.
class Prefetcher {
 public:
  // From here on the lines of these rows, which may be none (num_tokens 0). Keeps pointers to both.
  void start(const PackedTile& keys, const PackedTile& values);

  // Share `share` of as many as there are heads, of all their rows: the tiles are of the first
  // head, and the others' rows follow each token's.
  void start_share(const PackedTile& keys, const PackedTile& values, int share, int num_heads);

  // The next num_steps calls of step() request this share of the lines. No more: what is requested
  // early leaves memory idle at the end of the tile.
  KVX_INLINE void pace(int percent, int num_steps) {
    rate_ = num_steps > 0 ? num_lines_ * percent * kOne / (100 * num_steps) : 0;
  }
  KVX_INLINE void step() {
    owed_ += rate_;
    const int num_lines = static_cast<int>(static_cast<unsigned>(owed_) / kOne);
    if (num_lines == 0) return;
    owed_ -= num_lines * kOne;
    if (end_ - at_ >= num_lines * kLine) {
      for (int i = 0; i < num_lines; ++i) prefetch(at_ + i * kLine);
      at_ += num_lines * kLine;
    } else {
      for (int i = 0; i < num_lines; ++i) next_line();
    }
  }
  KVX_INLINE void rest() {
    while (at_ < end_ || list_ < num_lists_) next_line();
  }

 private:
  static constexpr int kLine = 64;
  static constexpr int kOne = 1 << 8;  // a line in the fixed-point numbers rate_ and owed_

  void add_lists(const PackedTile& tile, int first_token, int num_tokens, int num_heads);

  // Codes or scales, a row a token.
  struct Rows {
    const uint8_t* const* of_token;
    int num_tokens;
    int bytes;
  };

  // To the second cache: in the first one the next tile would push out this one.
  KVX_INLINE static void prefetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

  KVX_INLINE void next_line() {
    if (at_ < end_) {
      prefetch(at_);
      at_ += kLine;
    } else if (list_ < num_lists_) {
      start_run();
    }
  }

  // All rows of a list in one go where they lie side by side, else the next token's. A run that
  // continues the one before it continues its lines.
  KVX_INLINE void start_run() {
    const Rows& rows = lists_[list_];
    const int left = rows.num_tokens - token_;
    const uint8_t* first = rows.of_token[token_];
    const bool is_dense =
        rows.of_token[rows.num_tokens - 1] - first == int64_t{left - 1} * rows.bytes;
    if (first != end_) at_ = first;
    end_ = first + (is_dense ? left : 1) * rows.bytes;
    token_ += is_dense ? left : 1;
    if (token_ < rows.num_tokens) return;
    token_ = 0;
    ++list_;
  }

  Rows lists_[4];  // K's codes and scales, V's codes and scales
  int num_lists_ = 0;
  int num_lines_ = 0;
  int list_ = 0;  // where the next run begins
  int token_ = 0;
  const uint8_t* at_ = nullptr;  // what is left of the run
  const uint8_t* end_ = nullptr;
  int rate_ = 0;
  int owed_ = 0;
};

}  // namespace kvx::ops::cpu

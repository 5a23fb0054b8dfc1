// How a verb cuts its work: stripes x heads. A stripe takes every num_stripes-th unit of a list of
// units, so that units with one key stay in one stripe, in order. The heads of a stripe follow each
// other: their rows lie side by side in a caller's memory.
#pragma once

#include <algorithm>

#include "core/executor.hpp"

namespace kvx::ops {

struct Pieces {
  int num_heads = 0;
  int num_stripes = 0;

  int count() const { return num_heads * num_stripes; }
  int head_of(int piece) const { return piece % num_heads; }
  int stripe_of(int piece) const { return piece / num_heads; }
};

// By shape alone, never by the number of threads. num_floats: numbers moved in all.
inline Pieces cut_into_pieces(int num_heads, int64_t num_units, int64_t num_floats) {
  constexpr int64_t kFloatsPerPiece = 8192;  // some microseconds of work
  const int64_t wanted = num_floats / kFloatsPerPiece / std::max(num_heads, 1);
  return {num_heads,
          static_cast<int>(std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(num_units, 1, 64)))};
}

// Runs piece(i) for all pieces: in this thread when the work is too little to wake others.
// std::function keeps one pointer without allocating, so `task` is passed by address.
template <class Task>
void run_pieces(Executor& executor, int num_pieces, int64_t num_floats, Task& task) {
  constexpr int64_t kFloatsWorthWaking = 65536;  // about 20 microseconds of work
  const auto piece = [pointer = &task](int i) { pointer->run(i); };
  Executor& chosen = num_floats < kFloatsWorthWaking ? serial_executor() : executor;
  chosen.parallel_for(num_pieces, piece);
}

}  // namespace kvx::ops

// How a verb cuts its work: stripes x heads. A stripe has every num_stripes-th item of a list of
// items, so that items with one key stay in one stripe, in order. The heads of a stripe follow each
// other: their rows lie side by side in a caller's memory.
#pragma once

#include <algorithm>

#include "core/executor.hpp"

namespace kvx::ops {

struct TaskGrid {
  int num_heads = 0;
  int num_stripes = 0;

  int count() const { return num_heads * num_stripes; }
  int head_of(int task) const { return task % num_heads; }
  int stripe_of(int task) const { return task / num_heads; }
};

// By shape alone, never by the number of threads. num_floats: numbers moved in all.
inline TaskGrid cut_into_tasks(int num_heads, int64_t num_items, int64_t num_floats) {
  constexpr int64_t kFloatsPerTask = 8192;  // some microseconds of work
  const int64_t wanted = num_floats / kFloatsPerTask / std::max(num_heads, 1);
  return {num_heads,
          static_cast<int>(std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(num_items, 1, 64)))};
}

// Runs task(i) for all tasks: in this thread when the work is too little to wake others.
// std::function keeps one pointer without allocating, so `task` is passed by address.
template <class Task>
void run_tasks(Executor& executor, int num_tasks, int64_t num_floats, Task& task) {
  constexpr int64_t kFloatsWorthWaking = 65536;  // about 20 microseconds of work
  const auto run_one = [pointer = &task](int i) { pointer->run(i); };
  Executor& chosen = num_floats < kFloatsWorthWaking ? serial_executor() : executor;
  chosen.parallel_for(num_tasks, run_one);
}

}  // namespace kvx::ops

// The shape of launches that give each stored row to a warp: append, gather and copy_blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/checked.hpp"

namespace kvx::ops::cuda {

// A row is (unit, head of the run, side); a unit is a token of the call.
struct RowsLaunch {
  static constexpr int kThreads = 128;
  int64_t num_rows = 0;
  unsigned num_ctas = 0;
  int shared_bytes = 0;

  static RowsLaunch of(int64_t num_units, int num_heads, int head_dim) {
    constexpr int kWarpsPerCta = kThreads / 32;
    RowsLaunch launch;
    launch.num_rows = num_units * num_heads * 2;
    const int64_t wanted = ceil_div<int64_t>(launch.num_rows, kWarpsPerCta);
    // Enough to fill any device; more rows are taken in turns.
    constexpr int64_t kMostCtas = 8192;
    launch.num_ctas = static_cast<unsigned>(std::min(wanted, kMostCtas));
    launch.shared_bytes = kWarpsPerCta * head_dim * static_cast<int>(sizeof(float));
    return launch;
  }
};

}  // namespace kvx::ops::cuda

// Latency: how long blocks were under way, as counts by powers of two microseconds.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace kvx::tier {

struct Latency {
  // counts[i]: blocks that took less than 2^i microseconds, and not less than 2^(i-1); the last
  // one also counts all that took longer.
  static constexpr int kNumBuckets = 32;
  std::array<int64_t, kNumBuckets> counts{};
  int64_t num_blocks = 0;
  int64_t total_microseconds = 0;

  void add(int64_t microseconds) {
    const auto whole = static_cast<uint64_t>(std::max<int64_t>(microseconds, 0));
    ++counts[std::min(static_cast<int>(std::bit_width(whole)), kNumBuckets - 1)];
    ++num_blocks;
    total_microseconds += static_cast<int64_t>(whole);
  }

  // An upper bound of what this share of the blocks took, in microseconds; 0 without blocks.
  // share: above 0, up to 1.
  int64_t quantile(double share) const {
    int64_t seen = 0;
    for (int i = 0; i < kNumBuckets; ++i) {
      seen += counts[i];
      if (seen > 0 && static_cast<double>(seen) >= share * static_cast<double>(num_blocks)) {
        return int64_t{1} << i;
      }
    }
    return 0;
  }
};

}  // namespace kvx::tier

// LineRun: copies of as many bytes whose sides move on by equal strides, as a device makes them by
// one call: a layer's pages in neighbouring blocks, to or from pages that lie one after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/verbs/verbs.hpp"

namespace kvx::kv {

struct LineRun {
  BytesCopy first;
  int64_t to_stride = 0;  // with several lines at least a line's bytes, as CUDA asks
  int64_t from_stride = 0;
  int64_t num_lines = 1;
};

inline constexpr int64_t kMostLineStride = int64_t{1} << 30;  // CUDA takes 2^31 - 1

// The same copies in the same order.
inline std::vector<LineRun> join_lines(std::span<const BytesCopy> copies) {
  std::vector<LineRun> runs;
  for (const BytesCopy& copy : copies) {
    if (!runs.empty()) {
      LineRun& run = runs.back();
      const int64_t to_stride = copy.to - run.first.to - (run.num_lines - 1) * run.to_stride;
      const int64_t from_stride =
          copy.from - run.first.from - (run.num_lines - 1) * run.from_stride;
      const auto fits = [&copy](int64_t stride) {
        return stride >= copy.bytes && stride <= kMostLineStride;
      };
      const bool goes_on = run.num_lines == 1
                               ? fits(to_stride) && fits(from_stride)
                               : to_stride == run.to_stride && from_stride == run.from_stride;
      if (copy.bytes == run.first.bytes && goes_on) {
        run.to_stride = to_stride;
        run.from_stride = from_stride;
        ++run.num_lines;
        continue;
      }
    }
    runs.push_back({copy});
  }
  return runs;
}

// A run of fewer lines is no call of its own: its copies go with those that have no neighbour.
// Pages in any order have many runs of two, since any two that lie upwards on both sides are one.
inline constexpr int64_t kLeastLinesOfCall = 4;

// Each copy of a run, by visit(copy).
template <class Visit>
void for_each_line(const LineRun& run, const Visit& visit) {
  for (int64_t i = 0; i < run.num_lines; ++i) {
    visit(BytesCopy{run.first.to + i * run.to_stride, run.first.from + i * run.from_stride,
                    run.first.bytes});
  }
}

}  // namespace kvx::kv

// LatencyHistogram: how long calls took, in buckets of doubling width, counted by any thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvx {

class LatencyHistogram {
 public:
  // Bucket i counts calls of at most kFirstBound * 2^i seconds; a last one counts the others.
  static constexpr double kFirstBound = 16e-6;
  static constexpr int kNumBounds = 20;  // up to 8.4 seconds
  static constexpr double bound(int i) { return kFirstBound * static_cast<double>(1 << i); }

  struct Snapshot {
    std::array<uint64_t, kNumBounds + 1> counts{};  // of each bucket alone
    double sum_seconds = 0;
  };

  void add(std::chrono::nanoseconds duration) {
    const double seconds = std::chrono::duration<double>(duration).count();
    int bucket = 0;
    while (bucket < kNumBounds && seconds > bound(bucket)) ++bucket;
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    sum_nanoseconds_.fetch_add(duration.count(), std::memory_order_relaxed);
  }

  // Each count is right by itself; calls that end meanwhile may be in one and not in the other.
  Snapshot snapshot() const {
    Snapshot seen;
    for (size_t i = 0; i < counts_.size(); ++i) {
      seen.counts[i] = counts_[i].load(std::memory_order_relaxed);
    }
    seen.sum_seconds = 1e-9 * static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed));
    return seen;
  }

 private:
  std::array<std::atomic<uint64_t>, kNumBounds + 1> counts_{};
  std::atomic<int64_t> sum_nanoseconds_ = 0;
};

// Adds the time from its making to its end.
class LatencyTimer {
 public:
  explicit LatencyTimer(LatencyHistogram& to) : to_(to), began_(Clock::now()) {}
  LatencyTimer(const LatencyTimer&) = delete;
  LatencyTimer& operator=(const LatencyTimer&) = delete;
  ~LatencyTimer() { to_.add(Clock::now() - began_); }

 private:
  using Clock = std::chrono::steady_clock;
  LatencyHistogram& to_;
  Clock::time_point began_;
};

}  // namespace kvx

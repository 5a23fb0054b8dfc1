// Walks over buckets from the smallest magnitude up.
#include "tune/log_histogram.hpp"

#include <algorithm>
#include <cmath>

namespace kvx::tune {

double LogHistogram::middle_of(int bucket) {
  if (bucket == 0) return 0;
  const int step = bucket - 1;
  const double mantissa = 1 + (step % kStepsPerOctave + 0.5) / kStepsPerOctave;
  return std::ldexp(mantissa, kLowestExponent + step / kStepsPerOctave);
}

double percentile_of(std::span<const uint32_t> counts, double percent, double largest) {
  int64_t total = 0;
  for (const uint32_t count : counts) total += count;
  if (total == 0) return 0;
  if (percent >= 100) return largest;
  const auto rank = static_cast<int64_t>(std::ceil(percent / 100 * static_cast<double>(total)));
  int64_t seen = 0;
  int bucket = 0;
  for (; bucket < LogHistogram::kNumBuckets - 1; ++bucket) {
    seen += counts[bucket];
    if (seen >= rank) break;
  }
  return std::min(LogHistogram::middle_of(bucket), largest);
}

int64_t count_above(std::span<const uint32_t> counts, double limit) {
  int64_t count = 0;
  for (int bucket = 0; bucket < LogHistogram::kNumBuckets; ++bucket) {
    if (LogHistogram::middle_of(bucket) > limit) count += counts[bucket];
  }
  return count;
}

}  // namespace kvx::tune

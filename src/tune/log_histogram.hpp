// LogHistogram: how often each magnitude was seen, in steps of a 32nd of an octave.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace kvx::tune {

// Buckets are numbers of a caller's array [kNumBuckets], so that the histograms of many channels
// are one allocation. Merging adds the arrays: the histogram of the parts is that of the whole.
//
//   bucket 0: below 2^-16, zero included    bucket 1 + 32 * (e + 16) + m: 2^e * [1 + m/32, ...)
//
// The last bucket also takes what is 2^16 or larger.
class LogHistogram {
 public:
  static constexpr int kStepsPerOctave = 32;
  static constexpr int kLowestExponent = -16;
  static constexpr int kNumOctaves = 32;
  static constexpr int kNumBuckets = 1 + kStepsPerOctave * kNumOctaves;
  // A percentile from 2^-16 to 2^16 differs from the exact one by at most this share of it.
  static constexpr double kRelativeError = 1.0 / (2 * kStepsPerOctave);

  // Requires: magnitude >= 0 and finite.
  static constexpr int bucket_of(float magnitude) {
    constexpr int kMantissaBits = 5;
    constexpr int32_t kFirst = (127 + kLowestExponent) << kMantissaBits;
    const int32_t step =
        static_cast<int32_t>(std::bit_cast<uint32_t>(magnitude) >> (23 - kMantissaBits)) - kFirst;
    if (step < 0) return 0;
    return step >= kNumBuckets - 1 ? kNumBuckets - 1 : step + 1;
  }

  // The middle of a bucket; 0 of bucket 0.
  static double middle_of(int bucket);
};

// The smallest magnitude that `percent` of all numbers do not exceed (nearest rank), within
// LogHistogram::kRelativeError and at most `largest`, the exact maximum. counts: [kNumBuckets].
// 0 without numbers. Requires: 0 < percent <= 100.
double percentile_of(std::span<const uint32_t> counts, double percent, double largest);

// Numbers in buckets whose middle exceeds the limit.
int64_t count_above(std::span<const uint32_t> counts, double limit);

}  // namespace kvx::tune

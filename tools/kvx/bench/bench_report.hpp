// BenchReport: the measurements of kvx bench, as a table, JSON and CSV.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/kvx/bench/bench_cache.hpp"

namespace kvx::tool {

inline constexpr const char* kReadBlocks = "read blocks";
inline constexpr const char* kAttendDecode = "attend decode";

// One verb on one cache: the median of several calls.
struct Measurement {
  std::string format;
  std::string verb;
  BenchShape shape;
  double seconds = 0;        // a call
  int64_t packed_bytes = 0;  // that the call reads or writes once
  int64_t num_tokens = 0;    // that the call appends, gathers, or has queries for

  double gigabytes_per_second() const { return static_cast<double>(packed_bytes) / seconds / 1e9; }
  double tokens_per_second() const { return static_cast<double>(num_tokens) / seconds; }
};

struct BenchReport {
  std::string version;
  std::string cpu_level;
  int threads = 0;
  double read_gigabytes_per_second = 0;  // the yardstick
  std::vector<Measurement> measurements;

  double percent_of_read(const Measurement& measurement) const {
    return 100 * measurement.gigabytes_per_second() / read_gigabytes_per_second;
  }
  // The time to read the same blocks without mathematics, in percent of the call's; of attend
  // decode alone.
  std::optional<double> percent_of_block_read(const Measurement& measurement) const;
  // The verb's time over its time on a bf16 cache, where that was measured.
  std::optional<double> time_over_bf16(const Measurement& measurement) const;

 private:
  std::optional<double> seconds_of(const char* format, const char* verb,
                                   const BenchShape& shape) const;
};

std::string bench_table(const BenchReport& report, bool color);
std::string bench_json(const BenchReport& report);
std::string bench_csv(const BenchReport& report);

}  // namespace kvx::tool

// Three ways to read 256 MiB, all threads at once; the best time counts.
#include "tools/kvx/bench/read_bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "tools/kvx/bench/timing.hpp"

namespace kvx::tool {
namespace {

constexpr int64_t kBytes = int64_t{256} << 20;
constexpr double kMinSeconds = 0.5;

// Each loop returns something that depends on every byte, so that no read can be left out.
uint64_t read_one_stream(const uint64_t* words, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

uint64_t read_four_streams(const uint64_t* words, int64_t count) {
  const int64_t quarter = count / 4;
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (int64_t i = 0; i < quarter; ++i) {
    a += words[i];
    b += words[i + quarter];
    c += words[i + 2 * quarter];
    d += words[i + 3 * quarter];
  }
  return a ^ b ^ c ^ d;
}

uint64_t read_by_maximum(const uint64_t* words, int64_t count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words);
  uint8_t largest = 0;
  for (int64_t i = 0; i < count * 8; ++i) largest = std::max(largest, bytes[i]);
  return largest;
}

using ReadLoop = uint64_t (*)(const uint64_t* words, int64_t count);

}  // namespace

double read_bandwidth(Executor& executor) {
  // Written, not only allocated: untouched pages would all be the one zero page.
  std::vector<uint64_t> words(kBytes / 8, 0x0101010101010101u);
  const int num_threads = executor.num_threads();
  const int64_t share = kBytes / 8 / num_threads;
  std::atomic<uint64_t> sink{0};
  double best_seconds = 1e30;
  for (const ReadLoop loop : {read_one_stream, read_four_streams, read_by_maximum}) {
    const std::vector<double> times = time_calls(kMinSeconds, [&] {
      executor.parallel_for(
          num_threads, [&](int thread) { sink += loop(words.data() + thread * share, share); });
    });
    best_seconds = std::min(best_seconds, *std::min_element(times.begin(), times.end()));
  }
  return static_cast<double>(share * num_threads * 8) / best_seconds;
}

}  // namespace kvx::tool

// transfer_all: reads and writes of files that go through as a whole.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace kvx::tier {

// call(done) moves some of what is left behind `done` bytes, as read(2) and its like. Interrupted
// calls go on; false: errno is the reason, or is 0 where a file had ended.
template <class Call>
bool transfer_all(size_t num_bytes, const Call& call) {
  size_t done = 0;
  while (done < num_bytes) {
    errno = 0;
    const int64_t moved = call(done);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    done += static_cast<size_t>(moved);
  }
  return true;
}

}  // namespace kvx::tier

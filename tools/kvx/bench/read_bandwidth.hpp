// read_bandwidth: how fast this machine reads memory that no cache holds, the yardstick of kvx
// bench.
#pragma once

#include "core/executor.hpp"

namespace kvx::tool {

// Bytes a second: the best of three read loops (one stream a thread, four streams a thread, and
// single bytes compared), each run several times over 256 MiB.
double read_bandwidth(Executor& executor);

}  // namespace kvx::tool

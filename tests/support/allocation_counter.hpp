// Counts calls of operator new in a test binary that links allocation_counter.cpp of its folder.
#pragma once

#include <cstdint>

namespace kvx::tests {

// Allocations of all threads since the program began.
int64_t num_allocations();

}  // namespace kvx::tests

// The memory that a dual-scale block is quantised in. It is no part of a CPU level: what a level
// shares with others must not be compiled for its instruction set.
#pragma once

#include <cstdint>

namespace kvx::ops::cpu {

// This thread's, [num_floats] at least; it grows to the largest block's size and stays.
float* dual_scratch(int64_t num_floats);

}  // namespace kvx::ops::cpu

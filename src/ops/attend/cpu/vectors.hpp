// What integer products over codes and the steps of groups take from the instruction set that is
// being compiled for: one line for each level that has packed kernels.
#pragma once

#if defined(__AVX512VNNI__)
#include "ops/attend/cpu/isa/avx512/vectors.hpp"
#elif defined(__AVXVNNI__)
#include "ops/attend/cpu/isa/avxvnni/vectors.hpp"
#elif defined(__AVX2__)
#include "ops/attend/cpu/isa/avx2/vectors.hpp"
#else
#error "this instruction set has no packed kernels"
#endif

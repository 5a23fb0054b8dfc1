// What integer products over codes and the steps of groups take from the instruction set that is
// being compiled for: one line for each level that has packed kernels.
#pragma once

#if defined(KVX_LEVEL_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include "ops/attend/cpu/isa/dotprod/vectors.hpp"
#elif defined(KVX_LEVEL_NEON)
#include "ops/attend/cpu/isa/neon/vectors.hpp"
#elif defined(__AVX512VNNI__)
#include "ops/attend/cpu/isa/avx512/vectors.hpp"
#elif defined(__AVXVNNI__)
#include "ops/attend/cpu/isa/avxvnni/vectors.hpp"
#elif defined(__AVX2__)
#include "ops/attend/cpu/isa/avx2/vectors.hpp"
#else
#error "this instruction set has no packed kernels"
#endif

// The vectors of the instruction set that is being compiled for: one line for each level that has
// some of its own. docs/howto/add-a-cpu-level.md lists what a level's vectors.hpp defines.
#pragma once

#if defined(KVX_LEVEL_NEON)
#include "ops/cpu/isa/neon/vectors.hpp"
#elif defined(__AVX512F__)
#include "ops/cpu/isa/avx512/vectors.hpp"
#elif defined(__AVX2__)
#include "ops/cpu/isa/avx2/vectors.hpp"
#else
#include "ops/cpu/isa/scalar/vectors.hpp"
#endif

// The packed kernels' vectors of AVX-512.
#pragma once

#include "ops/attend/cpu/isa/avx512/code_vectors.hpp"
#include "ops/attend/cpu/isa/avx512/dual_vectors.hpp"
#include "ops/attend/cpu/isa/avx512/float_parts.hpp"
#include "ops/attend/cpu/isa/avx512/sorted_steps.hpp"

// The packed kernels' vectors of AVX2.
#pragma once

#include "ops/attend/cpu/isa/avx2/code_vectors.hpp"
#include "ops/attend/cpu/isa/avx2/dots.hpp"
#include "ops/attend/cpu/isa/avx2/dual_vectors.hpp"
#include "ops/attend/cpu/isa/avx2/float_parts.hpp"
#include "ops/attend/cpu/isa/avx2/steps.hpp"

// The packed kernels' vectors of Advanced SIMD with dot products of bytes: Advanced SIMD's, but for
// these.
#pragma once

#include "ops/attend/cpu/isa/dotprod/dots.hpp"
#include "ops/attend/cpu/isa/neon/code_vectors.hpp"
#include "ops/attend/cpu/isa/neon/dual_vectors.hpp"
#include "ops/attend/cpu/isa/neon/float_parts.hpp"
#include "ops/attend/cpu/isa/neon/steps.hpp"

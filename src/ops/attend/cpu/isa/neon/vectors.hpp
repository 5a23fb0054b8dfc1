// The packed kernels' vectors of Advanced SIMD.
#pragma once

#include "ops/attend/cpu/isa/neon/code_vectors.hpp"
#include "ops/attend/cpu/isa/neon/dots.hpp"
#include "ops/attend/cpu/isa/neon/dual_vectors.hpp"
#include "ops/attend/cpu/isa/neon/float_parts.hpp"
#include "ops/attend/cpu/isa/neon/steps.hpp"

// The packed kernels' vectors of AVX2 with AVX-VNNI: AVX2's, but for dot products of bytes.
#pragma once

#include "ops/attend/cpu/isa/avx2/code_vectors.hpp"
#include "ops/attend/cpu/isa/avx2/dual_vectors.hpp"
#include "ops/attend/cpu/isa/avx2/float_parts.hpp"
#include "ops/attend/cpu/isa/avx2/steps.hpp"
#include "ops/attend/cpu/isa/avxvnni/dots.hpp"

// The kernels for AVX2, FMA and F16C.
#define KVX_CPU_LEVEL level_avx2
#define KVX_CPU_LEVEL_ID device::CpuLevel::kAvx2
#define KVX_LEVEL_ENCODERS PartEncoders
#include "ops/append/part_encoders.hpp"
#include "ops/cpu/level.inc"

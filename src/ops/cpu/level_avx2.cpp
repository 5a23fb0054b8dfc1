// The kernels for AVX2, FMA and F16C.
#define KVX_CPU_LEVEL level_avx2
#define KVX_CPU_LEVEL_ID device::CpuLevel::kAvx2
#include "ops/cpu/level.inc"

// The tile kernels for AVX2 with FMA.
#define KVX_CPU_LEVEL level_avx2
#include "ops/attend/cpu/level.inc"

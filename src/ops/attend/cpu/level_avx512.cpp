// The tile kernels for AVX-512 F, BW, VL, DQ, VNNI and VBMI.
#define KVX_CPU_LEVEL level_avx512
#include "ops/attend/cpu/level.inc"

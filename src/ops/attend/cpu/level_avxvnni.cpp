// The tile kernels for AVX2 with FMA and AVX-VNNI.
#define KVX_CPU_LEVEL level_avxvnni
#include "ops/attend/cpu/level.inc"

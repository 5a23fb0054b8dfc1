// The kernels for AVX-512 F, BW, VL, DQ, VNNI and VBMI, and for GFNI.
#define KVX_CPU_LEVEL level_avx512
#define KVX_CPU_LEVEL_ID device::CpuLevel::kAvx512
#define KVX_LEVEL_ENCODERS PartEncoders
#include "ops/append/part_encoders.hpp"
#include "ops/cpu/level.inc"

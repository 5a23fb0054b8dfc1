// The kernels for Armv8.0's Advanced SIMD, which every 64-bit Arm processor has.
#define KVX_CPU_LEVEL level_neon
#define KVX_CPU_LEVEL_ID device::CpuLevel::kNeon
#define KVX_LEVEL_ENCODERS PartEncoders
#define KVX_LEVEL_NEON
#include "ops/append/part_encoders.hpp"
#include "ops/cpu/level.inc"

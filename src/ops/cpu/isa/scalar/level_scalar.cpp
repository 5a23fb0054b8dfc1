// The kernels for the compiler's baseline, no flags.
#define KVX_CPU_LEVEL level_scalar
#define KVX_CPU_LEVEL_ID device::CpuLevel::kScalar
#define KVX_LEVEL_ENCODERS NoPartEncoders
#include "ops/cpu/level.inc"

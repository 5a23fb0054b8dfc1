// The tile kernels for the build's own target.
#define KVX_CPU_LEVEL level_scalar
#include "ops/attend/cpu/level.inc"

// The tile kernels for Advanced SIMD with dot products of bytes (FEAT_DotProd).
#define KVX_CPU_LEVEL level_dotprod
#define KVX_LEVEL_NEON
#define KVX_LEVEL_ROW_BLOCK 8
#define KVX_LEVEL_FIND_PACKED find_packed<NoBlockKernels>
#include "ops/attend/cpu/packed_table.hpp"

#include "ops/attend/cpu/level.inc"

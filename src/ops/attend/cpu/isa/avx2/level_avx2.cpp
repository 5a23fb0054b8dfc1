// The tile kernels for AVX2 with FMA.
#define KVX_CPU_LEVEL level_avx2
#define KVX_LEVEL_ROW_BLOCK 4
#define KVX_LEVEL_FIND_PACKED find_packed<NoBlockKernels>
#include "ops/attend/cpu/packed_table.hpp"

#include "ops/attend/cpu/level.inc"

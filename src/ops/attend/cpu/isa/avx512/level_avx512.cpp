// The tile kernels for AVX-512 F, BW, VL, DQ, VNNI and VBMI, and for GFNI.
#define KVX_CPU_LEVEL level_avx512
#define KVX_LEVEL_ROW_BLOCK 8
#define KVX_LEVEL_FIND_PACKED find_packed<BlockKernels>
#include "ops/attend/cpu/isa/avx512/block_kernels.hpp"
#include "ops/attend/cpu/packed_table.hpp"

#include "ops/attend/cpu/level.inc"

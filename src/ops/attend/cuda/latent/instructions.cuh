// The latent kernel's own tensor core instructions: weights in shared memory against values, and
// how weights come there.
#pragma once

#include "ops/attend/cuda/common/wgmma.cuh"

namespace kvx::ops::cuda {

#ifdef KVX_HAS_WGMMA

#define KVX_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVX_R16(d, i) KVX_R4(d, i), KVX_R4(d, i + 4), KVX_R4(d, i + 8), KVX_R4(d, i + 12)
#define KVX_D64                                                                              \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
  "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// D += A B: A from shared memory with its sum's index contiguous, B with its columns contiguous.
#define KVX_WGMMA_WEIGHTS(Type, TypeName)                                                         \
  __device__ inline void wgmma_shared_weights(Type, float(&d)[64], uint64_t a, uint64_t b) {      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TypeName "." TypeName " " KVX_D64 \
                 ", %64, %65, 1, 1, 1, 0, 1;"                                                     \
                 : KVX_R16(d, 0), KVX_R16(d, 16), KVX_R16(d, 32), KVX_R16(d, 48)                  \
                 : "l"(a), "l"(b));                                                               \
  }
KVX_WGMMA_WEIGHTS(MmaF16, "f16")
KVX_WGMMA_WEIGHTS(MmaBf16, "bf16")
#undef KVX_WGMMA_WEIGHTS
#undef KVX_D64
#undef KVX_R16
#undef KVX_R4

// Four 8 x 8 matrices of 16-bit numbers: lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

#endif  // KVX_HAS_WGMMA

}  // namespace kvx::ops::cuda

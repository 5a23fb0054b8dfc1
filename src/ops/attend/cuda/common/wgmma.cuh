// Hopper's asynchronous tensor core instructions, one function each (sm_90a).
//
// wgmma m64nNk16: a warpgroup of 128 threads; D[64][N] += A[64][16] * B[16][N]. Thread 32 w + 4 g +
// t holds of D rows 16 w + g (d[4 j], d[4 j + 1]) and 16 w + g + 8 (d[4 j + 2], d[4 j + 3]),
// columns 8 j + 2 t and 8 j + 2 t + 1; of A in registers the pairs [g][2t], [g + 8][2t], [g][2t +
// 8], [g + 8][2t + 8]. So D's columns 16 s to 16 s + 15, packed to 16 bits, are A of step s as they
// lie.
//
// Operands in shared memory are tiles of 64 numbers (128 bytes) a row, rows one after the other, on
// 1024 bytes; the 16-byte chunk c of row r lies at c ^ (r % 8).
#pragma once

#include "ops/attend/cuda/common/mma.cuh"
#include "ops/attend/cuda/common/tile_copy.cuh"

// Kernels with these instructions have a body for sm_90a alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH__ == 900
#define KVX_HAS_WGMMA 1
#endif
#endif

namespace kvx::ops::cuda {

inline constexpr int kWarpgroup = 128;

#ifdef KVX_HAS_WGMMA

#define KVX_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define KVX_R16(d, i) KVX_R4(d, i), KVX_R4(d, i + 4), KVX_R4(d, i + 8), KVX_R4(d, i + 12)
#define KVX_R32(d, i) KVX_R16(d, i), KVX_R16(d, i + 16)
#define KVX_D32                                                                             \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31}"
#define KVX_D64                                                                              \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"  \
  "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45," \
  "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

// D = A B, or D += A B: both from shared memory, both with their sum's index contiguous.
// D += A B: A from registers, B with its columns contiguous.
#define KVX_WGMMA(Type, TypeName)                                                                  \
  __device__ inline void wgmma_shared(Type, float(&d)[32], uint64_t a, uint64_t b, bool adds) {    \
    asm volatile(                                                                                  \
        "{.reg .pred p; setp.ne.b32 p, %34, 0;"                                                    \
        " wgmma.mma_async.sync.aligned.m64n64k16.f32." TypeName "." TypeName " " KVX_D32           \
        ", %32, %33, p, 1, 1, 0, 0;}"                                                              \
        : KVX_R32(d, 0)                                                                            \
        : "l"(a), "l"(b), "r"(int{adds}));                                                         \
  }                                                                                                \
  __device__ inline void wgmma_shared(Type, float(&d)[64], uint64_t a, uint64_t b, bool adds) {    \
    asm volatile(                                                                                  \
        "{.reg .pred p; setp.ne.b32 p, %66, 0;"                                                    \
        " wgmma.mma_async.sync.aligned.m64n128k16.f32." TypeName "." TypeName " " KVX_D64          \
        ", %64, %65, p, 1, 1, 0, 0;}"                                                              \
        : KVX_R32(d, 0), KVX_R32(d, 32)                                                            \
        : "l"(a), "l"(b), "r"(int{adds}));                                                         \
  }                                                                                                \
  __device__ inline void wgmma_registers(Type, float(&d)[32], const uint32_t(&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TypeName "." TypeName " " KVX_D32   \
                 ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                                           \
                 : KVX_R32(d, 0)                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
  }                                                                                                \
  __device__ inline void wgmma_registers(Type, float(&d)[64], const uint32_t(&a)[4], uint64_t b) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TypeName "." TypeName " " KVX_D64  \
                 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                                           \
                 : KVX_R32(d, 0), KVX_R32(d, 32)                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                            \
  }
KVX_WGMMA(MmaF16, "f16")
KVX_WGMMA(MmaBf16, "bf16")
#undef KVX_WGMMA
#undef KVX_D64
#undef KVX_D32
#undef KVX_R32
#undef KVX_R16
#undef KVX_R4

// Before the first wgmma that meets registers which were written.
__device__ inline void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `Left` groups are under way.
template <int Left>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// What a wgmma wrote is not read earlier than here.
template <int N>
__device__ inline void hold(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

#endif  // KVX_HAS_WGMMA

// A tile as wgmma finds it. columns_stride: from 64 columns to the next 64, where columns of B are
// contiguous and more than 64.
__device__ inline uint64_t wgmma_tile(uint32_t address, int columns_stride) {
  constexpr uint64_t kEightRows = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t{(address & 0x3FFFFu) >> 4} |
         static_cast<uint64_t>(static_cast<uint32_t>(columns_stride) >> 4) << 16 |
         kEightRows << 32 | kSwizzle128 << 62;
}
// The same, `bytes` further on.
__device__ inline uint64_t wgmma_advance(uint64_t tile, int bytes) {
  return tile + static_cast<uint64_t>(bytes >> 4);
}

// Where chunk c of row r lies in a tile's 64 columns.
__device__ inline uint32_t wgmma_chunk(int row, int chunk) {
  return static_cast<uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}
__device__ inline void store_chunk(uint32_t address, const Four& x) {
  store_shared_16(address, {x.r[0], x.r[1], x.r[2], x.r[3]});
}

// Barriers that `arrivals` warps arrive at.
__device__ inline void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The loop is one instruction to the compiler: around wgmma it must not see lanes part.
__device__ inline void wait_for_arrivals(uint32_t barrier, uint32_t phase) {
  asm volatile(
      "{.reg .pred p;"
      " WAIT:"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;"
      " @p bra DONE;"
      " bra WAIT;"
      " DONE:}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
// Named barriers of the CTA.
__device__ inline void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void pass(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace kvx::ops::cuda

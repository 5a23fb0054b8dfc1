// The instructions of the tensor cores' path, one function each.
//
// mma m16n8k16: D[16][8] += A[16][16] * B[16][8]. Lane = 4 g + t holds
//   A: rows g, g + 8; columns 2t, 2t + 1 (a0, a1) and 2t + 8, 2t + 9 (a2, a3)
//   B: rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1); column g
//   D: rows g (d0, d1) and g + 8 (d2, d3); columns 2t, 2t + 1
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "ops/cuda/fp8.cuh"

namespace kvx::ops::cuda {

struct Fragment {  // of D
  float d[4];
};

struct MmaF16 {
  __device__ static void add(Fragment& f, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+f"(f.d[0]), "+f"(f.d[1]), "+f"(f.d[2]), "+f"(f.d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  // Half as many columns of A: m16n8k8.
  __device__ static void add_half(Fragment& f, uint32_t a0, uint32_t a1, uint32_t b0) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},"
        "{%0,%1,%2,%3};"
        : "+f"(f.d[0]), "+f"(f.d[1]), "+f"(f.d[2]), "+f"(f.d[3])
        : "r"(a0), "r"(a1), "r"(b0));
  }
  // D of sums that begin with another fragment, or with zeros: no register is copied.
  __device__ static Fragment begin(const Fragment& first, uint32_t a0, uint32_t a1, uint32_t a2,
                                   uint32_t a3, uint32_t b0, uint32_t b1) {
    Fragment f;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%10,%11,%12,%13};"
        : "=f"(f.d[0]), "=f"(f.d[1]), "=f"(f.d[2]), "=f"(f.d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(first.d[0]), "f"(first.d[1]),
          "f"(first.d[2]), "f"(first.d[3]));
    return f;
  }
  // Two numbers of 16 bits, low first.
  __device__ static uint32_t pack(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
  __device__ static float2 unpack(uint32_t bits) {
    return __half22float2(reinterpret_cast<const __half2&>(bits));
  }
  static constexpr bool kScalesQueries = true;  // into f16's range, by a power of two
};

struct MmaBf16 {
  __device__ static void add(Fragment& f, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
        "{%8,%9},{%0,%1,%2,%3};"
        : "+f"(f.d[0]), "+f"(f.d[1]), "+f"(f.d[2]), "+f"(f.d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
  __device__ static uint32_t pack(float low, float high) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
  }
  __device__ static float2 unpack(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
  }
  static constexpr bool kScalesQueries = false;
};

// Transposes an 8 x 8 matrix of 16-bit numbers: lane (g, t) gives [g][2t, 2t + 1] and takes the
// transpose's.
__device__ inline uint32_t transpose_8x8(uint32_t a) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

// Four 8 x 8 matrices of 16-bit units: lane l gives the address of a row, 16 bytes.
// volatile: shared memory changes under these, and the compiler cannot see by whom.
__device__ inline uint4 load_matrices(uint32_t address) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
__device__ inline uint4 load_matrices_transposed(uint32_t address) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// volatile: asked for where it stands.
__device__ inline uint4 load_global_16(const uint8_t* from) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(from)
               : "memory");
  return r;
}

__device__ inline uint4 load_shared_16(uint32_t address) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
__device__ inline uint2 load_shared_8(uint32_t address) {
  uint2 r;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  return r;
}
__device__ inline void store_shared_16(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
__device__ inline void store_shared_8(uint32_t address, uint2 x) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(x.x), "r"(x.y) : "memory");
}
__device__ inline uint32_t load_shared_4(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
__device__ inline uint32_t load_shared_2(uint32_t address) {
  uint16_t r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(address) : "memory");
  return r;
}

// x in a register, where the compiler would otherwise compute it again and again, and wait.
template <bool IsKept, class Int>
__device__ Int kept(Int x) {
  if constexpr (IsKept) asm volatile("" : "+r"(x));
  return x;
}

// 2^x; its error is two units in the last place.
__device__ inline float fast_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ inline uint32_t multiply_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ inline uint32_t add_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ inline uint32_t max_f16x2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
struct Two {
  uint32_t a, b;
};
// Four codes into (first, second), (third, fourth). One function for both: the instruction takes
// either half of a register, but a shift by 16 in front of it would stay.
__device__ inline Two e4m3x4_to_f16x2(uint32_t codes) {
#if KVX_HAS_FP8_CONVERSIONS
  Two r;
  asm("{.reg .b16 low, high;"
      " mov.b32 {low, high}, %2;"
      " cvt.rn.f16x2.e4m3x2 %0, low;"
      " cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(r.a), "=r"(r.b)
      : "r"(codes));
  return r;
#else
  return {e4m3_of_upper_bytes(__byte_perm(codes, 0, 0x1404)),
          e4m3_of_upper_bytes(__byte_perm(codes, 0, 0x3424))};
#endif
}

// Both halves of a register, each as a pair. Products take a half twice as an operand, if it is
// made by a move.
__device__ inline Two halves_twice(uint32_t pair) {
  Two r;
  asm("{.reg .b16 low, high;"
      " mov.b32 {low, high}, %2;"
      " mov.b32 %0, {low, low};"
      " mov.b32 %1, {high, high};}"
      : "=r"(r.a), "=r"(r.b)
      : "r"(pair));
  return r;
}

// (a & b) | c and (a & b) ^ c in one instruction.
__device__ inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
__device__ inline uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

}  // namespace kvx::ops::cuda

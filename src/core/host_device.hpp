// Markers for code that one definition serves on the CPU and, when nvcc compiles it, on the GPU.
#pragma once

#if defined(__CUDACC__)
#define KVX_HOST_DEVICE __host__ __device__
#else
#define KVX_HOST_DEVICE
#endif

// Small functions that kernels share are always inlined. A kernel file is compiled once per CPU
// level, and a shared out-of-line copy would be one level's instructions running on every machine.
#define KVX_INLINE KVX_HOST_DEVICE inline __attribute__((always_inline))

// Before a loop over a group's numbers: keeps GCC from unrolling a short loop away before it can
// turn it into vectors.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define KVX_VECTOR_LOOP _Pragma("GCC unroll 1")
#else
#define KVX_VECTOR_LOOP
#endif

// CTAs of a cluster: they run at once and read each other's shared memory. From compute capability
// 9.0 on; elsewhere no launch has clusters.
#pragma once

#include <cstdint>

namespace kvx::ops::cuda {

// For all threads of the cluster. What they wrote to shared memory before, all see behind it.
__device__ inline void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where CTA `rank` of the cluster has what lies at `own` in this one.
template <class T>
__device__ T* in_cta(T* own, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
  return reinterpret_cast<T*>(there);
#else
  return own;
#endif
}

}  // namespace kvx::ops::cuda

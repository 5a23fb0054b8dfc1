// What a kernel signals and waits for that may begin before the stream's earlier work has ended
// (overlapping_launch.cuh).
#pragma once

namespace kvx::ops::cuda {

// What follows in the stream may be made ready as soon as every CTA has said so or is done.
__device__ inline void let_later_launches_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Before this nothing may be read or written that earlier work touches.
__device__ inline void wait_for_earlier_work() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The first statement of a kernel that is launched so.
__device__ inline void wait_for_earlier_launches() {
  let_later_launches_begin();
  wait_for_earlier_work();
}

}  // namespace kvx::ops::cuda

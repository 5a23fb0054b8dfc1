// What a lane could not store as it came, and where that is counted.
#pragma once

#include "format/saturation.hpp"
#include "ops/cuda/device_counters.hpp"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

// Two counts in one register, of a row or less: neither reaches 2^16.
struct LostNumbers {
  uint32_t counts = 0;  // [saturated: 16 bits][nonfinite: 16 bits]

  __device__ int nonfinite() const { return static_cast<int>(counts & 0xFFFFu); }
  __device__ int saturated() const { return static_cast<int>(counts >> 16); }
  __device__ void add_nonfinite(bool is_lost) { counts += is_lost ? 1u : 0u; }
  __device__ void add_saturated(int count) { counts += static_cast<uint32_t>(count) << 16; }
  __device__ bool is_none() const { return counts == 0; }
};

__device__ inline void add_to(int64_t& total, int count) {
  if (count == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(&total), static_cast<unsigned long long>(count));
}

// To a call's counters, and to those of a head of the run, where somebody wants them.
__device__ inline void count_lost(DeviceCounters* counters, const CudaSide& side, int head,
                                  int nonfinite, int saturated) {
  if (nonfinite > 0) {
    atomicAdd(&counters->nonfinite_inputs, static_cast<unsigned long long>(nonfinite));
  }
  if (side.view.counts == nullptr) return;
  add_to(side.view.counts[head].nonfinite, nonfinite);
  add_to(side.view.counts[head].saturated, saturated);
}

__device__ inline void count_lost(DeviceCounters* counters, const CudaSide& side, int head,
                                  LostNumbers lost) {
  if (!lost.is_none()) count_lost(counters, side, head, lost.nonfinite(), lost.saturated());
}

}  // namespace kvx::ops::cuda

// The prefill kernel, for many query rows a sequence and KV head (sm_90a): wgmma in both products.
// A CTA takes 128 query rows of a KV head, whatever the heads and tokens they are of.
#pragma once

#include "ops/attend/cuda/prefill/wgmma/produce.cuh"
#include "ops/attend/cuda/prefill/wgmma/rows.cuh"

namespace kvx::ops::cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    attend_prefill(const __grid_constant__ PrefillParams params) {
#ifdef KVX_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillWorkTile work_tile = prefill_work_tile<Shape>(params);
  if (work_tile.num_rows == 0) return;
  const PrefillRing<Shape> ring(shared);
  if (threadIdx.x == 0) ring.begin(work_tile);
  __syncthreads();

  // The same in all lanes, and the compiler sees that it is.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp < 2 * kFillingWarps) {
    give_registers<Shape::kFillingRegisters>();
    if (work_tile.walk.num_tiles > 0) {
      const PrefillSideWalk<Shape> side = {work_tile.walk, ring, warp / kFillingWarps};
      if constexpr (Shape::kDecodes) {
        PackedProducer<Shape>(side).run();
      } else {
        produce_copies(side);
      }
    }
  } else {
    take_registers<Shape::kMultiplyingRegisters>();
    const int consumer = (warp - 2 * kFillingWarps) / 4;
    if (consumer >= work_tile.num_consumers()) return;
    PrefillRows<Shape> rows(work_tile, ring, consumer, warp % 4);
    rows.run();
    rows.store(work_tile.split);
  }
#endif
}

template <class Mma, PrefillScales Scales>
PrefillKernel wgmma_instance(const PrefillDims& dims) {
  return prefill_instance<PrefillEngine::kWgmma, Mma, Scales>(
      dims, [](auto shape) { return attend_prefill<decltype(shape)>; });
}
template <class Mma, PrefillScales Scales>
PrefillKernel long_wgmma_instance(const PrefillDims& dims) {
  return long_prefill_instance<PrefillEngine::kWgmma, Mma, Scales>(
      dims, [](auto shape) { return attend_prefill<decltype(shape)>; });
}

}  // namespace kvx::ops::cuda

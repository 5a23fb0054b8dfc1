// The prefill kernel, for many query rows a sequence and KV head (sm_90a): wgmma in both products.
// A CTA takes 128 query rows of a KV head, whatever the heads and tokens they are of.
#pragma once

#include "ops/attend/cuda/prefill_produce.cuh"
#include "ops/attend/cuda/prefill_rows.cuh"

namespace kvx::ops::cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kCtas)
    attend_prefill(const __grid_constant__ AttendJob job) {
#ifdef KVX_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const PrefillPiece piece = prefill_piece<Shape>(job);
  if (piece.num_rows == 0) return;
  const PrefillRing<Shape> ring(shared);
  if (threadIdx.x == 0) ring.begin(piece);
  __syncthreads();

  // The same in all lanes, and the compiler sees that it is.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp < 2 * kFillingWarps) {
    give_registers<Shape::kFillingRegisters>();
    if (piece.walk.num_tiles > 0) {
      const PrefillSideWalk<Shape> side = {piece.walk, ring, warp / kFillingWarps};
      if constexpr (Shape::kDecodes) {
        PackedProducer<Shape>(side).run();
      } else {
        produce_copies(side);
      }
    }
  } else {
    take_registers<Shape::kMultiplyingRegisters>();
    const int consumer = (warp - 2 * kFillingWarps) / 4;
    if (consumer >= piece.num_consumers()) return;
    PrefillRows<Shape> rows(piece, ring, consumer, warp % 4);
    rows.run();
    rows.store(piece.split);
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

// The prefill kernel, for many query rows a sequence and KV head (sm_90a): wgmma in both products.
// A CTA takes 128 query rows of a KV head, whatever the heads and tokens they are of.
#pragma once

#include "ops/attend/cuda/prefill_fill.cuh"
#include "ops/attend/cuda/prefill_rows.cuh"

namespace kvx::ops::cuda {

// blockIdx: tile of query rows (the last come first: they see most), head and split, sequence.
template <class Shape>
__global__ void __launch_bounds__(kPrefillThreads, 1)
    attend_prefill(const __grid_constant__ AttendJob job) {
#ifdef KVX_HAS_WGMMA
  extern __shared__ __align__(1024) uint8_t shared[];
  const int head = static_cast<int>(blockIdx.y) % job.packed.num_heads;
  const int split = static_cast<int>(blockIdx.y) / job.packed.num_heads;
  const int first_row = (job.num_row_tiles - 1 - static_cast<int>(blockIdx.x)) * kPrefillRows;
  const SequenceShape shape = sequence_shape(job, blockIdx.z);
  const int num_rows = min(kPrefillRows, shape.q_len * job.q_per_kv - first_row);
  if (!shape.is_valid) {
    return leave_empty(job, shape, job.packed.first_head + head, first_row, num_rows, split,
                       job.num_splits == 1);
  }
  if (num_rows <= 0) return;
  const TokenRange tokens = split_of(seen_by_rows(job, shape, first_row, num_rows), job.num_splits,
                                     split, Shape::kTokens);
  const int first_token = tokens.begin / Shape::kTokens * Shape::kTokens;
  const int num_tiles = tokens.begin < tokens.end
                            ? (tokens.end - first_token + Shape::kTokens - 1) / Shape::kTokens
                            : 0;
  const PrefillWalk walk = {
      job,         job.args.block_table.ids + int64_t{blockIdx.z} * job.args.block_table.row_stride,
      tokens,      head,
      first_token, num_tiles};
  const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const PrefillRing<Shape> ring = {(base + Shape::kAlignment - 1) &
                                   ~static_cast<uint32_t>(Shape::kAlignment - 1)};
  if (threadIdx.x == 0) ring.begin(packed_tokens(job, blockIdx.z, shape.seq_len));
  __syncthreads();

  // The same in all lanes, and the compiler sees that it is.
  const int warp = __shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / kWarp, 0);
  if (warp < 2 * kFillingWarps) {
    give_registers<Shape::kFillingRegisters>();
    if (num_tiles > 0) {
      const PrefillSideWalk<Shape> side = {walk, ring, warp / kFillingWarps};
      if constexpr (Shape::kDecodes) {
        DecodeFiller<Shape>(side).run();
      } else {
        CopyFiller<Shape>::run(side);
      }
    }
  } else {
    take_registers<Shape::kMultiplyingRegisters>();
    PrefillRows<Shape> rows(walk, shape, ring, warp - 2 * kFillingWarps, first_row, num_rows);
    rows.run();
    rows.store(split);
  }
#endif
}

template <class Shape>
PrefillKernel prefill_kernel() {
  return {.function = reinterpret_cast<const void*>(&attend_prefill<Shape>),
          .shared_bytes = Shape::kBytes + Shape::kAlignment,
          .step_tokens = Shape::kTokens,
          .shares_scales = Shape::kDecodes && !Shape::kScalesScores};
}

// The one for rows of two groups.
#define KVX_PREFILL_INSTANCE_OF_PARTS(Mma)                                    \
  template <>                                                                 \
  PrefillKernel prefill_instance<Mma, PrefillScales::kOnParts>(int) {         \
    return prefill_kernel<PrefillShape<Mma, 128, PrefillScales::kOnParts>>(); \
  }

// Defines the instances for one way of scales and type of operands.
#define KVX_PREFILL_INSTANCES(Mma, Scales)                                                   \
  template <>                                                                                \
  PrefillKernel prefill_instance<Mma, PrefillScales::Scales>(int head_dim) {                 \
    return head_dim == 64 ? prefill_kernel<PrefillShape<Mma, 64, PrefillScales::Scales>>()   \
                          : prefill_kernel<PrefillShape<Mma, 128, PrefillScales::Scales>>(); \
  }

}  // namespace kvx::ops::cuda

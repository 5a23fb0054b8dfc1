// Batches whose sequences differ in length: the device cuts each into as many work tiles as its
// length deserves (splits.hpp), so that all work tiles together are at most a grid of fixed size.
// Every CTA finds its own work tile from the lengths, and a sequence's first work tile stores them
// for the merge. Functions here take a whole warp. Their loops stay loops, since behind another
// kernel instructions come slower than they are executed; and all lanes go round as often, since
// what is the same for all of them then stays in uniform registers, of which the walk over tokens
// has none to spare.
//
// WorkTile p of a sequence, KV head h of the run and tile of query rows t is CTA
// (p' * num_row_tiles + t) * num_heads + h, where p' counts work tiles of all sequences in their
// order.
#pragma once

#include "ops/attend/cuda/common/params.cuh"

namespace kvx::ops::cuda {

__device__ inline int granules_of(const DecodeMmaParams& params, int sequence) {
  const SequenceShape shape = sequence_shape(params, sequence);
  return shape.is_valid ? (shape.seq_len + params.balance.granule - 1) / params.balance.granule : 0;
}

// Of sequences before `end`: the sum of what each one's granules give.
template <class Value>
__device__ int sum_over_sequences(const DecodeMmaParams& params, int end, const Value& value) {
  int sum = 0;
#pragma unroll 1
  for (int base = 0; base < end; base += kWarp) {
    const int s = base + static_cast<int>(threadIdx.x % kWarp);
    sum += s < end ? value(granules_of(params, s)) : 0;
  }
  return __reduce_add_sync(kWholeWarp, sum);
}

__device__ inline int granules_of_work_tile(const DecodeMmaParams& params) {
  return balanced_granules(
      params.num_sequences, params.balance.most_work_tiles,
      [&](const auto& value) { return sum_over_sequences(params, params.num_sequences, value); });
}

struct FoundWorkTiles {
  int sequence;
  SequenceWorkTiles work_tiles;  // none: there is no such sequence
};

// The sequence that work tile `work_tile` of all sequences belongs to.
__device__ inline FoundWorkTiles sequence_of_work_tile(const DecodeMmaParams& params,
                                                       int work_tile) {
  const int lane = threadIdx.x % kWarp;
  const int most = granules_of_work_tile(params);
  int before = 0;
#pragma unroll 1
  for (int base = 0; base < params.num_sequences; base += kWarp) {
    const int s = base + lane;
    const int own = s < params.num_sequences ? num_work_tiles(granules_of(params, s), most) : 0;
    int end = own;  // of the work tiles of sequences up to this lane's
#pragma unroll 1
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kWholeWarp, end, offset);
      end += lane >= offset ? other : 0;
    }
    const uint32_t behind = __ballot_sync(kWholeWarp, before + end > work_tile);
    if (behind != 0) {
      const int found = __ffs(static_cast<int>(behind)) - 1;
      const int num = __shfl_sync(kWholeWarp, own, found);
      return {base + found, {before + __shfl_sync(kWholeWarp, end, found) - num, num}};
    }
    before += __shfl_sync(kWholeWarp, end, kWarp - 1);
  }
  return {0, {0, 0}};
}

// Index of the first row's partial results of a work tile (counted over all sequences), head and
// tile of rows.
__device__ inline int64_t balanced_partial(const BalanceParams& balance, int num_heads,
                                           int work_tile, int head, int row_tile) {
  const int64_t cta = (int64_t{work_tile} * balance.num_row_tiles + row_tile) * num_heads + head;
  return cta * balance.rows_of_work_tile;
}

}  // namespace kvx::ops::cuda

// The latent kernel on mma.sync: its instances, by how many bits a code has.
#include "ops/attend/cuda/latent/mma_sync/kernel.cuh"
#include "ops/cuda/earlier_work.cuh"

namespace kvx::ops::cuda {
namespace {

using Shape = LatentMmaShape;

__device__ TokenRange both(TokenRange a, TokenRange b) {
  const int begin = max(a.begin, b.begin);
  return {begin, max(begin, min(a.end, b.end))};
}

// Rows of the layer's own format.
template <class Mma, int Bits>
__device__ __forceinline__ void attend_packed(const LatentMmaWalk& walk, LatentMmaWorker& worker,
                                              TokenRange tokens) {
  const LatentParams& params = walk.params;
  const int kv_head = walk.work_tile.kv_head;
  const LatentMmaRows rows(walk, kv_head - params.first_head, params.num_packed_blocks);
  const float unit = latent_unit(params, kv_head);
  if constexpr (Bits == 16) {
    LatentMmaCopies<Mma> reader(rows, params.tile_k.codes, params.rest, PairOrder::kNeighbours);
    worker.attend(reader, tokens, unit);
  } else {
    LatentMmaDecoder<Bits> reader(rows, params);
    worker.attend(reader, tokens, unit);
  }
  worker.multiply_sums(unit);
}

// Rows of bf16: the window's tokens in front of the packed ones, then those behind.
__device__ __forceinline__ void attend_full_precision(const LatentMmaWalk& walk,
                                                      LatentMmaWorker& worker, TokenRange all,
                                                      TokenRange packed) {
  const LatentParams& params = walk.params;
  const int head = walk.work_tile.kv_head - params.full_precision_first_head;
  const LatentMmaRows rows(walk, head, params.num_full_precision_blocks);
#pragma unroll 1
  for (const TokenRange& window : {TokenRange{all.begin, min(all.end, packed.begin)},
                                   TokenRange{max(all.begin, packed.end), all.end}}) {
    LatentMmaCopies<MmaBf16> reader(rows, params.tile_full_precision_k.codes,
                                    params.full_precision_rest, params.tile_k.format.pair_order);
    worker.attend(reader, window, 1.0f);
  }
}

template <class Mma, int Bits>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attend_latent_mma(const __grid_constant__ LatentParams params) {
  const bool is_merged = params.num_splits > 1 || params.balance.most_work_tiles > 0;
  if (!is_merged) let_later_launches_begin();
  wait_for_earlier_work();
  extern __shared__ __align__(16) uint8_t shared[];
  const LatentWorkTile work_tile = find_latent_work_tile<Shape::kRows>(params);
  if (work_tile.num_splits == 0) return;
  if (!work_tile.shape.is_valid) {
    store_empty_rows(params, work_tile.shape, work_tile.kv_head, work_tile.first_row,
                     work_tile.num_rows, work_tile.split, work_tile.num_splits == 1);
    return;
  }
  if (work_tile.num_rows <= 0) return;
  const LatentMmaWalk walk = {
      .params = params,
      .memory = {static_cast<uint32_t>(__cvta_generic_to_shared(shared))},
      .table = params.block_table.ids + int64_t{work_tile.sequence} * params.block_table.row_stride,
      .work_tile = work_tile};
  const TokenRange all =
      split_of(seen_by_rows(params, work_tile.shape, work_tile.first_row, work_tile.num_rows),
               work_tile.num_splits, work_tile.split, Shape::kTokens);
  const TokenRange packed = packed_tokens(params, work_tile.sequence, work_tile.shape.seq_len);
  LatentMmaWorker worker(walk);
  attend_packed<Mma, Bits>(walk, worker, both(all, packed));
  if (params.num_sink_blocks != nullptr) attend_full_precision(walk, worker, all, packed);
  let_later_launches_begin();
  worker.store(params.tile_k.format.pair_order);
}

template <class Mma, int Bits>
LatentKernel latent_mma_kernel() {
  return {.function = reinterpret_cast<const void*>(&attend_latent_mma<Mma, Bits>),
          .rows = Shape::kRows,
          .step_tokens = Shape::kTokens,
          .threads = Shape::kThreads,
          .shared_bytes = Shape::kBytes};
}

}  // namespace

LatentKernel find_latent_mma_kernel(const LatentFormats& formats) {
  const int bits = tensor_core_format(formats.id).bits;
  const bool has_rest_of_16_bits = tensor_core_format(formats.rest).bits == 16;
  if (bits < 16 && formats.has_segments && !has_rest_of_16_bits) return {};
  switch (bits) {
    case 4:
      return latent_mma_kernel<MmaF16, 4>();
    case 8:
      return latent_mma_kernel<MmaF16, 8>();
    case 16:
      if (formats.rest != formats.id) return {};
      return formats.id == format::FormatId::kBF16 ? latent_mma_kernel<MmaBf16, 16>()
                                                   : latent_mma_kernel<MmaF16, 16>();
    default:
      return {};
  }
}

}  // namespace kvx::ops::cuda

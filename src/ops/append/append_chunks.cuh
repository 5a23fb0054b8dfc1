// append's fast kernel: rows go by sixteen neighbours a lane, the next rows' loads are under way
// while a lane encodes.
#pragma once

#include "ops/append/append_job.cuh"

namespace kvx::ops::cuda {

struct AppendChunksLaunch {
  static constexpr int kThreads = 128;
  static constexpr int kCtasPerMultiprocessor = 6;  // what registers allow
};

// A lane's part of a row before it is encoded.
template <int Bytes>
struct PendingChunk {
  RawChunk<Bytes> raw;
  int64_t slot;
};

template <int Bytes>
__device__ inline PendingChunk<Bytes> load_pending(const AppendJob& job, const AppendSide& part,
                                                   uint32_t row, int chunk) {
  PendingChunk<Bytes> pending = {};
  pending.slot = -1;
  if (row >= job.num_rows || chunk >= part.chunks.num_chunks) return pending;
  const AppendRow at = append_row_at(job, row);
  pending.raw = load_chunk<Bytes>(part.input_row(at.token, job.first_head + at.head) +
                                  chunk * kChunk * Bytes);
  pending.slot = job.slot_mapping[at.token];
  return pending;
}

template <int Bytes>
__device__ inline void append_pending(const AppendJob& job, const AppendSide& part,
                                      const PendingChunk<Bytes>& pending, uint32_t row, int chunk,
                                      int lane) {
  const AppendRow at = append_row_at(job, row);
  const AppendTarget target = append_target(job, part, at, pending.slot, chunk == 0);
  const ChunkPlace place = {chunk, target.is_stored, part.chunks.lanes_per_group};
  if (part.keeps_bits) return store_raw(pending.raw, place, target.to.codes);
  Chunk numbers = numbers_of(pending.raw, part.input.dtype);
  if (part.is_transformed) {
    apply_transform_chunk(append_transform(job, part, at, target.position_block), place,
                          part.side.view.head_dim, lane, numbers);
  }
  if (!target.is_stored) numbers = {};
  count_nonfinite(job, encode_chunk(part.side, target.to, place, numbers));
}

// blockIdx.y: K or V. Bytes: of an input number.
template <int Bytes>
__global__ void __launch_bounds__(AppendChunksLaunch::kThreads,
                                  AppendChunksLaunch::kCtasPerMultiprocessor)
    append_chunks(const __grid_constant__ AppendJob job) {
  const AppendSide& part = job.sides[blockIdx.y];
  if (!part.is_stored()) return;
  const int lane = threadIdx.x % kWarp;
  const int chunk = lane & ((1 << part.chunks.log2_lanes) - 1);
  const auto rows_per_warp = static_cast<uint32_t>(part.chunks.rows_per_warp());
  const uint32_t warps_per_cta = AppendChunksLaunch::kThreads / kWarp;
  const uint32_t warp = blockIdx.x * warps_per_cta + threadIdx.x / kWarp;
  const uint32_t stride = gridDim.x * warps_per_cta * rows_per_warp;
  // The warp's first row; all its lanes leave the loop together.
  uint32_t first = warp * rows_per_warp;
  const uint32_t own = static_cast<uint32_t>(lane) >> part.chunks.log2_lanes;
  PendingChunk<Bytes> next = load_pending<Bytes>(job, part, first + own, chunk);
  for (; first < job.num_rows; first += stride) {
    const PendingChunk<Bytes> pending = next;
    next = load_pending<Bytes>(job, part, first + stride + own, chunk);
    append_pending(job, part, pending, first + own, chunk, lane);
  }
}

}  // namespace kvx::ops::cuda

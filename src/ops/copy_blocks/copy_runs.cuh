// copy_blocks where both sides store alike and rows follow each other without gaps: a warp moves a
// run of a block, many vectors under way at once.
#pragma once

#include <algorithm>

#include "ops/copy_blocks/copy_params.cuh"
#include "ops/cuda/overlapping_launch.cuh"

namespace kvx::ops::cuda {

// Codes or scales of a side. HND: a run is a head's tokens; NHD: all heads' tokens.
struct CopyRegion {
  const uint8_t* from;
  uint8_t* to;
  int64_t from_block_stride;
  int64_t to_block_stride;
  int64_t from_run_stride;
  int64_t to_run_stride;
  int bytes_per_token;  // of a run; 0: nothing to copy
};

struct CopyRunsParams {
  CopyRegion regions[2][2];  // [K, V][codes, scales]
  uint32_t num_runs;         // of a block
  FastDivide by_num_runs;
  CopyParams copy;
};

struct CopyRunsLaunch {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / kWarp;
};

// Requires: both on 16 bytes.
__device__ inline void copy_run(const uint8_t* from, uint8_t* to, int bytes, int lane) {
  constexpr int kAtOnce = 8;
  constexpr int kStep = kWarp * 16;  // bytes
  int at = lane * 16;
  for (; at - lane * 16 + kAtOnce * kStep <= bytes; at += kAtOnce * kStep) {
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      x[i] = __ldcs(reinterpret_cast<const uint4*>(from + at + i * kStep));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      __stwb(reinterpret_cast<uint4*>(to + at + i * kStep), x[i]);
    }
  }
  uint4 x[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (at + i * kStep + 16 <= bytes) {
      x[i] = __ldcs(reinterpret_cast<const uint4*>(from + at + i * kStep));
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (at + i * kStep + 16 <= bytes) {
      __stwb(reinterpret_cast<uint4*>(to + at + i * kStep), x[i]);
    }
  }
  const int tail = bytes / 16 * 16 + lane;
  if (tail < bytes) to[tail] = from[tail];
}

// blockIdx: warps' runs, which are (copy, run of the block); K or V.
__global__ void __launch_bounds__(CopyRunsLaunch::kThreads)
    copy_runs(const __grid_constant__ CopyRunsParams params) {
  wait_for_earlier_launches();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t at = blockIdx.x * CopyRunsLaunch::kWarps + threadIdx.x / kWarp;
  const uint32_t number = params.by_num_runs.quotient(at);
  if (number >= params.copy.copies.count) return;
  const auto run = static_cast<int>(at - number * params.num_runs);
  const BlockCopy copy = copy_at(params.copy, number);
  if (!is_inside(params.copy, copy)) {
    const bool counts = run == 0 && lane == 0 && blockIdx.y == 0;
    if (counts) count_outside(params.copy);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const CopyRegion& region = params.regions[blockIdx.y][i];
    copy_run(
        region.from + copy.from_block * region.from_block_stride + run * region.from_run_stride,
        region.to + copy.to_block * region.to_block_stride + run * region.to_run_stride,
        copy.num_tokens * region.bytes_per_token, lane);
  }
}

// The shape of a side's rows: bytes of a token in a run, runs of a block. None: no runs.
struct RunShape {
  int bytes_per_token = 0;
  int num_runs = 0;
  int64_t run_stride = 0;
};

// row_bytes: of a token and head. What has gaps has no runs.
template <class Address>
RunShape run_shape(const Address& a, int row_bytes, int num_heads) {
  const bool is_on_16 = lies_on(16, a.base, {a.block_stride});
  if (is_on_16 && a.token_stride == row_bytes && a.head_stride % 16 == 0) {
    return {row_bytes, num_heads, a.head_stride};
  }
  if (is_on_16 && a.head_stride == row_bytes && a.token_stride == int64_t{row_bytes} * num_heads) {
    return {row_bytes * num_heads, 1, 0};
  }
  return {};
}

// Finds a region's runs on both sides; false where they differ or there are none.
template <class Address>
bool find_region(const Address& from, const Address& to, int row_bytes, int num_heads,
                 CopyRegion& region, int& num_runs) {
  const RunShape from_runs = run_shape(from, row_bytes, num_heads);
  const RunShape to_runs = run_shape(to, row_bytes, num_heads);
  const bool is_alike = from_runs.num_runs == to_runs.num_runs &&
                        from_runs.bytes_per_token == to_runs.bytes_per_token;
  if (!is_alike || from_runs.num_runs == 0) return false;
  if (num_runs != 0 && num_runs != from_runs.num_runs) return false;
  num_runs = from_runs.num_runs;
  region = {from.base,
            to.base,
            from.block_stride,
            to.block_stride,
            from_runs.run_stride,
            to_runs.run_stride,
            from_runs.bytes_per_token};
  return true;
}

// Whether the same scales lie on both sides already: given ones, the same memory for all blocks.
inline bool shares_given_scales(const SideView& from, const SideView& to) {
  const ScaleAddress& a = from.scales;
  const ScaleAddress& b = to.scales;
  return a.base == b.base && a.head_stride == b.head_stride && a.group_stride == b.group_stride &&
         a.block_stride == 0 && a.token_stride == 0 && b.block_stride == 0 && b.token_stride == 0;
}

// K's or V's regions; false where rows must be looked at one by one.
inline bool find_regions(const CopySide& side, int num_heads, CopyRegion (&regions)[2],
                         int& num_runs) {
  regions[0] = regions[1] = {};
  if (side.is_skipped) return true;
  const SideView& from = side.from.view;
  const SideView& to = side.to.view;
  const bool has_fragments = from.codes.is_fragmented() || to.codes.is_fragmented();
  const bool is_moved_whole = side.is_alike && !side.changes_order() && !has_fragments;
  if (!is_moved_whole || from.tensor_scales != to.tensor_scales) return false;
  if (!find_region(from.codes, to.codes, side.from.code_bytes, num_heads, regions[0], num_runs)) {
    return false;
  }
  if (!from.spec.has_scale()) return true;
  if (from.spec.scale_source == format::ScaleSource::kGiven) return shares_given_scales(from, to);
  const int scale_bytes = side.from.num_groups * side.from.scale_bytes;
  const bool groups_are_dense =
      side.from.num_groups == 1 || (from.scales.group_stride == side.from.scale_bytes &&
                                    to.scales.group_stride == side.from.scale_bytes);
  return groups_are_dense &&
         find_region(from.scales, to.scales, scale_bytes, num_heads, regions[1], num_runs);
}

}  // namespace kvx::ops::cuda

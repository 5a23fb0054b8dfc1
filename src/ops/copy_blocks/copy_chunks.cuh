// copy_blocks' fast kernel: a row's lanes walk over heads of a token.
#pragma once

#include "ops/append/encode_chunk.cuh"
#include "ops/copy_blocks/copy_params.cuh"
#include "ops/cuda/overlapping_launch.cuh"
#include "ops/gather/decode_chunk.cuh"

namespace kvx::ops::cuda {

// More than ChunkLaunch's: copies wait for memory rather than for arithmetic.
inline constexpr int kCopyCtasPerMultiprocessor = 8;

struct CopyChunksParams {
  CopyParams copy;
  int heads_at_once;
  FastDivide by_walks_per_token;
};

__device__ inline void store_scale_bits(uint32_t bits, int bytes, uint8_t* scale) {
  if (bytes == 1) *scale = static_cast<uint8_t>(bits);
  if (bytes == 2) *reinterpret_cast<uint16_t*>(scale) = static_cast<uint16_t>(bits);
  if (bytes == 4) *reinterpret_cast<uint32_t*>(scale) = bits;
}

template <int Words>
__device__ inline void copy_words(const uint8_t* from, uint8_t* to) {
  uint32_t words[Words];
  load_words(from, words);
  store_words(words, to);
}

__device__ inline void copy_chunk_as_stored(const CopySide& side, const CopyRow& row,
                                            const ChunkPlace& place) {
  const int bytes = side.from.code_bytes / side.from_chunks.num_chunks;
  const uint8_t* from = row.from_codes + place.chunk * bytes;
  uint8_t* to = row.to_codes + place.chunk * bytes;
  if (bytes == 8 && side.changes_order()) {
    uint32_t words[2];
    load_words(from, words);
    for (uint32_t& word : words) word = in_other_order(side, word);
    store_words(words, to);
  } else if (bytes == 8) {
    copy_words<2>(from, to);
  }
  if (bytes == 16) copy_words<4>(from, to);
  if (bytes == 32) copy_words<8>(from, to);
  if (bytes == 64) copy_words<16>(from, to);
  const bool is_given = side.from.view.spec.scale_source == format::ScaleSource::kGiven;
  if (is_given || !place.leads_group()) return;
  const uint8_t* scale = row.from_scales + place.group() * side.from.view.scales.group_stride;
  const int scale_bytes = side.from.scale_bytes;
  store_scale_bits(scale_bits(scale, scale_bytes), scale_bytes,
                   row.to_scales + place.group() * side.to.view.scales.group_stride);
}

// Given scales are not written, so all of a row's must be equal already.
__device__ inline bool may_copy(const CopySide& side, const CopyRow& row, const ChunkPlace& place) {
  bool may = side.is_alike && row.from_tensor_scale == row.to_tensor_scale;
  if (side.from.view.spec.scale_source != format::ScaleSource::kGiven) return may;
  const int bytes = side.from.scale_bytes;
  if (may && place.is_inside) {
    may = scale_bits(row.from_scales + place.group() * side.from.view.scales.group_stride, bytes) ==
          scale_bits(row.to_scales + place.group() * side.to.view.scales.group_stride, bytes);
  }
  may = may || !place.is_inside;
  for (int lanes = 1; lanes < side.from_chunks.lanes(); lanes *= 2) {
    const bool others = __shfl_xor_sync(kWholeWarp, may, lanes);
    may = may && others;
  }
  return may;
}

// Whole warps come here together.
__device__ inline void copy_chunk(const CopyParams& params, const CopySide& side,
                                  const CopyRow& row, int head, ChunkPlace place) {
  const bool copies = may_copy(side, row, place);
  if (place.is_inside && copies) copy_chunk_as_stored(side, row, place);
  place.is_inside = place.is_inside && !copies;
  if (!__any_sync(kWholeWarp, place.is_inside)) return;
  const Chunk chunk =
      decode_chunk(side.from, {row.from_codes, row.from_scales, row.from_tensor_scale}, place);
  place.log2_lanes_per_group = side.to_chunks.log2_lanes_per_group;
  const LostNumbers lost =
      encode_chunk(side.to, {row.to_codes, row.to_scales, row.to_tensor_scale}, place, chunk);
  if (place.is_inside) count_lost(params.counters, side.to, head, lost);
}

// blockIdx: walks over (copy, token of the block), K or V.
__global__ void __launch_bounds__(ChunkLaunch::kThreads, kCopyCtasPerMultiprocessor)
    copy_chunks(const __grid_constant__ CopyChunksParams chunks) {
  wait_for_earlier_launches();
  const CopyParams& params = chunks.copy;
  const CopySide& side = params.sides[blockIdx.y];
  const uint32_t walk =
      (blockIdx.x * ChunkLaunch::kThreads + threadIdx.x) >> side.from_chunks.log2_lanes;
  const uint32_t unit = chunks.by_walks_per_token.quotient(walk);
  const uint32_t walk_of_unit = walk - unit * chunks.by_walks_per_token.divisor;
  const uint32_t number = params.by_block_size.quotient(unit);
  const int token = static_cast<int>(unit - number * params.by_block_size.divisor);
  const int first_head = static_cast<int>(walk_of_unit) * chunks.heads_at_once;
  ChunkPlace place = {static_cast<int>(threadIdx.x) & (side.from_chunks.lanes() - 1),
                      side.from_chunks.log2_lanes_per_group, false};
  BlockCopy copy;
  bool is_token = false;
  if (number < params.copies.count) {
    copy = copy_at(params, number);
    const bool is_valid = is_inside(params, copy);
    const bool counts = token == 0 && first_head == 0 && place.chunk == 0 && blockIdx.y == 0;
    if (!is_valid && counts) count_outside(params);
    is_token = is_valid && token < copy.num_tokens && place.chunk < side.from_chunks.num_chunks;
  }
  if (side.is_skipped) return;
  for (int i = 0; i < chunks.heads_at_once; ++i) {
    CopyRow row = {};
    place.is_inside = is_token && first_head + i < params.num_heads;
    if (place.is_inside) row = copy_row_at(side, copy, token, first_head + i);
    copy_chunk(params, side, row, first_head + i, place);
  }
}

}  // namespace kvx::ops::cuda

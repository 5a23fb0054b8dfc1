// The shape of a CTA of the latent kernel on mma.sync: 32 query rows against tiles of 32 tokens, by
// eight warps that all do everything.
//
// shared memory; a slab is 32 tokens of 64 numbers, 128 bytes each, swizzled (wgmma.cuh):
//   [buffer 0: 9 slabs][buffer 1: 9 slabs][scores: a part of each slice of the row]
//   [weights: 32 rows of 80 bytes][rescales: 32][query scales: 32][missing tokens: 2 x 32]
// While the tile of one buffer is multiplied, the other's is on its way. 91 KB: the least that a
// device has for a CTA is 99.
#pragma once

#include "ops/attend/cuda/latent/decode_chunk.cuh"
#include "ops/attend/cuda/latent/shared_numbers.cuh"
#include "ops/attend/cuda/latent/work_tile.cuh"

namespace kvx::ops::cuda {

struct LatentMmaShape {
  static constexpr int kRows = 32;
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kTokens = 32;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarp;
  // Of a row's numbers: two warps multiply a slice of the keys, each with 16 query rows.
  static constexpr int kSlices = kWarps / kRowTiles;
  static constexpr int kValueSlabs = kLatentValueDim / 64;  // warp w sums columns of slab w
  static_assert(kValueSlabs == kWarps);
  static constexpr int kSlabs = kLatentKeyDim / 64;
  static constexpr int kRestSlab = kValueSlabs;
  static constexpr int kSlabBytes = kTokens * 128;
  static constexpr int kBufferBytes = kSlabs * kSlabBytes;
  static constexpr int kSliceBytes = kRows * kTokens * 4;
  static constexpr int kWeightRowBytes = kTokens * 2 + 16;  // eight rows lie in all banks

  static constexpr int kScores = 2 * kBufferBytes;
  static constexpr int kWeights = kScores + kSlices * kSliceBytes;
  static constexpr int kRescales = kWeights + kRows * kWeightRowBytes;
  static constexpr int kQueryScales = kRescales + kRows * 4;
  static constexpr int kMissing = kQueryScales + kRows * 4;
  static constexpr int kBytes = kMissing + 2 * kTokens;
  // Rows of what lies where the buffers are, before and after them, are 8 numbers longer than they
  // need to be, for the banks.
  static constexpr int kQueryRow = kLatentKeyDim + 8;
  static constexpr int kOutputRow = kLatentValueDim + 8;
  static_assert(kRows * kQueryRow * 4 <= kWeights && kRows * kOutputRow * 4 <= kWeights);
  static_assert(kBytes + kReservedBytes <= 100 << 10);
};

struct LatentMmaMemory {
  using Shape = LatentMmaShape;
  uint32_t shared;

  __device__ uint32_t slab(int buffer, int slab) const {
    return shared + buffer * Shape::kBufferBytes + slab * Shape::kSlabBytes;
  }
  // The part of a row's score that a slice has. Columns are swizzled, so that a warp's pairs of
  // columns of eight rows lie in all banks; a pair stays together.
  __device__ uint32_t score(int slice, int row, int column) const {
    return shared + Shape::kScores + slice * Shape::kSliceBytes +
           (row * Shape::kTokens + (column ^ row % 4 * 8)) * 4;
  }
  __device__ uint32_t weights(int row) const {
    return shared + Shape::kWeights + row * Shape::kWeightRowBytes;
  }
  __device__ uint32_t rescale(int row) const { return shared + Shape::kRescales + row * 4; }
  __device__ uint32_t query_scale(int row) const { return shared + Shape::kQueryScales + row * 4; }
  // A byte: whether the token's block is not there.
  __device__ uint32_t missing(int buffer, int token) const {
    return shared + Shape::kMissing + buffer * Shape::kTokens + token;
  }
  // Binary32 numbers of a query row, before the buffers have tiles, and of the output, after.
  __device__ float* staged_query(int row) const {
    return static_cast<float*>(__cvta_shared_to_generic(shared + row * Shape::kQueryRow * 4));
  }
  __device__ float* output(int row) const {
    return static_cast<float*>(__cvta_shared_to_generic(shared + row * Shape::kOutputRow * 4));
  }
};

// What a CTA reads of its sequence.
struct LatentMmaWalk {
  const LatentParams& params;
  LatentMmaMemory memory;
  const int32_t* table;  // of the sequence
  const LatentWorkTile& work_tile;
};

}  // namespace kvx::ops::cuda

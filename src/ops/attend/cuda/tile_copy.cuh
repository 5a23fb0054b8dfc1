// Tiles on their way into shared memory: 16 tokens of one head, rows as they lie in their blocks,
// copied 16 bytes at a time by cp.async.
//
// shared memory of a tile's side:
//   [codes: 16 rows of kRowBytes, their 16-byte chunks swizzled][scales: 16 rows of kScaleRowBytes]
#pragma once

#include "ops/attend/cuda/mma.cuh"
#include "ops/cuda/side.cuh"

namespace kvx::ops::cuda {

inline constexpr int kTileTokens = 16;

// Bytes is 4 or 16; nothing is read and zeros are written when `is_there` is false. 4 bytes go
// through the first cache (scales share its lines), 16 past it.
template <int Bytes>
__device__ inline void copy_async(uint32_t to, const uint8_t* from, bool is_there) {
  const int source_bytes = is_there ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(source_bytes)
                 : "memory");
  }
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most `Left` of this thread's groups are on their way.
template <int Left>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

// Chunk c of row r lies at chunk c ^ swizzle(r): eight rows' chunks of one number lie in all banks.
template <int RowBytes>
__device__ constexpr int swizzle(int row) {
  constexpr int kChunks = RowBytes / 16;
  if constexpr (kChunks >= 8) return row & 7;
  if constexpr (kChunks == 4) return (row >> 1) & 3;
  return (row >> 2) & 1;
}

template <int RowBytes>
__device__ inline uint32_t chunk_address(uint32_t codes, int row, int chunk) {
  return codes + row * RowBytes + ((chunk ^ swizzle<RowBytes>(row)) << 4);
}

// RowBytes of codes and ScaleRowBytes of scales a token.
template <int RowBytes, int ScaleRowBytes>
struct TileCopy {
  static constexpr int kScalesAt = kTileTokens * RowBytes;
  static constexpr int kBytes = kScalesAt + (kTileTokens * ScaleRowBytes + 15) / 16 * 16;

  // codes, scales: of the tile's first token. num_tokens: that are there; the others become zeros.
  __device__ static void start(const CudaSide& side, const uint8_t* codes, const uint8_t* scales,
                               int num_tokens, uint32_t to, int lane) {
    constexpr int kChunks = RowBytes / 16;
    constexpr int kRowsAtOnce = kWarp / kChunks;
    const int row = lane / kChunks;
    const int chunk = lane % kChunks;
    const int stride = static_cast<int>(side.view.codes.token_stride);
    const uint8_t* from = codes + row * stride + chunk * 16;
#pragma unroll
    for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
      const int r = row + i * kRowsAtOnce;
      copy_async<16>(chunk_address<RowBytes>(to, r, chunk), from + i * kRowsAtOnce * stride,
                     r < num_tokens);
    }
    if constexpr (ScaleRowBytes > 0) start_scales(side, scales, num_tokens, to + kScalesAt, lane);
  }

  __device__ static void start_scales(const CudaSide& side, const uint8_t* scales, int num_tokens,
                                      uint32_t to, int lane) {
    const int stride = static_cast<int>(side.view.scales.token_stride);
    // Rows of two bytes follow each other (checked on the host) and go in pairs.
    constexpr int kTokensAWord = ScaleRowBytes < 4 ? 2 : 1;
    constexpr int kWords = ScaleRowBytes < 4 ? 1 : ScaleRowBytes / 4;
    const int token = lane / kWords * kTokensAWord;
    const int word = lane % kWords;
    if (token < kTileTokens) {
      copy_async<4>(to + lane * 4, scales + token * stride + word * 4, token < num_tokens);
    }
  }
};

}  // namespace kvx::ops::cuda

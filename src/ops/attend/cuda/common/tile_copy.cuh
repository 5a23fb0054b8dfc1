// Tiles on their way into shared memory: 16 tokens of one head, rows as they lie in their blocks.
// Rows that follow each other without a gap can come in one bulk copy, as they are; others come 16
// bytes at a time (cp.async), their chunks swizzled on the way: a warp a tile (TileCopy), or, of
// rows of four bits, four tiles of a side at once (FourTilesCopy).
#pragma once

#include "ops/attend/cuda/common/launch.hpp"
#include "ops/attend/cuda/common/mma.cuh"
#include "ops/attend/cuda/common/params.hpp"

namespace kvx::ops::cuda {

// 16 bytes, past the first cache. The second-level cache takes the whole line of 128: where a
// head's row is half of one, the memory opens a page once for it and its neighbour.
__device__ inline void copy_async_16(uint32_t to, const uint8_t* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
// The same under a policy of the second-level cache.
__device__ inline void copy_async_16_kept(uint32_t to, const uint8_t* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "l"(policy)
               : "memory");
}
// The first source_bytes of 16; the rest becomes zeros.
__device__ inline void copy_async_16(uint32_t to, const uint8_t* from, int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(source_bytes)
               : "memory");
}
// The same for 4 and 8 bytes, through the first cache: neighbours' scales share its lines.
__device__ inline void copy_async_4(uint32_t to, const uint8_t* from, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(source_bytes)
               : "memory");
}
// Where is_wanted: ptxas spends fewer registers on it than on an if.
__device__ inline void copy_async_4_if(bool is_wanted, uint32_t to, const uint8_t* from,
                                       int source_bytes) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.u32 wanted, %3, 0;\n"
      "@wanted cp.async.ca.shared.global [%0], [%1], 4, %2;\n"
      "}\n" ::"r"(to),
      "l"(from), "r"(source_bytes), "r"(static_cast<uint32_t>(is_wanted))
      : "memory");
}
__device__ inline void copy_async_8(uint32_t to, const uint8_t* from, int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from),
               "r"(source_bytes)
               : "memory");
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

template <int RowBytes, bool IsSwizzled>
__device__ inline uint32_t chunk_address(uint32_t codes, int row, int chunk) {
  const int place = IsSwizzled ? chunk ^ swizzle<RowBytes>(row) : chunk;
  return codes + row * RowBytes + (place << 4);
}

// Bulk copies and their barriers, elect and the fences came with compute capability 9.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasBulkCopies = false;
#else
inline constexpr bool kHasBulkCopies = true;
#endif

// Barriers in shared memory: one lane says how many bytes to expect, bulk copies bring them.
__device__ inline void init_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void wait_for_barrier(uint32_t barrier, uint32_t phase) {
  uint32_t is_done;
  do {
    asm volatile(
        "{.reg .pred p;"
        " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p;}"
        : "=r"(is_done)
        : "r"(barrier), "r"(phase)
        : "memory");
  } while (!is_done);
}
// One lane of the warp, and the compiler knows that it is one: operands of bulk copies go through
// registers of the warp, and for any other condition it would make a loop over the lanes.
__device__ inline bool is_elected() {
  uint32_t is_one;
  asm volatile(
      "{.reg .pred p;"
      " elect.sync _|p, 0xFFFFFFFF;"
      " selp.u32 %0, 1, 0, p;}"
      : "=r"(is_one));
  return is_one != 0;
}
__device__ inline void copy_bulk(uint32_t to, const uint8_t* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}
// Between ordinary accesses of shared memory and a bulk copy into it.
__device__ inline void fence_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// RowBytes of codes and ScaleRowBytes of scales a token.
template <int RowBytes, int ScaleRowBytes>
struct TileCopy {
  static constexpr int kCodeBytes = kTileTokens * RowBytes;
  static constexpr int kScaleBytes = kTileTokens * ScaleRowBytes;
  static constexpr int kBytes = kCodeBytes + kScaleBytes;
  static constexpr int kChannelBytes = 0;  // beside a step's tiles
  static constexpr int kChunks = RowBytes / 16;
  static constexpr int kRowsAtOnce = kWarp / kChunks;
  static constexpr int kLanes = kRowsAtOnce * kChunks;  // that copy codes
  static_assert(kLanes == kWarp || ScaleRowBytes == 0);
  // Rows of two bytes follow each other (checked on the host) and go in pairs.
  static constexpr int kTokensAWord = ScaleRowBytes < 4 ? 2 : 1;
  static constexpr int kWords = ScaleRowBytes < 4 ? 1 : ScaleRowBytes / 4;

  // This lane's part of addresses inside a block, for one head.
  struct Lane {
    int codes;
    int scales;
  };
  __device__ static Lane lane_part(const TileSide& side, int head, int lane) {
    return {head * side.codes.head_stride + lane / kChunks * side.codes.token_stride +
                lane % kChunks * 16,
            side.scales.word_of_head(head) +
                lane / kWords * kTokensAWord * side.scales.token_stride + lane % kWords * 4};
  }

  // The tile that begins with token `offset` of a block. num_tokens: that are there; the others
  // become zeros.
  __device__ static void start(const TileSide& side, const Lane& part, uint32_t block, int offset,
                               int num_tokens, uint32_t to, uint32_t scales_to, int lane) {
    if (kLanes < kWarp && lane >= kLanes) return;
    const int stride = side.codes.token_stride;
    const uint8_t* from = side.codes.at(block, offset * stride + part.codes);
    if (num_tokens < kTileTokens) {
      start_some(from, stride, num_tokens, to, lane);
    } else if (stride == RowBytes) {
#pragma unroll
      for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
        copy_async_16(place(to, i, lane), from + i * kRowsAtOnce * RowBytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
        copy_async_16(place(to, i, lane), from + i * kRowsAtOnce * stride);
      }
    }
    if constexpr (ScaleRowBytes > 0) {
      const int token = lane / kWords * kTokensAWord;
      if (kTileTokens / kTokensAWord * kWords < kWarp && token >= kTileTokens) return;
      const int tokens_there = min(max(num_tokens - token, 0), kTokensAWord);
      copy_async_4(scales_to + lane * 4,
                   side.scales.at(block, offset * side.scales.token_stride + part.scales),
                   tokens_there * (4 / kTokensAWord));
    }
  }

 private:
  __device__ static uint32_t place(uint32_t to, int i, int lane) {
    return chunk_address<RowBytes, true>(to, lane / kChunks + i * kRowsAtOnce, lane % kChunks);
  }
  __device__ static void start_some(const uint8_t* from, int stride, int num_tokens, uint32_t to,
                                    int lane) {
#pragma unroll 1
    for (int i = 0; i < kTileTokens / kRowsAtOnce; ++i) {
      copy_async_16(place(to, i, lane), from + i * kRowsAtOnce * stride,
                    lane / kChunks + i * kRowsAtOnce < num_tokens ? 16 : 0);
    }
  }
};

// The same for four tiles of 4-bit rows at once, each of a block of its own and copied by eight
// lanes: a lane finds but one place a side, and copies from rows that lie at even distances from
// there. A tile by the whole warp costs as much for its place and comes to two copies a lane.
template <class Copy>
struct FourTilesCopy {
  static constexpr int kLanes = 8;  // of a tile
  static constexpr int kDecodeMma = kWarp / kLanes;
  static constexpr int kRowBytes = Copy::kCodeBytes / kTileTokens;
  static constexpr int kScaleRowBytes = Copy::kScaleBytes / kTileTokens;
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowsAtOnce = kLanes / kChunks;
  static_assert(kLanes % kChunks == 0 && swizzle<kRowBytes>(kRowsAtOnce - 1) == 0,
                "rows that are copied together are swizzled alike");

  __device__ static int tile_of(int lane) { return lane / kLanes; }

  // This lane's part of addresses inside a block, for one head.
  struct Lane {
    int codes;
    int scales;
  };
  __device__ static Lane lane_part(const TileSide& side, int head, int lane) {
    return {head * side.codes.head_stride + first_row(lane) * side.codes.token_stride +
                chunk(lane) * 16,
            side.scales.word_of_head(head) + first_scales(lane) * side.scales.token_stride};
  }

  // This lane's tile begins with token `offset` of its block. num_tokens: that are there; the
  // others become zeros. to, scales_to: of tile 0. policy: for codes.
  __device__ static void start(const TileSide& side, const Lane& part, uint32_t block, int offset,
                               int num_tokens, uint32_t to, uint32_t scales_to, int lane,
                               uint64_t policy) {
    const int stride = side.codes.token_stride;
    const uint8_t* from = side.codes.at(block, offset * stride + part.codes);
    const uint8_t* scales = side.scales.at(block, offset * side.scales.token_stride + part.scales);
    const uint32_t codes_to = to + tile_of(lane) * Copy::kCodeBytes;
    const uint32_t tile_scales_to = scales_to + tile_of(lane) * Copy::kScaleBytes;
    const int64_t step = int64_t{kRowsAtOnce} * stride;
    if (num_tokens >= kTileTokens) [[likely]] {
#pragma unroll
      for (int i = 0; i < kTileTokens; i += kRowsAtOnce) {
        copy_async_16_kept(place(codes_to, i, lane), from, policy);
        from += step;
      }
      start_scales(side, scales, kTileTokens, tile_scales_to, lane);
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kTileTokens; i += kRowsAtOnce) {
      copy_async_16(place(codes_to, i, lane), from, first_row(lane) + i < num_tokens ? 16 : 0);
      from += step;
    }
    start_scales(side, scales, num_tokens, tile_scales_to, lane);
  }

 private:
  __device__ static int chunk(int lane) {
    return lane % kChunks;
  }
  __device__ static int first_row(int lane) {
    return lane % kLanes / kChunks;
  }
  // Rows of scales that are shorter than four bytes follow each other (checked on the host).
  __device__ static int first_scales(int lane) {
    return lane % kLanes * (kScaleRowBytes < 4 ? 2 : 1);
  }
  // row: that the tile's first lane copies.
  __device__ static uint32_t place(uint32_t to, int row, int lane) {
    return to + (first_row(lane) + row) * kRowBytes +
           ((chunk(lane) ^ swizzle<kRowBytes>(row)) << 4);
  }

  __device__ static void start_scales(const TileSide& side, const uint8_t* from, int num_tokens,
                                      uint32_t to, int lane) {
    const int first = first_scales(lane);
    const uint32_t at = to + first * kScaleRowBytes;
    if constexpr (kScaleRowBytes == 2) {
      copy_async_4(at, from, min(max(num_tokens - first, 0), 2) * 2);
    } else {
      static_assert(kScaleRowBytes == 4 || kScaleRowBytes == 8);
#pragma unroll
      for (int i = 0; i < kTileTokens; i += kLanes) {
        const uint8_t* row = from + i * side.scales.token_stride;
        const uint32_t row_to = at + i * kScaleRowBytes;
        const bool is_there = first + i < num_tokens;
        if (kScaleRowBytes == 8 && side.has_scales_on_8) {
          copy_async_8(row_to, row, is_there ? 8 : 0);
        } else {
#pragma unroll
          for (int b = 0; b < kScaleRowBytes; b += 4) {
            copy_async_4(row_to + b, row + b, is_there ? 4 : 0);
          }
        }
      }
    }
  }
};

}  // namespace kvx::ops::cuda

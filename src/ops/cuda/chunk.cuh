// Chunks: sixteen neighbours of a row, in a lane's registers. The fast kernels of append, gather
// and copy_blocks give each row to a power of two of lanes, which walk over its token's heads.
#pragma once

#include <cuda_fp16.h>

#include <algorithm>

#include "core/checked.hpp"
#include "ops/cuda/fits_chunks.hpp"
#include "ops/cuda/side.cuh"
#include "ops/cuda/transform_row.cuh"

namespace kvx::ops::cuda {

struct Chunk {
  float x[kChunk];
};

// How a side's rows are shared out: lanes a row, of which the first num_chunks work.
struct ChunkRows {
  int log2_lanes = 0;
  int num_chunks = 0;
  int log2_lanes_per_group = 0;

  __device__ int lanes() const { return 1 << log2_lanes; }
};

inline ChunkRows chunk_rows(const SideView& side) {
  const auto log2_of = [](int n) { return std::bit_width(static_cast<unsigned>(n - 1)); };
  const int group = format::group_length(side.spec, side.head_dim);
  ChunkRows rows;
  rows.num_chunks = ceil_div(side.head_dim, kChunk);
  rows.log2_lanes = log2_of(rows.num_chunks);
  rows.log2_lanes_per_group =
      group >= side.head_dim ? rows.log2_lanes : log2_of(std::max(group / kChunk, 1));
  return rows;
}

// Where a lane's chunk lies in its row.
struct ChunkPlace {
  int chunk;  // of the row
  int log2_lanes_per_group;
  bool is_inside;  // else the chunk holds zeros and nothing is stored

  __device__ int lanes_per_group() const { return 1 << log2_lanes_per_group; }
  __device__ int group() const { return chunk >> log2_lanes_per_group; }
  __device__ bool leads_group() const { return (chunk & (lanes_per_group() - 1)) == 0; }
};

// Bytes of a chunk as vectors.
template <int Words>
__device__ inline void load_words(const uint8_t* from, uint32_t (&words)[Words]) {
  static_assert(Words == 2 || Words % 4 == 0);
  if constexpr (Words == 2) {
    const uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
    words[0] = v.x;
    words[1] = v.y;
  } else {
#pragma unroll
    for (int w = 0; w < Words; w += 4) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from) + w / 4);
      words[w] = v.x;
      words[w + 1] = v.y;
      words[w + 2] = v.z;
      words[w + 3] = v.w;
    }
  }
}
template <int Words>
__device__ inline void store_words(const uint32_t (&words)[Words], uint8_t* to) {
  static_assert(Words == 2 || Words % 4 == 0);
  if constexpr (Words == 2) {
    __stwb(reinterpret_cast<uint2*>(to), uint2{words[0], words[1]});
  } else {
#pragma unroll
    for (int w = 0; w < Words; w += 4) {
      __stwb(reinterpret_cast<uint4*>(to) + w / 4,
             uint4{words[w], words[w + 1], words[w + 2], words[w + 3]});
    }
  }
}

// The same by a whole warp, of whose lanes some store nothing. A lane's 16 bytes would fill half a
// sector of memory, and the cache takes as long for a half as for a whole one: so a lane and its
// neighbour store each other's halves, first the even lane's sectors, then the odd one's.
template <int Words>
__device__ inline void store_words_of_warp(const uint32_t (&words)[Words], bool is_inside,
                                           uint8_t* to) {
  if constexpr (Words < 8) {
    if (is_inside) store_words(words, to);
  } else {
    const bool is_odd = threadIdx.x % 2 != 0;
    const auto swapped = [](auto mine) { return __shfl_xor_sync(kWholeWarp, mine, 1); };
    const auto address = reinterpret_cast<unsigned long long>(to);
    const unsigned long long others = swapped(address);
    const bool other_is_inside = swapped(is_inside);
    uint8_t* even = reinterpret_cast<uint8_t*>(is_odd ? others + 16 : address);
    uint8_t* odd = reinterpret_cast<uint8_t*>(is_odd ? address + 16 : others);
    const bool even_is_inside = is_odd ? other_is_inside : is_inside;
    const bool odd_is_inside = is_odd ? is_inside : other_is_inside;
#pragma unroll
    for (int w = 0; w < Words; w += 8) {  // a sector: [4 words][4 words]
      uint32_t of_even[4], of_odd[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t other = swapped(is_odd ? words[w + i] : words[w + 4 + i]);
        of_even[i] = is_odd ? other : words[w + i];
        of_odd[i] = is_odd ? words[w + 4 + i] : other;
      }
      if (even_is_inside) store_words(of_even, even + 4 * w);
      if (odd_is_inside) store_words(of_odd, odd + 4 * w);
    }
  }
}

// Words of a chunk's packed codes, loaded and stored by the chunk's place in its row.
template <class Format>
inline constexpr int kChunkWords = kChunk* Format::Codec::kBits / 32;

template <class Format>
__device__ inline void load_codes(const uint8_t* row, const ChunkPlace& place,
                                  uint32_t (&words)[kChunkWords<Format>]) {
  if (place.is_inside) load_words(row + place.chunk * kChunkWords<Format> * 4, words);
}
// Whole warps come here together.
template <class Format>
__device__ inline void store_codes(const uint32_t (&words)[kChunkWords<Format>],
                                   const ChunkPlace& place, uint8_t* row) {
  store_words_of_warp(words, place.is_inside, row + place.chunk * kChunkWords<Format> * 4);
}

// Words of a chunk in a caller's type.
template <DType Type>
inline constexpr int kInputWords = kChunk* bytes_of(Type) / 4;

template <DType Type>
__device__ inline Chunk numbers_of(const uint32_t (&words)[kInputWords<Type>]) {
  Chunk chunk;
#pragma unroll
  for (int w = 0; w < kInputWords<Type>; ++w) {
    if constexpr (Type == DType::kF32) {
      chunk.x[w] = __uint_as_float(words[w]);
    } else if constexpr (Type == DType::kBF16) {
      chunk.x[2 * w] = __uint_as_float(words[w] << 16);
      chunk.x[2 * w + 1] = __uint_as_float(words[w] & 0xFFFF0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[w]));
      chunk.x[2 * w] = pair.x;
      chunk.x[2 * w + 1] = pair.y;
    }
  }
  return chunk;
}

// In registers: strides below sixteen inside a lane, the others between lanes.
__device__ inline void hadamard_chunk(Chunk& chunk, int head_dim, int lane) {
  const int n = hadamard_block(head_dim);  // at least kChunk, which divides head_dim
#pragma unroll
  for (int stride = 1; stride < kChunk; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if ((i & stride) != 0) continue;
      const float a = chunk.x[i];
      const float b = chunk.x[i + stride];
      chunk.x[i] = a + b;
      chunk.x[i + stride] = a - b;
    }
  }
  for (int lanes = 1; lanes * kChunk < n; lanes *= 2) {
    const bool is_upper = (lane & lanes) != 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float other = __shfl_xor_sync(kWholeWarp, chunk.x[i], lanes);
      chunk.x[i] = is_upper ? other - chunk.x[i] : chunk.x[i] + other;
    }
  }
  const float norm = hadamard_norm(n);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk.x[i] *= norm;
}

__device__ inline void apply_transform_chunk(const TransformRow& row, const ChunkPlace& place,
                                             int head_dim, Chunk& chunk) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int d = place.chunk * kChunk + i;
    if (place.is_inside && row.mean) chunk.x[i] -= row.mean[d];
    if (place.is_inside && row.offset) chunk.x[i] -= row.offset[d];
    if (place.is_inside && row.factor) chunk.x[i] *= row.factor[d];
  }
  if (row.hadamard) hadamard_chunk(chunk, head_dim, place.chunk);
}

__device__ inline void undo_transform_chunk(const TransformRow& row, const ChunkPlace& place,
                                            int head_dim, Chunk& chunk) {
  if (row.hadamard) hadamard_chunk(chunk, head_dim, place.chunk);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const int d = place.chunk * kChunk + i;
    if (place.is_inside && row.factor) chunk.x[i] /= row.factor[d];
    if (place.is_inside && row.offset) chunk.x[i] += row.offset[d];
    if (place.is_inside && row.mean) chunk.x[i] += row.mean[d];
  }
}

// The shape of a launch in which a row's lanes take heads_at_once heads of a token one after the
// other: many, so that finding the token costs little, but enough walks to fill the device.
struct ChunkLaunch {
  static constexpr int kThreads = 128;
  static constexpr int kCtasPerMultiprocessor = 6;  // what registers allow
  int heads_at_once = 1;
  int walks_per_token = 1;
  unsigned num_ctas = 0;

  // lanes: of a row, K's or V's, whichever has more.
  static ChunkLaunch of(int num_multiprocessors, int64_t num_tokens, int num_heads, int lanes) {
    constexpr int kRounds = 2;  // of CTAs on the device, so that the last round costs little
    const int64_t wanted = int64_t{num_multiprocessors} * kCtasPerMultiprocessor * kRounds;
    const int walks_per_cta = kThreads / lanes;
    const auto num_ctas = [&](int heads_at_once) {
      return ceil_div<int64_t>(num_tokens * ceil_div(num_heads, heads_at_once), walks_per_cta);
    };
    ChunkLaunch launch;
    launch.heads_at_once = num_heads;
    while (launch.heads_at_once > 1 && 2 * num_ctas(launch.heads_at_once) < wanted) {
      launch.heads_at_once = ceil_div(launch.heads_at_once, 2);
    }
    launch.walks_per_token = ceil_div(num_heads, launch.heads_at_once);
    launch.num_ctas = static_cast<unsigned>(num_ctas(launch.heads_at_once));
    return launch;
  }
};

}  // namespace kvx::ops::cuda

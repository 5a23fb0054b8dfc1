// FedRow: a row with error feedback by one or some lanes, in shared memory, for the kernel of
// append_fed.cu. The bytes are encode_feedback.cuh's.
//
// A row's numbers are rounded sixteen at a time: first the errors of all numbers before them are
// added, in order, then each is rounded and its error added to those after it.
#pragma once

#include "format/feedback.hpp"
#include "ops/append/encode_chunk.cuh"

namespace kvx::ops::cuda {

// Sixteen codes into a row that lies at any address.
template <class Format>
__device__ inline void store_chunk_codes(const typename Format::Codec::Code (&codes)[kChunk],
                                         bool is_interleaved, uint8_t* to) {
  uint32_t words[kChunkWords<Format>];
  pack_chunk<Format>(codes, words);
  if constexpr (kMayHaveInterleaved<Format>) {
    if (is_interleaved) {
      for (uint32_t& word : words) word = format::interleaved_from_nibbles(word);
    }
  }
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
#pragma unroll
    for (int w = 0; w < kChunkWords<Format>; ++w) reinterpret_cast<uint32_t*>(to)[w] = words[w];
  } else {
    for (int b = 0; b < 4 * kChunkWords<Format>; ++b) {
      to[b] = reinterpret_cast<const uint8_t*>(words)[b];
    }
  }
}

// format::squared_error of a group of whole chunks.
template <class Codec>
struct ErrorOfChunks {
  const float* x;
  int n;
  __device__ float operator()(float step) const {
    const float inverse = format::reciprocal(step);
    float lanes[kChunk] = {};
    for (int first = 0; first < n; first += kChunk) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float number = x[first + i];
        const float error = number - hardware_rounded<Codec>(number * inverse) * step;
        lanes[i] += error * error;
      }
    }
#pragma unroll
    for (int width = kChunk / 2; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
  }
};

// How a chunk of a row of groups is rounded.
template <class Format>
struct ChunkRounding {
  using Codec = typename Format::Codec;
  static constexpr bool kMaySaturate = true;
  float step;
  float inverse;
  bool is_zero;

  __device__ __forceinline__ typename Codec::Code code(float number) const {
    return is_zero ? typename Codec::Code{0} : Codec::encode(number * inverse);
  }
  __device__ __forceinline__ float error(float number) const {
    const float value = is_zero ? 0.0f : hardware_rounded<Codec>(number * inverse) * step;
    return format::clamp(number - value, -format::kFeedbackLimit, format::kFeedbackLimit);
  }
  // Requires: number is finite, as all of a fed row are.
  __device__ __forceinline__ bool is_beyond(const format::SaturationLimit& limit,
                                            float number) const {
    const float factor = limit.is_of_product ? inverse : 1.0f;
    return !is_zero && fabsf(number * factor) > limit.most;
  }
};
template <class Format, format::ScaleType T>
struct AffineRounding {
  using Codec = typename Format::Codec;
  static constexpr bool kMaySaturate = false;
  format::AffineEncoder encoder;

  __device__ __forceinline__ typename Codec::Code code(float number) const {
    return format::round_fed_affine<Codec, T>(encoder, number).code;
  }
  __device__ __forceinline__ float error(float number) const {
    return format::round_fed_affine<Codec, T>(encoder, number).error;
  }
};

// One lane's part of a row. x: [head_dim] in shared memory; a rounded number is replaced by its
// error. Whole warps come here together.
template <int Lanes>
struct FedRow {
  static constexpr int kTargets = kChunk / Lanes;
  float* x;
  const float* weights;  // of the head, [head_dim, head_dim]
  int head_dim;
  int part;  // which of the row's lanes

  // rounding_of(chunk); store(chunk, codes). Returns how many of the numbers that it rounds are
  // beyond the limit.
  template <class Format, class RoundingOf, class Store>
  __device__ __forceinline__ int encode(const RoundingOf& rounding_of, const Store& store,
                                        const format::SaturationLimit& limit) const {
    int saturated = 0;
#pragma unroll 1
    for (int first = 0; first < head_dim; first += kChunk) {
      add_earlier_errors(first);
      float numbers[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) numbers[i] = x[first + i];
      const auto rounding = rounding_of(first / kChunk);
      typename Format::Codec::Code codes[kChunk];
      const float* row = weights + int64_t{first} * head_dim + first;
#pragma unroll
      for (int i = 0; i < kChunk; ++i, row += head_dim) {
        codes[i] = rounding.code(numbers[i]);
        if constexpr (decltype(rounding)::kMaySaturate) {
          saturated += rounding.is_beyond(limit, numbers[i]);
        }
        const float error = rounding.error(numbers[i]);
#pragma unroll
        for (int first_of_four = (i + 1) / 4 * 4; first_of_four < kChunk; first_of_four += 4) {
          float of_row[4];
          load_weights(row + first_of_four, of_row);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& number = numbers[first_of_four + j];
            if (first_of_four + j > i) number = __fadd_rn(number, __fmul_rn(error, of_row[j]));
          }
        }
        numbers[i] = error;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i % Lanes == part) x[first + i] = numbers[i];
      }
      __syncwarp();
      if (part == 0) store(first / kChunk, codes);
    }
    return saturated;
  }

 private:
  // A lane adds to kTargets of the chunk's numbers.
  __device__ __forceinline__ void add_earlier_errors(int first) const {
    const int at = first + part * kTargets;
    float sums[kTargets];
#pragma unroll
    for (int t = 0; t < kTargets; ++t) sums[t] = x[at + t];
    const float* row = weights + at;
#pragma unroll 4
    for (int i = 0; i < first; ++i, row += head_dim) {
      float of_row[kTargets];
      load_weights(row, of_row);
#pragma unroll
      for (int t = 0; t < kTargets; ++t) {
        sums[t] = __fadd_rn(sums[t], __fmul_rn(x[i], of_row[t]));
      }
    }
#pragma unroll
    for (int t = 0; t < kTargets; ++t) x[at + t] = sums[t];
    __syncwarp();
  }
  template <int Count>
  __device__ __forceinline__ static void load_weights(const float* row, float (&to)[Count]) {
    if constexpr (Count % 4 == 0) {
#pragma unroll
      for (int t = 0; t < Count; t += 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(row + t));
        to[t] = four.x, to[t + 1] = four.y, to[t + 2] = four.z, to[t + 3] = four.w;
      }
    } else {
      static_assert(Count == 2);
      const float2 two = __ldg(reinterpret_cast<const float2*>(row));
      to[0] = two.x, to[1] = two.y;
    }
  }
};

}  // namespace kvx::ops::cuda

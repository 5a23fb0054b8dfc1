// encode_chunk: lanes turn rows into stored bytes, sixteen neighbours a lane, in registers: half
// the groups need no other lane, and a scale's arithmetic is shared by sixteen numbers. The same
// bytes as encode_row, for scales from amax, given scales, affine rows and formats without scales.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "ops/append/encode_row.cuh"
#include "ops/append/hardware_codes.cuh"
#include "ops/cuda/chunk.cuh"

namespace kvx::ops::cuda {

// Codes, one each, into words.
template <class Format>
__device__ inline void pack_chunk(const typename Format::Codec::Code (&codes)[kChunk],
                                  uint32_t (&words)[kChunkWords<Format>]) {
  alignas(4) uint8_t bytes[sizeof(words)];
  format::pack<Format::kFacts.packing>(codes, 0, kChunk, bytes);
#pragma unroll
  for (int w = 0; w < kChunkWords<Format>; ++w) {
    words[w] = reinterpret_cast<const uint32_t*>(bytes)[w];
  }
}

__device__ inline float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}

// A NaN or an infinity shows in the result. In pairs, since one chain would wait for every step.
__device__ inline float chunk_magnitude(const Chunk& chunk) {
  float largest[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    largest[i] = larger_magnitude(chunk.x[2 * i], chunk.x[2 * i + 1]);
  }
#pragma unroll
  for (int n = kChunk / 4; n > 0; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) largest[i] = larger_magnitude(largest[i], largest[i + n]);
  }
  return largest[0];
}

// The definition's group_magnitude over the lanes of a group.
__device__ inline format::GroupMagnitude group_magnitude(float of_chunk, int lanes) {
  uint32_t largest = __float_as_uint(of_chunk);
  for (int offset = 1; offset < lanes; offset *= 2) {
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, offset));
  }
  return {__uint_as_float(largest), largest >= 0x7F800000u};
}

// format::store_scale for a scale that lies on its own size.
__device__ inline void store_aligned_scale(format::ScaleType type, format::StoredScale stored,
                                           uint8_t* to) {
  const int bytes = format::bytes_of(type);
  if (bytes == 1) *to = static_cast<uint8_t>(stored.bits);
  if (bytes == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(stored.bits);
  if (bytes == 4) *reinterpret_cast<uint32_t*>(to) = stored.bits;
}

// What stands between a group's numbers and its codes.
struct ChunkStep {
  float step;
  float inverse;
  bool is_given;   // scales that are read
  bool is_zeroed;  // every code is 0
};

template <class Format>
__device__ inline ChunkStep chunk_step(const CudaSide& side, const RowTarget& to,
                                       const ChunkPlace& place, float magnitude) {
  const format::ScaleMaker maker = format::scale_maker<Format>(side.view.spec, to.tensor_scale);
  uint8_t* scale = to.scales + place.group() * side.view.scales.group_stride;
  if (side.view.spec.scale_source == format::ScaleSource::kGiven) {
    const auto stored =
        place.is_inside ? format::load_scale(maker.type, scale) : format::StoredScale{0};
    const float step = maker.step(stored);
    return {step, format::reciprocal(step), true, false};
  }
  const format::GroupMagnitude group = group_magnitude(magnitude, place.lanes_per_group());
  const bool is_zeroed = group.has_nonfinite || group.amax == 0;
  format::StoredScale stored =
      hardware_make(maker, Format::Codec::kQmax, is_zeroed ? 1.0f : group.amax);
  const float step = hardware_step(maker, stored);
  if (is_zeroed) {
    stored = group.has_nonfinite ? format::nan_scale(maker.type) : format::StoredScale{0};
  }
  if (place.is_inside && place.leads_group()) store_aligned_scale(maker.type, stored, scale);
  return {step, format::reciprocal(step), false, is_zeroed};
}

template <class Format>
__device__ inline int count_saturated(const Chunk& chunk, const CudaSide& side, const RowTarget& to,
                                      float inverse) {
  const format::ScaleMaker maker = format::scale_maker<Format>(side.view.spec, to.tensor_scale);
  const auto limit =
      format::saturation_limit<typename Format::Codec>(side.view.spec.scale_source, maker);
  if (limit.is_none()) return 0;
  int count = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) count += limit.is_exceeded_by(chunk.x[i], inverse);
  return count;
}

// Any numbers, by the definition.
template <class Format>
__device__ inline LostNumbers encode_extremes(const Chunk& chunk, const ChunkStep& step,
                                              const CudaSide& side, const RowTarget& to,
                                              uint32_t (&words)[kChunkWords<Format>]) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[kChunk];
  const bool is_zero = step.is_given && !(step.step > 0);
  LostNumbers lost;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float x = chunk.x[i];
    const bool is_number = format::is_finite(x);
    codes[i] = is_number ? Codec::encode(is_zero ? 0.0f : finite_product(x, step.inverse))
                         : Codec::encode_nonfinite(x);
    lost.add_nonfinite(!is_number && Codec::kCountsNonfinite);
  }
  lost.add_saturated(count_saturated<Format>(chunk, side, to, step.inverse));
  pack_chunk<Format>(codes, words);
  if constexpr (kMayHaveInterleaved<Format>) {
    if (side.view.is_interleaved) {
      for (uint32_t& word : words) word = format::interleaved_from_nibbles(word);
    }
  }
  return lost;
}

// is_interleaved: of formats that may have them.
template <class Format>
__device__ inline void pack_products(const float (&products)[kChunk],
                                     uint32_t (&words)[kChunkWords<Format>],
                                     bool is_interleaved = false) {
  using Hardware = HardwareCodes<typename Format::Codec>;
#pragma unroll
  for (int w = 0; w < kChunkWords<Format>; ++w) {
    const float* of_word = products + w * codes_at_once<Format>();
    if constexpr (kMayHaveInterleaved<Format>) {
      words[w] = Hardware::word(of_word, is_interleaved);
    } else {
      words[w] = Hardware::word(of_word);
    }
  }
}

// Whether a chunk's codes under a given scale are the hardware's, and none of its numbers is
// saturated. Requires: its products are below HardwareCodes::kMost.
template <class Codec>
__device__ inline bool fits_given_step(const ChunkStep& step, float magnitude) {
  if (!step.is_given) return true;
  constexpr float kMost = format::saturation_product<Codec>();
  if constexpr (HardwareCodes<Codec>::kMost <= kMost) {
    return step.step > 0;
  } else {
    return step.step > 0 && magnitude * step.inverse <= kMost;
  }
}

template <class Format>
__device__ inline LostNumbers encode_scaled_chunk(const CudaSide& side, const RowTarget& to,
                                                  const ChunkPlace& place, const Chunk& chunk) {
  using Codec = typename Format::Codec;
  using Hardware = HardwareCodes<Codec>;
  const float magnitude = chunk_magnitude(chunk);
  const ChunkStep step = chunk_step<Format>(side, to, place, magnitude);
  uint32_t words[kChunkWords<Format>] = {};
  LostNumbers lost;
  // Where kUnit is not 1, a product below the normal numbers is so small that its code is 0 anyway.
  constexpr float kLeastInverse = Hardware::kUnit == 1.0f ? 0.0f : 0x1p-100f;
  const bool is_ordinary = magnitude * step.inverse < Hardware::kMost &&
                           step.inverse >= kLeastInverse && fits_given_step<Codec>(step, magnitude);
  if (is_ordinary && !step.is_zeroed) {
    const float inverse = step.inverse * Hardware::kUnit;
    float products[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) products[i] = chunk.x[i] * inverse;
    pack_products<Format>(products, words, side.view.is_interleaved);
  } else if (!step.is_zeroed) {
    lost = encode_extremes<Format>(chunk, step, side, to, words);
  } else if (magnitude != 0) {  // its group has a NaN or an infinity
    lost.add_saturated(count_saturated<Format>(chunk, side, to, step.inverse));
  }
  store_codes<Format>(words, place, to.codes);
  return lost;
}

// Whether packed F16 or BF16 numbers are all finite: zero times anything else is a NaN.
template <class Pair, int Words>
__device__ inline bool are_finite(const uint32_t (&words)[Words]) {
  const auto pair = [&](int w) { return reinterpret_cast<const Pair&>(words[w]); };
  const uint32_t zeros = 0;
  const Pair zero = reinterpret_cast<const Pair&>(zeros);
  Pair sums[2] = {zero, zero};
#pragma unroll
  for (int w = 0; w < Words; ++w) sums[w % 2] = __hfma2(pair(w), zero, sums[w % 2]);
  return __hbeq2(__hadd2(sums[0], sums[1]), zero);
}

// The codes are the numbers. Whole warps come here together.
template <class Format>
__device__ inline void encode_plain_chunk(const RowTarget& to, const ChunkPlace& place,
                                          const Chunk& chunk) {
  using Codec = typename Format::Codec;
  uint32_t words[kChunkWords<Format>];
  pack_products<Format>(chunk.x, words);
  bool has_codes;  // of the definition: NaNs have others
  if constexpr (std::is_same_v<Codec, format::F16Codec>) {
    has_codes = are_finite<__half2>(words);
  } else if constexpr (std::is_same_v<Codec, format::BF16Codec>) {
    has_codes = are_finite<__nv_bfloat162>(words);
  } else {
    has_codes = chunk_magnitude(chunk) < HardwareCodes<Codec>::kMost;
  }
  if (!has_codes) {
    typename Codec::Code codes[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) codes[i] = Codec::encode(chunk.x[i]);
    pack_chunk<Format>(codes, words);
  }
  store_codes<Format>(words, place, to.codes);
}

// Smallest of a row in the first half, largest with its sign turned in the second.
struct AffineBounds {
  __half low;
  __half high;
  bool has_nonfinite;
};

__device__ inline AffineBounds affine_bounds(const __half2 (&x)[kChunk / 2],
                                             const ChunkPlace& place) {
  const __half2 infinities = __half2half2(__ushort_as_half(0x7C00));
  __half2 low = x[0];
  __half2 high = x[0];
#pragma unroll
  for (int i = 1; i < kChunk / 2; ++i) {
    low = __hmin2_nan(low, x[i]);
    high = __hmax2_nan(high, x[i]);
  }
  high = __hneg2(high);
  __half2 both = __hmin2_nan(__lows2half2(low, high), __highs2half2(low, high));
  if (!place.is_inside) both = infinities;
  for (int offset = 1; offset < place.lanes_per_group(); offset *= 2) {
    both = __hmin2_nan(both, __shfl_xor_sync(kWholeWarp, both, offset));
  }
  const bool is_finite = __hbgt2(both, __hneg2(infinities));
  return {__low2half(both), __hneg(__high2half(both)), !is_finite};
}

// The code of each half in its low bits, under those of 1024.
template <class Codec>
__device__ inline uint32_t affine_codes_f16(__half2 x, __half2 zero, __half2 inverse) {
  const __half2 most = __half2half2(__float2half_rn(Codec::kQmax));
  const __half2 product = __hmul2_rn(__hsub2_rn(x, zero), inverse);
  const __half2 clamped = __hmin2(__hmax2(product, __half2half2(__ushort_as_half(0))), most);
  const __half2 sum = __hadd2_rn(clamped, __half2half2(__ushort_as_half(0x6400)));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

// F16 parameters: all of docs/numbers.md, section 4, is F16 arithmetic and done as such, two
// numbers at a time.
template <class Format>
__device__ inline void encode_affine_f16(const RowTarget& to, const ChunkPlace& place,
                                         const Chunk& chunk) {
  using Codec = typename Format::Codec;
  __half2 x[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    x[i] = __floats2half2_rn(chunk.x[2 * i], chunk.x[2 * i + 1]);
  }
  const AffineBounds bounds = affine_bounds(x, place);
  const float range = __half2float(bounds.high) - __half2float(bounds.low);
  const __half scale = __float2half_rn(range / Codec::kQmax);
  const __half2 inverse = __half2half2(__float2half_rn(1.0f / __half2float(scale)));
  const __half2 zero = __half2half2(bounds.low);
  if (place.is_inside && place.chunk == 0) {
    // row parameters: [scale: 2 bytes][zero: 2 bytes]
    const uint32_t params = __half_as_ushort(scale) | uint32_t{__half_as_ushort(bounds.low)} << 16;
    *reinterpret_cast<uint32_t*>(to.scales) = bounds.has_nonfinite ? 0x7E007E00u : params;
  }
  uint32_t codes[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) codes[i] = affine_codes_f16<Codec>(x[i], zero, inverse);
  uint32_t words[kChunkWords<Format>];
#pragma unroll
  for (int w = 0; w < kChunkWords<Format>; ++w) {
    if constexpr (Format::kFacts.packing == format::Packing::kBytes) {
      words[w] = __byte_perm(codes[2 * w], codes[2 * w + 1], 0x6420);
    } else {
      static_assert(Format::kFacts.packing == format::Packing::kTurboMind,
                    "affine chunks have no branch for this packing");
      // TurboMind's order: a word's low half holds the even numbers, its high half the odd ones.
      words[w] = codes[4 * w] + (codes[4 * w + 1] << 4) + (codes[4 * w + 2] << 8) +
                 (codes[4 * w + 3] << 12) - 0x64006400u * 0x1111u;
    }
    if (bounds.has_nonfinite) words[w] = 0;
  }
  store_codes<Format>(words, place, to.codes);
}

// BF16 parameters, by the definition.
template <class Format>
__device__ inline void encode_affine_bf16(const RowTarget& to, const ChunkPlace& place,
                                          const Chunk& chunk) {
  using Codec = typename Format::Codec;
  constexpr format::ScaleType kType = format::ScaleType::kBF16;
  float x[kChunk];
  int32_t low = 0x7FFFFFFF;
  int32_t high = -0x7FFFFFFF - 1;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    x[i] = format::ParamFloat<kType>::round(chunk.x[i]);
    if (!place.is_inside) continue;
    low = min(low, format::ordered_bits(x[i]));
    high = max(high, format::ordered_bits(x[i]));
  }
  for (int offset = 1; offset < place.lanes_per_group(); offset *= 2) {
    low = min(low, __shfl_xor_sync(kWholeWarp, low, offset));
    high = max(high, __shfl_xor_sync(kWholeWarp, high, offset));
  }
  const auto encoder = format::affine_encoder<Codec, kType>(format::affine_range(low, high));
  if (place.is_inside && place.chunk == 0) {
    // row parameters: [scale: 2 bytes][zero: 2 bytes]
    *reinterpret_cast<uint32_t*>(to.scales) = encoder.params.scale | uint32_t{encoder.params.zero}
                                                                         << 16;
  }
  typename Codec::Code codes[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    codes[i] =
        encoder.has_nonfinite ? 0 : format::encode_affine_number<Codec, kType>(encoder, x[i]);
  }
  uint32_t words[kChunkWords<Format>];
  pack_chunk<Format>(codes, words);
  store_codes<Format>(words, place, to.codes);
}

// Returns what the lane could not store as it came. Whole warps come here together.
template <class Format>
__device__ inline LostNumbers encode_chunk_of(const CudaSide& side, const RowTarget& to,
                                              const ChunkPlace& place, const Chunk& chunk) {
  using Codec = typename Format::Codec;
  if constexpr (format::is_affine<Format>()) {
    if (side.view.spec.scale_type == format::ScaleType::kF16) {
      encode_affine_f16<Format>(to, place, chunk);
    } else {
      encode_affine_bf16<Format>(to, place, chunk);
    }
    return {};
  } else if constexpr (format::is_plain<Format>()) {
    encode_plain_chunk<Format>(to, place, chunk);
    return {};
  } else {
    return encode_scaled_chunk<Format>(side, to, place, chunk);
  }
}

__device__ inline LostNumbers encode_chunk(const CudaSide& side, const RowTarget& to,
                                           const ChunkPlace& place, const Chunk& chunk) {
  LostNumbers lost;
  visit_chunk_format(
      side.id, [&]<class Format>() { lost = encode_chunk_of<Format>(side, to, place, chunk); });
  return lost;
}

}  // namespace kvx::ops::cuda

// encode_row: a warp turns one row of numbers into stored bytes. The arithmetic is format/'s; here
// the warp takes over the loops over a group.
#pragma once

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "format/q4_0.hpp"
#include "format/traits.hpp"
#include "ops/append/encode_feedback.cuh"
#include "ops/cuda/fragments.cuh"
#include "ops/cuda/lost_numbers.cuh"
#include "ops/cuda/side.cuh"
#include "ops/cuda/visit_format.cuh"

namespace kvx::ops::cuda {

// Groups are shared out to half warps: sixteen lanes, as the squared error's order of addition
// wants them (docs/numbers.md, section 5).
inline constexpr int kGroupLanes = 16;

// Where a row goes.
struct RowTarget {
  uint8_t* codes;
  uint8_t* scales;  // of its group 0
  float tensor_scale;
  const float* feedback = nullptr;  // of the head, [head_dim, head_dim]; null: none
};

// A group in shared memory as one lane of sixteen sees it.
struct GroupPart {
  const float* x;
  int n;
  int lane;  // 0 .. 15
};

template <class T, class Combine>
__device__ inline T reduce_group(T value, const Combine& combine) {
  for (int offset = kGroupLanes / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kWholeWarp, value, offset));
  }
  return value;
}

__device__ inline format::GroupMagnitude group_magnitude(const GroupPart& part) {
  uint32_t largest = 0;
  for (int i = part.lane; i < part.n; i += kGroupLanes) {
    largest = max(largest, __float_as_uint(part.x[i]) & 0x7FFFFFFFu);
  }
  largest = reduce_group(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
  return {__uint_as_float(largest), largest >= 0x7F800000u};
}

// The warp's squared_error: lanes l and l + 8 first, then 4, 2, 1.
template <class Codec>
struct WarpErrorOfGroup {
  GroupPart part;
  __device__ float operator()(float step) const {
    const float inverse_step = format::reciprocal(step);
    float sum = 0;
    for (int i = part.lane; i < part.n; i += kGroupLanes) {
      sum += format::square_of_error<Codec>(step, inverse_step, part.x[i]);
    }
    return reduce_group(sum, [](float a, float b) { return a + b; });
  }
};

// A finite number's product may overflow. Every code saturates long before that, and only
// inputs that are not finite may be infinite in pack_row.
__device__ inline float finite_product(float x, float inverse_step) {
  return format::clamp(x * inverse_step, -format::kFloatMax, format::kFloatMax);
}

// scale_group of the definition: turns the group's numbers into products. Both halves of the warp
// come here together, an idle one with n = 0. products: [n], or null: the scale alone is made.
// Returns the lane's count of numbers beyond the limit.
template <class Codec>
__device__ inline int scale_group(const format::ScaleMaker& maker, format::ScaleChoice choice,
                                  const format::SaturationLimit& limit, const GroupPart& part,
                                  float* products, uint8_t* scale) {
  const format::GroupMagnitude group = group_magnitude(part);
  int saturated = 0;
  if (!(group.amax <= limit.most)) {  // a NaN too
    for (int i = part.lane; i < part.n; i += kGroupLanes) {
      saturated += limit.is_exceeded_by(part.x[i], 1.0f);
    }
  }
  const bool is_plain = !group.has_nonfinite && group.amax != 0;
  // The halves stay together: a group without a scale of its own goes along with a harmless one.
  const float amax = is_plain ? group.amax : 1.0f;
  format::StoredScale stored =
      format::choose_scale<Codec>(maker, choice, amax, WarpErrorOfGroup<Codec>{part});
  const float inverse_step = format::reciprocal(maker.step(stored));
  if (!is_plain)
    stored = group.has_nonfinite ? format::nan_scale(maker.type) : format::StoredScale{0};
  for (int i = part.lane; products != nullptr && i < part.n; i += kGroupLanes) {
    products[i] = is_plain ? finite_product(part.x[i], inverse_step) : 0.0f;
  }
  if (part.lane == 0 && part.n > 0) format::store_scale(maker.type, stored, scale);
  return saturated;
}

// Makes a row's scales, and its products under them unless products is null. Returns the lane's
// count of saturated numbers.
template <class Format>
__device__ inline int scale_computed(const CudaSide& side, const RowTarget& to, const float* x,
                                     float* products, int lane) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = format::scale_maker<Format>(side.view.spec, to.tensor_scale);
  const format::SaturationLimit limit =
      format::saturation_limit<Codec>(format::ScaleSource::kComputed, maker);
  const int head_dim = side.view.head_dim;
  int saturated = 0;
  for (int pair = 0; pair < side.num_groups; pair += 2) {
    const int group = pair + lane / kGroupLanes;
    const int first = min(group * side.group_length, head_dim);
    const int n = min(side.group_length, head_dim - first);
    const GroupPart part = {x + first, group < side.num_groups ? n : 0, lane % kGroupLanes};
    saturated += scale_group<Codec>(maker, side.view.spec.scale_choice, limit, part,
                                    products == nullptr ? nullptr : products + first,
                                    to.scales + group * side.view.scales.group_stride);
  }
  return saturated;
}

// The same under scales that are read. Products of non-finite numbers stay non-finite.
template <class Format>
__device__ inline int scale_given(const CudaSide& side, const RowTarget& to, float* x, int lane) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = format::scale_maker<Format>(side.view.spec, to.tensor_scale);
  const format::SaturationLimit limit =
      format::saturation_limit<Codec>(format::ScaleSource::kGiven, maker);
  int saturated = 0;
  for (int d = lane; d < side.view.head_dim; d += kWarp) {
    const uint8_t* scale = to.scales + d / side.group_length * side.view.scales.group_stride;
    const float step = maker.step(format::load_scale(maker.type, scale));
    if (!format::is_finite(x[d])) continue;  // stays as it is, for encode_nonfinite
    const float inverse = format::reciprocal(step);
    saturated += limit.is_exceeded_by(x[d], inverse);
    x[d] = step > 0 ? finite_product(x[d], inverse) : 0.0f;
  }
  return saturated;
}

// How many codes a lane packs at once: as many as fill a word of four bytes, or where none do, as
// the packing has in its smallest unit.
template <class Format>
constexpr int codes_at_once() {
  constexpr int kBits = Format::Codec::kBits;
  return 32 % kBits == 0 ? 32 / kBits : format::codes_packed_together(Format::kFacts.packing);
}

// code_of(d): the code of number d of the row. Rows begin at any address and have any length; those
// in interleaved order have whole words.
template <class Format, class CodeOf>
__device__ inline void pack_row(const SideView& side, uint8_t* row, int lane,
                                const CodeOf& code_of) {
  using Code = typename Format::Codec::Code;
  constexpr int kCodes = codes_at_once<Format>();
  constexpr int kBytes = kCodes * Format::Codec::kBits / 8;
  static_assert(kCodes * Format::Codec::kBits % 8 == 0);
  static_assert(kCodes % format::codes_packed_together(Format::kFacts.packing) == 0);
  const bool is_aligned = kBytes == 4 && reinterpret_cast<uintptr_t>(row) % 4 == 0;
  const int num_words = side.head_dim / kCodes;
  for (int w = lane; w < num_words; w += kWarp) {
    Code codes[kCodes];
#pragma unroll
    for (int i = 0; i < kCodes; ++i) codes[i] = code_of(w * kCodes + i);
    alignas(4) uint8_t bytes[kBytes];
    format::pack<Format::kFacts.packing>(codes, 0, kCodes, bytes);
    if constexpr (kMayHaveInterleaved<Format>) {
      auto& word = *reinterpret_cast<uint32_t*>(bytes);
      if (side.is_interleaved) word = format::interleaved_from_nibbles(word);
    }
    if (is_fragmented(side)) {
      store_fragments(side.codes.fragment_bytes, side.codes.fragment_stride, row, kBytes * w,
                      kBytes, bytes);
    } else if (is_aligned) {
      *reinterpret_cast<uint32_t*>(row + 4 * w) = *reinterpret_cast<const uint32_t*>(bytes);
    } else {
      for (int b = 0; b < kBytes; ++b) row[kBytes * w + b] = bytes[b];
    }
  }
  // One lane packs the codes that are left.
  const int rest = side.head_dim - num_words * kCodes;
  if (rest == 0 || lane != 0) return;
  Code codes[kCodes];
  for (int i = 0; i < rest; ++i) codes[i] = code_of(num_words * kCodes + i);
  uint8_t bytes[kBytes];
  format::pack<Format::kFacts.packing>(codes, 0, rest, bytes);
  const int num_bytes = rest * Format::Codec::kBits / 8;
  for (int b = 0; b < num_bytes; ++b) {
    row[byte_of_row(side.codes, kBytes * num_words + b)] = bytes[b];
  }
}

// The codes that feed_back_row left in x.
template <class Format>
__device__ inline void pack_fed_row(const CudaSide& side, const RowTarget& to, const float* x,
                                    int lane) {
  pack_row<Format>(side.view, to.codes, lane, [x](int d) {
    return static_cast<typename Format::Codec::Code>(__float_as_uint(x[d]));
  });
}

template <class Format, format::ScaleType T>
__device__ inline void encode_affine_row(const CudaSide& side, const RowTarget& to, float* x,
                                         int lane) {
  using Codec = typename Format::Codec;
  const int head_dim = side.view.head_dim;
  int32_t low = 0x7FFFFFFF;
  int32_t high = -0x7FFFFFFF - 1;
  for (int d = lane; d < head_dim; d += kWarp) {
    const int32_t bits = format::ordered_bits(format::ParamFloat<T>::round(x[d]));
    low = min(low, bits);
    high = max(high, bits);
  }
  low = __reduce_min_sync(kWholeWarp, low);
  high = __reduce_max_sync(kWholeWarp, high);
  const auto encoder = format::affine_encoder<Codec, T>(format::affine_range(low, high));
  // row parameters: [scale: 2 bytes][zero: 2 bytes]
  if (lane == 0) memcpy(to.scales, &encoder.params, 4);
  if (to.feedback != nullptr && !encoder.has_nonfinite && takes_feedback(x, head_dim, lane)) {
    const auto round = [&](float number) {
      return format::round_fed_affine<Codec, T>(encoder, number);
    };
    feed_back_row(to.feedback, head_dim, x, lane, round);
    return pack_fed_row<Format>(side, to, x, lane);
  }
  pack_row<Format>(side.view, to.codes, lane, [&](int d) -> typename Codec::Code {
    if (encoder.has_nonfinite) return 0;
    return format::encode_affine_number<Codec, T>(encoder, format::ParamFloat<T>::round(x[d]));
  });
}

// Under scales that are computed or read. Returns the row's count of saturated numbers.
template <class Format>
__device__ inline int encode_fed_row(const CudaSide& side, const RowTarget& to, float* x,
                                     int lane) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = format::scale_maker<Format>(side.view.spec, to.tensor_scale);
  if (side.view.spec.scale_source == format::ScaleSource::kComputed) {
    scale_computed<Format>(side, to, x, nullptr, lane);
  }
  __syncwarp();
  const auto step_of = [&](int group) {
    const uint8_t* scale = to.scales + group * side.view.scales.group_stride;
    return maker.step(format::load_scale(maker.type, scale));
  };
  GroupRounding<Format, decltype(step_of)> rounding(
      side, groups_with_numbers(side, x, lane), step_of,
      format::saturation_limit<Codec>(side.view.spec.scale_source, maker));
  feed_back_row(to.feedback, side.view.head_dim, x, lane, rounding);
  pack_fed_row<Format>(side, to, x, lane);
  return rounding.num_saturated();
}

// x: the row in shared memory, overwritten. Returns what the lane could not store as it came.
// Requires: the scales are not page-shared (refused on the host).
template <class Format>
__device__ inline LostNumbers encode_row_of(const CudaSide& side, const RowTarget& to, float* x,
                                            int lane) {
  using Codec = typename Format::Codec;
  LostNumbers lost;
  __syncwarp();
  if constexpr (format::is_plain<Format>()) {
    pack_row<Format>(side.view, to.codes, lane, [x](int d) { return Codec::encode(x[d]); });
  } else if constexpr (format::is_affine<Format>()) {
    if (side.view.spec.scale_type == format::ScaleType::kF16) {
      encode_affine_row<Format, format::ScaleType::kF16>(side, to, x, lane);
    } else {
      encode_affine_row<Format, format::ScaleType::kBF16>(side, to, x, lane);
    }
  } else if (to.feedback != nullptr && takes_feedback(x, side.view.head_dim, lane)) {
    const int saturated = encode_fed_row<Format>(side, to, x, lane);
    if (lane == 0) lost.add_saturated(saturated);
  } else {
    const bool is_given = side.view.spec.scale_source == format::ScaleSource::kGiven;
    lost.add_saturated(is_given ? scale_given<Format>(side, to, x, lane)
                                : scale_computed<Format>(side, to, x, x, lane));
    __syncwarp();
    pack_row<Format>(side.view, to.codes, lane, [&](int d) -> typename Codec::Code {
      if (format::is_finite(x[d])) return Codec::encode(x[d]);
      lost.add_nonfinite(Codec::kCountsNonfinite);
      return Codec::encode_nonfinite(x[d]);
    });
  }
  __syncwarp();
  return lost;
}

// A lane a block.
__device__ inline LostNumbers encode_q4_0_row(const CudaSide& side, const RowTarget& to,
                                              const float* x, int lane) {
  LostNumbers lost;
  __syncwarp();
  for (int block = lane; block < side.num_groups; block += kWarp) {
    lost.add_saturated(format::q4_0::encode(x + block * format::q4_0::kGroup,
                                            to.codes + block * side.view.codes.fragment_stride,
                                            to.scales + block * side.view.scales.group_stride));
  }
  __syncwarp();
  return lost;
}

__device__ inline LostNumbers encode_row(const CudaSide& side, const RowTarget& to, float* x,
                                         int lane) {
  if (holds_q4_0_blocks(side.view)) return encode_q4_0_row(side, to, x, lane);
  LostNumbers lost;
  visit_format(side.id, [&]<class Format>() { lost = encode_row_of<Format>(side, to, x, lane); });
  return lost;
}

}  // namespace kvx::ops::cuda

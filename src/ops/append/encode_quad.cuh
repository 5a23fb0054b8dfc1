// encode_quad: a warp turns a row of at most 128 numbers into stored bytes, four neighbours a lane,
// without shared memory. The same arithmetic as encode_row, for scales from amax, given scales,
// affine rows and formats without scales.
#pragma once

#include "ops/append/encode_row.cuh"
#include "ops/cuda/transform_row.cuh"

namespace kvx::ops::cuda {

inline constexpr int kQuad = 4;
inline constexpr int kMaxQuadRow = kWarp * kQuad;

struct Quad {
  float x[kQuad];
};

// In registers: strides 1 and 2 inside a lane, the others between lanes.
__device__ inline void hadamard_quad(Quad& q, int head_dim, int lane) {
  const int n = hadamard_block(head_dim);
  if (n > 1) {
    q = {q.x[0] + q.x[1], q.x[0] - q.x[1], q.x[2] + q.x[3], q.x[2] - q.x[3]};
  }
  if (n > 2) {
    q = {q.x[0] + q.x[2], q.x[1] + q.x[3], q.x[0] - q.x[2], q.x[1] - q.x[3]};
  }
  for (int lanes = 1; lanes * kQuad < n; lanes *= 2) {
    const bool is_upper = (lane & lanes) != 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float other = __shfl_xor_sync(kWholeWarp, q.x[i], lanes);
      q.x[i] = is_upper ? other - q.x[i] : q.x[i] + other;
    }
  }
  const float norm = hadamard_norm(n);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) q.x[i] *= norm;
}

__device__ inline void apply_transform_quad(const TransformRow& row, Quad& q, int head_dim,
                                            int lane) {
  const bool is_inside = lane * kQuad < head_dim;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const int d = lane * kQuad + i;
    if (is_inside && row.mean) q.x[i] -= row.mean[d];
    if (is_inside && row.offset) q.x[i] -= row.offset[d];
    if (is_inside && row.factor) q.x[i] *= row.factor[d];
  }
  if (row.hadamard) hadamard_quad(q, head_dim, lane);
}

// The definition's group_magnitude over lanes of one group; lanes outside the row hold zeros.
__device__ inline format::GroupMagnitude quad_group_magnitude(const Quad& q, int lanes) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    largest = max(largest, __float_as_uint(q.x[i]) & 0x7FFFFFFFu);
  }
  for (int offset = 1; offset < lanes; offset *= 2) {
    largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, offset));
  }
  return {__uint_as_float(largest), largest >= 0x7F800000u};
}

// Where a quad lies in its row.
struct QuadPlace {
  int lane;
  bool is_inside;
  int group;
  int lanes_per_group;  // a power of two
};

__device__ inline QuadPlace quad_place(const CudaSide& side, int lane) {
  const int first = lane * kQuad;
  const bool is_whole_row = side.group_length >= side.view.head_dim;
  return {lane, first < side.view.head_dim, is_whole_row ? 0 : first / side.group_length,
          is_whole_row ? kWarp : side.group_length / kQuad};
}

template <class Format>
__device__ inline void scale_quad(const CudaSide& side, const RowTarget& to, const QuadPlace& place,
                                  Quad& q) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = cpu::scale_maker<Format>(side.view.spec, to.tensor_scale);
  uint8_t* scale = to.scales + place.group * side.view.scales.group_stride;
  if (side.view.spec.scale_source == format::ScaleSource::kGiven) {
    if (!place.is_inside) return;
    const float step = maker.step(format::load_scale(maker.type, scale));
    const float inverse_step = format::reciprocal(step);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (!format::is_finite(q.x[i])) continue;  // stays as it is, for encode_nonfinite
      q.x[i] = step > 0 ? finite_product(q.x[i], inverse_step) : 0.0f;
    }
    return;
  }
  const format::GroupMagnitude group = quad_group_magnitude(q, place.lanes_per_group);
  const bool is_plain = !group.has_nonfinite && group.amax != 0;
  format::StoredScale stored = maker.make(Codec::kQmax, is_plain ? group.amax : 1.0f);
  const float inverse_step = format::reciprocal(maker.step(stored));
  if (!is_plain) {
    stored = group.has_nonfinite ? format::nan_scale(maker.type) : format::StoredScale{0};
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    q.x[i] = is_plain ? finite_product(q.x[i], inverse_step) : 0.0f;
  }
  if (place.is_inside && place.lane % place.lanes_per_group == 0) {
    format::store_scale(maker.type, stored, scale);
  }
}

template <int Bytes>
__device__ inline void store_bytes(const uint8_t* from, uint8_t* to) {
  if constexpr (Bytes == 16) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  if constexpr (Bytes == 8) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
  if constexpr (Bytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
  }
  if constexpr (Bytes == 2) {
    *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from);
  }
}

// TurboMind's order mixes eight codes: the even lane of a pair stores both lanes'.
template <class Format>
__device__ inline void store_quad(const typename Format::Codec::Code* codes, const QuadPlace& place,
                                  uint8_t* row) {
  using Code = typename Format::Codec::Code;
  constexpr format::Packing kPacking = Format::kFacts.packing;
  constexpr int kBytes = kQuad * Format::Codec::kBits / 8;
  alignas(16) uint8_t bytes[16];
  if constexpr (kPacking == format::Packing::kTurboMind) {
    Code both[2 * kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      both[i] = codes[i];
      both[kQuad + i] =
          static_cast<Code>(__shfl_xor_sync(kWholeWarp, static_cast<unsigned>(codes[i]), 1));
    }
    if (!place.is_inside || place.lane % 2 != 0) return;
    format::pack<kPacking>(both, 0, 2 * kQuad, bytes);
    store_bytes<2 * kBytes>(bytes, row + place.lane * kBytes);
  } else {
    if (!place.is_inside) return;
    format::pack<kPacking>(codes, 0, kQuad, bytes);
    store_bytes<kBytes>(bytes, row + place.lane * kBytes);
  }
}

template <class Format, format::ScaleType T>
__device__ inline void encode_affine_quad(const RowTarget& to, const QuadPlace& place, Quad& q) {
  using Codec = typename Format::Codec;
  int32_t low = 0x7FFFFFFF;
  int32_t high = -0x7FFFFFFF - 1;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    q.x[i] = format::ParamFloat<T>::round(q.x[i]);
    if (!place.is_inside) continue;
    low = min(low, format::ordered_bits(q.x[i]));
    high = max(high, format::ordered_bits(q.x[i]));
  }
  low = __reduce_min_sync(kWholeWarp, low);
  high = __reduce_max_sync(kWholeWarp, high);
  const auto encoder = format::affine_encoder<Codec, T>(format::affine_range(low, high));
  if (place.lane == 0) memcpy(to.scales, &encoder.params, 4);
  typename Codec::Code codes[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    codes[i] = encoder.has_nonfinite ? 0 : format::encode_affine_number<Codec, T>(encoder, q.x[i]);
  }
  store_quad<Format>(codes, place, to.codes);
}

// Returns the lane's count of non-finite numbers that the codes could not say.
template <class Format>
__device__ inline int encode_quad_of(const CudaSide& side, const RowTarget& to,
                                     const QuadPlace& place, Quad& q) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[kQuad];
  int counted = 0;
  if constexpr (cpu::is_affine<Format>()) {
    if (side.view.spec.scale_type == format::ScaleType::kF16) {
      encode_affine_quad<Format, format::ScaleType::kF16>(to, place, q);
    } else {
      encode_affine_quad<Format, format::ScaleType::kBF16>(to, place, q);
    }
    return 0;
  } else if constexpr (cpu::is_plain<Format>()) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) codes[i] = Codec::encode(q.x[i]);
  } else {
    scale_quad<Format>(side, to, place, q);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const bool is_finite = format::is_finite(q.x[i]);
      codes[i] = is_finite ? Codec::encode(q.x[i]) : Codec::encode_nonfinite(q.x[i]);
      if (!is_finite && Codec::kCountsNonfinite && place.is_inside) ++counted;
    }
  }
  store_quad<Format>(codes, place, to.codes);
  return counted;
}

__device__ inline int encode_quad(const CudaSide& side, const RowTarget& to, Quad q, int lane) {
  const QuadPlace place = quad_place(side, lane);
  int counted = 0;
  visit_format(side.id,
               [&]<class Format>() { counted = encode_quad_of<Format>(side, to, place, q); });
  return counted;
}

// Four neighbours of a caller's row. Requires: they lie on their own size.
__device__ inline Quad load_quad(DType type, const uint8_t* row, int lane) {
  if (type == DType::kF32) {
    const float4 x = reinterpret_cast<const float4*>(row)[lane];
    return {x.x, x.y, x.z, x.w};
  }
  const uint2 bits = reinterpret_cast<const uint2*>(row)[lane];
  const uint32_t halves[kQuad] = {bits.x & 0xFFFFu, bits.x >> 16, bits.y & 0xFFFFu, bits.y >> 16};
  Quad q;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const auto half = static_cast<uint16_t>(halves[i]);
    q.x[i] = type == DType::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
  }
  return q;
}

// Whether rows of this side can go four neighbours a lane.
inline bool fits_quads(const SideView& side, const FloatRows& input) {
  const auto divides = [](int64_t value, int64_t by) { return value % by == 0; };
  const int dim = side.head_dim;
  const int group = format::group_length(side.spec, dim);
  const bool is_power_of_two = (group & (group - 1)) == 0;
  const bool groups_fit = !side.spec.has_scale() || group == dim || (is_power_of_two && group >= 4);
  const bool is_turbomind = side.spec.facts->packing == format::Packing::kTurboMind;
  const int store_bytes = kQuad * side.spec.facts->element_bits / 8 * (is_turbomind ? 2 : 1);
  const int load_bytes = kQuad * bytes_of(input.dtype);
  const CodeAddress& c = side.codes;
  return dim % 8 == 0 && dim <= kMaxQuadRow && groups_fit &&
         side.spec.scale_choice == format::ScaleChoice::kAmax &&
         divides(reinterpret_cast<intptr_t>(c.base), store_bytes) &&
         divides(c.block_stride, store_bytes) && divides(c.token_stride, store_bytes) &&
         divides(c.head_stride, store_bytes) &&
         divides(reinterpret_cast<intptr_t>(input.data), load_bytes) &&
         divides(input.token_stride, kQuad) && divides(input.head_stride, kQuad);
}

}  // namespace kvx::ops::cuda

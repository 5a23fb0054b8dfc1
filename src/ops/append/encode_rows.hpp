// encode_rows: f32 rows of one head to stored rows, for any format. The arithmetic is format/'s;
// here are the loops over tokens and groups, and where the bytes go.
#pragma once

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "format/spec.hpp"
#include "format/traits.hpp"
#include "ops/append/dual_scale/encode_dual.hpp"
#include "ops/append/encode_feedback.hpp"
#include "ops/append/encode_row.hpp"
#include "ops/append/saturation.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

template <class Format>
KVX_INLINE void encode_plain(const EncodeParams& params) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const EncodeRow row = encode_row(params, t);
    for (int i = 0; i < params.head_dim; ++i) codes[i] = Codec::encode(row.x[i]);
    format::pack<Format::kFacts.packing>(codes, 0, params.head_dim, row.codes);
  }
}

// row parameters: [scale: 2 bytes][zero: 2 bytes]
template <class Format, format::ScaleType T>
KVX_INLINE void encode_affine(const EncodeParams& params) {
  using Codec = typename Format::Codec;
  typename Codec::Code codes[format::kMaxHeadDim];
  float rounded[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const EncodeRow row = encode_row(params, t);
    const format::AffineParams affine =
        format::quantize_affine<Codec, T>(row.x, params.head_dim, codes, rounded);
    memcpy(row.scales, &affine.scale, 2);
    memcpy(row.scales + 2, &affine.zero, 2);
    format::pack<Format::kFacts.packing>(codes, 0, params.head_dim, row.codes);
  }
}

// One scale a group, made here. Size: numbers in a full group, 0 when it is known only at run time.
template <class Format, int Size>
void encode_computed(const EncodeParams& params) {
  using Codec = typename Format::Codec;
  const format::ScaleMaker maker = format::scale_maker<Format>(*params.spec, params.tensor_scale);
  const format::ScaleChoice choice = params.spec->scale_choice;
  const float limit = format::largest_storable<Codec>(maker);
  const bool has_limit = limit < format::kFloatMax;
  const int size = Size != 0 ? Size : params.head_dim;
  float products[format::kMaxHeadDim];
  typename Codec::Code codes[format::kMaxHeadDim];
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const EncodeRow row = encode_row(params, t);
    uint8_t* scale = row.scales;
    int first = 0;
    for (; first + size <= params.head_dim; first += size, scale += params.scale_group_stride) {
      const format::StoredScale stored =
          format::scale_group<Codec>(maker, choice, row.x + first, size, products + first);
      format::store_scale(maker.type, stored, scale);
    }
    if (first < params.head_dim) {  // the last group is shorter
      const format::StoredScale stored = format::scale_group<Codec>(
          maker, choice, row.x + first, params.head_dim - first, products + first);
      format::store_scale(maker.type, stored, scale);
    }
    format::encode_products<Codec>(products, params.head_dim, codes);
    format::pack<Format::kFacts.packing>(codes, 0, params.head_dim, row.codes);
    if (params.saturated != nullptr && has_limit) {
      *params.saturated += count_beyond(limit, row.x, params.head_dim);
    }
  }
}

// Scales are read. Returns the number of non-finite inputs that no code can express.
template <class Format, int Size>
int64_t encode_given(const EncodeParams& params) {
  using Codec = typename Format::Codec;
  constexpr format::SaturationLimit kLimit = {format::saturation_product<Codec>(), true};
  const format::ScaleMaker maker = format::scale_maker<Format>(*params.spec, params.tensor_scale);
  const int size = Size != 0 ? Size : params.head_dim;
  float products[format::kMaxHeadDim];
  typename Codec::Code codes[format::kMaxHeadDim];
  int64_t nonfinite = 0;
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const EncodeRow row = encode_row(params, t);
    const uint8_t* scale = row.scales;
    for (int first = 0; first < params.head_dim;
         first += size, scale += params.scale_group_stride) {
      const float step = maker.step(format::load_scale(maker.type, scale));
      const int n = params.head_dim - first < size ? params.head_dim - first : size;
      format::scale_group_with_step(step, row.x + first, n, products + first);
      if (params.saturated != nullptr) {
        *params.saturated += count_saturated(kLimit, step, row.x + first, n);
      }
    }
    format::encode_products<Codec>(products, params.head_dim, codes);
    nonfinite += format::encode_nonfinite<Codec>(row.x, params.head_dim, codes);
    format::pack<Format::kFacts.packing>(codes, 0, params.head_dim, row.codes);
  }
  return nonfinite;
}

// One group of head_dim, [first, first + n), of all tokens of a page that shares its scales.
struct PageGroup {
  int first;
  int n;
  uint8_t* scale;
};

// Codes of one token's group under a fixed step, packed. Returns the number of non-finite
// inputs that no code can express.
template <class Format>
KVX_INLINE int encode_under_step(float step, const float* x, PageGroup group, uint8_t* row) {
  using Codec = typename Format::Codec;
  float products[format::kMaxHeadDim];
  typename Codec::Code codes[format::kMaxHeadDim];
  format::scale_group_with_step(step, x, group.n, products);
  format::encode_products<Codec>(products, group.n, codes);
  const int nonfinite = format::encode_nonfinite<Codec>(x, group.n, codes);
  format::pack<Format::kFacts.packing>(codes, group.first, group.n, row);
  return nonfinite;
}

// The largest finite magnitude of the run in this group; 0 when there is none.
KVX_INLINE float finite_amax(const EncodeParams& params, PageGroup group) {
  uint32_t largest = 0;
  for (int t = 0; t < params.num_tokens; ++t) {
    const float* x = source_row(params, t) + group.first;
    for (int i = 0; i < group.n; ++i) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
      const uint32_t finite = magnitude < 0x7F800000u ? magnitude : 0u;
      largest = finite > largest ? finite : largest;
    }
  }
  return std::bit_cast<float>(largest);
}

// The block's earlier tokens move from one step to a larger one.
template <class Format>
KVX_INLINE void requantize_page_group(const EncodeParams& params, PageGroup group, float old_step,
                                      float step) {
  using Codec = typename Format::Codec;
  constexpr format::Packing kPacking = Format::kFacts.packing;
  typename Codec::Code codes[format::kMaxHeadDim];
  float values[format::kMaxHeadDim];
  for (int t = 0; t < params.first_token; ++t) {
    uint8_t* row = params.codes + t * params.token_stride;
    format::unpack<kPacking>(row, group.first, group.n, codes);
    format::dequantize_group<Codec>(old_step, codes, group.n, values);
    encode_under_step<Format>(step, values, group, row);
  }
}

// docs/numbers.md, section 2, "Page-shared scales".
template <class Format>
KVX_INLINE int64_t encode_page_group(const EncodeParams& params, const format::ScaleMaker& maker,
                                     PageGroup group) {
  using Codec = typename Format::Codec;
  const float amax = finite_amax(params, group);
  const bool is_first_run = params.first_token == 0;
  const format::StoredScale old =
      is_first_run ? format::StoredScale{0} : format::load_scale(maker.type, group.scale);
  const format::StoredScale wanted =
      amax > 0 ? maker.make(Codec::kQmax, amax) : format::StoredScale{0};
  const bool grows = is_first_run || maker.step(wanted) > maker.step(old);
  const float step = maker.step(grows ? wanted : old);
  if (grows) {
    format::store_scale(maker.type, wanted, group.scale);
    requantize_page_group<Format>(params, group, maker.step(old), step);
  }
  // A step of 0 encodes every finite input as 0, as an all-zero group must be.
  const float run_step = amax > 0 ? step : 0.0f;
  int64_t nonfinite = 0;
  for (int t = params.first_token; t < params.first_token + params.num_tokens; ++t) {
    const EncodeRow row = encode_row(params, t);
    nonfinite += encode_under_step<Format>(run_step, row.x + group.first, group, row.codes);
  }
  return nonfinite;
}

template <class Format>
int64_t encode_page_shared(const EncodeParams& params) {
  const format::ScaleMaker maker = format::scale_maker<Format>(*params.spec, params.tensor_scale);
  const int size =
      params.spec->group_size == format::kWholeRow ? params.head_dim : params.spec->group_size;
  int64_t nonfinite = 0;
  uint8_t* scale = params.scales;
  for (int first = 0; first < params.head_dim; first += size, scale += params.scale_group_stride) {
    const int n = params.head_dim - first < size ? params.head_dim - first : size;
    nonfinite += encode_page_group<Format>(params, maker, {first, n, scale});
  }
  return nonfinite;
}

// Finds the spec's group size among those that the format has, so that it is a constant.
template <class Format, int Index = 0>
int64_t encode_groups(const EncodeParams& params) {
  constexpr auto kSizes = Format::kFacts.group_sizes;
  if constexpr (Index + 1 < kSizes.count) {
    if (params.spec->group_size != kSizes.values[Index])
      return encode_groups<Format, Index + 1>(params);
  }
  constexpr int kSize = kSizes.values[Index];
  if (params.spec->scale_source == format::ScaleSource::kGiven) {
    return encode_given<Format, kSize>(params);
  }
  encode_computed<Format, kSize>(params);
  return 0;
}

// What a level encodes rows with beside the loops above: PartEncoders (part_encoders.hpp), or
// nothing.
struct NoPartEncoders {
  static constexpr bool kExist = false;
};

template <class Format, class Parts>
constexpr bool takes_parts() {
  return Parts::kExist && format::has_fast_kernels<Format>();
}

template <class Format, class Parts>
int64_t encode_affine_rows(const EncodeParams& params) {
  using format::ScaleType;
  const bool is_f16 = params.spec->scale_type == ScaleType::kF16;
  if constexpr (takes_parts<Format, Parts>()) {
    if (params.head_dim % Parts::kNumbers == 0) {
      is_f16 ? Parts::template encode_affine<Format, ScaleType::kF16>(params)
             : Parts::template encode_affine<Format, ScaleType::kBF16>(params);
      return 0;
    }
  }
  is_f16 ? encode_affine<Format, ScaleType::kF16>(params)
         : encode_affine<Format, ScaleType::kBF16>(params);
  return 0;
}

template <class Format, class Parts>
int64_t encode_scaled_rows(const EncodeParams& params) {
  using format::ScaleSource;
  if (params.spec->scale_source == ScaleSource::kPageShared)
    return encode_page_shared<Format>(params);
  if constexpr (takes_parts<Format, Parts>()) {
    if (params.head_dim % Parts::kNumbers == 0) {
      return params.spec->scale_source == ScaleSource::kGiven
                 ? Parts::template encode_given<Format>(params, encode_groups<Format>)
                 : Parts::template encode_computed<Format>(params);
    }
  }
  return encode_groups<Format>(params);
}

template <class Format, class Parts = NoPartEncoders>
int64_t encode_rows(const EncodeParams& params) {
  if constexpr (format::is_plain<Format>()) {
    constexpr bool kIsCopy = Format::kFacts.id == format::FormatId::kF32;
    if constexpr (takes_parts<Format, Parts>() && !kIsCopy) {
      if (params.head_dim % Parts::kNumbers == 0) {
        Parts::template encode_plain<typename Format::Codec>(params);
        return 0;
      }
    }
    encode_plain<Format>(params);
    return 0;
  } else if constexpr (format::is_dual<Format>()) {
    return encode_dual<Format>(params);
  } else {
    EncodeParams first = params;
    if (params.feedback != nullptr) first.saturated = nullptr;  // feed_back counts
    int64_t nonfinite = 0;
    if constexpr (format::is_affine<Format>()) {
      nonfinite = encode_affine_rows<Format, Parts>(first);
    } else {
      nonfinite = encode_scaled_rows<Format, Parts>(first);
    }
    if (params.feedback != nullptr) feed_back<Format>(params);
    return nonfinite;
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

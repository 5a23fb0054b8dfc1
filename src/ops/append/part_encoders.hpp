// PartEncoders: what encode_rows takes its vector loops from, at the levels that have them.
#pragma once

#include "ops/append/encode_affine_parts.hpp"
#include "ops/append/encode_parts.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// All require: head_dim is a multiple of kPartNumbers.
struct PartEncoders {
  static constexpr bool kExist = true;
  static constexpr int kNumbers = kPartNumbers;

  // Formats whose codes are 16-bit floats.
  template <class Codec>
  KVX_INLINE static void encode_plain(const EncodeParams& params) {
    encode_half_rows<Codec>(params);
  }
  template <class Format, format::ScaleType T>
  KVX_INLINE static void encode_affine(const EncodeParams& params) {
    encode_affine_parts<Format, T>(params);
  }
  template <class Format>
  KVX_INLINE static int64_t encode_computed(const EncodeParams& params) {
    return encode_computed_parts<Format>(params);
  }
  // definition: encodes rows with a number that is not finite.
  template <class Format>
  KVX_INLINE static int64_t encode_given(const EncodeParams& params,
                                         int64_t (*definition)(const EncodeParams&)) {
    return encode_given_parts<Format>(params, definition);
  }
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

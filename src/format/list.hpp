// The list of formats. A new format is its number in facts.hpp, its file in formats/, and its word
// here; everything else reads this list, and what is missing is a link error.
#pragma once

#include "format/formats/bf16.hpp"
#include "format/formats/f16.hpp"
#include "format/formats/f32.hpp"
#include "format/formats/fp4_row.hpp"
#include "format/formats/fp8_e4m3.hpp"
#include "format/formats/fp8_e5m2.hpp"
#include "format/formats/int4.hpp"
#include "format/formats/int4_affine.hpp"
#include "format/formats/int4_row.hpp"
#include "format/formats/int8.hpp"
#include "format/formats/int8_affine.hpp"
#include "format/formats/mxfp4.hpp"
#include "format/formats/mxfp4_g16.hpp"
#include "format/formats/nvfp4.hpp"

// In the order of FormatId.
#define KVX_FOR_EACH_FORMAT(WORD) \
  WORD(F32)                       \
  WORD(F16)                       \
  WORD(BF16)                      \
  WORD(Fp8E4M3)                   \
  WORD(Fp8E5M2)                   \
  WORD(Int8)                      \
  WORD(Int4)                      \
  WORD(Int8Affine)                \
  WORD(Int4Affine)                \
  WORD(Mxfp4G16)                  \
  WORD(Mxfp4)                     \
  WORD(Nvfp4)                     \
  WORD(Fp4Row)                    \
  WORD(Int4Row)

namespace kvx::format {

#define KVX_COUNT_ONE(Format) +1
inline constexpr int kNumFormats = 0 KVX_FOR_EACH_FORMAT(KVX_COUNT_ONE);
#undef KVX_COUNT_ONE

#define KVX_FACTS_POINTER(Format) &Format::kFacts,
inline constexpr const Facts* kAllFacts[kNumFormats] = {KVX_FOR_EACH_FORMAT(KVX_FACTS_POINTER)};
#undef KVX_FACTS_POINTER

constexpr bool list_is_in_id_order() {
  for (int i = 0; i < kNumFormats; ++i) {
    if (static_cast<int>(kAllFacts[i]->id) != i) return false;
  }
  return true;
}
static_assert(list_is_in_id_order());

constexpr const Facts& facts_of(FormatId id) {
  return *kAllFacts[static_cast<int>(id)];
}

}  // namespace kvx::format

// The list of formats, which everything else reads. docs/howto/add-a-format.md names the files of a
// new one; what is missing does not compile.
#pragma once

#include <array>

#include "format/formats/bf16.hpp"
#include "format/formats/f16.hpp"
#include "format/formats/f32.hpp"
#include "format/formats/fp4_row.hpp"
#include "format/formats/fp8_e4m3.hpp"
#include "format/formats/fp8_e5m2.hpp"
#include "format/formats/int2_dual.hpp"
#include "format/formats/int3_dual.hpp"
#include "format/formats/int4.hpp"
#include "format/formats/int4_affine.hpp"
#include "format/formats/int4_dual.hpp"
#include "format/formats/int4_row.hpp"
#include "format/formats/int8.hpp"
#include "format/formats/int8_affine.hpp"
#include "format/formats/mxfp4.hpp"
#include "format/formats/mxfp4_g16.hpp"
#include "format/formats/nvfp4.hpp"
#include "format/packing.hpp"

// APPLY(WORD, Format, NAME) for every format, in the order of FormatId. NAME ends the C ABI's
// constant, KVX_FORMAT_<NAME>.
#define KVX_FORMAT_TABLE(APPLY, WORD)  \
  APPLY(WORD, F32, F32)                \
  APPLY(WORD, F16, F16)                \
  APPLY(WORD, BF16, BF16)              \
  APPLY(WORD, Fp8E4M3, FP8_E4M3)       \
  APPLY(WORD, Fp8E5M2, FP8_E5M2)       \
  APPLY(WORD, Int8, INT8)              \
  APPLY(WORD, Int4, INT4)              \
  APPLY(WORD, Int8Affine, INT8_AFFINE) \
  APPLY(WORD, Int4Affine, INT4_AFFINE) \
  APPLY(WORD, Mxfp4G16, MXFP4_G16)     \
  APPLY(WORD, Mxfp4, MXFP4)            \
  APPLY(WORD, Nvfp4, NVFP4)            \
  APPLY(WORD, Fp4Row, FP4_ROW)         \
  APPLY(WORD, Int4Row, INT4_ROW)       \
  APPLY(WORD, Int4Dual, INT4_DUAL)     \
  APPLY(WORD, Int3Dual, INT3_DUAL)     \
  APPLY(WORD, Int2Dual, INT2_DUAL)

// WORD(Format) for every format.
#define KVX_APPLY_TO_FORMAT(WORD, Format, NAME) WORD(Format)
#define KVX_FOR_EACH_FORMAT(WORD) KVX_FORMAT_TABLE(KVX_APPLY_TO_FORMAT, WORD)

namespace kvx::format {

#define KVX_COUNT_ONE(Format) +1
inline constexpr int kNumFormats = 0 KVX_FOR_EACH_FORMAT(KVX_COUNT_ONE);
#undef KVX_COUNT_ONE

#define KVX_FACTS_POINTER(Format) &Format::kFacts,
inline constexpr const Facts* kAllFacts[kNumFormats] = {KVX_FOR_EACH_FORMAT(KVX_FACTS_POINTER)};
#undef KVX_FACTS_POINTER

// Those of which a row is written and read by itself: all but the dual-scale formats.
constexpr bool stores_rows(const Facts& facts) {
  return facts.scale_rules.values[0] != ScaleRule::kDual;
}
#define KVX_COUNT_ROW_FORMAT(Format) +(stores_rows(Format::kFacts) ? 1 : 0)
inline constexpr int kNumRowFormats = 0 KVX_FOR_EACH_FORMAT(KVX_COUNT_ROW_FORMAT);
#undef KVX_COUNT_ROW_FORMAT
inline constexpr auto kRowFacts = [] {
  std::array<const Facts*, kNumRowFormats> rows{};
  size_t count = 0;
  for (const Facts* facts : kAllFacts) {
    if (stores_rows(*facts)) rows[count++] = facts;
  }
  return rows;
}();

constexpr bool list_is_in_id_order() {
  for (int i = 0; i < kNumFormats; ++i) {
    if (static_cast<int>(kAllFacts[i]->id) != i) return false;
  }
  return true;
}
static_assert(list_is_in_id_order());

// Whether the list has the format. The compiler refuses the switch while it lacks one.
constexpr bool is_listed(FormatId id) {
  switch (id) {
#define KVX_IS_LISTED(Format) case Format::kFacts.id:
    KVX_FOR_EACH_FORMAT(KVX_IS_LISTED)
#undef KVX_IS_LISTED
    return true;
  }
  return false;
}

// Whether the packing takes the codes, and cuts neither a group nor a row.
constexpr bool fits_packing(const Facts& facts) {
  const int together = codes_packed_together(facts.packing);
  for (int i = 0; i < facts.group_sizes.count; ++i) {
    const bool is_plain = facts.scale_types.preferred() == ScaleType::kNone;
    if (!is_plain && facts.group_sizes.values[i] % together != 0) return false;
  }
  return can_pack(facts.packing, facts.element_bits) && facts.head_dim_multiple % together == 0;
}

#define KVX_CHECK_FACTS(Format)                                                             \
  static_assert(fits_packing(Format::kFacts), #Format "'s packing does not fit its facts"); \
  static_assert(Format::kFacts.element_bits == Format::Codec::kBits);
KVX_FOR_EACH_FORMAT(KVX_CHECK_FACTS)
#undef KVX_CHECK_FACTS

constexpr const Facts& facts_of(FormatId id) {
  return *kAllFacts[static_cast<int>(id)];
}

}  // namespace kvx::format

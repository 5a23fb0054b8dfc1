// What the tensor core kernels need to know of each format: the one table that decode_mma, prefill
// and the plan read. formats.cuh adds the types that decode codes and scales. A format that claims
// fast kernels (Kernels::kAll) and is missing here is a compile-time error.
#pragma once

#include "core/host_device.hpp"
#include "format/list.hpp"

namespace kvx::ops::cuda {

// Which two of eight neighbours in a row a register of a prefill tile holds. In this order decoding
// takes no more than masks; queries and outputs are put into the same order.
enum class PairOrder : uint8_t {
  kNeighbours,  // (0, 1), (2, 3), (4, 5), (6, 7): 16 bits, and 4 bits in TurboMind's packing
  kBytes,       // (0, 2), (1, 3), (4, 6), (5, 7)
  kNibbles,     // (0, 4), (1, 5), (2, 6), (3, 7)
};

// Where the scales of a row enter the computation.
enum class ScalePath : uint8_t {
  kNone,      // the codes are the numbers
  kRow,       // one binary32 scale a row multiplies scores and weights; one a head, their sums
  kRowF16,    // one f16 scale a row, or one in a word (RowWord), likewise, in decode_mma alone
  kGroups64,  // f16 scales of groups of 64 multiply scores and weights, or f16 operands
  kAffine,    // a scale and a zero of the row, likewise
  kOperand,   // scales of groups of 16 or 32 multiply f16 operands, exactly
};

struct TensorCoreFormat {
  int bits;  // of a code; 0: only the reference kernel reads the format; -1: it is not in the table
  PairOrder pair_order;
  ScalePath scale_path;
  int operand_group = 0;  // numbers of a group, with ScalePath::kOperand

  constexpr bool is_supported() const { return bits > 0; }
};

constexpr TensorCoreFormat tensor_core_format(format::FormatId id) {
  using enum PairOrder;
  using format::FormatId;
  switch (id) {
    case FormatId::kBF16:
    case FormatId::kF16:
      return {16, kNeighbours, ScalePath::kNone};
    case FormatId::kFp8E4M3:
    case FormatId::kFp8E5M2:
      return {8, kBytes, ScalePath::kRow};
    case FormatId::kInt8:
      return {8, kBytes, ScalePath::kGroups64};
    case FormatId::kInt8Affine:
      return {8, kBytes, ScalePath::kAffine};
    case FormatId::kInt4:
      return {4, kNibbles, ScalePath::kGroups64};
    case FormatId::kInt4Affine:
      return {4, kNeighbours, ScalePath::kAffine};
    case FormatId::kMxfp4:
      return {4, kNibbles, ScalePath::kOperand, 32};
    case FormatId::kMxfp4G16:
    case FormatId::kNvfp4:
      return {4, kNibbles, ScalePath::kOperand, 16};
    case FormatId::kFp4Row:
    case FormatId::kInt4Row:
      return {4, kNibbles, ScalePath::kRowF16};
    case FormatId::kF32:
      return {0, kNeighbours, ScalePath::kNone};
    default:  // a format of the reference kernels: the assertion below admits no other
      return {-1, kNeighbours, ScalePath::kNone};
  }
}

constexpr bool has_every_fast_format() {
  for (const format::Facts* facts : format::kAllFacts) {
    const bool is_missing = tensor_core_format(facts->id).bits < 0;
    if (is_missing && facts->kernels == format::Kernels::kAll) return false;
  }
  return true;
}
static_assert(has_every_fast_format(), "a format with fast kernels needs its line in the table");

// The formats that prefill has a decoder for; others are decoded as one of them. WORD(Id)
#define KVX_FOR_EACH_PREFILL_DECODER(WORD) \
  WORD(kFp8E4M3)                           \
  WORD(kFp8E5M2)                           \
  WORD(kInt8)                              \
  WORD(kInt8Affine)                        \
  WORD(kInt4)                              \
  WORD(kInt4Affine)                        \
  WORD(kNvfp4)                             \
  WORD(kMxfp4)

// mxfp4 and mxfp4_g16 differ in where the scale of a number lies, not in how it is decoded.
constexpr format::FormatId prefill_decoder(format::FormatId id) {
  return id == format::FormatId::kMxfp4G16 ? format::FormatId::kMxfp4 : id;
}
constexpr bool has_prefill_decoder(format::FormatId id) {
#define KVX_IS_DECODER(Id) \
  if (prefill_decoder(id) == format::FormatId::Id) return true;
  KVX_FOR_EACH_PREFILL_DECODER(KVX_IS_DECODER)
#undef KVX_IS_DECODER
  return false;
}

}  // namespace kvx::ops::cuda

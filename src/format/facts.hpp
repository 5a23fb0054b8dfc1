// Facts: the six facts that define a format. Everything else about a format is computed from them.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.hpp"

namespace kvx::format {

// The closed list of formats, in the order in which documentation shows them.
enum class FormatId : uint8_t {
  kF32,
  kF16,
  kBF16,
  kFp8E4M3,
  kFp8E5M2,
  kInt8,
  kInt4,
  kInt8Affine,
  kInt4Affine,
  kMxfp4G16,
  kMxfp4,
  kNvfp4,
  kFp4Row,
  kInt4Row,
  kInt4Dual,
  kInt3Dual,
  kInt2Dual,
};

// How a scale is stored. kNone: the codes are the numbers.
enum class ScaleType : uint8_t { kNone, kF32, kF16, kBF16, kE8M0, kE4M3 };

// How a scale is made from a group (docs/numbers.md, sections 2, 4 and 9).
enum class ScaleRule : uint8_t {
  kNone,
  kAmax,       // amax / qmax, rounded to the stored type
  kE8M0Ceil,   // smallest power of two that clips nothing
  kE8M0Floor,  // OCP MX: floor(log2(amax)) - emax; may clip
  kAffine,     // (max - min) / qmax and min, per row
  kDual,       // a scale a token, and a step and a zero a channel of the block
};

// Who writes a scale. Not a fact of the format: the same bytes, another writer or another address.
enum class ScaleSource : uint8_t {
  kComputed,    // at append, one per group of each row, stored beside the row
  kGiven,       // static: read from a table that append does not write
  kPageShared,  // at append, one per group of a whole block; growth requantises the block
};

// How codes lie in a row (docs/numbers.md, section 7). packing.hpp implements each.
enum class Packing : uint8_t {
  kBytes,
  kNibbles,
  kWords,      // nibbles, read four bytes at a time
  kQuarters,   // four 2-bit codes a byte, the first in the lowest bits
  kThreeBits,  // of 64 codes: their low bits as kQuarters has them, then their high bits
  kTurboMind,
};

// Which kernels read and write a format's rows. The bytes are the same in all of them. A format
// that lacks a part of some fast kernel does not compile with kAll.
enum class Kernels : uint8_t {
  kAll,        // the reference kernels and every fast one
  kReference,  // the reference kernels alone: loops over the functions of format/, on every backend
};

// Up to four permitted values; the first is the default.
template <class T>
struct Choices {
  T values[4];
  int count;

  constexpr T preferred() const { return values[0]; }
  constexpr bool allows(T value) const {
    for (int i = 0; i < count; ++i) {
      if (values[i] == value) return true;
    }
    return false;
  }
};

inline constexpr int kWholeRow = 0;  // as a group size: the group is the row

struct Facts {
  FormatId id;
  std::string_view name;
  std::string_view element;  // the element type's name; the format's Codec implements it
  int element_bits;
  Choices<int> group_sizes;  // along head_dim; kWholeRow
  Choices<ScaleType> scale_types;
  Choices<ScaleRule> scale_rules;
  Choices<ScaleSource> scale_sources;
  bool has_tensor_scale;  // a second-level f32 scale, given per layer and KV head
  Packing packing;
  int head_dim_multiple;     // head_dim must be a multiple of this
  std::string_view summary;  // one line for `kvx formats` and docs/formats.md
  Kernels kernels = Kernels::kAll;
};

constexpr int bytes_of(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return 0;
    case ScaleType::kF32:
      return 4;
    case ScaleType::kF16:
    case ScaleType::kBF16:
      return 2;
    case ScaleType::kE8M0:
    case ScaleType::kE4M3:
      return 1;
  }
  return 0;
}

constexpr std::string_view name_of(ScaleType type) {
  constexpr std::string_view kNames[] = {"none", "f32", "f16", "bf16", "e8m0", "e4m3"};
  return kNames[static_cast<int>(type)];
}
constexpr std::string_view name_of(ScaleRule rule) {
  constexpr std::string_view kNames[] = {"none", "amax", "ceil", "floor", "affine", "dual"};
  return kNames[static_cast<int>(rule)];
}
constexpr std::string_view name_of(ScaleSource source) {
  constexpr std::string_view kNames[] = {"computed", "given", "page"};
  return kNames[static_cast<int>(source)];
}
constexpr std::string_view name_of(Packing packing) {
  switch (packing) {
    case Packing::kBytes:
      return "bytes";
    case Packing::kNibbles:
      return "nibbles";
    case Packing::kWords:
      return "words of eight";
    case Packing::kQuarters:
      return "four a byte";
    case Packing::kThreeBits:
      return "two and one bits";
    case Packing::kTurboMind:
      return "TurboMind u4";
  }
  return "";
}

}  // namespace kvx::format

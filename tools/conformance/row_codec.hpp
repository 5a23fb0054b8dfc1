// RowCodec: an independent encoder and decoder of every format of 1.2, written in plain loops from
// docs/numbers.md, so that the expected bytes of a provider are exact.
#pragma once

#include <kvx/kvx_abi.h>

#include <cstdint>
#include <vector>

namespace kvx::conformance {

// [sign][exponent][mantissa]; codes of positive numbers grow with them.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  uint32_t largest;   // code of the largest finite number
  bool has_infinity;  // else what is larger saturates
  uint32_t nan;       // 0: none
};

extern const SmallFloat kE2M1;
extern const SmallFloat kE4M3;
extern const SmallFloat kE5M2;
extern const SmallFloat kF16;
extern const SmallFloat kBF16;

double decode_float(const SmallFloat& type, uint32_t code);
// Rounds to nearest, ties to the even code, and keeps the sign of a zero.
uint32_t encode_float(const SmallFloat& type, double x);

enum class Packing { kBytes, kNibbles, kTurboMind };

// The facts of a format with its default options, from docs/numbers.md.
struct FormatFacts {
  kvx_format_t format;
  const char* name;
  const SmallFloat* element;  // null: an integer, or F32
  int largest_integer;        // of a symmetric integer, or the affine one's code; 0: a float
  bool is_affine;
  Packing packing;
  int group;            // 0: no scale; -1: the row
  uint32_t scale_type;  // kvx_scale_type_t; 0: no scale
  int head_dim_multiple;
  bool has_tensor_scale;

  bool has_scale() const { return scale_type != 0; }
  int group_length(int head_dim) const { return group < 0 ? head_dim : group; }
  int groups_per_row(int head_dim) const;
  int code_bytes(int head_dim) const;  // of a row
  int scale_bytes() const;             // of a group
};

const std::vector<FormatFacts>& all_formats();
const FormatFacts& facts_of(kvx_format_t format);

struct CodedRow {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;  // [groups][scale_bytes]
};

// With computed scales, or the affine formats' parameters.
CodedRow encode_row(const FormatFacts& facts, const std::vector<float>& row, float tensor_scale);
// The scale of a group with this largest magnitude. Requires: neither affine nor plain.
std::vector<uint8_t> encode_scale(const FormatFacts& facts, float amax, float tensor_scale);
// Encodes with given scales, [groups][scale_bytes].
std::vector<uint8_t> encode_codes(const FormatFacts& facts, const std::vector<float>& row,
                                  const std::vector<uint8_t>& scales, float tensor_scale);

// The floats that kvx_gather returns, and those that attention computes with.
std::vector<float> decode_row(const FormatFacts& facts, const CodedRow& row, int head_dim,
                              float tensor_scale);
std::vector<double> decode_exactly(const FormatFacts& facts, const CodedRow& row, int head_dim,
                                   float tensor_scale);

}  // namespace kvx::conformance

// FormatSpec: a format with its options chosen, and the sizes that follow. Kernels include it, so
// it includes little; spec.hpp makes one.
#pragma once

#include "format/facts.hpp"
#include "format/group.hpp"

namespace kvx::format {

inline constexpr int kMaxHeadDim = 1024;

// How one side (K or V) of a head is stored. Make one with make_spec; the facts' choices hold then.
struct FormatSpec {
  const Facts* facts = nullptr;
  int group_size = 1;  // kWholeRow: the group is the row
  ScaleType scale_type = ScaleType::kNone;
  ScaleRule scale_rule = ScaleRule::kNone;
  ScaleSource scale_source = ScaleSource::kComputed;
  ScaleChoice scale_choice = ScaleChoice::kAmax;  // the encoder's; readers ignore it

  bool has_scale() const { return scale_type != ScaleType::kNone; }
  bool is_affine() const { return scale_rule == ScaleRule::kAffine; }
  // Rows are quantised together, a whole block at once (format/dual_scale.hpp).
  bool is_dual() const { return scale_rule == ScaleRule::kDual; }

  friend bool operator==(const FormatSpec&, const FormatSpec&) = default;
};

// Numbers in a full group: group_size, or head_dim for a whole-row group.
int group_length(const FormatSpec& spec, int head_dim);
// Groups in a row; the last may be shorter. 0 for formats without a scale.
int groups_per_row(const FormatSpec& spec, int head_dim);

// Bytes of one group's stored scale; affine rows store a scale and a zero.
int scale_bytes_per_group(const FormatSpec& spec);
// Bytes of a row's codes, and of a row's scales wherever they lie (given and page-shared ones lie
// elsewhere).
int code_bytes_per_row(const FormatSpec& spec, int head_dim);
int scale_bytes_per_row(const FormatSpec& spec, int head_dim);
// Bytes of one head's steps and zeros in a block of a dual-scale format; 0 for all others.
int channel_bytes_per_block(const FormatSpec& spec, int head_dim);

// Bits a number takes in the cache, its row's computed scales included; page-shared scales, and the
// steps and zeros of channels, are spread over block_size.
double bits_per_value(const FormatSpec& spec, int head_dim, int block_size);

}  // namespace kvx::format

// FormatSpec: a format with its options chosen, checked against the facts, and the sizes that
// follow.
#pragma once

#include <optional>
#include <string_view>

#include "core/result.hpp"
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

  friend bool operator==(const FormatSpec&, const FormatSpec&) = default;
};

// What a caller may ask for beside the format's name; absent means the format's default.
struct SpecOptions {
  std::optional<int> group_size = std::nullopt;
  std::optional<ScaleType> scale_type = std::nullopt;
  std::optional<ScaleRule> scale_rule = std::nullopt;
  std::optional<ScaleSource> scale_source = std::nullopt;
  std::optional<ScaleChoice> scale_choice = std::nullopt;
};

// INVALID_ARGUMENT names the option, its value and what the format allows.
Result<FormatSpec> make_spec(const Facts& facts, const SpecOptions& options = {});
Result<FormatSpec> make_spec(FormatId id, const SpecOptions& options = {});

// Empty when no format has this name.
std::optional<FormatId> format_named(std::string_view name);

// INVALID_ARGUMENT when head_dim is outside 1..kMaxHeadDim or no multiple of what the format needs.
Status check_head_dim(const FormatSpec& spec, int head_dim);

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

// Bits a number takes in the cache, its row's computed scales included; page-shared scales are
// spread over block_size.
double bits_per_value(const FormatSpec& spec, int head_dim, int block_size);

// nvfp4's second-level scale from a calibrated amax (C-16). KV practice (vLLM, FlashInfer,
// TensorRT-LLM) is amax / 448; Model-Optimizer's weights use amax / (6 * 448). Both decode alike:
// the checkpoint says which it holds. INVALID_ARGUMENT when amax is not positive and finite.
Result<float> tensor_scale_for_kv(float amax);
Result<float> tensor_scale_for_weights(float amax);

// INVALID_ARGUMENT unless positive and at most FLT_MAX / 448 (docs/numbers.md, section 2).
Status check_tensor_scale(float scale);

// A calibrated step in its stored type. INVALID_ARGUMENT: not positive and finite, or no power of
// two for E8M0.
Result<StoredScale> given_scale(ScaleType type, float step);

}  // namespace kvx::format

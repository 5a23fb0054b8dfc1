// How a FormatSpec is made: options checked against the facts, scales that callers give.
#pragma once

#include <optional>
#include <string_view>

#include "core/result.hpp"
#include "format/format_spec.hpp"

namespace kvx::format {

// What a caller may choose beside the format's name; absent means the format's default.
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

// INVALID_ARGUMENT when the format quantises whole blocks, of other sizes than this.
Status check_block_size(const FormatSpec& spec, int block_size);

// UNSUPPORTED when the format quantises whole blocks: for verbs and places that write rows alone.
Status check_rows_alone(const FormatSpec& spec);

// nvfp4's second-level scale from a calibrated amax. For KV caches vLLM, FlashInfer and
// TensorRT-LLM use amax / 448; Model-Optimizer's weights use amax / (6 * 448). Both decode alike,
// and a checkpoint states which of them it holds. INVALID_ARGUMENT when amax is not positive and
// finite.
Result<float> tensor_scale_for_kv(float amax);
Result<float> tensor_scale_for_weights(float amax);

// INVALID_ARGUMENT unless positive and at most FLT_MAX / 448 (docs/numbers.md, section 2).
Status check_tensor_scale(float scale);

// A calibrated step in its stored type. INVALID_ARGUMENT: not positive and finite, or no power of
// two for E8M0.
Result<StoredScale> given_scale(ScaleType type, float step);

}  // namespace kvx::format

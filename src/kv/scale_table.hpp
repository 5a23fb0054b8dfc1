// A table of given scales: a side's static steps (value = code * step) in the format's scale type.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/result.hpp"
#include "format/spec.hpp"

namespace kvx::kv {

// [num_kv_heads, groups] stored scales; steps has the same shape, or is empty for fp8, which then
// gets 1.0 everywhere. INVALID_ARGUMENT, `what` named: another number of steps, one that is not
// positive and finite, or an E8M0 step that is no power of two.
// Requires: spec.scale_source is given and check_head_dim(spec, head_dim) is ok.
Result<std::vector<uint8_t>> make_scale_table(const format::FormatSpec& spec, int head_dim,
                                              int num_kv_heads, std::span<const float> steps,
                                              std::string_view what);

// INVALID_ARGUMENT: tensor scales that are not num_kv_heads positive finite numbers (none is fine),
// or any for a format that has none.
Status check_tensor_scales(const format::FormatSpec& spec, int num_kv_heads,
                           std::span<const float> scales, std::string_view what);

}  // namespace kvx::kv

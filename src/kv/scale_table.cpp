// Static steps to stored scales.
#include "kv/scale_table.hpp"

#include "format/scale.hpp"

namespace kvx::kv {
namespace {

bool is_positive_finite(float x) {
  return x > 0 && x <= format::kFloatMax;
}

// A given scale is data: what its type can't say exactly enough is refused, not bent.
Result<format::StoredScale> stored_scale(format::ScaleType type, float step) {
  if (type != format::ScaleType::kE8M0) return format::round_scale(type, step);
  for (uint32_t code = 0; code < format::E8M0::kNanCode; ++code) {
    if (format::E8M0::decode(code) == step) return format::StoredScale{code};
  }
  return invalid_argument("{} is no power of two from 2^-127 to 2^127", step);
}

}  // namespace

Result<std::vector<uint8_t>> make_scale_table(const format::FormatSpec& spec, int head_dim,
                                              int num_kv_heads, std::span<const float> steps,
                                              std::string_view what) {
  const int bytes = format::bytes_of(spec.scale_type);
  const int groups = format::groups_per_row(spec, head_dim);
  const size_t count = static_cast<size_t>(num_kv_heads) * groups;
  const bool is_fp8 =
      spec.facts->id == format::FormatId::kFp8E4M3 || spec.facts->id == format::FormatId::kFp8E5M2;
  const bool is_one = steps.empty() && is_fp8;
  if (!is_one && steps.size() != count) {
    return invalid_argument("{} has {} given scales; {} needs {} ({} heads of {})", what,
                            steps.size(), spec.facts->name, count, num_kv_heads, groups);
  }
  std::vector<uint8_t> table(count * bytes);
  for (size_t i = 0; i < count; ++i) {
    const float step = is_one ? 1.0f : steps[i];
    if (!is_positive_finite(step)) {
      return invalid_argument("{}: scale {} is {}; expected a positive finite number", what, i,
                              step);
    }
    const Result<format::StoredScale> scale = stored_scale(spec.scale_type, step);
    if (!scale.ok()) {
      return invalid_argument("{}: scale {}: {}", what, i, scale.error().message);
    }
    format::store_scale(spec.scale_type, scale.value(), table.data() + i * bytes);
  }
  return table;
}

Status check_tensor_scales(const format::FormatSpec& spec, int num_kv_heads,
                           std::span<const float> scales, std::string_view what) {
  if (scales.empty()) return {};
  if (!spec.facts->has_tensor_scale) {
    return invalid_argument("{} has {} tensor scales; {} has none", what, scales.size(),
                            spec.facts->name);
  }
  if (scales.size() != static_cast<size_t>(num_kv_heads)) {
    return invalid_argument("{} has {} tensor scales; expected {}, one a head", what, scales.size(),
                            num_kv_heads);
  }
  for (size_t i = 0; i < scales.size(); ++i) {
    if (is_positive_finite(scales[i])) continue;
    return invalid_argument("{}: tensor scale {} is {}; expected a positive finite number", what, i,
                            scales[i]);
  }
  return {};
}

}  // namespace kvx::kv

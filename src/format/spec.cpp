// make_spec checks options against a format's facts; the sizes follow from the facts alone.
#include "format/spec.hpp"

#include <string>

#include "core/checked.hpp"
#include "format/choice_text.hpp"
#include "format/list.hpp"

namespace kvx::format {
namespace {

template <class T>
Status choose(const Facts& facts, std::string_view field, const Choices<T>& choices,
              const std::optional<T>& wanted, T& chosen) {
  chosen = wanted.value_or(choices.preferred());
  if (choices.allows(chosen)) return {};
  return invalid_argument("{} is {}; {} takes {}", field, text_of(chosen), facts.name,
                          list_of(choices, " or "));
}

Status check_scale_choice(const Facts& facts, const FormatSpec& spec) {
  if (spec.scale_choice == ScaleChoice::kAmax) return {};
  const bool makes_symmetric_scales = spec.has_scale() && !spec.is_affine() && !spec.is_dual();
  if (!makes_symmetric_scales) {
    return invalid_argument("scale choice is {}; {} has no scale to choose",
                            name_of(spec.scale_choice), facts.name);
  }
  if (spec.scale_source != ScaleSource::kComputed) {
    return invalid_argument("scale choice is {}; it needs computed scales, and the source is {}",
                            name_of(spec.scale_choice), name_of(spec.scale_source));
  }
  if (spec.scale_choice == ScaleChoice::k4Over6 && facts.element != "E2M1") {
    return invalid_argument("scale choice is 4over6; it is for E2M1, and {} stores {}", facts.name,
                            facts.element);
  }
  return {};
}

Result<float> tensor_scale(float amax, float divisor) {
  const float scale = amax / divisor;
  if (!(scale > 0) || !is_finite(scale)) {
    return invalid_argument("amax is {}; a tensor scale needs a positive finite amax", amax);
  }
  return scale;
}

}  // namespace

Result<FormatSpec> make_spec(const Facts& facts, const SpecOptions& options) {
  FormatSpec spec;
  spec.facts = &facts;
  KVX_RETURN_IF_ERROR(
      choose(facts, "group size", facts.group_sizes, options.group_size, spec.group_size));
  KVX_RETURN_IF_ERROR(
      choose(facts, "scale type", facts.scale_types, options.scale_type, spec.scale_type));
  KVX_RETURN_IF_ERROR(
      choose(facts, "scale rule", facts.scale_rules, options.scale_rule, spec.scale_rule));
  KVX_RETURN_IF_ERROR(
      choose(facts, "scale source", facts.scale_sources, options.scale_source, spec.scale_source));
  spec.scale_choice = options.scale_choice.value_or(ScaleChoice::kAmax);
  KVX_RETURN_IF_ERROR(check_scale_choice(facts, spec));
  return spec;
}

Result<FormatSpec> make_spec(FormatId id, const SpecOptions& options) {
  return make_spec(facts_of(id), options);
}

std::optional<FormatId> format_named(std::string_view name) {
  for (const Facts* facts : kAllFacts) {
    if (facts->name == name) return facts->id;
  }
  return std::nullopt;
}

Status check_head_dim(const FormatSpec& spec, int head_dim) {
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return invalid_argument("head_dim is {}; expected 1 to {}", head_dim, kMaxHeadDim);
  }
  if (head_dim % spec.facts->head_dim_multiple != 0) {
    return invalid_argument("head_dim is {}; {} needs a multiple of {}", head_dim, spec.facts->name,
                            spec.facts->head_dim_multiple);
  }
  return {};
}

Status check_block_size(const FormatSpec& spec, int block_size) {
  if (!spec.is_dual() || block_size == 64 || block_size == 128) return {};
  return invalid_argument("block_size is {}; {} quantises blocks of 64 or 128 tokens", block_size,
                          spec.facts->name);
}

Status check_rows_alone(const FormatSpec& spec) {
  if (!spec.is_dual()) return {};
  return unsupported(
      "format is {}, which quantises whole blocks; it is for paged caches with a full-precision "
      "window, and for pages beside one",
      spec.facts->name);
}

int group_length(const FormatSpec& spec, int head_dim) {
  return spec.group_size == kWholeRow ? head_dim : spec.group_size;
}

int groups_per_row(const FormatSpec& spec, int head_dim) {
  return spec.has_scale() ? ceil_div(head_dim, group_length(spec, head_dim)) : 0;
}

int scale_bytes_per_group(const FormatSpec& spec) {
  return bytes_of(spec.scale_type) * (spec.is_affine() ? 2 : 1);
}

int code_bytes_per_row(const FormatSpec& spec, int head_dim) {
  return head_dim * spec.facts->element_bits / 8;
}

int scale_bytes_per_row(const FormatSpec& spec, int head_dim) {
  return groups_per_row(spec, head_dim) * scale_bytes_per_group(spec);
}

int channel_bytes_per_block(const FormatSpec& spec, int head_dim) {
  return spec.is_dual() ? 2 * head_dim : 0;
}

double bits_per_value(const FormatSpec& spec, int head_dim, int block_size) {
  double bytes = code_bytes_per_row(spec, head_dim);
  if (spec.scale_source == ScaleSource::kComputed) bytes += scale_bytes_per_row(spec, head_dim);
  if (spec.scale_source == ScaleSource::kPageShared) {
    bytes += static_cast<double>(scale_bytes_per_row(spec, head_dim)) / block_size;
  }
  bytes += static_cast<double>(channel_bytes_per_block(spec, head_dim)) / block_size;
  return 8 * bytes / head_dim;
}

Result<float> tensor_scale_for_kv(float amax) {
  return tensor_scale(amax, 448.0f);
}
Result<float> tensor_scale_for_weights(float amax) {
  return tensor_scale(amax, 6.0f * 448.0f);
}

Status check_tensor_scale(float scale) {
  constexpr float kLargest = kFloatMax / E4M3::kMax;
  if (scale > 0 && scale <= kLargest) return {};
  return invalid_argument("tensor scale is {}; expected a positive number, at most {}", scale,
                          kLargest);
}

Result<StoredScale> given_scale(ScaleType type, float step) {
  if (!(step > 0) || !is_finite(step)) {
    return invalid_argument("scale is {}; expected a positive finite number", step);
  }
  if (type != ScaleType::kE8M0) return round_scale(type, step);
  const uint32_t bits = std::bit_cast<uint32_t>(step);
  const StoredScale scale{step == E8M0::decode(0) ? 0 : bits >> 23};
  if (E8M0::decode(scale.bits) == step) return scale;
  return invalid_argument("scale is {}; an E8M0 scale is a power of two", step);
}

}  // namespace kvx::format

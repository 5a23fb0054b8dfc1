// Formats as the C ABI names them, and kvx_format_info.
#include "api/checks/format_spec.hpp"

#include <algorithm>
#include <cstring>

#include "api/call.hpp"
#include "api/guard.hpp"
#include "format/list.hpp"

namespace kvx::boundary {
namespace {

using format::FormatId;
using format::ScaleChoice;
using format::ScaleRule;
using format::ScaleSource;
using format::ScaleType;

// The ABI counts from 1, so that 0 means the default.
constexpr uint32_t number(FormatId id) {
  return static_cast<uint32_t>(id) + 1;
}
constexpr uint32_t number(ScaleSource source) {
  return static_cast<uint32_t>(source) + 1;
}
constexpr uint32_t number(ScaleChoice choice) {
  return static_cast<uint32_t>(choice) + 1;
}
// 0 means no scale in the library and the default in the ABI.
constexpr uint32_t number(ScaleType type) {
  return static_cast<uint32_t>(type);
}
constexpr uint32_t number(ScaleRule rule) {
  return static_cast<uint32_t>(rule);
}

#define KVX_CHECK_NUMBER(WORD, Format, NAME) \
  static_assert(number(format::Format::kFacts.id) == KVX_FORMAT_##NAME);
KVX_FORMAT_TABLE(KVX_CHECK_NUMBER, )
#undef KVX_CHECK_NUMBER
static_assert(number(ScaleType::kF32) == KVX_SCALE_TYPE_F32);
static_assert(number(ScaleType::kF16) == KVX_SCALE_TYPE_F16);
static_assert(number(ScaleType::kBF16) == KVX_SCALE_TYPE_BF16);
static_assert(number(ScaleType::kE8M0) == KVX_SCALE_TYPE_E8M0);
static_assert(number(ScaleType::kE4M3) == KVX_SCALE_TYPE_E4M3);
static_assert(number(ScaleRule::kAmax) == KVX_SCALE_RULE_AMAX);
static_assert(number(ScaleRule::kE8M0Ceil) == KVX_SCALE_RULE_E8M0_CEIL);
static_assert(number(ScaleRule::kE8M0Floor) == KVX_SCALE_RULE_E8M0_FLOOR);
static_assert(number(ScaleRule::kAffine) == KVX_SCALE_RULE_AFFINE);
static_assert(number(ScaleRule::kDual) == KVX_SCALE_RULE_DUAL);
static_assert(number(ScaleSource::kComputed) == KVX_SCALE_SOURCE_COMPUTED);
static_assert(number(ScaleSource::kGiven) == KVX_SCALE_SOURCE_GIVEN);
static_assert(number(ScaleSource::kPageShared) == KVX_SCALE_SOURCE_PAGE_SHARED);
static_assert(number(ScaleChoice::kAmax) == KVX_SCALE_CHOICE_AMAX);
static_assert(number(ScaleChoice::k4Over6) == KVX_SCALE_CHOICE_4OVER6);
static_assert(number(ScaleChoice::kSearch) == KVX_SCALE_CHOICE_SEARCH);

Status check_most(std::string_view name, const char* field, uint32_t value, uint32_t most) {
  if (value <= most) return {};
  return invalid_argument("{}.{} is {}; expected 0 to {}", name, field, value, most);
}

Result<format::SpecOptions> read_options(const kvx_format_spec_t& spec, std::string_view name) {
  KVX_RETURN_IF_ERROR(check_most(name, "scale_type", spec.scale_type, KVX_SCALE_TYPE_E4M3));
  KVX_RETURN_IF_ERROR(check_most(name, "scale_rule", spec.scale_rule, KVX_SCALE_RULE_DUAL));
  KVX_RETURN_IF_ERROR(
      check_most(name, "scale_source", spec.scale_source, KVX_SCALE_SOURCE_PAGE_SHARED));
  KVX_RETURN_IF_ERROR(check_most(name, "scale_choice", spec.scale_choice, KVX_SCALE_CHOICE_SEARCH));
  KVX_RETURN_IF_ERROR(check_most(name, "reserved", spec.reserved, 0));
  format::SpecOptions options;
  if (spec.group_size == KVX_GROUP_WHOLE_ROW) {
    options.group_size = format::kWholeRow;
  } else if (spec.group_size != 0) {
    KVX_RETURN_IF_ERROR(check_most(name, "group_size", spec.group_size, format::kMaxHeadDim));
    options.group_size = static_cast<int>(spec.group_size);
  }
  if (spec.scale_type != 0) options.scale_type = static_cast<ScaleType>(spec.scale_type);
  if (spec.scale_rule != 0) options.scale_rule = static_cast<ScaleRule>(spec.scale_rule);
  if (spec.scale_source != 0) {
    options.scale_source = static_cast<ScaleSource>(spec.scale_source - 1);
  }
  if (spec.scale_choice != 0) {
    options.scale_choice = static_cast<ScaleChoice>(spec.scale_choice - 1);
  }
  return options;
}

kvx_format_info_t describe(const format::FormatSpec& spec, int head_dim) {
  const format::Facts& facts = *spec.facts;
  const auto count = [](int n) { return static_cast<uint32_t>(n); };
  return {.size = sizeof(kvx_format_info_t),
          .head_dim_multiple = count(facts.head_dim_multiple),
          .name = facts.name.data(),
          .summary = facts.summary.data(),
          .group_size = spec.has_scale() ? count(format::group_length(spec, head_dim)) : 1,
          .groups_per_row = count(format::groups_per_row(spec, head_dim)),
          .code_bytes_per_row = count(format::code_bytes_per_row(spec, head_dim)),
          .scale_bytes_per_row = count(format::scale_bytes_per_row(spec, head_dim)),
          .scale_bytes_per_group = count(format::scale_bytes_per_group(spec)),
          .scale_type = number(spec.scale_type),
          .scale_rule = number(spec.scale_rule),
          .scale_source = number(spec.scale_source),
          .has_tensor_scale = facts.has_tensor_scale ? 1u : 0u,
          .reserved = 0};
}

Status format_info(const kvx_format_spec_t* spec, uint32_t head_dim, kvx_format_info_t* info) {
  KVX_ASSIGN_OR_RETURN(const format::FormatSpec format, read_format(spec, "spec"));
  KVX_RETURN_IF_ERROR(
      format::check_head_dim(format, static_cast<int>(std::min<uint32_t>(head_dim, INT32_MAX))));
  if (info == nullptr) return invalid_argument("info is null");
  if (info->size < 8) return invalid_argument("info.size is {}; expected at least 8", info->size);
  kvx_format_info_t answer = describe(format, static_cast<int>(head_dim));
  answer.size = std::min<uint32_t>(info->size, sizeof answer);
  memcpy(info, &answer, answer.size);
  return {};
}

}  // namespace

Result<format::FormatSpec> read_format(const kvx_format_spec_t* spec, std::string_view name) {
  KVX_ASSIGN_OR_RETURN(const kvx_format_spec_t args, read_struct(spec, name));
  if (args.format < 1 || args.format > format::kNumFormats) {
    return invalid_argument("{}.format is {}; expected 1 to {}", name, args.format,
                            format::kNumFormats);
  }
  KVX_ASSIGN_OR_RETURN(const format::SpecOptions options, read_options(args, name));
  return format::make_spec(static_cast<FormatId>(args.format - 1), options);
}

kvx_format_spec_t spec_of(const format::FormatSpec& spec) {
  return {.size = sizeof(kvx_format_spec_t),
          .format = number(spec.facts->id),
          .group_size = spec.group_size == format::kWholeRow
                            ? KVX_GROUP_WHOLE_ROW
                            : static_cast<uint32_t>(spec.has_scale() ? spec.group_size : 0),
          .scale_type = number(spec.scale_type),
          .scale_rule = number(spec.scale_rule),
          .scale_source = spec.has_scale() ? number(spec.scale_source) : 0,
          .scale_choice = spec.has_scale() ? number(spec.scale_choice) : 0,
          .reserved = 0};
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_format_info(const kvx_format_spec_t* spec, uint32_t head_dim,
                                        kvx_format_info_t* info) {
  return kvx::boundary::run_call([&] { return kvx::boundary::format_info(spec, head_dim, info); });
}

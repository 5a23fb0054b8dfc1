// Converts quant_policy to a KvCacheMode, and a mode to its format.
#include "engines/turbomind/policy.hpp"

namespace kvx::engines::turbomind {
namespace {

constexpr int kFirstSupportedSm = 80;
constexpr int kFirstSmWithFp4 = 100;
constexpr int kLastPlausibleSm = 499;  // a larger number is __CUDA_ARCH__, major * 100

constexpr bool has(int quant_policy, QuantPolicy bit) {
  return (quant_policy & static_cast<int>(bit)) != 0;
}

Status check_policy(int quant_policy) {
  constexpr int kKnown = static_cast<int>(QuantPolicy::kCacheKVInt4) |
                         static_cast<int>(QuantPolicy::kCacheKVInt8) |
                         static_cast<int>(QuantPolicy::kCacheKVFp4);
  const int unknown = quant_policy & ~kKnown;
  if (unknown == 0) return {};
  return invalid_argument(
      "quant_policy is {}; expected a mask of 4 (int4), 8 (int8) and 16 (fp4), or 0; the bits "
      "{:#x} "
      "are reserved or unknown",
      quant_policy, static_cast<unsigned>(unknown));
}

Status check_sm(int sm_version) {
  const bool is_gpu = sm_version >= 10 && sm_version <= kLastPlausibleSm;
  if (sm_version == kCpu || is_gpu) return {};
  return invalid_argument("sm_version is {}; expected major * 10 + minor (90), or 0 for the CPU",
                          sm_version);
}

Result<KvCacheMode> automatic_fp4_mode(int sm_version) {
  const bool is_ada_or_hopper = sm_version == 89 || sm_version / 10 == 9;
  if (sm_version == kCpu || is_ada_or_hopper) return KvCacheMode::kFp4Mx;
  if (sm_version >= kFirstSmWithFp4) return KvCacheMode::kFp4Nv;
  return unsupported(
      "sm_version is {}; fp4_format auto needs 89, 90 or newer, or the CPU; mx and nv can be named "
      "from {} on",
      sm_version, kFirstSupportedSm);
}

Result<KvCacheMode> fp4_mode(int sm_version, Fp4Format format) {
  if (format == Fp4Format::kAuto) return automatic_fp4_mode(sm_version);
  if (sm_version != kCpu && sm_version < kFirstSupportedSm) {
    return unsupported("sm_version is {}; fp4 needs {} or newer, or the CPU", sm_version,
                       kFirstSupportedSm);
  }
  return format == Fp4Format::kMx ? KvCacheMode::kFp4Mx : KvCacheMode::kFp4Nv;
}

KvCacheMode integer_mode(int quant_policy) {
  if (has(quant_policy, QuantPolicy::kCacheKVInt8)) return KvCacheMode::kInt8;
  if (has(quant_policy, QuantPolicy::kCacheKVInt4)) return KvCacheMode::kInt4;
  return KvCacheMode::kNone;
}

constexpr format::FormatId format_id_of(KvCacheMode mode, DType dtype) {
  switch (mode) {
    case KvCacheMode::kNone:
      return dtype == DType::kF16 ? format::FormatId::kF16 : format::FormatId::kBF16;
    case KvCacheMode::kInt4:
      return format::FormatId::kInt4Affine;
    case KvCacheMode::kInt8:
      return format::FormatId::kInt8Affine;
    case KvCacheMode::kFp4Mx:
      return format::FormatId::kMxfp4G16;
    case KvCacheMode::kFp4Nv:
      return format::FormatId::kNvfp4;
  }
  return format::FormatId::kF32;  // not reached: the switch names every mode
}

}  // namespace

std::string_view name_of(KvCacheMode mode) {
  constexpr std::string_view kNames[] = {"none", "int4", "int8", "fp4 mx", "fp4 nv"};
  return kNames[static_cast<int>(mode)];
}

Result<KvCacheMode> get_kv_cache_mode(int quant_policy, int sm_version,
                                      const KvCacheModeOptions& options) {
  KVX_RETURN_IF_ERROR(check_policy(quant_policy));
  if (!has(quant_policy, QuantPolicy::kCacheKVFp4)) return integer_mode(quant_policy);
  KVX_RETURN_IF_ERROR(check_sm(sm_version));
  Result<KvCacheMode> mode = fp4_mode(sm_version, options.fp4_format);
  if (!mode.ok() && options.on_unsupported == OnUnsupported::kFallBack) {
    return integer_mode(quant_policy);
  }
  return mode;
}

Result<format::FormatSpec> format_of(KvCacheMode mode, DType dtype) {
  if (dtype != DType::kF16 && dtype != DType::kBF16) {
    return invalid_argument("dtype is {}; TurboMind computes in f16 or bf16", name_of(dtype));
  }
  format::SpecOptions options;
  if (mode == KvCacheMode::kInt4 || mode == KvCacheMode::kInt8) {
    options.scale_type = dtype == DType::kF16 ? format::ScaleType::kF16 : format::ScaleType::kBF16;
  }
  return format::make_spec(format_id_of(mode, dtype), options);
}

int q_bits(KvCacheMode mode, DType dtype) {
  return format_of(mode, dtype).value().facts->element_bits;
}

int t_bits(KvCacheMode mode, DType dtype) {
  const bool has_params = mode == KvCacheMode::kInt4 || mode == KvCacheMode::kInt8;
  return has_params ? 8 * bytes_of(dtype) : 0;
}

Result<std::string> recipe_of(KvCacheMode mode, DType dtype) {
  KVX_ASSIGN_OR_RETURN(const format::FormatSpec spec, format_of(mode, dtype));
  std::string options = is_fp4(mode) ? "search," : "";
  if (spec.is_affine()) options = fmt::format("scale={},", format::name_of(spec.scale_type));
  return fmt::format("{}:{}order=turbomind", spec.facts->name, options);
}

}  // namespace kvx::engines::turbomind

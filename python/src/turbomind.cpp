// TurboMind's policy and block sizes for Python; kvx.turbomind is built on it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "engines/turbomind/layout.hpp"
#include "python/src/bindings.hpp"
#include "python/src/errors.hpp"

namespace kvx::python {
namespace {

namespace nb = nanobind;
namespace turbomind = engines::turbomind;
using turbomind::KvCacheMode;

DType compute_type(std::string_view name) {
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  throw CoreError(invalid_argument("dtype is '{}'; expected float16 or bfloat16", name));
}

turbomind::Fp4Format fp4_format(std::string_view name) {
  if (name == "auto") return turbomind::Fp4Format::kAuto;
  if (name == "mx") return turbomind::Fp4Format::kMx;
  if (name == "nv") return turbomind::Fp4Format::kNv;
  throw CoreError(invalid_argument("fp4_format is '{}'; expected auto, mx or nv", name));
}

KvCacheMode get_kv_cache_mode(int quant_policy, int sm_version, std::string_view format,
                              bool fall_back) {
  const turbomind::KvCacheModeOptions options{
      fp4_format(format),
      fall_back ? turbomind::OnUnsupported::kFallBack : turbomind::OnUnsupported::kError};
  return value_of(turbomind::get_kv_cache_mode(quant_policy, sm_version, options));
}

nb::dict block_sizes(KvCacheMode mode, std::string_view dtype, int num_layers, int num_kv_heads,
                     int head_dim, int block_len) {
  const auto layout = value_of(turbomind::make_pool_layout(
      {mode, compute_type(dtype), num_layers, num_kv_heads, head_dim, block_len}));
  nb::dict dict;
  dict["q_bits"] = turbomind::q_bits(mode, compute_type(dtype));
  dict["t_bits"] = turbomind::t_bits(mode, compute_type(dtype));
  dict["block_bytes"] = layout.block_bytes;
  dict["scale_block_bytes"] = layout.scale_block_bytes;
  return dict;
}

}  // namespace

void bind_turbomind(nb::module_& module) {
  nb::enum_<KvCacheMode>(module, "KvCacheMode", "What a TurboMind cache stores.")
      .value("kNone", KvCacheMode::kNone)
      .value("kInt4", KvCacheMode::kInt4)
      .value("kInt8", KvCacheMode::kInt8)
      .value("kFp4Mx", KvCacheMode::kFp4Mx)
      .value("kFp4Nv", KvCacheMode::kFp4Nv);
  module.def("get_kv_cache_mode", &get_kv_cache_mode, nb::arg("quant_policy"),
             nb::arg("sm_version"), nb::arg("fp4_format"), nb::arg("fall_back"));
  module.def("turbomind_block_sizes", &block_sizes, nb::arg("mode"), nb::arg("dtype"),
             nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("block_len"));
}

}  // namespace kvx::python

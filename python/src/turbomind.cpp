// TurboMind's policy and block sizes for Python; kvx.turbomind is built on it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "engines/turbomind/block_pool.hpp"
#include "engines/turbomind/layout.hpp"
#include "python/src/arguments.hpp"
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

// Where K's or V's rows of a layer begin, and what is from token to token and head to head.
nb::dict place_of(const turbomind::PoolLayout& layout, int layer, turbomind::KvSide side) {
  const turbomind::Geometry& geometry = layout.geometry;
  const bool has_two_tokens = geometry.block_len > 1;
  const bool has_two_heads = geometry.num_kv_heads > 1;
  // Distances of offsets; a stride that nothing uses is 0.
  const auto strides = [&](auto offset_of) {
    const int64_t first = offset_of(0, 0);
    return std::pair(has_two_tokens ? offset_of(0, 1) - first : 0,
                     has_two_heads ? offset_of(1, 0) - first : 0);
  };
  nb::dict place;
  const auto codes = [&](int head, int token) {
    return layout.data_offset(layer, head, side, token);
  };
  place["codes"] = codes(0, 0);
  place["code_strides"] = nb::make_tuple(strides(codes).first, strides(codes).second);
  place["scales"] = 0;
  place["scale_strides"] = nb::none();
  if (layout.token_param_bytes > 0) {
    const auto params = [&](int head, int token) {
      return layout.param_offset(layer, head, side, token);
    };
    place["scales"] = params(0, 0);
    place["scale_strides"] =
        nb::make_tuple(strides(params).first, strides(params).second, layout.token_param_bytes);
  } else if (layout.token_scale_bytes > 0) {
    const auto scales = [&](int head, int token) {
      return layout.scale_offset(layer, head, side, token);
    };
    place["scales"] = scales(0, 0);
    place["scale_strides"] = nb::make_tuple(strides(scales).first, strides(scales).second, 1);
  }
  return place;
}

nb::dict layer_places(KvCacheMode mode, std::string_view dtype, int num_layers, int num_kv_heads,
                      int head_dim, int block_len, int layer) {
  const auto layout = value_of(turbomind::make_pool_layout(
      {mode, compute_type(dtype), num_layers, num_kv_heads, head_dim, block_len}));
  check_range("layer", layer, 0, num_layers - 1);
  nb::dict dict;
  const format::FormatSpec& spec = layout.spec;
  dict["recipe"] = spec.is_affine() ? fmt::format("{}:scale={}", spec.facts->name,
                                                  format::name_of(spec.scale_type))
                                    : std::string(spec.facts->name);
  dict["block_bytes"] = layout.block_bytes;
  dict["scale_block_bytes"] = layout.scale_block_bytes;
  dict["k"] = place_of(layout, layer, turbomind::KvSide::kKey);
  dict["v"] = place_of(layout, layer, turbomind::KvSide::kValue);
  return dict;
}

std::string recipe_of(KvCacheMode mode, std::string_view dtype) {
  return value_of(turbomind::recipe_of(mode, compute_type(dtype)));
}

// Both pools in memory of the library's own, on the host or on a GPU.
class TurbomindPool {
 public:
  // device: a GPU's index; -1: the host
  TurbomindPool(KvCacheMode mode, std::string_view dtype, int num_layers, int num_kv_heads,
                int head_dim, int block_len, int64_t num_blocks, int64_t budget_bytes, int device)
      : layout_(value_of(turbomind::make_pool_layout(
            {mode, compute_type(dtype), num_layers, num_kv_heads, head_dim, block_len}))),
        device_memory_(device < 0 ? nullptr : value_of(cache::cuda_memory(device))),
        pool_(value_of(
            turbomind::DataAndScalePool::create(device < 0 ? cache::host_memory() : *device_memory_,
                                                layout_, blocks_of(num_blocks, budget_bytes)))) {}

  std::vector<int32_t> allocate(int count) {
    if (count < 0) throw CoreError(invalid_argument("count is {}; expected 0 or more", count));
    std::vector<int32_t> ids(static_cast<size_t>(count));
    throw_if_error(pool_.blocks().allocate(0, ids));
    return ids;
  }
  void release(const std::vector<int32_t>& ids) {
    throw_if_error(pool_.free_data_and_scale_blocks(ids, ids));
  }
  nb::dict facts() const {
    const turbomind::Pools pools = pool_.pools();
    nb::dict dict;
    dict["num_blocks"] = pools.num_blocks;
    dict["num_free"] = pool_.blocks().num_free(0);
    dict["data"] = reinterpret_cast<uintptr_t>(pools.data);
    dict["scales"] = reinterpret_cast<uintptr_t>(pools.scales);
    dict["block_bytes"] = layout_.block_bytes;
    dict["scale_block_bytes"] = layout_.scale_block_bytes;
    return dict;
  }

 private:
  int64_t blocks_of(int64_t num_blocks, int64_t budget_bytes) const {
    if ((num_blocks != 0) == (budget_bytes != 0) || num_blocks < 0 || budget_bytes < 0) {
      throw CoreError(
          invalid_argument("num_blocks is {} and budget_bytes {}; expected one of the two",
                           num_blocks, budget_bytes));
    }
    if (num_blocks != 0) return num_blocks;
    const int64_t count = turbomind::blocks_within_budget(layout_, budget_bytes);
    if (count >= 1) return count;
    throw CoreError(out_of_range("budget_bytes is {}; a block takes {} with its scales",
                                 budget_bytes, layout_.bytes_per_block()));
  }

  turbomind::PoolLayout layout_;
  std::unique_ptr<cache::Memory> device_memory_;  // outlives the pool
  turbomind::DataAndScalePool pool_;
};

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
  module.def("turbomind_layer_places", &layer_places, nb::arg("mode"), nb::arg("dtype"),
             nb::arg("num_layers"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
             nb::arg("block_len"), nb::arg("layer"));
  nb::class_<TurbomindPool>(module, "TurbomindPool", "Both pools; kvx.engines.turbomind.Pool.")
      .def(nb::init<KvCacheMode, std::string_view, int, int, int, int, int64_t, int64_t, int>(),
           nb::arg("mode"), nb::arg("dtype"), nb::arg("num_layers"), nb::arg("num_kv_heads"),
           nb::arg("head_dim"), nb::arg("block_len"), nb::arg("num_blocks"),
           nb::arg("budget_bytes"), nb::arg("device"))
      .def("allocate", &TurbomindPool::allocate, nb::arg("count"))
      .def("release", &TurbomindPool::release, nb::arg("ids"))
      .def("facts", &TurbomindPool::facts);
  module.def("turbomind_recipe", &recipe_of, nb::arg("mode"), nb::arg("dtype"));
}

}  // namespace kvx::python

// TurboMind's pools in an engine's memory: modes, sizes and descriptions of layers.
#include "api/engines/turbomind.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "api/call.hpp"
#include "api/checks/format_spec.hpp"
#include "api/checks/out_structs.hpp"
#include "api/guard.hpp"

namespace kvx::boundary {
namespace {

using engines::turbomind::KvCacheMode;

constexpr uint32_t kNumModes = 5;
static_assert(static_cast<uint32_t>(KvCacheMode::kInt4) == KVX_TURBOMIND_MODE_INT4);
static_assert(static_cast<uint32_t>(KvCacheMode::kInt8) == KVX_TURBOMIND_MODE_INT8);
static_assert(static_cast<uint32_t>(KvCacheMode::kFp4Mx) == KVX_TURBOMIND_MODE_FP4_MX);
static_assert(static_cast<uint32_t>(KvCacheMode::kFp4Nv) == KVX_TURBOMIND_MODE_FP4_NV);

Result<DType> compute_type(uint32_t dtype) {
  if (dtype == KVX_DTYPE_F16) return DType::kF16;
  if (dtype == KVX_DTYPE_BF16) return DType::kBF16;
  return invalid_argument("pools.dtype is {}; expected KVX_DTYPE_F16 1 or BF16 2", dtype);
}

Result<int> count_of(uint32_t value, std::string_view field) {
  constexpr uint32_t kMost = 1 << 30;
  if (value >= 1 && value <= kMost) return static_cast<int>(value);
  return invalid_argument("pools.{} is {}; expected 1 to {}", field, value, kMost);
}

Status check_scale_choice(const kvx_turbomind_pools_t& args, KvCacheMode mode) {
  if (args.scale_choice > KVX_SCALE_CHOICE_SEARCH) {
    return invalid_argument("pools.scale_choice is {}; expected 0 to {}", args.scale_choice,
                            static_cast<int>(KVX_SCALE_CHOICE_SEARCH));
  }
  if (args.scale_choice <= KVX_SCALE_CHOICE_AMAX || engines::turbomind::is_fp4(mode)) return {};
  return invalid_argument("pools.scale_choice is {}; only fp4 modes choose scales, the mode is {}",
                          args.scale_choice, engines::turbomind::name_of(mode));
}

// The formats of all modes, for as long as the library lives.
const kvx_format_spec_t* spec_of_mode(KvCacheMode mode, DType dtype, uint32_t scale_choice) {
  constexpr int kNumChoices = KVX_SCALE_CHOICE_SEARCH + 1;
  using Specs = std::array<kvx_format_spec_t, size_t{kNumModes} * 2 * kNumChoices>;
  const auto index = [](KvCacheMode of_mode, bool is_bf16, uint32_t choice) {
    return (static_cast<size_t>(of_mode) * 2 + (is_bf16 ? 1 : 0)) * kNumChoices + choice;
  };
  static const Specs kSpecs = [&index] {
    Specs specs{};
    for (uint32_t m = 0; m < kNumModes; ++m) {
      for (const DType type : {DType::kF16, DType::kBF16}) {
        const auto of_mode = static_cast<KvCacheMode>(m);
        for (uint32_t choice = 0; choice < kNumChoices; ++choice) {
          kvx_format_spec_t& spec = specs[index(of_mode, type == DType::kBF16, choice)];
          spec = spec_of(engines::turbomind::format_of(of_mode, type).value());
          if (choice != KVX_SCALE_CHOICE_DEFAULT) spec.scale_choice = choice;
        }
      }
    }
    return specs;
  }();
  return &kSpecs[index(mode, dtype == DType::kBF16, scale_choice)];
}

Status mode(int32_t quant_policy, uint32_t sm_version, uint32_t fp4_format, uint32_t may_fall_back,
            uint32_t* result) {
  using engines::turbomind::Fp4Format;
  using engines::turbomind::OnUnsupported;
  if (result == nullptr) return invalid_argument("mode is null");
  if (fp4_format > KVX_TURBOMIND_FP4_NV) {
    return invalid_argument("fp4_format is {}; expected 0 to {}", fp4_format,
                            static_cast<int>(KVX_TURBOMIND_FP4_NV));
  }
  const int sm = static_cast<int>(std::min<uint32_t>(sm_version, INT32_MAX));
  KVX_ASSIGN_OR_RETURN(const KvCacheMode found, engines::turbomind::get_kv_cache_mode(
                                                    quant_policy, sm,
                                                    {static_cast<Fp4Format>(fp4_format),
                                                     may_fall_back != 0 ? OnUnsupported::kFallBack
                                                                        : OnUnsupported::kError}));
  *result = static_cast<uint32_t>(found);
  return {};
}

Status block_sizes(const kvx_turbomind_pools_t* caller, kvx_turbomind_sizes_t* sizes) {
  KVX_ASSIGN_OR_RETURN(const kvx_turbomind_pools_t args, read_struct(caller, "pools"));
  KVX_ASSIGN_OR_RETURN(const engines::turbomind::PoolLayout layout, read_pool_layout(args));
  const engines::turbomind::Geometry& geometry = layout.geometry;
  kvx_turbomind_sizes_t answer{};
  answer.q_bits = static_cast<uint32_t>(engines::turbomind::q_bits(geometry.mode, geometry.dtype));
  answer.t_bits = static_cast<uint32_t>(engines::turbomind::t_bits(geometry.mode, geometry.dtype));
  answer.block_bytes = static_cast<uint64_t>(layout.block_bytes);
  answer.scale_block_bytes = static_cast<uint64_t>(layout.scale_block_bytes);
  return write_struct(answer, sizes, "sizes");
}

Status layer(const kvx_turbomind_pools_t* caller, uint32_t index, kvx_side_t* k, kvx_side_t* v) {
  KVX_ASSIGN_OR_RETURN(const kvx_turbomind_pools_t args, read_struct(caller, "pools"));
  KVX_ASSIGN_OR_RETURN(const engines::turbomind::PoolLayout layout, read_pool_layout(args));
  KVX_ASSIGN_OR_RETURN(const engines::turbomind::Pools pools, read_pools(args, layout));
  KVX_RETURN_IF_ERROR(check_side_room(k, "k"));
  KVX_RETURN_IF_ERROR(check_side_room(v, "v"));
  KVX_ASSIGN_OR_RETURN(const engines::turbomind::LayerBlocks blocks,
                       engines::turbomind::layer_blocks(
                           layout, pools, static_cast<int>(std::min<uint32_t>(index, INT32_MAX)),
                           {args.global_k_scales, args.global_v_scales}));
  const kvx_format_spec_t* spec =
      spec_of_mode(layout.geometry.mode, layout.geometry.dtype, args.scale_choice);
  const ops::LayerView view = blocks.view();
  const uint32_t flags = args.is_scattered != 0 ? uint32_t{KVX_SIDE_SCATTERED_BLOCKS} : 0u;
  fill_side(side_of(view.runs.front().k, spec, flags), k);
  fill_side(side_of(view.runs.front().v, spec, flags), v);
  return {};
}

}  // namespace

Result<engines::turbomind::PoolLayout> read_pool_layout(const kvx_turbomind_pools_t& args) {
  if (args.mode >= kNumModes) {
    return invalid_argument("pools.mode is {}; expected 0 to {}", args.mode, kNumModes - 1);
  }
  if (args.is_scattered > 1 || args.reserved != 0) {
    return invalid_argument("pools.is_scattered is {} and reserved {}; expected 0 or 1, and 0",
                            args.is_scattered, args.reserved);
  }
  engines::turbomind::Geometry geometry;
  geometry.mode = static_cast<KvCacheMode>(args.mode);
  KVX_RETURN_IF_ERROR(check_scale_choice(args, geometry.mode));
  KVX_ASSIGN_OR_RETURN(geometry.dtype, compute_type(args.dtype));
  KVX_ASSIGN_OR_RETURN(geometry.num_layers, count_of(args.num_layers, "num_layers"));
  KVX_ASSIGN_OR_RETURN(geometry.num_kv_heads, count_of(args.num_kv_heads, "num_kv_heads"));
  KVX_ASSIGN_OR_RETURN(geometry.head_dim, count_of(args.head_dim, "head_dim"));
  KVX_ASSIGN_OR_RETURN(geometry.block_len, count_of(args.block_len, "block_len"));
  return engines::turbomind::make_pool_layout(geometry);
}

Result<engines::turbomind::Pools> read_pools(const kvx_turbomind_pools_t& args,
                                             const engines::turbomind::PoolLayout& layout) {
  engines::turbomind::Pools pools;
  pools.data = static_cast<uint8_t*>(args.data);
  pools.data_stride = args.data_stride != 0 ? args.data_stride : layout.block_bytes;
  pools.scales = static_cast<uint8_t*>(args.scales);
  pools.scale_stride = args.scale_stride != 0 ? args.scale_stride : layout.scale_block_bytes;
  pools.num_blocks = args.num_blocks;
  pools.is_scattered = args.is_scattered != 0;
  if (layout.scale_block_bytes == 0 && args.scales != nullptr) {
    return invalid_argument("pools.scales is set; {} has no scale pool",
                            engines::turbomind::name_of(layout.geometry.mode));
  }
  return pools;
}

}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_turbomind_mode(int32_t quant_policy, uint32_t sm_version,
                                           uint32_t fp4_format, uint32_t may_fall_back,
                                           uint32_t* mode) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::mode(quant_policy, sm_version, fp4_format, may_fall_back, mode);
  });
}

extern "C" kvx_status_t kvx_turbomind_block_sizes(const kvx_turbomind_pools_t* pools,
                                                  kvx_turbomind_sizes_t* sizes) {
  return kvx::boundary::run_call([&] { return kvx::boundary::block_sizes(pools, sizes); });
}

extern "C" kvx_status_t kvx_turbomind_layer(const kvx_turbomind_pools_t* pools, uint32_t layer,
                                            kvx_side_t* k, kvx_side_t* v) {
  return kvx::boundary::run_call([&] { return kvx::boundary::layer(pools, layer, k, v); });
}

// Layers of TurboMind's pools (LMDeploy 0.16), in which blocks lie anywhere.
//
//   auto pools = kvx::api::turbomind::Pools::of_pointers(geometry, block_ptrs, scale_block_ptrs);
//   auto ids = pools->block_ids(block_ptrs, scale_block_ptrs);     // for a block table
//   auto layer = pools->layer(3);                                  // for append, attend, gather
//
//   auto owned = kvx::api::turbomind::OwnedPools::create(geometry, {.budget_bytes = 1 << 30});
//   auto taken = owned->allocate(4);                               // in memory of kvx's own
#pragma once

#include <memory>
#include <type_traits>

#include "kvx/kvx.hpp"

namespace kvx::api::turbomind {

struct Geometry {
  kvx_turbomind_mode_t mode = KVX_TURBOMIND_MODE_NONE;
  kvx_dtype_t dtype = KVX_DTYPE_F16;  // the engine's compute type
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;  // of this rank
  uint32_t head_dim = 0;
  uint32_t block_len = 64;
};

// What LMDeploy's quant_policy means. sm_version: major * 10 + minor; 0: the CPU.
inline Result<kvx_turbomind_mode_t> mode_of(int quant_policy, uint32_t sm_version,
                                            kvx_turbomind_fp4_t fp4 = KVX_TURBOMIND_FP4_AUTO) {
  uint32_t mode = 0;
  const kvx_status_t status =
      kvx_turbomind_mode(quant_policy, sm_version, static_cast<uint32_t>(fp4), 0, &mode);
  return value_or_failure(status, [&] { return static_cast<kvx_turbomind_mode_t>(mode); });
}

class Pools {
 public:
  explicit Pools(const Geometry& geometry) : pools_(sized<kvx_turbomind_pools_t>()) {
    pools_.mode = static_cast<uint32_t>(geometry.mode);
    pools_.dtype = static_cast<uint32_t>(geometry.dtype);
    pools_.num_layers = geometry.num_layers;
    pools_.num_kv_heads = geometry.num_kv_heads;
    pools_.head_dim = geometry.head_dim;
    pools_.block_len = geometry.block_len;
  }
  // Pools in which every block of the tables has an id. scale_block_ptrs: empty without FP4.
  static Result<Pools> of_pointers(const Geometry& geometry, const std::vector<void*>& block_ptrs,
                                   const std::vector<void*>& scale_block_ptrs = {}) {
    Pools pools(geometry);
    const kvx_status_t status =
        kvx_turbomind_find_pools(&pools.pools_, block_ptrs.data(), table_of(scale_block_ptrs),
                                 static_cast<int64_t>(block_ptrs.size()));
    return value_or_failure(status, [&] { return pools; });
  }

  // Bytes of a block in both pools; a memory budget divides by their sum.
  Result<kvx_turbomind_sizes_t> block_sizes() const {
    auto sizes = sized<kvx_turbomind_sizes_t>();
    return value_or_failure(kvx_turbomind_block_sizes(&pools_, &sizes), [&] { return sizes; });
  }
  // Memory of one chunk: block b is data + b * block_bytes, and likewise scales (null without FP4).
  Pools& set_memory(void* data, void* scales, int64_t num_blocks) {
    pools_.data = data;
    pools_.scales = scales;
    pools_.num_blocks = num_blocks;
    return *this;
  }
  Result<std::vector<int32_t>> block_ids(const std::vector<void*>& block_ptrs,
                                         const std::vector<void*>& scale_block_ptrs = {}) const {
    std::vector<int32_t> ids(block_ptrs.size());
    const kvx_status_t status =
        kvx_turbomind_block_ids(&pools_, block_ptrs.data(), table_of(scale_block_ptrs),
                                static_cast<int64_t>(block_ptrs.size()), ids.data());
    return value_or_failure(status, [&] { return ids; });
  }
  // The same on a GPU: both tables and ids, [num_block_ptrs], lie in its memory, and an entry that
  // begins no block becomes -1. counters: kvx_layer_t's, or null.
  Status device_block_ids(const void* const* block_ptrs, const void* const* scale_block_ptrs,
                          int64_t num_block_ptrs, int32_t* ids, uint64_t* counters = nullptr,
                          void* stream = nullptr) const {
    return to_status(kvx_turbomind_device_block_ids(&pools_, block_ptrs, scale_block_ptrs,
                                                    num_block_ptrs, ids, counters, stream));
  }
  Result<Layer> layer(uint32_t index) const {
    auto k = sized<kvx_side_t>();
    auto v = sized<kvx_side_t>();
    return value_or_failure(kvx_turbomind_layer(&pools_, index, &k, &v), [&] {
      return Layer(LayerShape{pools_.num_blocks, pools_.block_len, pools_.num_kv_heads}, side_of(k),
                   side_of(v));
    });
  }
  kvx_turbomind_pools_t& get() { return pools_; }
  const kvx_turbomind_pools_t& get() const { return pools_; }

 private:
  static const void* const* table_of(const std::vector<void*>& pointers) {
    return pointers.empty() ? nullptr : pointers.data();
  }
  static Side side_of(const kvx_side_t& side) {
    Side result;
    result.format.format = static_cast<kvx_format_t>(side.spec->format);
    result.format.group_size = side.spec->group_size;
    result.format.scale_type = static_cast<kvx_scale_type_t>(side.spec->scale_type);
    result.format.scale_rule = static_cast<kvx_scale_rule_t>(side.spec->scale_rule);
    result.format.scale_source = static_cast<kvx_scale_source_t>(side.spec->scale_source);
    result.format.scale_choice = static_cast<kvx_scale_choice_t>(side.spec->scale_choice);
    result.head_dim = side.head_dim;
    result.codes = side.codes;
    result.code_block_stride = side.code_block_stride;
    result.code_token_stride = side.code_token_stride;
    result.code_head_stride = side.code_head_stride;
    result.scales = side.scales;
    result.scale_block_stride = side.scale_block_stride;
    result.scale_token_stride = side.scale_token_stride;
    result.scale_head_stride = side.scale_head_stride;
    result.scale_group_stride = side.scale_group_stride;
    result.tensor_scales = side.tensor_scales;
    result.flags = side.flags;
    return result;
  }

  kvx_turbomind_pools_t pools_;
};

// How many blocks there are: num_blocks, or as many as a budget of both pools holds.
struct PoolSize {
  int64_t num_blocks = 0;
  uint64_t budget_bytes = 0;
  uint32_t memory = KVX_MEMORY_HOST;  // or KVX_MEMORY_DEVICE
  uint32_t device = 0;                // a GPU's index
};

// As the engine's kernels take them; scale_block_ptrs is empty without FP4.
struct PointerTable {
  std::vector<const void*> block_ptrs;
  std::vector<const void*> scale_block_ptrs;
};

// Both pools in memory of kvx's own, which ends with this object. It belongs to one thread at a
// time.
class OwnedPools {
 public:
  static Result<OwnedPools> create(const Geometry& geometry, const PoolSize& size) {
    Pools pools(geometry);
    pools.get().num_blocks = size.num_blocks;
    auto config = sized<kvx_turbomind_pool_config_t>();
    config.memory = size.memory;
    config.device = size.device;
    config.pools = &pools.get();
    config.budget_bytes = size.budget_bytes;
    kvx_turbomind_pool_t pool = nullptr;
    kvx_status_t status = kvx_turbomind_pool_create(&config, &pool);
    OwnedPools owned(pool, std::move(pools));
    if (status == KVX_STATUS_OK) status = kvx_turbomind_pool_describe(pool, &owned.pools_.get());
    return value_or_failure(status, [&] { return std::move(owned); });
  }

  // The memory of both, whose layers the verbs take while this object lives.
  const Pools& pools() const { return pools_; }
  Result<kvx_turbomind_pool_facts_t> facts() const {
    auto facts = sized<kvx_turbomind_pool_facts_t>();
    return value_or_failure(kvx_turbomind_pool_facts(pool_.get(), &facts), [&] { return facts; });
  }
  // Ids of so many free blocks, or OUT_OF_RANGE.
  Result<std::vector<int32_t>> allocate(int64_t num_blocks) {
    std::vector<int32_t> ids(num_blocks > 0 ? static_cast<size_t>(num_blocks) : 0);
    const kvx_status_t status = kvx_turbomind_pool_allocate(pool_.get(), num_blocks, ids.data());
    return value_or_failure(status, [&] { return ids; });
  }
  // Takes all of them back, or none.
  Status release(const std::vector<int32_t>& ids) {
    return to_status(
        kvx_turbomind_pool_release(pool_.get(), static_cast<int64_t>(ids.size()), ids.data()));
  }
  Result<PointerTable> pointers(const std::vector<int32_t>& ids) const {
    PointerTable table{std::vector<const void*>(ids.size()), {}};
    const bool has_scales = pools_.get().scales != nullptr;
    if (has_scales) table.scale_block_ptrs.resize(ids.size());
    const kvx_status_t status = kvx_turbomind_pool_pointers(
        pool_.get(), static_cast<int64_t>(ids.size()), ids.data(), table.block_ptrs.data(),
        has_scales ? table.scale_block_ptrs.data() : nullptr);
    return value_or_failure(status, [&] { return table; });
  }

 private:
  struct Free {
    void operator()(kvx_turbomind_pool_t pool) const { kvx_turbomind_pool_free(pool); }
  };
  OwnedPools(kvx_turbomind_pool_t pool, Pools pools) : pool_(pool), pools_(std::move(pools)) {}

  std::unique_ptr<std::remove_pointer_t<kvx_turbomind_pool_t>, Free> pool_;
  Pools pools_;
};

}  // namespace kvx::api::turbomind

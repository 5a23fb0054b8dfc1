// kvx_turbomind_pool_*: TurboMind's data and scale pools in memory of the library's own.
#include <algorithm>
#include <memory>
#include <optional>

#include "api/call.hpp"
#include "api/checks/out_structs.hpp"
#include "api/engines/turbomind.hpp"
#include "api/guard.hpp"
#include "api/handle_map.hpp"
#include "engines/turbomind/block_pool.hpp"

namespace kvx::boundary {
namespace {

namespace turbomind = engines::turbomind;

// The memory outlives the pool that lies in it.
struct OwnedPool {
  std::unique_ptr<cache::Memory> device_memory;  // null on the host
  kvx_turbomind_pools_t description;
  std::optional<turbomind::DataAndScalePool> pool;
};

using Handles = HandleMap<kvx_turbomind_pool_t, OwnedPool>;

// Never destroyed: threads may still call when static objects are.
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

Result<OwnedPool*> find(kvx_turbomind_pool_t handle) {
  if (handle == nullptr) return invalid_argument("pool is null");
  OwnedPool* const found = handles().find(handle);
  if (found == nullptr) return invalid_argument("pool is not a handle, or was freed");
  return found;
}

Result<int64_t> count_of(const kvx_turbomind_pool_config_t& config,
                         const kvx_turbomind_pools_t& pools, const turbomind::PoolLayout& layout) {
  if ((pools.num_blocks != 0) == (config.budget_bytes != 0)) {
    return invalid_argument(
        "config.pools.num_blocks is {} and budget_bytes {}; expected one of the two",
        pools.num_blocks, config.budget_bytes);
  }
  if (pools.num_blocks < 0 || pools.num_blocks > INT32_MAX) {
    return invalid_argument("config.pools.num_blocks is {}; expected 1 to {}", pools.num_blocks,
                            INT32_MAX);
  }
  if (pools.num_blocks != 0) return pools.num_blocks;
  const auto budget = static_cast<int64_t>(std::min<uint64_t>(config.budget_bytes, INT64_MAX));
  const int64_t count = turbomind::blocks_within_budget(layout, budget);
  if (count >= 1) return std::min<int64_t>(count, INT32_MAX);
  return out_of_range("config.budget_bytes is {}; a block takes {} with its scales",
                      config.budget_bytes, layout.bytes_per_block());
}

Result<cache::Memory*> memory_of(const kvx_turbomind_pool_config_t& config, OwnedPool& owner) {
  const bool is_host = config.memory == KVX_MEMORY_UNKNOWN || config.memory == KVX_MEMORY_HOST;
  if (!is_host && config.memory != KVX_MEMORY_DEVICE) {
    return invalid_argument("config.memory is {}; expected 0, KVX_MEMORY_HOST or DEVICE",
                            config.memory);
  }
  if (config.reserved != 0 || (is_host && config.device != 0)) {
    return invalid_argument("config.device is {} and reserved {}; expected 0 on the host, and 0",
                            config.device, config.reserved);
  }
  if (is_host) return &cache::host_memory();
  const auto device = static_cast<int>(std::min<uint32_t>(config.device, INT32_MAX));
  KVX_ASSIGN_OR_RETURN(owner.device_memory, cache::cuda_memory(device));
  return owner.device_memory.get();
}

Status create(const kvx_turbomind_pool_config_t* caller, kvx_turbomind_pool_t* result) {
  if (result == nullptr) return invalid_argument("pool is null");
  KVX_ASSIGN_OR_RETURN(const kvx_turbomind_pool_config_t config, read_struct(caller, "config"));
  auto owner = std::make_unique<OwnedPool>();
  kvx_turbomind_pools_t& pools = owner->description;
  KVX_ASSIGN_OR_RETURN(pools, read_struct(config.pools, "config.pools"));
  if (pools.data != nullptr || pools.scales != nullptr || pools.data_stride != 0 ||
      pools.scale_stride != 0 || pools.is_scattered != 0) {
    return invalid_argument(
        "config.pools has data, scales, strides or is_scattered; expected none, the pool has "
        "memory of its own");
  }
  KVX_ASSIGN_OR_RETURN(const turbomind::PoolLayout layout, read_pool_layout(pools));
  KVX_ASSIGN_OR_RETURN(const int64_t num_blocks, count_of(config, pools, layout));
  KVX_ASSIGN_OR_RETURN(cache::Memory * memory, memory_of(config, *owner));
  KVX_ASSIGN_OR_RETURN(turbomind::DataAndScalePool made,
                       turbomind::DataAndScalePool::create(*memory, layout, num_blocks));
  const turbomind::Pools where = made.pools();
  // What is left of the description, global scales, is checked as each call would.
  if (const auto checked =
          turbomind::layer_blocks(layout, where, 0, {pools.global_k_scales, pools.global_v_scales});
      !checked.ok()) {
    return checked.error();
  }
  pools.size = sizeof pools;
  pools.num_blocks = where.num_blocks;
  pools.data = where.data;
  pools.data_stride = where.data_stride;
  pools.scales = where.scales;
  pools.scale_stride = where.scale_stride;
  owner->pool.emplace(std::move(made));
  *result = handles().add(std::move(owner));
  return {};
}

Status facts(kvx_turbomind_pool_t handle, kvx_turbomind_pool_facts_t* result) {
  KVX_ASSIGN_OR_RETURN(const OwnedPool* owner, find(handle));
  const kvx_turbomind_pools_t& pools = owner->description;
  kvx_turbomind_pool_facts_t answer{};
  answer.num_blocks = pools.num_blocks;
  answer.num_free = owner->pool->blocks().num_free(0);
  answer.data_bytes = static_cast<uint64_t>(pools.num_blocks * pools.data_stride);
  answer.scale_bytes = static_cast<uint64_t>(pools.num_blocks * pools.scale_stride);
  return write_struct(answer, result, "facts");
}

Status describe(kvx_turbomind_pool_t handle, kvx_turbomind_pools_t* result) {
  KVX_ASSIGN_OR_RETURN(const OwnedPool* owner, find(handle));
  if (result == nullptr) return invalid_argument("pools is null");
  if (result->size != sizeof *result) {
    return invalid_argument("pools.size is {}; expected {}", result->size, sizeof *result);
  }
  *result = owner->description;
  return {};
}

// Checks a list of ids. Requires: nothing.
Status check_list(int64_t num_blocks, const void* ids) {
  if (num_blocks >= 0 && num_blocks <= INT32_MAX && (ids != nullptr || num_blocks == 0)) return {};
  return invalid_argument("num_blocks is {} with ids {}; expected 0 to {}, and ids", num_blocks,
                          ids, INT32_MAX);
}

Status allocate(kvx_turbomind_pool_t handle, int64_t num_blocks, int32_t* ids) {
  KVX_ASSIGN_OR_RETURN(OwnedPool * owner, find(handle));
  KVX_RETURN_IF_ERROR(check_list(num_blocks, ids));
  return owner->pool->blocks().allocate(0, {ids, static_cast<size_t>(num_blocks)});
}

Status release(kvx_turbomind_pool_t handle, int64_t num_blocks, const int32_t* ids) {
  KVX_ASSIGN_OR_RETURN(OwnedPool * owner, find(handle));
  KVX_RETURN_IF_ERROR(check_list(num_blocks, ids));
  const std::span<const int32_t> list(ids, static_cast<size_t>(num_blocks));
  return owner->pool->free_data_and_scale_blocks(list, list);
}

Status pointers(kvx_turbomind_pool_t handle, int64_t num_blocks, const int32_t* ids,
                const void** block_ptrs, const void** scale_block_ptrs) {
  KVX_ASSIGN_OR_RETURN(const OwnedPool* owner, find(handle));
  KVX_RETURN_IF_ERROR(check_list(num_blocks, ids));
  const turbomind::DataAndScalePool& pool = *owner->pool;
  const bool has_scales = owner->description.scales != nullptr;
  if (block_ptrs == nullptr || (scale_block_ptrs != nullptr) != has_scales) {
    return invalid_argument("{} is {}; the pool {} scale blocks",
                            block_ptrs == nullptr ? "block_ptrs" : "scale_block_ptrs",
                            block_ptrs == nullptr || has_scales ? "null" : "set",
                            has_scales ? "has" : "has no");
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (pool.get_block_ptr(ids[i]) != nullptr) continue;
    return out_of_range("ids[{}] is {}; the pool has {} blocks", i, ids[i],
                        owner->description.num_blocks);
  }
  for (int64_t i = 0; i < num_blocks; ++i) {
    block_ptrs[i] = pool.get_block_ptr(ids[i]);
    if (has_scales) scale_block_ptrs[i] = pool.get_scale_block_ptr(ids[i]);
  }
  return {};
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_turbomind_pool_create(const kvx_turbomind_pool_config_t* config,
                                                  kvx_turbomind_pool_t* pool) {
  return kvx::boundary::run_call([&] { return kvx::boundary::create(config, pool); });
}

extern "C" void kvx_turbomind_pool_free(kvx_turbomind_pool_t pool) {
  kvx::boundary::run_call([&]() -> kvx::Status {
    kvx::boundary::handles().remove(pool, [](const auto&) { return true; });
    return {};
  });
}

extern "C" kvx_status_t kvx_turbomind_pool_facts(kvx_turbomind_pool_t pool,
                                                 kvx_turbomind_pool_facts_t* facts) {
  return kvx::boundary::run_call([&] { return kvx::boundary::facts(pool, facts); });
}

extern "C" kvx_status_t kvx_turbomind_pool_describe(kvx_turbomind_pool_t pool,
                                                    kvx_turbomind_pools_t* pools) {
  return kvx::boundary::run_call([&] { return kvx::boundary::describe(pool, pools); });
}

extern "C" kvx_status_t kvx_turbomind_pool_allocate(kvx_turbomind_pool_t pool, int64_t num_blocks,
                                                    int32_t* ids) {
  return kvx::boundary::run_call([&] { return kvx::boundary::allocate(pool, num_blocks, ids); });
}

extern "C" kvx_status_t kvx_turbomind_pool_release(kvx_turbomind_pool_t pool, int64_t num_blocks,
                                                   const int32_t* ids) {
  return kvx::boundary::run_call([&] { return kvx::boundary::release(pool, num_blocks, ids); });
}

extern "C" kvx_status_t kvx_turbomind_pool_pointers(kvx_turbomind_pool_t pool, int64_t num_blocks,
                                                    const int32_t* ids, const void** block_ptrs,
                                                    const void** scale_block_ptrs) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::pointers(pool, num_blocks, ids, block_ptrs, scale_block_ptrs); });
}

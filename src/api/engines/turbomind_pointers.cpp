// TurboMind's pointer tables and its probe.
#include <algorithm>
#include <utility>

#include "api/call.hpp"
#include "api/checks/out_structs.hpp"
#include "api/engines/turbomind.hpp"
#include "api/guard.hpp"
#include "api/verbs/device_verb.hpp"
#include "engines/turbomind/pointer_tables.hpp"
#include "engines/turbomind/probe.hpp"
#include "ops/cuda/convert/pointer_ids.hpp"

namespace kvx::boundary {
namespace {

namespace turbomind = engines::turbomind;

// The caller's tables: block_ptrs, and scale_block_ptrs where the mode has a scale pool.
struct Tables {
  turbomind::PoolLayout layout;
  std::span<const uint8_t* const> blocks;
  std::span<const uint8_t* const> scale_blocks;
};

Result<Tables> read_tables(const kvx_turbomind_pools_t& args, const void* const* block_ptrs,
                           const void* const* scale_block_ptrs, int64_t num_block_ptrs,
                           std::string_view count) {
  Tables tables;
  KVX_ASSIGN_OR_RETURN(tables.layout, read_pool_layout(args));
  if (num_block_ptrs < 0 || num_block_ptrs > INT32_MAX) {
    return invalid_argument("{} is {}; expected 0 to {}", count, num_block_ptrs, INT32_MAX);
  }
  const bool has_scales = tables.layout.scale_block_bytes > 0;
  if (block_ptrs == nullptr) return invalid_argument("block_ptrs is null");
  if (has_scales != (scale_block_ptrs != nullptr)) {
    return invalid_argument(
        "scale_block_ptrs is {}; {} {} a scale pool", has_scales ? "null" : "set",
        turbomind::name_of(tables.layout.geometry.mode), has_scales ? "has" : "has not");
  }
  const auto size = static_cast<size_t>(num_block_ptrs);
  tables.blocks = {reinterpret_cast<const uint8_t* const*>(block_ptrs), size};
  if (has_scales) {
    tables.scale_blocks = {reinterpret_cast<const uint8_t* const*>(scale_block_ptrs), size};
  }
  return tables;
}

Status find_pools(kvx_turbomind_pools_t* caller, const void* const* block_ptrs,
                  const void* const* scale_block_ptrs, int64_t num_block_ptrs) {
  KVX_ASSIGN_OR_RETURN(kvx_turbomind_pools_t args, read_struct(caller, "pools"));
  if (caller->size < sizeof args) {
    return invalid_argument("pools.size is {}; expected {}", caller->size, sizeof args);
  }
  KVX_ASSIGN_OR_RETURN(const Tables tables, read_tables(args, block_ptrs, scale_block_ptrs,
                                                        num_block_ptrs, "num_block_ptrs"));
  KVX_ASSIGN_OR_RETURN(const turbomind::Pools found,
                       turbomind::find_pools(tables.layout, tables.blocks, tables.scale_blocks));
  caller->data = found.data;
  caller->data_stride = found.data_stride;
  caller->scales = found.scales;
  caller->scale_stride = found.scale_stride;
  caller->num_blocks = found.num_blocks;
  caller->is_scattered = found.is_scattered ? 1 : 0;
  return {};
}

struct TablesOfPools {
  Tables tables;
  turbomind::Pools pools;
};

// Checks and reads all but the tables' entries, which a GPU may have.
Result<TablesOfPools> read_tables_of_pools(const kvx_turbomind_pools_t* caller,
                                           const void* const* block_ptrs,
                                           const void* const* scale_block_ptrs,
                                           int64_t num_block_ptrs, const int32_t* ids) {
  KVX_ASSIGN_OR_RETURN(const kvx_turbomind_pools_t args, read_struct(caller, "pools"));
  KVX_ASSIGN_OR_RETURN(Tables tables, read_tables(args, block_ptrs, scale_block_ptrs,
                                                  num_block_ptrs, "num_block_ptrs"));
  if (ids == nullptr) return invalid_argument("ids is null");
  KVX_ASSIGN_OR_RETURN(const turbomind::Pools pools, read_pools(args, tables.layout));
  if (const auto checked = turbomind::layer_blocks(tables.layout, pools, 0); !checked.ok()) {
    return checked.error();
  }
  return TablesOfPools{std::move(tables), pools};
}

Status block_ids(const kvx_turbomind_pools_t* caller, const void* const* block_ptrs,
                 const void* const* scale_block_ptrs, int64_t num_block_ptrs, int32_t* ids) {
  KVX_ASSIGN_OR_RETURN(
      const TablesOfPools given,
      read_tables_of_pools(caller, block_ptrs, scale_block_ptrs, num_block_ptrs, ids));
  std::vector<int32_t> found(given.tables.blocks.size());
  KVX_RETURN_IF_ERROR(turbomind::block_ids_of_both(given.pools, given.tables.blocks,
                                                   given.tables.scale_blocks, found));
  std::ranges::copy(found, ids);
  return {};
}

// The entries are checked where they lie.
Status device_block_ids(const kvx_turbomind_pools_t* caller, const void* const* block_ptrs,
                        const void* const* scale_block_ptrs, int64_t num_block_ptrs, int32_t* ids,
                        uint64_t* counters, void* stream) {
  KVX_ASSIGN_OR_RETURN(
      const TablesOfPools given,
      read_tables_of_pools(caller, block_ptrs, scale_block_ptrs, num_block_ptrs, ids));
  VerbAddresses addresses;
  addresses.add("block_ptrs", block_ptrs)
      .add("scale_block_ptrs", scale_block_ptrs)
      .add("ids", ids)
      .add("counters", counters);
  KVX_ASSIGN_OR_RETURN(const DeviceVerb verb, begin_on_device(addresses, counters, stream));
  return ops::pointer_ids(verb.context,
                          {.blocks = given.tables.blocks.data(),
                           .scale_blocks = given.tables.scale_blocks.data(),
                           .count = num_block_ptrs,
                           .pool = {given.pools.data, given.pools.data_stride},
                           .scale_pool = {given.pools.scales, given.pools.scale_stride},
                           .num_blocks = given.pools.num_blocks},
                          ids, verb.counters);
}

int as_int(uint32_t value) {
  return static_cast<int>(std::min<uint32_t>(value, INT32_MAX));
}

Result<turbomind::Fp4KvProbeResult> probe_in(const Tables& tables, uint32_t memory, int layer,
                                             int head, int64_t token, void* stream) {
  auto* const* blocks = const_cast<uint8_t* const*>(tables.blocks.data());
  auto* const* scales = const_cast<uint8_t* const*>(tables.scale_blocks.data());
  const size_t count = tables.blocks.size();
  if (memory == KVX_MEMORY_DEVICE) {
    return turbomind::fp4_kv_probe(tables.layout, {blocks, scales, static_cast<int64_t>(count)},
                                   layer, head, token, stream);
  }
  if (memory != KVX_MEMORY_UNKNOWN && memory != KVX_MEMORY_HOST) {
    return invalid_argument("memory is {}; expected 0, KVX_MEMORY_HOST or DEVICE", memory);
  }
  for (size_t i = 0; i < count; ++i) {
    if (blocks[i] != nullptr && scales[i] != nullptr) continue;
    return invalid_argument("{}[{}] is null",
                            blocks[i] == nullptr ? "block_ptrs" : "scale_block_ptrs", i);
  }
  return turbomind::fp4_kv_probe_host(tables.layout, {{blocks, count}, {scales, count}}, layer,
                                      head, token);
}

Status probe(const kvx_turbomind_pools_t* caller, const void* const* block_ptrs,
             const void* const* scale_block_ptrs, int64_t num_blocks, uint32_t layer, uint32_t head,
             int64_t token, uint32_t memory, void* stream, kvx_turbomind_probe_t* result) {
  KVX_ASSIGN_OR_RETURN(const kvx_turbomind_pools_t args, read_struct(caller, "pools"));
  KVX_ASSIGN_OR_RETURN(const turbomind::PoolLayout layout, read_pool_layout(args));
  if (!turbomind::is_fp4(layout.geometry.mode)) {
    return invalid_argument("pools.mode is {}; the probe reads fp4",
                            turbomind::name_of(layout.geometry.mode));
  }
  KVX_ASSIGN_OR_RETURN(const Tables tables,
                       read_tables(args, block_ptrs, scale_block_ptrs, num_blocks, "num_blocks"));
  KVX_RETURN_IF_ERROR(check_out_struct(result, "probe"));
  KVX_ASSIGN_OR_RETURN(const turbomind::Fp4KvProbeResult found,
                       probe_in(tables, memory, as_int(layer), as_int(head), token, stream));
  kvx_turbomind_probe_t answer{};
  answer.k_scale0 = found.k_scale0;
  answer.v_scale0 = found.v_scale0;
  answer.k_scale1 = found.k_scale1;
  answer.v_scale1 = found.v_scale1;
  answer.kv_byte0 = found.kv_byte0;
  return write_struct(answer, result, "probe");
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_turbomind_find_pools(kvx_turbomind_pools_t* pools,
                                                 const void* const* block_ptrs,
                                                 const void* const* scale_block_ptrs,
                                                 int64_t num_block_ptrs) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::find_pools(pools, block_ptrs, scale_block_ptrs, num_block_ptrs);
  });
}

extern "C" kvx_status_t kvx_turbomind_block_ids(const kvx_turbomind_pools_t* pools,
                                                const void* const* block_ptrs,
                                                const void* const* scale_block_ptrs,
                                                int64_t num_block_ptrs, int32_t* ids) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::block_ids(pools, block_ptrs, scale_block_ptrs, num_block_ptrs, ids);
  });
}

extern "C" kvx_status_t kvx_turbomind_device_block_ids(const kvx_turbomind_pools_t* pools,
                                                       const void* const* block_ptrs,
                                                       const void* const* scale_block_ptrs,
                                                       int64_t num_block_ptrs, int32_t* ids,
                                                       uint64_t* counters, void* stream) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::device_block_ids(pools, block_ptrs, scale_block_ptrs, num_block_ptrs, ids,
                                           counters, stream);
  });
}

extern "C" kvx_status_t kvx_turbomind_probe(const kvx_turbomind_pools_t* pools,
                                            const void* const* block_ptrs,
                                            const void* const* scale_block_ptrs, int64_t num_blocks,
                                            uint32_t layer, uint32_t head, int64_t token,
                                            uint32_t memory, void* stream,
                                            kvx_turbomind_probe_t* probe) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::probe(pools, block_ptrs, scale_block_ptrs, num_blocks, layer, head, token,
                                memory, stream, probe);
  });
}

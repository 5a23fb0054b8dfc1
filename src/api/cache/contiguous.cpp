// kvx_contiguous_*: contiguous caches of equally long sequences.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <optional>

#include "api/cache/placement.hpp"
#include "api/call.hpp"
#include "api/checks/format_spec.hpp"
#include "api/checks/out_structs.hpp"
#include "api/checks/precision.hpp"
#include "api/checks/rows_view.hpp"
#include "api/executor.hpp"
#include "api/guard.hpp"
#include "api/handle_map.hpp"
#include "api/kernels.hpp"
#include "kv/contiguous/contiguous_cache.hpp"

namespace kvx::boundary {
namespace {

constexpr uint32_t kMostNumber = 1 << 20;  // of layers, heads, sequences, tokens

// The caller's threads outlive the cache that runs in them. specs: K's and V's of each layer, to
// which kvx_contiguous_layer's sides point.
struct OwnedContiguous {
  std::optional<CallersExecutor> threads;
  std::vector<std::array<kvx_format_spec_t, 2>> specs;
  std::optional<kv::ContiguousCache> cache;
};

using Handles = HandleMap<kvx_contiguous_t, OwnedContiguous>;

// Never destroyed: threads may still call when static objects are.
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

Result<OwnedContiguous*> find(kvx_contiguous_t handle) {
  if (handle == nullptr) return invalid_argument("cache is null");
  OwnedContiguous* const found = handles().find(handle);
  if (found == nullptr) return invalid_argument("cache is not a handle, or was freed");
  return found;
}

Result<int> count_of(const char* name, uint32_t value, uint32_t least = 1,
                     uint32_t most = kMostNumber) {
  if (value >= least && value <= most) return static_cast<int>(value);
  return invalid_argument("{} is {}; expected {} to {}", name, value, least, most);
}

Result<kv::ContiguousConfig> read_config(const kvx_contiguous_config_t& args) {
  constexpr uint32_t kMostDim = format::kMaxHeadDim;
  kv::ContiguousConfig config;
  kv::CacheGeometry& geometry = config.geometry;
  KVX_ASSIGN_OR_RETURN(geometry.num_layers, count_of("config.num_layers", args.num_layers));
  KVX_ASSIGN_OR_RETURN(geometry.num_kv_heads, count_of("config.num_kv_heads", args.num_kv_heads));
  KVX_ASSIGN_OR_RETURN(geometry.k_head_dim,
                       count_of("config.k_head_dim", args.k_head_dim, 1, kMostDim));
  KVX_ASSIGN_OR_RETURN(geometry.v_head_dim,
                       count_of("config.v_head_dim", args.v_head_dim, 0, kMostDim));
  if (geometry.v_head_dim == 0) geometry.v_head_dim = geometry.k_head_dim;
  KVX_ASSIGN_OR_RETURN(config.num_q_heads, count_of("config.num_q_heads", args.num_q_heads));
  KVX_ASSIGN_OR_RETURN(config.batch_size, count_of("config.batch_size", args.batch_size));
  KVX_ASSIGN_OR_RETURN(config.max_seq_len, count_of("config.max_seq_len", args.max_seq_len));
  KVX_ASSIGN_OR_RETURN(config.max_append, count_of("config.max_append", args.max_append, 0));
  config.max_append = std::max(config.max_append, 1);
  if ((args.flags & ~uint32_t{KVX_CONTIGUOUS_EVICTS}) != 0) {
    return Error{ErrorCode::kIncompatible,
                 fmt::format("config.flags is {:#x}; this library supports 0x1", args.flags)};
  }
  if (args.flags != 0) config.overflow = kv::Overflow::kEvict;
  if (args.reserved != 0) {
    return invalid_argument("config.reserved is {}; expected 0", args.reserved);
  }
  if (args.recipe == nullptr) return invalid_argument("config.recipe is null");
  KVX_ASSIGN_OR_RETURN(config.recipe, kv::parse_recipe(args.recipe));
  if (args.layer_windows != nullptr) {
    geometry.layer_windows.assign(args.layer_windows, args.layer_windows + args.num_layers);
  }
  KVX_ASSIGN_OR_RETURN(config.cuda, read_placement(args, "config", kMostNumber));
  return config;
}

Status create(const kvx_contiguous_config_t* caller, kvx_contiguous_t* result) {
  if (result == nullptr) return invalid_argument("cache is null");
  KVX_ASSIGN_OR_RETURN(const kvx_contiguous_config_t args, read_struct(caller, "config"));
  KVX_ASSIGN_OR_RETURN(kv::ContiguousConfig config, read_config(args));
  auto owned = std::make_unique<OwnedContiguous>();
  KVX_ASSIGN_OR_RETURN(owned->threads, read_executor(args.executor));
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  KVX_ASSIGN_OR_RETURN(
      owned->cache,
      kv::ContiguousCache::create(std::move(config), {kernels, &chosen_executor(owned->threads)}));
  for (int layer = 0; layer < owned->cache->config().geometry.num_layers; ++layer) {
    const ops::HeadRun run = owned->cache->view(layer).runs.front();
    owned->specs.push_back({spec_of(run.k.spec), spec_of(run.v.spec)});
  }
  *result = handles().add(std::move(owned));
  return {};
}

Result<int> layer_of(const OwnedContiguous& owned, uint32_t layer) {
  const auto num_layers = static_cast<uint32_t>(owned.cache->config().geometry.num_layers);
  if (layer < num_layers) return static_cast<int>(layer);
  return invalid_argument("layer is {}; the cache has {}", layer, num_layers);
}

Status check_on_device(const OwnedContiguous& owned, const VerbAddresses& addresses) {
  return check_on_device(owned.cache->config().cuda, addresses, "rows");
}

Status append(kvx_contiguous_t handle, uint32_t layer, uint32_t num_tokens, const kvx_rows_t* k,
              const kvx_rows_t* v) {
  KVX_ASSIGN_OR_RETURN(OwnedContiguous * owned, find(handle));
  KVX_ASSIGN_OR_RETURN(const int index, layer_of(*owned, layer));
  KVX_ASSIGN_OR_RETURN(const int count, count_of("num_tokens", num_tokens));
  const kv::CacheGeometry& geometry = owned->cache->config().geometry;
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows keys,
                       read_rows(k, geometry.num_kv_heads, geometry.k_head_dim, "k"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows values,
                       read_rows(v, geometry.num_kv_heads, geometry.v_head_dim, "v"));
  KVX_RETURN_IF_ERROR(
      check_on_device(*owned, VerbAddresses().add_rows("k.data", keys).add_rows("v.data", values)));
  return owned->cache->append(index, count, as_input(keys), as_input(values));
}

Status attend(kvx_contiguous_t handle, const kvx_contiguous_attend_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedContiguous * owned, find(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_contiguous_attend_args_t args, read_struct(caller, "args"));
  KVX_ASSIGN_OR_RETURN(const int index, layer_of(*owned, args.layer));
  KVX_ASSIGN_OR_RETURN(const int num_queries, count_of("args.num_queries", args.num_queries));
  if (args.sees_all > 1) {
    return invalid_argument("args.sees_all is {}; expected 0 or 1", args.sees_all);
  }
  const kv::ContiguousConfig& config = owned->cache->config();
  const kv::CacheGeometry& geometry = config.geometry;
  kv::ContiguousAttention attention;
  attention.softmax_scale = args.softmax_scale != 0
                                ? args.softmax_scale
                                : 1.0f / std::sqrt(static_cast<float>(geometry.k_head_dim));
  attention.softcap = args.softcap;
  KVX_ASSIGN_OR_RETURN(attention.window, count_of("args.window", args.window, 0));
  KVX_ASSIGN_OR_RETURN(attention.precision, read_precision(args.precision));
  attention.sinks = args.sinks;
  attention.lse = args.lse;
  attention.is_causal = args.sees_all == 0;
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows q,
                       read_rows(args.q, config.num_q_heads, geometry.k_head_dim, "q"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows out,
                       read_rows(args.out, config.num_q_heads, geometry.v_head_dim, "out"));
  KVX_RETURN_IF_ERROR(check_on_device(*owned, VerbAddresses()
                                                  .add_rows("q.data", q)
                                                  .add_rows("out.data", out)
                                                  .add("args.sinks", args.sinks)
                                                  .add("args.lse", args.lse)));
  return owned->cache->attend(index, num_queries, as_input(q), out, attention);
}

Status gather(kvx_contiguous_t handle, uint32_t layer, const kvx_rows_t* k, const kvx_rows_t* v) {
  KVX_ASSIGN_OR_RETURN(OwnedContiguous * owned, find(handle));
  KVX_ASSIGN_OR_RETURN(const int index, layer_of(*owned, layer));
  const kv::CacheGeometry& geometry = owned->cache->config().geometry;
  MutableFloatRows keys;
  MutableFloatRows values;
  if (k != nullptr) {
    KVX_ASSIGN_OR_RETURN(keys, read_rows(k, geometry.num_kv_heads, geometry.k_head_dim, "k"));
  }
  if (v != nullptr) {
    KVX_ASSIGN_OR_RETURN(values, read_rows(v, geometry.num_kv_heads, geometry.v_head_dim, "v"));
  }
  if (k == nullptr && v == nullptr) return invalid_argument("k and v are null; expected one");
  KVX_RETURN_IF_ERROR(
      check_on_device(*owned, VerbAddresses().add_rows("k.data", keys).add_rows("v.data", values)));
  return owned->cache->gather(index, keys, values);
}

Status facts(kvx_contiguous_t handle, uint32_t layer, kvx_contiguous_facts_t* result) {
  KVX_ASSIGN_OR_RETURN(OwnedContiguous * owned, find(handle));
  KVX_ASSIGN_OR_RETURN(const int index, layer_of(*owned, layer));
  const kv::ContiguousCache& cache = *owned->cache;
  kvx_contiguous_facts_t answer{};
  answer.seq_len = static_cast<uint32_t>(cache.seq_len());
  answer.num_held = static_cast<uint32_t>(cache.num_held(index));
  answer.capacity = static_cast<uint32_t>(cache.config().capacity(index));
  answer.allocated_bytes = static_cast<uint64_t>(cache.allocated_bytes());
  answer.used_bytes = static_cast<uint64_t>(cache.used_bytes());
  answer.read_bytes_per_step = static_cast<uint64_t>(cache.read_bytes_per_step());
  return write_struct(answer, result, "facts");
}

Status layer(kvx_contiguous_t handle, uint32_t number, kvx_side_t* k, kvx_side_t* v) {
  KVX_ASSIGN_OR_RETURN(OwnedContiguous * owned, find(handle));
  KVX_ASSIGN_OR_RETURN(const int index, layer_of(*owned, number));
  KVX_RETURN_IF_ERROR(check_side_room(k, "k"));
  KVX_RETURN_IF_ERROR(check_side_room(v, "v"));
  const ops::LayerView view = owned->cache->view(index);
  if (view.runs.size() != 1) {
    return unsupported("layer {} has {} runs of heads of different formats; expected one", number,
                       view.runs.size());
  }
  const auto& specs = owned->specs[static_cast<size_t>(index)];
  fill_side(side_of(view.runs.front().k, &specs[0]), k);
  fill_side(side_of(view.runs.front().v, &specs[1]), v);
  return {};
}

// Runs body(cache) of a handle.
template <class Body>
kvx_status_t run_on(kvx_contiguous_t handle, Body body) {
  return run_call([&]() -> Status {
    KVX_ASSIGN_OR_RETURN(OwnedContiguous * owned, find(handle));
    return body(*owned->cache);
  });
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_contiguous_create(const kvx_contiguous_config_t* config,
                                              kvx_contiguous_t* cache) {
  return kvx::boundary::run_call([&] { return kvx::boundary::create(config, cache); });
}

extern "C" void kvx_contiguous_free(kvx_contiguous_t cache) {
  kvx::boundary::run_call([&]() -> kvx::Status {
    kvx::boundary::handles().remove(cache, [](const auto&) { return true; });
    return {};
  });
}

extern "C" kvx_status_t kvx_contiguous_append(kvx_contiguous_t cache, uint32_t layer,
                                              uint32_t num_tokens, const kvx_rows_t* k,
                                              const kvx_rows_t* v) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::append(cache, layer, num_tokens, k, v); });
}

extern "C" kvx_status_t kvx_contiguous_advance(kvx_contiguous_t cache, uint32_t num_tokens) {
  return kvx::boundary::run_on(cache, [&](kvx::kv::ContiguousCache& of) -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(const int count, kvx::boundary::count_of("num_tokens", num_tokens));
    return of.advance(count);
  });
}

extern "C" kvx_status_t kvx_contiguous_reset(kvx_contiguous_t cache) {
  return kvx::boundary::run_on(cache, [](kvx::kv::ContiguousCache& of) -> kvx::Status {
    of.reset();
    return {};
  });
}

extern "C" kvx_status_t kvx_contiguous_attend(kvx_contiguous_t cache,
                                              const kvx_contiguous_attend_args_t* args) {
  return kvx::boundary::run_call([&] { return kvx::boundary::attend(cache, args); });
}

extern "C" kvx_status_t kvx_contiguous_gather(kvx_contiguous_t cache, uint32_t layer,
                                              const kvx_rows_t* k, const kvx_rows_t* v) {
  return kvx::boundary::run_call([&] { return kvx::boundary::gather(cache, layer, k, v); });
}

extern "C" kvx_status_t kvx_contiguous_facts(kvx_contiguous_t cache, uint32_t layer,
                                             kvx_contiguous_facts_t* facts) {
  return kvx::boundary::run_call([&] { return kvx::boundary::facts(cache, layer, facts); });
}

extern "C" kvx_status_t kvx_contiguous_layer(kvx_contiguous_t cache, uint32_t layer, kvx_side_t* k,
                                             kvx_side_t* v) {
  return kvx::boundary::run_call([&] { return kvx::boundary::layer(cache, layer, k, v); });
}

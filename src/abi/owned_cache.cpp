// Caches that own their memory: kvx_cache_*, kvx_sequence_* and kvx_step_* over kv::KvCache.
#include <cmath>

#include "abi/call.hpp"
#include "abi/callers_memory.hpp"
#include "abi/executor.hpp"
#include "abi/kernels.hpp"
#include "abi/layer_view.hpp"
#include "kv/kv_cache.hpp"

namespace kvx::abi {
namespace {

// What a kvx_cache_t points to; the header's struct has no definition, so that nothing of this
// stands in the ABI. The executor and the memory outlive the cache that runs on them.
struct OwnedCache {
  std::optional<CallersMemory> callers_memory;
  std::optional<CallersExecutor> callers_threads;
  std::unique_ptr<Executor> own_threads;
  std::unique_ptr<kv::KvCache> cache;
};

OwnedCache* owned(kvx_cache_t handle) {
  return reinterpret_cast<OwnedCache*>(handle);
}

Result<kv::KvCache*> cache_of(kvx_cache_t handle) {
  if (handle == nullptr) return invalid_argument("cache is null");
  return owned(handle)->cache.get();
}

Status check_range(const char* name, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return {};
  return invalid_argument("config.{} is {}; expected {} to {}", name, value, least, most);
}

Result<kv::KvCacheConfig> read_config(const kvx_cache_config_t& known) {
  constexpr uint64_t kMost = 1 << 20;
  KVX_RETURN_IF_ERROR(check_range("num_layers", known.num_layers, 1, kMost));
  KVX_RETURN_IF_ERROR(check_range("num_kv_heads", known.num_kv_heads, 1, kMost));
  KVX_RETURN_IF_ERROR(check_range("k_head_dim", known.k_head_dim, 1, format::kMaxHeadDim));
  KVX_RETURN_IF_ERROR(check_range("v_head_dim", known.v_head_dim, 0, format::kMaxHeadDim));
  KVX_RETURN_IF_ERROR(check_range("block_size", known.block_size, 0, cache::kMaxBlockSize));
  KVX_RETURN_IF_ERROR(check_range("max_sequences", known.max_sequences, 1, kMost));
  KVX_RETURN_IF_ERROR(check_range("num_threads", known.num_threads, 0, 4096));
  if (known.recipe == nullptr) return invalid_argument("config.recipe is null");
  kv::KvCacheConfig config;
  KVX_ASSIGN_OR_RETURN(config.recipe, kv::parse_recipe(known.recipe));
  config.geometry.num_layers = static_cast<int>(known.num_layers);
  config.geometry.num_kv_heads = static_cast<int>(known.num_kv_heads);
  config.geometry.k_head_dim = static_cast<int>(known.k_head_dim);
  config.geometry.v_head_dim = static_cast<int>(known.v_head_dim);
  if (known.layer_windows != nullptr) {
    config.geometry.layer_windows.assign(known.layer_windows,
                                         known.layer_windows + known.num_layers);
  }
  if (known.block_size != 0) config.block_size = static_cast<int>(known.block_size);
  config.max_sequences = static_cast<int>(known.max_sequences);
  config.max_tokens_per_sequence = known.max_tokens_per_sequence;
  config.memory_budget_bytes = known.memory_budget_bytes;
  return config;
}

Status create(const kvx_cache_config_t* caller, kvx_cache_t* result) {
  if (result == nullptr) return invalid_argument("cache is null");
  KVX_ASSIGN_OR_RETURN(const kvx_cache_config_t known, read_struct(caller, "config"));
  KVX_ASSIGN_OR_RETURN(kv::KvCacheConfig config, read_config(known));
  auto handle = std::make_unique<OwnedCache>();
  KVX_ASSIGN_OR_RETURN(auto memory, read_allocator(known.allocator));
  if (memory) config.memory = &handle->callers_memory.emplace(*memory);
  KVX_ASSIGN_OR_RETURN(handle->callers_threads, read_executor(known.executor));
  if (!handle->callers_threads && known.num_threads > 1) {
    handle->own_threads = make_thread_pool(static_cast<int>(known.num_threads));
  }
  Executor& executor =
      handle->own_threads ? *handle->own_threads : chosen_executor(handle->callers_threads);
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  KVX_ASSIGN_OR_RETURN(handle->cache, kv::KvCache::create(std::move(config), {kernels, &executor}));
  *result = reinterpret_cast<kvx_cache_t>(handle.release());
  return {};
}

void free_cache(kvx_cache_t handle) {
  delete owned(handle);
}

Status sequence_create(kvx_cache_t handle, int32_t* sequence) {
  KVX_ASSIGN_OR_RETURN(kv::KvCache * cache, cache_of(handle));
  if (sequence == nullptr) return invalid_argument("sequence is null");
  KVX_ASSIGN_OR_RETURN(*sequence, cache->create_sequence());
  return {};
}

Status sequence_tokens(kvx_cache_t handle, int32_t sequence, int64_t* num_tokens,
                       int64_t* max_step) {
  KVX_ASSIGN_OR_RETURN(const kv::KvCache* cache, cache_of(handle));
  if (num_tokens == nullptr) return invalid_argument("num_tokens is null");
  if (!cache->is_in_use(sequence)) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  *num_tokens = cache->num_tokens(sequence);
  if (max_step != nullptr) *max_step = cache->max_step_tokens(sequence);
  return {};
}

Status step_begin(kvx_cache_t handle, uint32_t num_entries, const int32_t* sequences,
                  const int32_t* num_tokens) {
  KVX_ASSIGN_OR_RETURN(kv::KvCache * cache, cache_of(handle));
  if (num_entries != 0 && (sequences == nullptr || num_tokens == nullptr)) {
    return invalid_argument("{} is null", sequences == nullptr ? "sequences" : "num_tokens");
  }
  std::vector<kv::StepEntry> entries;
  for (uint32_t i = 0; i < num_entries; ++i) entries.push_back({sequences[i], num_tokens[i]});
  return cache->begin_step(entries);
}

Status step_layer(kvx_cache_t handle, const kvx_step_layer_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(kv::KvCache * cache, cache_of(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_step_layer_args_t known, read_struct(caller, "args"));
  const kv::CacheGeometry& geometry = cache->config().geometry;
  if (known.reserved != 0) return invalid_argument("args.reserved is {}", known.reserved);
  if (known.layer >= static_cast<uint32_t>(geometry.num_layers)) {
    return invalid_argument("args.layer is {}; the cache has {}", known.layer, geometry.num_layers);
  }
  if (known.num_q_heads < 1 || known.num_q_heads > 1u << 20) {
    return invalid_argument("args.num_q_heads is {}; expected a positive multiple of {}",
                            known.num_q_heads, geometry.num_kv_heads);
  }
  const int num_q_heads = static_cast<int>(known.num_q_heads);
  const int num_kv_heads = geometry.num_kv_heads;
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows q,
                       read_rows(known.q, num_q_heads, geometry.k_head_dim, "q"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows k,
                       read_rows(known.k, num_kv_heads, geometry.k_head_dim, "k"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows v,
                       read_rows(known.v, num_kv_heads, geometry.v_head_dim, "v"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows out,
                       read_rows(known.out, num_q_heads, geometry.v_head_dim, "out"));
  const float scale = known.softmax_scale != 0
                          ? known.softmax_scale
                          : 1.0f / std::sqrt(static_cast<float>(geometry.k_head_dim));
  return cache->append_and_attend(static_cast<int>(known.layer),
                                  {num_q_heads, scale, known.softcap, known.sinks}, as_input(q),
                                  as_input(k), as_input(v), out);
}

Status sequence_gather(kvx_cache_t handle, int32_t sequence, uint32_t layer, int64_t first_token,
                       int64_t num_tokens, const kvx_rows_t* k, const kvx_rows_t* v) {
  KVX_ASSIGN_OR_RETURN(const kv::KvCache* cache, cache_of(handle));
  const kv::CacheGeometry& geometry = cache->config().geometry;
  if (layer >= static_cast<uint32_t>(geometry.num_layers)) {
    return invalid_argument("layer is {}; the cache has {}", layer, geometry.num_layers);
  }
  MutableFloatRows k_rows;
  MutableFloatRows v_rows;
  if (k != nullptr) {
    KVX_ASSIGN_OR_RETURN(k_rows, read_rows(k, geometry.num_kv_heads, geometry.k_head_dim, "k"));
  }
  if (v != nullptr) {
    KVX_ASSIGN_OR_RETURN(v_rows, read_rows(v, geometry.num_kv_heads, geometry.v_head_dim, "v"));
  }
  return cache->gather(sequence, static_cast<int>(layer), first_token, num_tokens, k_rows, v_rows);
}

}  // namespace
}  // namespace kvx::abi

extern "C" kvx_status_t kvx_cache_create(const kvx_cache_config_t* config, kvx_cache_t* cache) {
  return kvx::abi::run_call([&] { return kvx::abi::create(config, cache); });
}

extern "C" void kvx_cache_free(kvx_cache_t cache) {
  kvx::abi::free_cache(cache);
}

extern "C" kvx_status_t kvx_sequence_create(kvx_cache_t cache, int32_t* sequence) {
  return kvx::abi::run_call([&] { return kvx::abi::sequence_create(cache, sequence); });
}

extern "C" kvx_status_t kvx_sequence_free(kvx_cache_t cache, int32_t sequence) {
  return kvx::abi::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::kv::KvCache * known, kvx::abi::cache_of(cache));
    return known->free_sequence(sequence);
  });
}

extern "C" kvx_status_t kvx_sequence_tokens(kvx_cache_t cache, int32_t sequence,
                                            int64_t* num_tokens, int64_t* max_step) {
  return kvx::abi::run_call(
      [&] { return kvx::abi::sequence_tokens(cache, sequence, num_tokens, max_step); });
}

extern "C" kvx_status_t kvx_step_begin(kvx_cache_t cache, uint32_t num_entries,
                                       const int32_t* sequences, const int32_t* num_tokens) {
  return kvx::abi::run_call(
      [&] { return kvx::abi::step_begin(cache, num_entries, sequences, num_tokens); });
}

extern "C" kvx_status_t kvx_step_layer(kvx_cache_t cache, const kvx_step_layer_args_t* args) {
  return kvx::abi::run_call([&] { return kvx::abi::step_layer(cache, args); });
}

extern "C" kvx_status_t kvx_step_end(kvx_cache_t cache) {
  return kvx::abi::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::kv::KvCache * known, kvx::abi::cache_of(cache));
    return known->end_step();
  });
}

extern "C" kvx_status_t kvx_sequence_gather(kvx_cache_t cache, int32_t sequence, uint32_t layer,
                                            int64_t first_token, int64_t num_tokens,
                                            const kvx_rows_t* k, const kvx_rows_t* v) {
  return kvx::abi::run_call([&] {
    return kvx::abi::sequence_gather(cache, sequence, layer, first_token, num_tokens, k, v);
  });
}

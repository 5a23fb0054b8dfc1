// Caches that own their memory: kvx_cache_*, kvx_sequence_* and kvx_step_* over kv::KvCache.
#include "api/cache/owned_cache.hpp"

#include <bit>
#include <climits>
#include <cmath>
#include <mutex>

#include "api/cache/placement.hpp"
#include "api/cache/tables.hpp"
#include "api/call.hpp"
#include "api/checks/precision.hpp"
#include "api/checks/rows_view.hpp"
#include "api/handle_map.hpp"
#include "api/kernels.hpp"

namespace kvx::boundary {

// ---- handles

namespace {

using Handles = HandleMap<kvx_cache_t, OwnedCache>;

// Never destroyed: a cache that lives until the process ends may use threads that no longer exist
// when static objects are destroyed.
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}

}  // namespace

SequenceNumbers::SequenceNumbers(int max_sequences)
    : index_bits_(std::bit_width(static_cast<unsigned>(max_sequences - 1))),
      num_ended_(static_cast<size_t>(max_sequences), 0) {}

int32_t SequenceNumbers::number_of(int sequence) const {
  return num_ended_[sequence] << index_bits_ | sequence;
}

int SequenceNumbers::sequence_of(int32_t number) const {
  const int32_t sequence = number & ((1 << index_bits_) - 1);
  const bool is_current = number >= 0 && sequence < static_cast<int32_t>(num_ended_.size()) &&
                          number == number_of(sequence);
  return is_current ? sequence : -1;
}

void SequenceNumbers::retire(int sequence) {
  num_ended_[sequence] = (num_ended_[sequence] + 1) & (INT32_MAX >> index_bits_);
}

Result<int> OwnedCache::sequence(int32_t number) const {
  const int index = numbers.sequence_of(number);
  if (cache->is_in_use(index)) return index;
  return invalid_argument("sequence is {}; it is not in use", number);
}

Result<OwnedCache*> find_cache(kvx_cache_t handle) {
  if (handle == nullptr) return invalid_argument("cache is null");
  OwnedCache* const cache = handles().find(handle);
  if (cache == nullptr) return invalid_argument("cache is not a handle, or was freed");
  if (cache->is_in_listener) return invalid_argument("cache is called from inside its listener");
  return cache;
}

// ---- creation

namespace {

Status check_range(const char* name, uint64_t value, uint64_t least, uint64_t most) {
  if (value >= least && value <= most) return {};
  return invalid_argument("config.{} is {}; expected {} to {}", name, value, least, most);
}

Result<kv::KvCacheConfig> read_config(const kvx_cache_config_t& args) {
  constexpr uint64_t kMost = 1 << 20;
  KVX_RETURN_IF_ERROR(check_range("num_layers", args.num_layers, 1, kMost));
  KVX_RETURN_IF_ERROR(check_range("num_kv_heads", args.num_kv_heads, 1, kMost));
  KVX_RETURN_IF_ERROR(check_range("k_head_dim", args.k_head_dim, 1, format::kMaxHeadDim));
  KVX_RETURN_IF_ERROR(check_range("v_head_dim", args.v_head_dim, 1, format::kMaxHeadDim));
  KVX_RETURN_IF_ERROR(check_range("block_size", args.block_size, 0, cache::kMaxBlockSize));
  KVX_RETURN_IF_ERROR(check_range("max_sequences", args.max_sequences, 1, kMost));
  KVX_RETURN_IF_ERROR(check_range("num_threads", args.num_threads, 0, 4096));
  kv::KvCacheConfig config;
  config.geometry.num_layers = static_cast<int>(args.num_layers);
  config.geometry.num_kv_heads = static_cast<int>(args.num_kv_heads);
  config.geometry.k_head_dim = static_cast<int>(args.k_head_dim);
  config.geometry.v_head_dim = static_cast<int>(args.v_head_dim);
  if (args.layer_windows != nullptr) {
    config.geometry.layer_windows.assign(args.layer_windows, args.layer_windows + args.num_layers);
  }
  if (args.block_size != 0) config.block_size = static_cast<int>(args.block_size);
  config.max_sequences = static_cast<int>(args.max_sequences);
  config.max_tokens_per_sequence = args.max_tokens_per_sequence;
  config.memory_budget_bytes = args.memory_budget_bytes;
  return config;
}

Result<cache::EvictionKind> read_eviction(uint32_t policy, const char* name) {
  constexpr cache::EvictionKind kPolicies[] = {cache::EvictionKind::kLru, cache::EvictionKind::kLru,
                                               cache::EvictionKind::kLfu, cache::EvictionKind::k2Q,
                                               cache::EvictionKind::kAgents};
  if (policy < std::size(kPolicies)) return kPolicies[policy];
  return invalid_argument("{} is {}; expected 0 to {}", name, policy, std::size(kPolicies) - 1);
}

Status read_tiers(const kvx_cache_options_t& args, kv::KvCacheConfig& config) {
  if (args.tiers != nullptr) {
    KVX_ASSIGN_OR_RETURN(config.tiers, tier::parse_tiers(args.tiers));
  }
  if (!config.tiers.empty() && !config.prefix.is_on) {
    return invalid_argument("options.tiers is '{}'; expected KVX_CACHE_PREFIXES with it",
                            args.tiers);
  }
  return {};
}

// What was there before tiers: one tier, by fields of its own.
Status read_host_tier(const kvx_cache_options_t& args, kv::KvCacheConfig& config) {
  if (args.reserved != 0) {
    return invalid_argument("options.reserved is {}; expected 0", args.reserved);
  }
  if (args.host_tier_bytes < 0) {
    return invalid_argument("options.host_tier_bytes is {}; expected 0 or more",
                            args.host_tier_bytes);
  }
  if (args.host_tier_bytes > 0 && !config.prefix.is_on) {
    return invalid_argument("options.host_tier_bytes is {}; expected KVX_CACHE_PREFIXES with it",
                            args.host_tier_bytes);
  }
  tier::TierConfig tier;
  if (args.host_tier_folder != nullptr) tier.folder = args.host_tier_folder;
  if (args.host_tier_bytes == 0 && !tier.folder.empty()) {
    return invalid_argument("options.host_tier_folder is '{}'; expected host_tier_bytes with it",
                            tier.folder);
  }
  if (!tier.folder.empty()) tier.kind = tier::TierKind::kDisk;
  tier.budget_bytes = args.host_tier_bytes;
  KVX_ASSIGN_OR_RETURN(tier.eviction,
                       read_eviction(args.host_tier_eviction, "options.host_tier_eviction"));
  if (tier.budget_bytes == 0) return {};
  if (!config.tiers.empty()) {
    return invalid_argument("options.host_tier_bytes is {}; expected 0 with options.tiers, '{}'",
                            args.host_tier_bytes, args.tiers);
  }
  config.tiers = {tier};
  return {};
}

// The recipe with its tables, and the overrides behind its own.
Status read_recipes(const char* recipe, const kvx_cache_options_t& options,
                    kv::KvCacheConfig& config) {
  if (recipe == nullptr && options.tables == nullptr) {
    return invalid_argument("config.recipe is null");
  }
  KVX_ASSIGN_OR_RETURN(const tune::CacheRecipe tuned,
                       options.tables == nullptr ? tune::read_recipe(recipe)
                                                 : recipe_of_tables(options.tables, recipe));
  KVX_RETURN_IF_ERROR(read_texts(options.layer_overrides, options.num_layer_overrides,
                                 "options.layer_overrides", [&](const char* text) -> Status {
                                   KVX_ASSIGN_OR_RETURN(auto one, kv::parse_layer_override(text));
                                   config.overrides.push_back(std::move(one));
                                   return {};
                                 }));
  KVX_RETURN_IF_ERROR(read_texts(options.head_overrides, options.num_head_overrides,
                                 "options.head_overrides", [&](const char* text) -> Status {
                                   KVX_ASSIGN_OR_RETURN(auto one, kv::parse_head_override(text));
                                   config.overrides.push_back(std::move(one));
                                   return {};
                                 }));
  return tune::use_recipe(tuned, config);
}

Status read_options(const kvx_cache_options_t& args, kv::KvCacheConfig& config) {
  constexpr uint32_t kFlags = KVX_CACHE_PREFIXES | KVX_CACHE_ZEROES_ON_FREE | KVX_CACHE_LATENT;
  if ((args.flags & ~kFlags) != 0) {
    return Error{
        ErrorCode::kIncompatible,
        fmt::format("options.flags is {:#x}; this library supports {:#x}", args.flags, kFlags)};
  }
  if (args.prefix_hash > KVX_PREFIX_HASH_SHA256) {
    return invalid_argument("options.prefix_hash is {}; expected 0 to {}", args.prefix_hash,
                            static_cast<int>(KVX_PREFIX_HASH_SHA256));
  }
  config.zeroes_on_free = (args.flags & KVX_CACHE_ZEROES_ON_FREE) != 0;
  config.geometry.is_latent = (args.flags & KVX_CACHE_LATENT) != 0;
  config.prefix.is_on = (args.flags & KVX_CACHE_PREFIXES) != 0;
  config.prefix.hash = args.prefix_hash == KVX_PREFIX_HASH_SHA256 ? cache::HashAlgorithm::kSha256
                                                                  : cache::HashAlgorithm::kXxh3;
  if (args.model != nullptr) config.prefix.model = args.model;
  if (args.layer_sinks != nullptr) {
    config.geometry.layer_sinks.assign(args.layer_sinks,
                                       args.layer_sinks + config.geometry.num_layers);
  }
  KVX_ASSIGN_OR_RETURN(config.eviction, read_eviction(args.eviction, "options.eviction"));
  if (args.max_speculative_tokens > INT_MAX) {
    return invalid_argument("options.max_speculative_tokens is {}; expected 0 to {}",
                            args.max_speculative_tokens, INT_MAX);
  }
  config.max_speculative_tokens = static_cast<int>(args.max_speculative_tokens);
  KVX_ASSIGN_OR_RETURN(config.cuda, read_placement(args, "options", 1 << 24));
  KVX_RETURN_IF_ERROR(read_tiers(args, config));
  return read_host_tier(args, config);
}

Status create(const kvx_cache_config_t* caller, const kvx_cache_options_t* options,
              kvx_cache_t* result) {
  if (result == nullptr) return invalid_argument("cache is null");
  KVX_ASSIGN_OR_RETURN(const kvx_cache_config_t args, read_struct(caller, "config"));
  KVX_ASSIGN_OR_RETURN(kv::KvCacheConfig config, read_config(args));
  kvx_cache_options_t given{};
  if (options != nullptr) {
    KVX_ASSIGN_OR_RETURN(given, read_struct(options, "options"));
  }
  KVX_RETURN_IF_ERROR(read_options(given, config));
  KVX_RETURN_IF_ERROR(read_recipes(args.recipe, given, config));
  auto handle = std::make_unique<OwnedCache>();
  KVX_ASSIGN_OR_RETURN(auto memory, read_allocator(args.allocator));
  if (memory) config.memory = &handle->callers_memory.emplace(*memory);
  KVX_ASSIGN_OR_RETURN(handle->callers_threads, read_executor(args.executor));
  if (!handle->callers_threads && args.num_threads > 1) {
    handle->own_threads = make_thread_pool(static_cast<int>(args.num_threads));
  }
  Executor& executor =
      handle->own_threads ? *handle->own_threads : chosen_executor(handle->callers_threads);
  KVX_ASSIGN_OR_RETURN(const ops::cpu::KernelTable* kernels, chosen_kernels());
  KVX_ASSIGN_OR_RETURN(handle->cache, kv::KvCache::create(std::move(config), {kernels, &executor}));
  handle->shown.emplace(*handle->cache, "");
  handle->numbers = SequenceNumbers(handle->cache->config().max_sequences);
  *result = handles().add(std::move(handle));
  return {};
}

// ---- sequences and steps

Status sequence_create(kvx_cache_t handle, int32_t* sequence) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (sequence == nullptr) return invalid_argument("sequence is null");
  KVX_ASSIGN_OR_RETURN(const int index, owned->cache->create_sequence());
  *sequence = owned->numbers.number_of(index);
  return {};
}

Status sequence_free(kvx_cache_t handle, int32_t sequence) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  KVX_RETURN_IF_ERROR(owned->cache->free_sequence(index));
  owned->numbers.retire(index);
  return {};
}

Status sequence_tokens(kvx_cache_t handle, int32_t sequence, int64_t* num_tokens,
                       int64_t* max_step) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (num_tokens == nullptr) return invalid_argument("num_tokens is null");
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  *num_tokens = owned->cache->num_tokens(index);
  if (max_step != nullptr) *max_step = owned->cache->max_step_tokens(index);
  return {};
}

// is_speculative may be null: no entry is.
Status step_begin(kvx_cache_t handle, uint32_t num_entries, const int32_t* sequences,
                  const int32_t* num_tokens, const uint8_t* is_speculative) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  if (num_entries != 0 && (sequences == nullptr || num_tokens == nullptr)) {
    return invalid_argument("{} is null", sequences == nullptr ? "sequences" : "num_tokens");
  }
  // A count that was never set is an error here and not a read beyond the arrays.
  const int max_sequences = owned->cache->config().max_sequences;
  if (num_entries > static_cast<uint32_t>(max_sequences)) {
    return invalid_argument("num_entries is {}; expected 1 to max_sequences, {}", num_entries,
                            max_sequences);
  }
  std::vector<kv::StepEntry> entries;
  for (uint32_t i = 0; i < num_entries; ++i) {
    const int index = owned->numbers.sequence_of(sequences[i]);
    if (!owned->cache->is_in_use(index)) {
      return invalid_argument("sequences[{}] is {}; it is not in use", i, sequences[i]);
    }
    entries.push_back({index, num_tokens[i], is_speculative != nullptr && is_speculative[i] != 0});
  }
  return owned->cache->begin_step(entries);
}

Status check_on_device(const OwnedCache& owned, const VerbAddresses& addresses) {
  return check_on_device(owned.cache->config().cuda, addresses, "args' rows");
}

// Null rows where V is a part of K's.
Result<MutableFloatRows> read_step_v(const kvx_rows_t* v, const kv::CacheGeometry& geometry) {
  if (!geometry.is_latent) return read_rows(v, geometry.num_kv_heads, geometry.v_head_dim, "v");
  if (v == nullptr) return MutableFloatRows{};
  return invalid_argument("args.v is set; a latent cache's V is a part of K's rows: expected null");
}

Status step_layer(kvx_cache_t handle, const kvx_step_layer_args_t* caller) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const kvx_step_layer_args_t args, read_struct(caller, "args"));
  const kv::CacheGeometry& geometry = owned->cache->config().geometry;
  if (args.reserved != 0 || args.reserved_2 != 0) {
    return invalid_argument("args.reserved is {}, reserved_2 {}; expected 0", args.reserved,
                            args.reserved_2);
  }
  KVX_ASSIGN_OR_RETURN(const ops::Precision precision, read_precision(args.precision));
  if (args.layer >= static_cast<uint32_t>(geometry.num_layers)) {
    return invalid_argument("args.layer is {}; the cache has {}", args.layer, geometry.num_layers);
  }
  if (args.num_q_heads < 1 || args.num_q_heads > 1u << 20) {
    return invalid_argument("args.num_q_heads is {}; expected a positive multiple of {}",
                            args.num_q_heads, geometry.num_kv_heads);
  }
  const int num_q_heads = static_cast<int>(args.num_q_heads);
  const int num_kv_heads = geometry.num_kv_heads;
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows q,
                       read_rows(args.q, num_q_heads, geometry.k_head_dim, "q"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows k,
                       read_rows(args.k, num_kv_heads, geometry.k_head_dim, "k"));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows v, read_step_v(args.v, geometry));
  KVX_ASSIGN_OR_RETURN(const MutableFloatRows out,
                       read_rows(args.out, num_q_heads, geometry.v_head_dim, "out"));
  KVX_RETURN_IF_ERROR(check_on_device(*owned, VerbAddresses()
                                                  .add_rows("q.data", q)
                                                  .add_rows("k.data", k)
                                                  .add_rows("v.data", v)
                                                  .add_rows("out.data", out)
                                                  .add("args.sinks", args.sinks)
                                                  .add("args.tree_mask", args.tree_mask)));
  const float scale = args.softmax_scale != 0
                          ? args.softmax_scale
                          : 1.0f / std::sqrt(static_cast<float>(geometry.k_head_dim));
  return owned->cache->append_and_attend(static_cast<int>(args.layer),
                                         {num_q_heads, scale, args.softcap, args.sinks, precision,
                                          args.tree_mask, args.tree_mask_stride},
                                         as_input(q), as_input(k), as_input(v), out);
}

Status sequence_gather(kvx_cache_t handle, int32_t sequence, uint32_t layer, int64_t first_token,
                       int64_t num_tokens, const kvx_rows_t* k, const kvx_rows_t* v) {
  KVX_ASSIGN_OR_RETURN(OwnedCache * owned, find_cache(handle));
  KVX_ASSIGN_OR_RETURN(const int index, owned->sequence(sequence));
  const kv::CacheGeometry& geometry = owned->cache->config().geometry;
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
  KVX_RETURN_IF_ERROR(check_on_device(
      *owned, VerbAddresses().add_rows("k.data", k_rows).add_rows("v.data", v_rows)));
  return owned->cache->gather(index, static_cast<int>(layer), first_token, num_tokens, k_rows,
                              v_rows);
}

}  // namespace
}  // namespace kvx::boundary

extern "C" kvx_status_t kvx_cache_create(const kvx_cache_config_t* config, kvx_cache_t* cache) {
  return kvx_cache_create_with(config, nullptr, cache);
}

extern "C" kvx_status_t kvx_cache_create_with(const kvx_cache_config_t* config,
                                              const kvx_cache_options_t* options,
                                              kvx_cache_t* cache) {
  return kvx::boundary::run_call([&] { return kvx::boundary::create(config, options, cache); });
}

extern "C" void kvx_cache_free(kvx_cache_t cache) {
  // The call that runs the cache's listener still uses the cache.
  (void)kvx::boundary::handles().remove(
      cache, [](const kvx::boundary::OwnedCache& owned) { return !owned.is_in_listener; });
}

extern "C" kvx_status_t kvx_sequence_create(kvx_cache_t cache, int32_t* sequence) {
  return kvx::boundary::run_call([&] { return kvx::boundary::sequence_create(cache, sequence); });
}

extern "C" kvx_status_t kvx_sequence_free(kvx_cache_t cache, int32_t sequence) {
  return kvx::boundary::run_call([&] { return kvx::boundary::sequence_free(cache, sequence); });
}

extern "C" kvx_status_t kvx_sequence_tokens(kvx_cache_t cache, int32_t sequence,
                                            int64_t* num_tokens, int64_t* max_step) {
  return kvx::boundary::run_call(
      [&] { return kvx::boundary::sequence_tokens(cache, sequence, num_tokens, max_step); });
}

extern "C" kvx_status_t kvx_step_begin(kvx_cache_t cache, uint32_t num_entries,
                                       const int32_t* sequences, const int32_t* num_tokens) {
  return kvx_step_begin_with(cache, num_entries, sequences, num_tokens, nullptr);
}

extern "C" kvx_status_t kvx_step_begin_with(kvx_cache_t cache, uint32_t num_entries,
                                            const int32_t* sequences, const int32_t* num_tokens,
                                            const uint8_t* is_speculative) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::step_begin(cache, num_entries, sequences, num_tokens, is_speculative);
  });
}

extern "C" kvx_status_t kvx_step_layer(kvx_cache_t cache, const kvx_step_layer_args_t* args) {
  return kvx::boundary::run_call([&] { return kvx::boundary::step_layer(cache, args); });
}

extern "C" kvx_status_t kvx_step_end(kvx_cache_t cache) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::boundary::OwnedCache * owned, kvx::boundary::find_cache(cache));
    KVX_RETURN_IF_ERROR(owned->cache->check_step_rows());
    return owned->cache->end_step();
  });
}

extern "C" kvx_status_t kvx_cache_synchronize(kvx_cache_t cache) {
  return kvx::boundary::run_call([&]() -> kvx::Status {
    KVX_ASSIGN_OR_RETURN(kvx::boundary::OwnedCache * owned, kvx::boundary::find_cache(cache));
    return owned->cache->synchronize();
  });
}

extern "C" kvx_status_t kvx_sequence_gather(kvx_cache_t cache, int32_t sequence, uint32_t layer,
                                            int64_t first_token, int64_t num_tokens,
                                            const kvx_rows_t* k, const kvx_rows_t* v) {
  return kvx::boundary::run_call([&] {
    return kvx::boundary::sequence_gather(cache, sequence, layer, first_token, num_tokens, k, v);
  });
}

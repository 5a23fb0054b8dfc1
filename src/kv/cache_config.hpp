// KvCacheConfig: what a cache is created from.
#pragma once

#include <optional>
#include <vector>

#include "cache/prefix/eviction_order.hpp"
#include "kv/plan/layer_tables.hpp"
#include "kv/prefix_cache.hpp"
#include "kv/verbs/cuda_place.hpp"

namespace kvx::kv {

// Of a sequence: positions and lengths are int32 in the verbs.
inline constexpr int64_t kMaxTokens = int64_t{1} << 30;

struct KvCacheConfig {
  CacheGeometry geometry;
  Recipe recipe;
  std::vector<RecipeOverride> overrides;      // later ones win
  std::vector<LayerCalibration> calibration;  // [num_layers], or empty
  int block_size = 64;                        // tokens, 1 to 1024
  int max_sequences = 1;
  int64_t max_tokens_per_sequence = 0;
  // Tokens of a sequence in steps that say is_speculative, since the last that stayed for sure: a
  // cut reaches back to any of them, also where pages share scales and append is immediate. Costs
  // memory for their rows and a block a group; elsewhere cuts are exact without it. 0: none.
  int max_speculative_tokens = 0;
  int64_t memory_budget_bytes = 0;  // of all regions; 0: what max_sequences full sequences need
  PrefixCacheConfig prefix;         // off: a block is free when its last sequence leaves
  cache::EvictionKind eviction = cache::EvictionKind::kLru;  // of cached blocks
  bool zeroes_on_free = false;      // a freed block's bytes are overwritten with zeros
  cache::Memory* memory = nullptr;  // of the pools, on the host, outlives the cache; null: kvx's
  // The pools lie in a GPU's memory: rows given to the cache and taken from it (k, v, q, out) and
  // attention's sinks are then in memory that it reads, and calls return when their work is on its
  // way in the stream.
  std::optional<CudaPlacement> cuda;
  std::vector<tier::TierConfig> tiers;  // behind the pool, nearest first; need prefixes
};

}  // namespace kvx::kv

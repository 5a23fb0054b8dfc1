// CacheStorage: where a cache's blocks lie and how each layer sees them: layer groups, the block
// pool, and the layers' views of its memory.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cache/sequence.hpp"
#include "kv/cache_config.hpp"
#include "kv/plan/group_plan.hpp"
#include "kv/plan/layer_store.hpp"
#include "kv/verbs/verbs.hpp"
#include "tier/block_parts.hpp"

namespace kvx::kv {

// Which blocks a copy goes between.
enum class CopyKind : uint8_t {
  kPacked,         // packed to packed
  kFullPrecision,  // full precision to full precision
  kPack,           // full precision to packed
};

// All but the pool's counts stays as create() made it.
struct CacheStorage {
  // Errors as KvCache::create.
  static Result<CacheStorage> create(KvCacheConfig config, const ops::CpuContext& context);

  // The pool's classes: of each group in turn packed blocks and, with a full-precision window,
  // full-precision ones.
  int packed_class(int group) const { return has_full_precision_window() ? 2 * group : group; }
  int full_precision_class(int group) const { return 2 * group + 1; }
  bool has_full_precision_window() const { return full_precision_window.is_on(); }
  int num_groups() const { return static_cast<int>(groups.size()); }
  const GroupPlan& group_of(int layer) const { return groups[group_of_layer[layer]]; }

  cache::SequenceShape sequence_shape() const;
  // Where the layers lie in the blocks of each of the pool's classes. In an order in which a layer
  // is no run of bytes a block is one part.
  tier::BlockParts block_parts() const;
  // Whether a page's scale may grow under codes that are there already.
  bool has_growing_pages() const;
  // A group's layers, for copies of all of them.
  std::vector<LayerCopy> layer_copies(int group, CopyKind kind) const;
  std::span<uint8_t> block_bytes(int block_class, int32_t id) const;
  // A cache's fingerprint with the order that codes have in this pool: blocks with equal ones are
  // equal byte for byte.
  std::string pool_fingerprint(std::string_view fingerprint) const;
  // Memory that the verbs read.
  cache::Memory& device_or_host_memory() const;

  KvCacheConfig config;
  ops::CpuContext context;
  cache::FullPrecisionWindow full_precision_window;
  std::vector<LayerPlan> plans;  // [layers]
  std::vector<GroupPlan> groups;
  std::vector<int> group_of_layer;
  std::unique_ptr<CudaPlace> place;  // null on the host
  std::unique_ptr<cache::BlockPool> pool;
  std::vector<std::unique_ptr<LayerStore>> layers;

 private:
  Status create_place();
  Status create_pool();
  Status create_layers(std::span<const LayerPlan> plans_of_layers);
};

}  // namespace kvx::kv

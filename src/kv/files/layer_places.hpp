// LayerPlaces: where a layer lies in the blocks of its group, and its KV heads in the layer: what
// can leave a cache as soon as the layer is computed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/cache_storage.hpp"
#include "tier/cache_file.hpp"

namespace kvx::kv {

// A layer's part of a block: a run of its bytes. All zero: there are no such blocks.
struct PagePlace {
  int64_t offset = 0;
  int64_t bytes = 0;

  friend bool operator==(const PagePlace&, const PagePlace&) = default;
};

// KV heads [first, end) of a cache that has num_heads; num_heads 0: all that there are.
struct HeadCut {
  int first = 0;
  int end = 0;
  int num_heads = 0;

  bool is_whole() const { return num_heads == 0; }
  friend bool operator==(const HeadCut&, const HeadCut&) = default;
};

struct LayerPlaces {
  int32_t group = 0;
  PagePlace packed;
  PagePlace full_precision;  // with a full-precision window

  const PagePlace& of(const tier::StoredBlockKind& kind) const {
    return kind.is_full_precision ? full_precision : packed;
  }
  friend bool operator==(const LayerPlaces&, const LayerPlaces&) = default;
};

// [num_layers]. UNSUPPORTED: an order in which a layer is no run of bytes.
Result<std::vector<LayerPlaces>> layer_places(const CacheStorage& storage);
// Where each KV head begins in the layer's part of a block, and where the last one ends:
// [num_kv_heads + 1]. Requires: there are such blocks, in an order that layer_places() supports.
std::vector<int64_t> head_offsets(const CacheStorage& storage, int layer, bool is_full_precision);

// The pool's classes, as a file's kinds.
std::vector<tier::StoredBlockKind> block_kinds(const CacheStorage& storage);

}  // namespace kvx::kv

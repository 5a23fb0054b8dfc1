// Layers' places come from the layouts of their group's blocks.
#include "kv/files/layer_places.hpp"

#include <algorithm>

namespace kvx::kv {
namespace {

const cache::LayerPlace& place_in(const CacheStorage& storage, int layer, bool is_full_precision) {
  const GroupPlan& group = storage.group_of(layer);
  const auto found = std::find(group.layers.begin(), group.layers.end(), layer);
  const cache::BlockLayout& layout = is_full_precision ? group.full_precision : group.packed;
  return layout.layers[static_cast<size_t>(found - group.layers.begin())];
}

}  // namespace

Result<std::vector<LayerPlaces>> layer_places(const CacheStorage& storage) {
  if (storage.config.recipe.order != cache::BlockOrder::kHeads) {
    return unsupported(
        "the blocks' order is {}, in which a layer's scales lie apart; expected order=heads where "
        "a sequence leaves layer by layer",
        name_of(storage.config.recipe.order));
  }
  std::vector<LayerPlaces> places;
  for (int layer = 0; layer < storage.config.geometry.num_layers; ++layer) {
    LayerPlaces& one = places.emplace_back();
    one.group = storage.group_of_layer[layer];
    const cache::LayerPlace& packed = place_in(storage, layer, false);
    one.packed = {packed.offset, packed.bytes};
    if (!storage.has_full_precision_window()) continue;
    const cache::LayerPlace& full = place_in(storage, layer, true);
    one.full_precision = {full.offset, full.bytes};
  }
  return places;
}

std::vector<int64_t> head_offsets(const CacheStorage& storage, int layer, bool is_full_precision) {
  const cache::LayerPlace& place = place_in(storage, layer, is_full_precision);
  std::vector<int64_t> offsets;
  for (const cache::RunPlace& run : place.runs) {
    for (int head = 0; head < run.num_heads; ++head) {
      offsets.push_back(run.k.codes_offset - place.offset + head * run.head_stride);
    }
  }
  offsets.push_back(place.bytes);
  return offsets;
}

std::vector<tier::StoredBlockKind> block_kinds(const CacheStorage& storage) {
  std::vector<tier::StoredBlockKind> kinds;
  const cache::BlockPool& pool = *storage.pool;
  const int per_group = pool.num_classes() / storage.num_groups();
  for (int c = 0; c < pool.num_classes(); ++c) {
    kinds.push_back({c / per_group, c % per_group == 1, pool.block_bytes(c)});
  }
  return kinds;
}

}  // namespace kvx::kv

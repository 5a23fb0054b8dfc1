// StoredChain: the memory of the file's blocks, and the verbs' views of it.
#include "kv/files/stored_chain.hpp"

#include <algorithm>

#include "ops/gather/gather.hpp"

namespace kvx::kv {

using cache::kNoBlock;

Result<StoredChain> StoredChain::create(StoredCache stored,
                                        std::span<const LayerCalibration> calibration,
                                        std::span<const tier::StoredBlockKind> kinds,
                                        const ops::CpuContext& context) {
  StoredChain chain;
  chain.stored_ = std::move(stored);
  chain.calibration_.assign(calibration.begin(), calibration.end());
  chain.context_ = &context;
  Recipe window;  // of a recipe plan_groups() reads the full-precision window and the order alone
  window.order = chain.stored_.order;
  window.has_full_precision_window = chain.stored_.full_precision_window.is_on();
  window.full_precision_spec = chain.stored_.full_precision_spec;
  KVX_ASSIGN_OR_RETURN(chain.plans_, plan_groups(chain.stored_.geometry, chain.stored_.layers,
                                                 window, chain.stored_.block_size));
  chain.groups_.resize(chain.plans_.size());
  chain.group_of_layer_.resize(chain.stored_.geometry.num_layers);
  chain.index_in_group_.resize(chain.stored_.geometry.num_layers);
  std::vector<tier::StoredBlockKind> expected;
  for (int g = 0; g < static_cast<int>(chain.plans_.size()); ++g) {
    const GroupPlan& plan = chain.plans_[g];
    expected.push_back({g, false, plan.packed.block_bytes});
    if (window.has_full_precision_window)
      expected.push_back({g, true, plan.full_precision.block_bytes});
    for (int i = 0; i < static_cast<int>(plan.layers.size()); ++i) {
      chain.group_of_layer_[plan.layers[i]] = g;
      chain.index_in_group_[plan.layers[i]] = i;
    }
  }
  if (std::equal(kinds.begin(), kinds.end(), expected.begin(), expected.end())) return chain;
  return invalid_argument("the file's kinds of blocks are not those of its fingerprint");
}

int StoredChain::best_block_copy(const tier::FileBlock& block, int group) const {
  int best = -1;
  for (int i = 0; i < static_cast<int>(block.block_copies.size()); ++i) {
    const int kind = block.block_copies[i].kind;
    if (kind / num_kinds_per_group() != group) continue;
    const bool is_full_precision = kind % num_kinds_per_group() == 1;
    if (best < 0 || is_full_precision) best = i;
  }
  return best;
}

int64_t StoredChain::num_usable(std::span<const tier::FileBlock* const> path) const {
  int64_t num_tokens = 0;
  for (const tier::FileBlock* block : path)
    num_tokens += static_cast<int64_t>(block->tokens.size());
  for (auto n = static_cast<int64_t>(path.size()); n > 0; --n) {
    bool is_usable = true;
    for (int g = 0; g < static_cast<int>(plans_.size()) && is_usable; ++g) {
      const int64_t seen = cache::expired_blocks(num_tokens, plans_[g].window, stored_.block_size);
      int64_t b = 0;
      while (b < n && ((b >= sink_blocks(g) && b < seen) || best_block_copy(*path[b], g) >= 0)) ++b;
      is_usable = b >= n;
    }
    if (is_usable) return n;
    num_tokens -= static_cast<int64_t>(path[n - 1]->tokens.size());
  }
  return 0;
}

// ---- reading

void StoredChain::read_group(tier::CacheFileReader& file,
                             std::span<const tier::FileBlock* const> path, int64_t first_block,
                             int g, Reading& reading) {
  Group& group = groups_[g];
  const auto num_blocks = static_cast<int64_t>(path.size());
  group.ids.assign(path.size(), kNoBlock);
  group.is_full_precision.assign(path.size(), 0);
  group.first_block = num_blocks;
  while (group.first_block > first_block && best_block_copy(*path[group.first_block - 1], g) >= 0) {
    --group.first_block;
  }
  int32_t num_packed = 0;
  int32_t num_full_precision = 0;
  const auto is_read = [&](int64_t b) {
    return b >= group.first_block || (b >= first_block && b < sink_blocks(g));
  };
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (!is_read(b)) continue;
    const tier::StoredBlockCopy& block_copy = path[b]->block_copies[best_block_copy(*path[b], g)];
    group.is_full_precision[b] = block_copy.kind % num_kinds_per_group() == 1;
    group.ids[b] = group.is_full_precision[b] != 0 ? num_full_precision++ : num_packed++;
  }
  const int64_t packed_bytes = plans_[g].packed.block_bytes;
  const int64_t full_precision_bytes = plans_[g].full_precision.block_bytes;
  // One block at least, so that no view points to nothing.
  group.packed.resize(static_cast<size_t>(std::max(num_packed, 1) * packed_bytes));
  group.full_precision.resize(
      static_cast<size_t>(std::max(num_full_precision, 1) * full_precision_bytes));
  for (int64_t b = 0; b < num_blocks; ++b) {
    if (!is_read(b)) continue;
    const tier::StoredBlockCopy& block_copy = path[b]->block_copies[best_block_copy(*path[b], g)];
    const bool is_full_precision = group.is_full_precision[b] != 0;
    const auto bytes = static_cast<size_t>(is_full_precision ? full_precision_bytes : packed_bytes);
    std::vector<uint8_t>& memory = is_full_precision ? group.full_precision : group.packed;
    const Status read = file.read_block_copy(
        block_copy, std::span(memory).subspan(static_cast<size_t>(group.ids[b]) * bytes, bytes));
    if (read.ok() || b >= reading.num_blocks) continue;
    reading = {b, fmt::format("block {}: {}", b, read.error().message)};
  }
}

Result<StoredChain::Reading> StoredChain::read(tier::CacheFileReader& file,
                                               std::span<const tier::FileBlock* const> path,
                                               int64_t first_block) {
  Reading reading{static_cast<int64_t>(path.size()), {}};
  for (int g = 0; g < static_cast<int>(plans_.size()); ++g) {
    read_group(file, path, first_block, g, reading);
  }
  KVX_RETURN_IF_ERROR(create_stores());
  return reading;
}

Status StoredChain::create_stores() {
  static const LayerCalibration kNotCalibrated;
  const bool has_full_precision = stored_.full_precision_window.is_on();
  layers_.clear();
  for (int layer = 0; layer < stored_.geometry.num_layers; ++layer) {
    const int g = group_of_layer_[layer];
    Group& group = groups_[g];
    const GroupPlan& plan = plans_[g];
    const auto memory_of = [&](std::vector<uint8_t>& bytes, const cache::BlockLayout& layout) {
      return LayerMemory{bytes.data(), static_cast<int64_t>(bytes.size()) / layout.block_bytes,
                         &layout, index_in_group_[layer]};
    };
    const LayerMemory full_precision =
        has_full_precision ? memory_of(group.full_precision, plan.full_precision) : LayerMemory{};
    const auto num_tokens = static_cast<int64_t>(group.ids.size()) * stored_.block_size;
    KVX_ASSIGN_OR_RETURN(
        const LayerCalibration calibration,
        with_block_offsets(stored_.geometry, layer, stored_.block_size, num_tokens,
                           calibration_.empty() ? kNotCalibrated : calibration_[layer]));
    KVX_ASSIGN_OR_RETURN(std::unique_ptr<LayerStore> store,
                         LayerStore::create(stored_.geometry, layer, stored_.layers[layer],
                                            stored_.full_precision_spec, calibration,
                                            memory_of(group.packed, plan.packed), full_precision));
    layers_.push_back(std::move(store));
  }
  return {};
}

int64_t StoredChain::first_token(int layer) const {
  return groups_[group_of_layer_[layer]].first_block * stored_.block_size;
}

int64_t StoredChain::sinks_end(int layer) const {
  return sink_blocks(group_of_layer_[layer]) * stored_.block_size;
}

// ---- rows

Status StoredChain::gather(int layer, int64_t first_token, int64_t num_tokens, MutableFloatRows k,
                           MutableFloatRows v) const {
  const Group& group = groups_[group_of_layer_[layer]];
  const LayerStore& store = *layers_[layer];
  const int64_t bs = stored_.block_size;
  const int64_t end = first_token + num_tokens;
  ops::GatherArgs args;
  args.transform = store.transform();
  args.block_table = {group.ids.data(), static_cast<int64_t>(group.ids.size())};
  args.max_blocks_per_sequence = static_cast<int64_t>(group.ids.size());
  args.num_sequences = 1;
  args.k = k;
  args.v = v;
  for (int64_t token = first_token; token < end;) {
    const int64_t block = token / bs;
    const int64_t block_end = std::min(end, (block + 1) * bs);
    if (group.ids[block] == kNoBlock) {
      token = block_end;
      continue;
    }
    const ops::GatherRange range{0, token, block_end - token, token - first_token};
    args.cache = group.is_full_precision[block] != 0 ? store.full_precision() : store.packed();
    args.ranges = {&range, 1};
    KVX_RETURN_IF_ERROR(ops::gather(*context_, args));
    token = block_end;
  }
  return {};
}

}  // namespace kvx::kv

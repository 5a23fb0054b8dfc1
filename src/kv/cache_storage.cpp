// CacheStorage: create() turns a recipe into memory and views.
#include "kv/cache_storage.hpp"

#include <algorithm>

#include "cache/pool/pool_plan.hpp"
#include "core/log.hpp"
#include "device/cuda_caller.hpp"

namespace kvx::kv {
namespace {

constexpr int kMaxSequences = 1 << 20;

Status check_config(const KvCacheConfig& config) {
  if (config.max_sequences < 1 || config.max_sequences > kMaxSequences) {
    return invalid_argument("max_sequences is {}; expected 1 to {}", config.max_sequences,
                            kMaxSequences);
  }
  if (config.max_tokens_per_sequence < 1 || config.max_tokens_per_sequence > kMaxTokens) {
    return invalid_argument("max_tokens_per_sequence is {}; expected 1 to {}",
                            config.max_tokens_per_sequence, kMaxTokens);
  }
  if (config.memory_budget_bytes < 0) {
    return invalid_argument("memory_budget_bytes is {}; expected 0 or more",
                            config.memory_budget_bytes);
  }
  const int num_calibrated = static_cast<int>(config.calibration.size());
  if (num_calibrated != 0 && num_calibrated != config.geometry.num_layers) {
    return invalid_argument("calibration has {} layers; expected none or num_layers, {}",
                            num_calibrated, config.geometry.num_layers);
  }
  return {};
}

// What a GPU's calls are limited to, before anything is allocated there.
Status check_cuda_config(const KvCacheConfig& config) {
  constexpr int kMaxEntries = 65535;  // of attend on CUDA
  if (config.memory != nullptr) {
    return invalid_argument("memory and cuda are both given; expected one place for the pools");
  }
  if (config.max_sequences > kMaxEntries) {
    return invalid_argument("max_sequences is {}; expected 1 to {} on a GPU", config.max_sequences,
                            kMaxEntries);
  }
  if (config.cuda->max_step_tokens < config.max_sequences) {
    return invalid_argument(
        "cuda.max_step_tokens is {}; expected at least max_sequences, {}: a token of each in one "
        "step",
        config.cuda->max_step_tokens, config.max_sequences);
  }
  // A cut appends the rows that stay once more, in tables of a step's size.
  if (config.max_speculative_tokens > config.cuda->max_step_tokens) {
    return invalid_argument("max_speculative_tokens is {}; expected 0 to cuda.max_step_tokens, {}",
                            config.max_speculative_tokens, config.cuda->max_step_tokens);
  }
  return {};
}

}  // namespace

Result<CacheStorage> CacheStorage::create(KvCacheConfig config, const ops::CpuContext& context) {
  KVX_RETURN_IF_ERROR(check_config(config));
  CacheStorage storage;
  storage.config = std::move(config);
  storage.context = context;
  const KvCacheConfig& kept = storage.config;
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans,
                       plan_layers(kept.geometry, kept.recipe, kept.overrides));
  KVX_ASSIGN_OR_RETURN(storage.full_precision_window,
                       full_precision_window_of(kept.recipe, kept.block_size));
  KVX_ASSIGN_OR_RETURN(storage.groups,
                       plan_groups(kept.geometry, plans, kept.recipe, kept.block_size));
  KVX_RETURN_IF_ERROR(storage.create_place());
  std::optional<device::CurrentCudaDevice> current;  // kernels are chosen for this device
  if (kept.cuda) {
    KVX_ASSIGN_OR_RETURN(auto set, device::CurrentCudaDevice::set(kept.cuda->context.device.index));
    current.emplace(std::move(set));
  }
  KVX_RETURN_IF_ERROR(storage.create_pool());
  KVX_RETURN_IF_ERROR(storage.create_layers(plans));
  storage.plans = plans;
  return storage;
}

std::string CacheStorage::pool_fingerprint(std::string_view fingerprint) const {
  bool is_interleaved = false;
  for (const auto& layer : layers) {
    for (const ops::HeadRun& run : layer->packed().runs) {
      is_interleaved = is_interleaved || run.k.is_interleaved || run.v.is_interleaved;
    }
  }
  return fmt::format("{}pool_order {}\n", fingerprint, is_interleaved ? "interleaved" : "plain");
}

cache::Memory& CacheStorage::device_or_host_memory() const {
  return place ? *place->memory : cache::host_memory();
}

Status CacheStorage::create_place() {
  if (config.memory != nullptr && config.memory->kind() != cache::MemoryKind::kHost) {
    return invalid_argument("memory is a device's; expected the host's, or config.cuda");
  }
  if (!config.cuda) return {};
  KVX_RETURN_IF_ERROR(check_cuda_config(config));
  KVX_ASSIGN_OR_RETURN(place, CudaPlace::create(config.cuda->context));
  return {};
}

// Classes: packed and, with full-precision window, full-precision blocks of each group in turn
// (packed_class, full_precision_class).
Status CacheStorage::create_pool() {
  // A sliding-window group is given the whole length too: its blocks come back as they expire, but
  // a long prompt may hold them all.
  std::vector<cache::ClassDemand> demands;
  for (size_t g = 0; g < groups.size(); ++g) {
    const GroupPlan& group = groups[g];
    const cache::BlockCounts blocks = cache::count_blocks(
        group.full_precision_window, config.max_tokens_per_sequence, config.block_size);
    demands.push_back({fmt::format("group {} packed", g), group.packed.block_bytes, blocks.packed});
    if (!has_full_precision_window()) continue;
    demands.push_back({fmt::format("group {} full_precision", g), group.full_precision.block_bytes,
                       blocks.full_precision});
  }
  std::vector<int64_t> num_blocks;
  if (config.memory_budget_bytes > 0) {
    KVX_ASSIGN_OR_RETURN(const cache::PoolPlan plan,
                         cache::plan_pool(config.memory_budget_bytes, demands));
    num_blocks = plan.num_blocks;
  } else {
    // With prefixes one more: save_sequence() copies the open block through it; and a page for
    // each sequence that speculates.
    const bool keeps_pages = config.max_speculative_tokens > 0 && has_growing_pages();
    const int64_t num_spare =
        (config.prefix.is_on ? 1 : 0) + (keeps_pages ? config.max_sequences : 0);
    for (const cache::ClassDemand& demand : demands) {
      num_blocks.push_back(demand.blocks_per_sequence * config.max_sequences + num_spare);
    }
  }
  std::vector<cache::BlockClassSpec> classes;
  for (size_t c = 0; c < demands.size(); ++c) {
    classes.push_back({demands[c].name, num_blocks[c], {demands[c].block_bytes}});
  }
  cache::Memory& on_host = config.memory ? *config.memory : cache::host_memory();
  cache::Memory& memory = place ? *place->memory : on_host;
  KVX_ASSIGN_OR_RETURN(
      cache::BlockPool created,
      cache::BlockPool::create(memory, classes, {config.eviction, config.zeroes_on_free}));
  for (const cache::BlockClassSpec& spec : classes) {
    log(LogLevel::kInfo, "a cache has {} blocks of {} bytes for {}", spec.num_blocks,
        spec.block_bytes.front(), spec.name);
  }
  pool = std::make_unique<cache::BlockPool>(std::move(created));
  return {};
}

Status CacheStorage::create_layers(std::span<const LayerPlan> plans_of_layers) {
  const int num_layers = config.geometry.num_layers;
  group_of_layer.resize(num_layers);
  layers.resize(num_layers);
  static const LayerCalibration kNotCalibrated;
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    const GroupPlan& group = groups[g];
    for (int i = 0; i < static_cast<int>(group.layers.size()); ++i) {
      const int layer = group.layers[i];
      LayerMemory packed{pool->region(packed_class(g)), pool->num_blocks(packed_class(g)),
                         &group.packed, i};
      LayerMemory full_precision;
      if (has_full_precision_window()) {
        full_precision = {pool->region(full_precision_class(g)),
                          pool->num_blocks(full_precision_class(g)), &group.full_precision, i};
      }
      group_of_layer[layer] = g;
      KVX_ASSIGN_OR_RETURN(
          const LayerCalibration calibration,
          with_block_offsets(
              config.geometry, layer, config.block_size, config.max_tokens_per_sequence,
              config.calibration.empty() ? kNotCalibrated : config.calibration[layer]));
      KVX_ASSIGN_OR_RETURN(
          layers[layer], LayerStore::create(config.geometry, layer, plans_of_layers[layer],
                                            config.recipe.full_precision_spec, calibration, packed,
                                            full_precision, place.get()));
    }
  }
  return {};
}

cache::SequenceShape CacheStorage::sequence_shape() const {
  cache::SequenceShape shape{config.block_size, config.max_tokens_per_sequence, {}};
  for (int g = 0; g < static_cast<int>(groups.size()); ++g) {
    shape.groups.push_back({packed_class(g),
                            has_full_precision_window() ? full_precision_class(g) : 0,
                            groups[g].full_precision_window, groups[g].window,
                            cache::blocks_for(groups[g].sinks, config.block_size)});
  }
  return shape;
}

tier::BlockParts CacheStorage::block_parts() const {
  const bool has_runs = config.recipe.order == cache::BlockOrder::kHeads;
  tier::BlockParts parts;
  parts.layers.resize(static_cast<size_t>(config.geometry.num_layers));
  for (int g = 0; g < num_groups(); ++g) {
    const std::vector<int>& members = groups[g].layers;
    for (int i = 0; i < static_cast<int>(members.size()); ++i) {
      parts.layers[members[i]] = {g, has_runs || i == 0 ? i : -1};
    }
    for (const cache::BlockLayout* layout : {&groups[g].packed, &groups[g].full_precision}) {
      if (layout == &groups[g].full_precision && !has_full_precision_window()) continue;
      std::vector<int64_t>& ends = parts.ends.emplace_back();
      for (size_t i = 1; has_runs && i < layout->layers.size(); ++i) {
        ends.push_back(layout->layers[i].offset);
      }
      ends.push_back(layout->block_bytes);
    }
  }
  return parts;
}

bool CacheStorage::has_growing_pages() const {
  return !has_full_precision_window() && std::ranges::any_of(groups, [](const GroupPlan& group) {
    return group.packed.page_scale_bytes > 0;
  });
}

std::vector<LayerCopy> CacheStorage::layer_copies(int group, CopyKind kind) const {
  std::vector<LayerCopy> copies;
  for (int layer : groups[group].layers) {
    const LayerStore& store = *layers[layer];
    const ops::LayerView& full_precision = store.full_precision_in_packed_runs();
    copies.push_back({kind == CopyKind::kPacked ? &store.packed() : &full_precision,
                      kind == CopyKind::kFullPrecision ? &full_precision : &store.packed()});
  }
  return copies;
}

std::span<uint8_t> CacheStorage::block_bytes(int block_class, int32_t id) const {
  const int64_t bytes = pool->block_bytes(block_class);
  return {pool->region(block_class) + id * bytes, static_cast<size_t>(bytes)};
}

}  // namespace kvx::kv

// KvCache: create() turns a recipe into memory and views; a step moves sequences forward.
#include "kv/kv_cache.hpp"

#include <algorithm>

#include "cache/pool/pool_plan.hpp"
#include "core/log.hpp"
#include "device/cuda_caller.hpp"
#include "kv/kv_step.hpp"
#include "kv/verbs/cpu_verbs.hpp"
#include "kv/verbs/cuda_verbs.hpp"

namespace kvx::kv {

// ---- creation
// -------------------------------------------------------------------------------------------------------

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

KvCache::KvCache(KvCacheConfig config, const ops::CpuContext& context)
    : config_(std::move(config)), context_(context) {}

KvCache::~KvCache() = default;

Result<std::unique_ptr<KvCache>> KvCache::create(KvCacheConfig config,
                                                 const ops::CpuContext& context) {
  KVX_RETURN_IF_ERROR(check_config(config));
  std::unique_ptr<KvCache> cache(new KvCache(std::move(config), context));
  const KvCacheConfig& kept = cache->config_;
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans,
                       plan_layers(kept.geometry, kept.recipe, kept.overrides));
  KVX_ASSIGN_OR_RETURN(cache->full_precision_window_,
                       full_precision_window_of(kept.recipe, kept.block_size));
  KVX_ASSIGN_OR_RETURN(cache->groups_,
                       plan_groups(kept.geometry, plans, kept.recipe, kept.block_size));
  KVX_RETURN_IF_ERROR(cache->create_place());
  std::optional<device::CurrentCudaDevice> current;  // what asks for kernels means this device's
  if (kept.cuda) {
    KVX_ASSIGN_OR_RETURN(auto set, device::CurrentCudaDevice::set(kept.cuda->context.device.index));
    current.emplace(std::move(set));
  }
  KVX_RETURN_IF_ERROR(cache->create_pool());
  KVX_RETURN_IF_ERROR(cache->create_layers(plans));
  KVX_RETURN_IF_ERROR(cache->create_sequences());
  KVX_RETURN_IF_ERROR(cache->create_speculations());
  KVX_RETURN_IF_ERROR(cache->create_prefix_cache(plans));
  KVX_RETURN_IF_ERROR(cache->create_host_tier());
  return cache;
}

Status KvCache::create_place() {
  if (config_.memory != nullptr && config_.memory->kind() != cache::MemoryKind::kHost) {
    return invalid_argument("memory is a device's; expected the host's, or config.cuda");
  }
  if (!config_.cuda) return {};
  KVX_RETURN_IF_ERROR(check_cuda_config(config_));
  KVX_ASSIGN_OR_RETURN(place_, CudaPlace::create(config_.cuda->context));
  return {};
}

Result<std::unique_ptr<Verbs>> KvCache::create_verbs() {
  if (!place_) return std::unique_ptr<Verbs>(new CpuVerbs(context_, nonfinite_inputs_));
  CudaVerbLimits limits;
  limits.max_step_tokens = config_.cuda->max_step_tokens;
  limits.max_entries = config_.max_sequences;
  limits.max_blocks = cache::blocks_for(config_.max_tokens_per_sequence, config_.block_size);
  limits.num_groups = static_cast<int64_t>(groups_.size());
  limits.max_block_bytes = pool_->max_block_bytes();
  KVX_ASSIGN_OR_RETURN(auto verbs, CudaVerbs::create(*place_, limits));
  return std::unique_ptr<Verbs>(std::move(verbs));
}

// Classes: packed and, with full-precision window, full-precision blocks of each group in turn
// (packed_class, full_precision_class).
Status KvCache::create_pool() {
  // A sliding-window group is given the whole length too: its blocks come back as they expire, but
  // a long prompt may hold them all.
  std::vector<cache::ClassDemand> demands;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const GroupPlan& group = groups_[g];
    const cache::BlockCounts blocks = cache::count_blocks(
        group.full_precision_window, config_.max_tokens_per_sequence, config_.block_size);
    demands.push_back({fmt::format("group {} packed", g), group.packed.block_bytes, blocks.packed});
    if (!has_full_precision_window()) continue;
    demands.push_back({fmt::format("group {} full_precision", g), group.full_precision.block_bytes,
                       blocks.full_precision});
  }
  std::vector<int64_t> num_blocks;
  if (config_.memory_budget_bytes > 0) {
    KVX_ASSIGN_OR_RETURN(const cache::PoolPlan plan,
                         cache::plan_pool(config_.memory_budget_bytes, demands));
    num_blocks = plan.num_blocks;
  } else {
    // With prefixes one more: save_sequence() copies the open block through it; and a page for
    // each sequence that speculates.
    const bool keeps_pages = config_.max_speculative_tokens > 0 && has_growing_pages();
    const int64_t num_spare =
        (config_.prefix.is_on ? 1 : 0) + (keeps_pages ? config_.max_sequences : 0);
    for (const cache::ClassDemand& demand : demands) {
      num_blocks.push_back(demand.blocks_per_sequence * config_.max_sequences + num_spare);
    }
  }
  std::vector<cache::BlockClassSpec> classes;
  for (size_t c = 0; c < demands.size(); ++c) {
    classes.push_back({demands[c].name, num_blocks[c], {demands[c].block_bytes}});
  }
  cache::Memory& on_host = config_.memory ? *config_.memory : cache::host_memory();
  cache::Memory& memory = place_ ? *place_->memory : on_host;
  KVX_ASSIGN_OR_RETURN(
      cache::BlockPool pool,
      cache::BlockPool::create(memory, classes, {config_.eviction, config_.zeroes_on_free}));
  for (const cache::BlockClassSpec& spec : classes) {
    log(LogLevel::kInfo, "a cache has {} blocks of {} bytes for {}", spec.num_blocks,
        spec.block_bytes.front(), spec.name);
  }
  pool_ = std::make_unique<cache::BlockPool>(std::move(pool));
  return {};
}

Status KvCache::create_layers(std::span<const LayerPlan> plans) {
  const int num_layers = config_.geometry.num_layers;
  group_of_layer_.resize(num_layers);
  layers_.resize(num_layers);
  static const LayerCalibration kNotCalibrated;
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    const GroupPlan& group = groups_[g];
    for (int i = 0; i < static_cast<int>(group.layers.size()); ++i) {
      const int layer = group.layers[i];
      LayerMemory packed{pool_->region(packed_class(g)), pool_->num_blocks(packed_class(g)),
                         &group.packed, i};
      LayerMemory full_precision;
      if (has_full_precision_window()) {
        full_precision = {pool_->region(full_precision_class(g)),
                          pool_->num_blocks(full_precision_class(g)), &group.full_precision, i};
      }
      group_of_layer_[layer] = g;
      KVX_ASSIGN_OR_RETURN(
          layers_[layer],
          LayerStore::create(
              config_.geometry, layer, plans[layer], config_.recipe.full_precision_spec,
              config_.calibration.empty() ? kNotCalibrated : config_.calibration[layer], packed,
              full_precision, place_.get()));
    }
  }
  return {};
}

cache::SequenceShape KvCache::sequence_shape() const {
  cache::SequenceShape shape{config_.block_size, config_.max_tokens_per_sequence, {}};
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    shape.groups.push_back({packed_class(g),
                            has_full_precision_window() ? full_precision_class(g) : 0,
                            groups_[g].full_precision_window, groups_[g].window,
                            cache::blocks_for(groups_[g].sinks, config_.block_size)});
  }
  return shape;
}

Status KvCache::create_sequences() {
  const cache::SequenceShape shape = sequence_shape();
  for (int s = 0; s < config_.max_sequences; ++s) {
    KVX_ASSIGN_OR_RETURN(cache::Sequence sequence, cache::Sequence::create(shape));
    sequences_.push_back(std::move(sequence));
  }
  uses_.assign(config_.max_sequences, Use::kFree);
  KVX_ASSIGN_OR_RETURN(verbs_, create_verbs());
  step_ = std::make_unique<KvStep>(*this);
  return step_->prepare();
}

// ---- sequences and steps
// --------------------------------------------------------------------------------------------

Result<int> KvCache::acquire_sequence() {
  const auto unused = std::find(uses_.begin(), uses_.end(), Use::kFree);
  if (unused == uses_.end()) {
    return out_of_range("all {} sequences are in use; free one or raise max_sequences",
                        config_.max_sequences);
  }
  return static_cast<int>(unused - uses_.begin());
}

bool KvCache::is_in_use(int sequence) const {
  const std::lock_guard lock(state_mutex_);
  return is_known(sequence);
}

Status KvCache::check_sequence(int sequence) const {
  if (!is_known(sequence)) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  if (uses_[sequence] == Use::kInStep) {
    return invalid_argument("a step is open with sequence {}; end or cancel it first", sequence);
  }
  return {};
}

Result<int> KvCache::create_sequence() {
  const std::lock_guard lock(state_mutex_);
  KVX_ASSIGN_OR_RETURN(const int sequence, acquire_sequence());
  if (prefixes_) KVX_RETURN_IF_ERROR(prefixes_->begin(sequence, {}));
  uses_[sequence] = Use::kIdle;
  return sequence;
}

Status KvCache::free_sequence(int sequence) {
  const std::lock_guard lock(state_mutex_);
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  collect();
  if (prefixes_) prefixes_->store_tail(sequence);
  if (!speculations_.empty()) speculations_[sequence].let_go(*pool_);
  KVX_RETURN_IF_ERROR(sequences_[sequence].clear(*pool_));
  if (prefixes_) prefixes_->end(sequence);
  uses_[sequence] = Use::kFree;
  return {};
}

int64_t KvCache::max_step_tokens(int sequence) const {
  const cache::Sequence& tokens = sequences_[sequence];
  const int64_t most = tokens.max_tokens() - tokens.num_tokens();
  return config_.cuda ? std::min<int64_t>(most, config_.cuda->max_step_tokens) : most;
}

Status KvCache::begin_step(std::span<const StepEntry> entries) {
  return step_->begin(entries);
}

Status KvCache::append_and_attend(int layer, const AttentionParams& params, FloatRows q,
                                  FloatRows k, FloatRows v, MutableFloatRows out) {
  return step_->append_and_attend(layer, params, q, k, v, out);
}

Status KvCache::check_step_rows() const {
  return step_->check_rows();
}

Status KvCache::end_step() {
  return step_->end();
}

Status KvCache::end_step(std::span<const int> kept_tokens) {
  return step_->end(kept_tokens);
}

int64_t KvCache::nonfinite_inputs() const {
  const Result<int64_t> counted = verbs_->nonfinite_inputs();
  if (counted.ok()) return counted.value();
  log(LogLevel::kWarning, "{}", counted.error().message);
  return 0;
}

// Once a cache: a model that makes one NaN makes many. A GPU's are known when somebody asks.
void KvCache::warn_of_nonfinite_inputs() {
  if (nonfinite_inputs_ == 0 || has_warned_of_nonfinite_) return;
  has_warned_of_nonfinite_ = true;
  log(LogLevel::kWarning, "{} NaN or infinite inputs are stored as zeros",
      nonfinite_inputs_.load());
}

Status KvCache::cancel_step() {
  return step_->cancel();
}

// ---- reading back and accounting
// ------------------------------------------------------------------------------------

Status KvCache::gather(int sequence, int layer, int64_t first_token, int64_t num_tokens,
                       MutableFloatRows k, MutableFloatRows v) const {
  if (!is_in_use(sequence)) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  if (layer < 0 || layer >= config_.geometry.num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer,
                            config_.geometry.num_layers - 1);
  }
  const cache::Sequence& tokens = sequences_[sequence];
  if (first_token < 0 || num_tokens < 0 || num_tokens > tokens.num_tokens() - first_token) {
    return out_of_range("{} tokens from {} are wanted; the sequence has {}", num_tokens,
                        first_token, tokens.num_tokens());
  }
  const int g = group_of_layer_[layer];
  const int64_t bs = config_.block_size;
  const int64_t last = first_token + num_tokens;
  for (int64_t block = first_token / bs; block * bs < last; ++block) {
    if (tokens.table(g)[block] != cache::kNoBlock) continue;
    return out_of_range(
        "{} tokens from {} are wanted; the window of layer {} has left tokens {} to {} behind",
        num_tokens, first_token, layer, block * bs, (block + 1) * bs - 1);
  }
  ops::GatherArgs args;
  args.transform = layers_[layer]->transform();
  args.block_table = {tokens.table(g).data(), tokens.table(g).size()};
  args.max_blocks_per_sequence = tokens.table(g).size();
  args.num_sequences = 1;
  args.k = k;
  args.v = v;
  const LayerStore& store = *layers_[layer];
  const int64_t head_end = tokens.num_sink_blocks(g) * bs;
  const int64_t tail_begin = tokens.first_recent_block(g) * bs;
  // The full-precision head, the packed middle and the full-precision tail, each as far as the
  // range reaches into it.
  std::vector<GatherPart> parts;
  const auto add_part = [&](const ops::LayerView& view, int64_t begin, int64_t end) {
    begin = std::max(begin, first_token);
    end = std::min(end, last);
    if (begin < end) parts.push_back({&view, {0, begin, end - begin, begin - first_token}});
  };
  add_part(store.full_precision(), 0, head_end);
  add_part(store.packed(), head_end, tail_begin);
  add_part(store.full_precision(), std::max(head_end, tail_begin), last);
  return verbs_->gather(args, parts);
}

cache::PoolAccount KvCache::account() const {
  std::vector<cache::BlockLayout> layouts;
  for (const GroupPlan& group : groups_) {
    layouts.push_back(group.packed);
    if (has_full_precision_window()) layouts.push_back(group.full_precision);
  }
  const std::lock_guard lock(state_mutex_);
  return cache::account_pool(*pool_, layouts);
}

cache::ByteCount KvCache::sequence_bytes(int64_t num_tokens) const {
  return cache::sequence_bytes(sizes_of(groups_), num_tokens);
}

int64_t KvCache::bytes_read_per_step(int64_t num_tokens) const {
  return cache::bytes_read_per_step(sizes_of(groups_), num_tokens);
}

Result<RecipeCost> cost_of(const KvCacheConfig& config, int64_t num_tokens) {
  if (num_tokens < 1 || num_tokens > kMaxTokens) {
    return invalid_argument("num_tokens is {}; expected 1 to {}", num_tokens, kMaxTokens);
  }
  const CacheGeometry& geometry = config.geometry;
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans,
                       plan_layers(geometry, config.recipe, config.overrides));
  KVX_ASSIGN_OR_RETURN(const std::vector<GroupPlan> groups,
                       plan_groups(geometry, plans, config.recipe, config.block_size));
  const std::vector<cache::GroupSizes> sizes = sizes_of(groups);
  double bytes = 0;
  for (const GroupPlan& group : groups) {
    bytes += static_cast<double>(group.packed.code_bytes() + group.packed.scale_bytes()) /
             config.block_size;
  }
  const double values = static_cast<double>(geometry.num_layers) * geometry.num_kv_heads *
                        (geometry.k_head_dim + geometry.v_head_dim);
  RecipeCost cost;
  cost.bits_per_value = 8 * bytes / values;
  cost.bytes_per_token = static_cast<double>(cache::sequence_bytes(sizes, num_tokens).total()) /
                         static_cast<double>(num_tokens);
  cost.tokens_per_gib = cache::tokens_that_fit(sizes, int64_t{1} << 30, num_tokens);
  return cost;
}

}  // namespace kvx::kv

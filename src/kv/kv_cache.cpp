// KvCache: sequences, steps, reading back and accounting.
#include "kv/kv_cache.hpp"

#include <algorithm>

#include "core/log.hpp"
#include "device/cuda_caller.hpp"
#include "kv/files/outgoing_sequence.hpp"
#include "kv/kv_step.hpp"

namespace kvx::kv {

// ---- creation

KvCache::KvCache(std::unique_ptr<SequenceTable> table) : table_(std::move(table)) {}

KvCache::~KvCache() {
  if (!table_) return;
  const std::lock_guard lock(table_->mutex);
  for (int s = 0; s < config().max_sequences; ++s) {
    table_->abandon_outgoing(s, "its cache is gone");
  }
}

Result<std::unique_ptr<KvCache>> KvCache::create(KvCacheConfig config,
                                                 const ops::CpuContext& context) {
  KVX_ASSIGN_OR_RETURN(CacheStorage storage, CacheStorage::create(std::move(config), context));
  KVX_ASSIGN_OR_RETURN(auto table, SequenceTable::create(std::move(storage)));
  std::unique_ptr<KvCache> cache(new KvCache(std::move(table)));
  KVX_ASSIGN_OR_RETURN(cache->verbs_, cache->table_->create_verbs());
  cache->step_ = std::make_unique<KvStep>(*cache);
  KVX_RETURN_IF_ERROR(cache->step_->prepare());
  return cache;
}

// ---- sequences and steps

bool KvCache::is_in_use(int sequence) const {
  const std::lock_guard lock(table_->mutex);
  return table_->holds(sequence);
}

Result<int> KvCache::create_sequence() {
  const std::lock_guard lock(table_->mutex);
  KVX_ASSIGN_OR_RETURN(const int sequence, table_->acquire_sequence());
  if (table_->prefixes) KVX_RETURN_IF_ERROR(table_->prefixes->begin(sequence, {}));
  table_->uses[sequence] = SequenceUse::kIdle;
  return sequence;
}

Status KvCache::free_sequence(int sequence) {
  std::unique_lock lock(table_->mutex);
  KVX_RETURN_IF_ERROR(table_->end_load(lock, sequence));
  table_->collect();
  if (table_->prefixes) table_->prefixes->store_tail(sequence);
  table_->abandon_outgoing(sequence, "the sequence was freed before its last layer");
  if (!table_->speculations.empty()) table_->speculations[sequence].release(*storage().pool);
  KVX_RETURN_IF_ERROR(table_->sequences[sequence].clear(*storage().pool));
  if (table_->prefixes) table_->prefixes->end(sequence);
  table_->uses[sequence] = SequenceUse::kFree;
  return {};
}

int64_t KvCache::max_step_tokens(int sequence) const {
  return table_->max_step_tokens(sequence);
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

Result<std::vector<LayerCounts>> KvCache::head_counts() const {
  KVX_RETURN_IF_ERROR(verbs_->synchronize());
  std::optional<device::CurrentCudaDevice> current;
  if (storage().place) {
    KVX_ASSIGN_OR_RETURN(auto set,
                         device::CurrentCudaDevice::set(storage().place->context.device.index));
    current.emplace(std::move(set));
  }
  std::vector<LayerCounts> counts;
  for (const auto& layer : storage().layers) {
    KVX_ASSIGN_OR_RETURN(LayerCounts of_layer, layer->counts());
    counts.push_back(std::move(of_layer));
  }
  return counts;
}

std::optional<int64_t> KvCache::saturated_inputs() const {
  const Result<std::vector<LayerCounts>> layers = head_counts();
  if (!layers.ok()) return std::nullopt;
  int64_t sum = 0;
  for (const LayerCounts& layer : layers.value()) {
    for (const auto* side : {&layer.k, &layer.v}) {
      for (const ops::HeadCounts& head : *side) sum += head.saturated;
    }
  }
  return sum;
}

Status KvCache::cancel_step() {
  return step_->cancel();
}

// ---- reading back and accounting

Status KvCache::check_gather(int sequence, int layer, int64_t first_token,
                             int64_t num_tokens) const {
  if (!is_in_use(sequence)) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  const int num_layers = config().geometry.num_layers;
  if (layer < 0 || layer >= num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer, num_layers - 1);
  }
  if (table_->is_loading(sequence)) return SequenceTable::still_loads(sequence);
  const cache::Sequence& tokens = table_->sequences[sequence];
  if (first_token < 0 || num_tokens < 0 || num_tokens > tokens.num_tokens() - first_token) {
    return out_of_range("{} tokens from {} are wanted; the sequence has {}", num_tokens,
                        first_token, tokens.num_tokens());
  }
  const cache::BlockTable& table = tokens.table(storage().group_of_layer[layer]);
  const int64_t bs = config().block_size;
  for (int64_t block = first_token / bs; block * bs < first_token + num_tokens; ++block) {
    if (table[block] != cache::kNoBlock) continue;
    return out_of_range(
        "{} tokens from {} are wanted; the window of layer {} has left tokens {} to {} behind",
        num_tokens, first_token, layer, block * bs, (block + 1) * bs - 1);
  }
  return {};
}

Status KvCache::gather(int sequence, int layer, int64_t first_token, int64_t num_tokens,
                       MutableFloatRows k, MutableFloatRows v) const {
  KVX_RETURN_IF_ERROR(check_gather(sequence, layer, first_token, num_tokens));
  const cache::Sequence& tokens = table_->sequences[sequence];
  const int g = storage().group_of_layer[layer];
  const LayerStore& store = *storage().layers[layer];
  ops::GatherArgs args;
  args.transform = store.transform();
  args.block_table = {tokens.table(g).data(), tokens.table(g).size()};
  args.max_blocks_per_sequence = tokens.table(g).size();
  args.num_sequences = 1;
  args.k = k;
  args.v = v;
  const int64_t bs = config().block_size;
  const int64_t last = first_token + num_tokens;
  const int64_t sinks_end = tokens.num_sink_blocks(g) * bs;
  const int64_t recent_begin = tokens.first_recent_block(g) * bs;
  // Sinks, packed blocks and recent blocks, each as far as the range reaches into it.
  std::vector<GatherPart> parts;
  const auto add_part = [&](const ops::LayerView& view, int64_t begin, int64_t end) {
    begin = std::max(begin, first_token);
    end = std::min(end, last);
    if (begin < end) parts.push_back({&view, {0, begin, end - begin, begin - first_token}});
  };
  add_part(store.full_precision(), 0, sinks_end);
  add_part(store.packed(), sinks_end, recent_begin);
  add_part(store.full_precision(), std::max(sinks_end, recent_begin), last);
  return verbs_->gather(args, parts);
}

cache::PoolAccount KvCache::account() const {
  std::vector<cache::BlockLayout> layouts;
  for (const GroupPlan& group : storage().groups) {
    layouts.push_back(group.packed);
    if (storage().has_full_precision_window()) layouts.push_back(group.full_precision);
  }
  const std::lock_guard lock(table_->mutex);
  return cache::account_pool(*storage().pool, layouts);
}

cache::ByteCount KvCache::sequence_bytes(int64_t num_tokens) const {
  return cache::sequence_bytes(sizes_of(storage().groups), num_tokens);
}

int64_t KvCache::bytes_read_per_step(int64_t num_tokens) const {
  return cache::bytes_read_per_step(sizes_of(storage().groups), num_tokens);
}

// ---- files

std::string_view KvCache::fingerprint() const {
  return table_->prefixes ? std::string_view(table_->prefixes->fingerprint()) : std::string_view();
}

Status KvCache::save_sequence(int sequence, const std::string& path, const SaveOptions& options) {
  if (!table_->prefixes) return prefixes_are_off();
  const LatencyTimer timer(table_->latencies.save);
  return kv::save_sequence(*table_, *verbs_, sequence, path, options);
}

Status KvCache::save_prefixes(const std::string& path, const SaveOptions& options) const {
  if (!table_->prefixes) return prefixes_are_off();
  const LatencyTimer timer(table_->latencies.save);
  return kv::save_prefixes(*table_, *verbs_, path, options);
}

Result<int> KvCache::load_sequence(const std::string& path) {
  if (!table_->prefixes) return prefixes_are_off();
  const LatencyTimer timer(table_->latencies.load);
  return kv::load_sequence(*table_, *verbs_, path);
}

Result<LoadReport> KvCache::load_prefixes(const std::string& path) {
  if (!table_->prefixes) return prefixes_are_off();
  const LatencyTimer timer(table_->latencies.load);
  return kv::load_prefixes(*table_, *verbs_, path);
}

Result<std::shared_ptr<OutgoingSequence>> KvCache::hand_on(int sequence,
                                                           std::span<const int32_t> tokens,
                                                           bool for_peers) {
  if (!table_->prefixes) return prefixes_are_off();
  const int64_t num_tokens =
      std::min<int64_t>(std::ssize(tokens), config().max_tokens_per_sequence);
  const int64_t bytes = sequence_bytes(std::max<int64_t>(num_tokens, 1)).total();
  const std::lock_guard lock(table_->mutex);
  return OutgoingSequence::begin(*table_, *verbs_, sequence, tokens, bytes, for_peers);
}

// ---- what a recipe costs

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
                        (geometry.k_head_dim + geometry.stored_v_head_dim());
  RecipeCost cost;
  cost.bits_per_value = 8 * bytes / values;
  cost.bytes_per_token = static_cast<double>(cache::sequence_bytes(sizes, num_tokens).total()) /
                         static_cast<double>(num_tokens);
  cost.tokens_per_gib = cache::tokens_that_fit(sizes, int64_t{1} << 30, num_tokens);
  return cost;
}

}  // namespace kvx::kv

// KvCache: create() turns a recipe into memory and views; a step moves sequences forward.
#include "kv/kv_cache.hpp"

#include <algorithm>

#include "cache/pool_plan.hpp"
#include "core/log.hpp"
#include "ops/append/append.hpp"
#include "ops/attend/attend.hpp"
#include "ops/gather/gather.hpp"

namespace kvx::kv {

// ---- creation
// -------------------------------------------------------------------------------------------------------

namespace {

constexpr int kMaxSequences = 1 << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // positions and lengths are int32 in the verbs

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

}  // namespace

Result<std::unique_ptr<KvCache>> KvCache::create(KvCacheConfig config,
                                                 const ops::CpuContext& context) {
  KVX_RETURN_IF_ERROR(check_config(config));
  std::unique_ptr<KvCache> cache(new KvCache(std::move(config), context));
  const KvCacheConfig& kept = cache->config_;
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans,
                       plan_layers(kept.geometry, kept.recipe, kept.overrides));
  KVX_ASSIGN_OR_RETURN(cache->wide_ends_, wide_ends_of(kept.recipe, kept.block_size));
  KVX_ASSIGN_OR_RETURN(cache->groups_,
                       plan_groups(kept.geometry, plans, kept.recipe, kept.block_size));
  KVX_RETURN_IF_ERROR(cache->create_pool());
  KVX_RETURN_IF_ERROR(cache->create_layers(plans));
  KVX_RETURN_IF_ERROR(cache->create_sequences());
  KVX_RETURN_IF_ERROR(cache->create_prefix_cache(plans));
  return cache;
}

// Classes: packed and, with wide ends, wide blocks of each group in turn (packed_class,
// wide_class).
Status KvCache::create_pool() {
  // A sliding-window group is given the whole length too: its blocks come back as they expire, but
  // a long prompt may hold them all.
  const cache::BlockCounts blocks =
      cache::count_blocks(wide_ends_, config_.max_tokens_per_sequence, config_.block_size);
  std::vector<cache::ClassDemand> demands;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const GroupPlan& group = groups_[g];
    demands.push_back({fmt::format("group {} packed", g), group.packed.block_bytes, blocks.packed});
    if (!has_wide_ends()) continue;
    demands.push_back({fmt::format("group {} wide", g), group.wide.block_bytes, blocks.wide});
  }
  std::vector<int64_t> num_blocks;
  if (config_.memory_budget_bytes > 0) {
    KVX_ASSIGN_OR_RETURN(const cache::PoolPlan plan,
                         cache::plan_pool(config_.memory_budget_bytes, demands));
    num_blocks = plan.num_blocks;
  } else {
    // With prefixes one more: save_sequence() copies the open block through it.
    const int64_t num_spare = config_.prefix.is_on ? 1 : 0;
    for (const cache::ClassDemand& demand : demands) {
      num_blocks.push_back(demand.blocks_per_sequence * config_.max_sequences + num_spare);
    }
  }
  std::vector<cache::BlockClassSpec> classes;
  for (size_t c = 0; c < demands.size(); ++c) {
    classes.push_back({demands[c].name, num_blocks[c], {demands[c].block_bytes}});
  }
  cache::Memory& memory = config_.memory ? *config_.memory : cache::host_memory();
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
      LayerMemory wide;
      if (has_wide_ends()) {
        wide = {pool_->region(wide_class(g)), pool_->num_blocks(wide_class(g)), &group.wide, i};
      }
      group_of_layer_[layer] = g;
      KVX_ASSIGN_OR_RETURN(
          layers_[layer],
          LayerStore::create(
              config_.geometry, layer, plans[layer], config_.recipe.wide_spec,
              config_.calibration.empty() ? kNotCalibrated : config_.calibration[layer], packed,
              wide));
    }
  }
  return {};
}

cache::SequenceShape KvCache::sequence_shape() const {
  cache::SequenceShape shape{config_.block_size, config_.max_tokens_per_sequence, {}};
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    shape.groups.push_back(
        {packed_class(g), has_wide_ends() ? wide_class(g) : 0, wide_ends_, groups_[g].window});
  }
  return shape;
}

Status KvCache::create_sequences() {
  const cache::SequenceShape shape = sequence_shape();
  for (int s = 0; s < config_.max_sequences; ++s) {
    KVX_ASSIGN_OR_RETURN(cache::Sequence sequence, cache::Sequence::create(shape));
    sequences_.push_back(std::move(sequence));
  }
  in_use_.assign(config_.max_sequences, false);
  step_.groups.resize(groups_.size());
  return {};
}

// ---- sequences and steps
// --------------------------------------------------------------------------------------------

Result<int> KvCache::take_sequence() {
  const auto unused = std::find(in_use_.begin(), in_use_.end(), false);
  if (unused == in_use_.end()) {
    return out_of_range("all {} sequences are in use; free one or raise max_sequences",
                        config_.max_sequences);
  }
  return static_cast<int>(unused - in_use_.begin());
}

Status KvCache::check_sequence(int sequence) const {
  if (sequence < 0 || sequence >= config_.max_sequences || !in_use_[sequence]) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  if (step_.is_open) return invalid_argument("a step is open; call end_step first");
  return {};
}

Result<int> KvCache::create_sequence() {
  KVX_ASSIGN_OR_RETURN(const int sequence, take_sequence());
  if (prefixes_) KVX_RETURN_IF_ERROR(prefixes_->begin(sequence, {}));
  in_use_[sequence] = true;
  return sequence;
}

Status KvCache::free_sequence(int sequence) {
  KVX_RETURN_IF_ERROR(check_sequence(sequence));
  KVX_RETURN_IF_ERROR(sequences_[sequence].clear(*pool_));
  if (prefixes_) prefixes_->end(sequence);
  in_use_[sequence] = false;
  return {};
}

int64_t KvCache::max_step_tokens(int sequence) const {
  const cache::Sequence& tokens = sequences_[sequence];
  return std::min(tokens.most_tokens_at_once(), tokens.max_tokens() - tokens.num_tokens());
}

Status KvCache::check_entries(std::span<const StepEntry> entries) const {
  if (step_.is_open) return invalid_argument("a step is open; call end_step first");
  if (entries.empty()) return invalid_argument("entries is empty; expected at least one sequence");
  for (size_t i = 0; i < entries.size(); ++i) {
    const StepEntry& entry = entries[i];
    if (entry.sequence < 0 || entry.sequence >= config_.max_sequences || !in_use_[entry.sequence]) {
      return invalid_argument("entries[{}].sequence is {}; it is not in use", i, entry.sequence);
    }
    for (size_t j = 0; j < i; ++j) {
      if (entries[j].sequence == entry.sequence) {
        return invalid_argument("entries[{}].sequence is {}; it is named twice", i, entry.sequence);
      }
    }
    const cache::Sequence& sequence = sequences_[entry.sequence];
    if (entry.num_tokens > sequence.max_tokens() - sequence.num_tokens()) {
      return out_of_range("entries[{}].num_tokens is {}; the sequence has {} of {} tokens", i,
                          entry.num_tokens, sequence.num_tokens(), sequence.max_tokens());
    }
    if (entry.num_tokens < 1 || entry.num_tokens > max_step_tokens(entry.sequence)) {
      return invalid_argument("entries[{}].num_tokens is {}; expected 1 to {} in one step", i,
                              entry.num_tokens, max_step_tokens(entry.sequence));
    }
  }
  return {};
}

// Before anything moves: do all entries together find their blocks?
Status KvCache::check_free_blocks(std::span<const StepEntry> entries) {
  needed_blocks_.assign(pool_->num_classes(), 0);
  for (const StepEntry& entry : entries) {
    sequences_[entry.sequence].add_needed_blocks(*pool_, entry.num_tokens, needed_blocks_);
  }
  for (int c = 0; c < pool_->num_classes(); ++c) {
    if (needed_blocks_[c] <= pool_->num_free(c)) continue;
    if (needed_blocks_[c] <= pool_->num_available(c)) {
      log(LogLevel::kDebug, "the step evicts {} cached blocks of {}",
          needed_blocks_[c] - pool_->num_free(c), pool_->name(c));
      continue;
    }
    return out_of_range("the step needs {} blocks of {}; {} of {} are free", needed_blocks_[c],
                        pool_->name(c), pool_->num_available(c), pool_->num_blocks(c));
  }
  return {};
}

// Blocks that leave the entry's recent window go from 16 bits to their packed format, in all layers
// of their group.
Status KvCache::quantise_leaving_blocks(const StepEntry& entry) {
  cache::Sequence& sequence = sequences_[entry.sequence];
  moves_.clear();
  KVX_RETURN_IF_ERROR(sequence.take_moves(*pool_, entry.num_tokens, moves_));
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    copies_.clear();
    for (const cache::BlockMove& move : moves_) {
      if (move.group == g) copies_.push_back({move.wide_id, move.packed_id, config_.block_size});
    }
    if (copies_.empty()) continue;
    for (int layer : groups_[g].layers) {
      const LayerStore& store = *layers_[layer];
      KVX_ASSIGN_OR_RETURN(const int64_t nonfinite,
                           ops::copy_blocks(context_, store.wide(), store.packed(), copies_));
      nonfinite_inputs_ += nonfinite;
    }
  }
  KVX_RETURN_IF_ERROR(sequence.finish_moves(*pool_, moves_));
  return prefixes_ ? prefixes_->record_moves(entry.sequence, moves_) : Status{};
}

Status KvCache::begin_step(std::span<const StepEntry> entries) {
  KVX_RETURN_IF_ERROR(check_entries(entries));
  for (const StepEntry& entry : entries) {
    KVX_RETURN_IF_ERROR(sequences_[entry.sequence].release_expired(*pool_));
  }
  KVX_RETURN_IF_ERROR(check_free_blocks(entries));
  for (const StepEntry& entry : entries) {
    KVX_RETURN_IF_ERROR(copy_open_blocks(entry));
    KVX_RETURN_IF_ERROR(quantise_leaving_blocks(entry));
    KVX_RETURN_IF_ERROR(sequences_[entry.sequence].reserve(*pool_, entry.num_tokens));
  }
  describe_step(entries);
  return {};
}

// Once a step, for all layers: slots, positions, lengths and block tables as the verbs take them.
void KvCache::describe_step(std::span<const StepEntry> entries) {
  step_.is_open = true;
  step_.entries.assign(entries.begin(), entries.end());
  step_.positions.clear();
  step_.q_starts.assign(1, 0);
  step_.seq_lens.clear();
  for (const StepEntry& entry : entries) {
    const int64_t first = sequences_[entry.sequence].num_tokens();
    for (int t = 0; t < entry.num_tokens; ++t) step_.positions.push_back(first + t);
    step_.q_starts.push_back(step_.q_starts.back() + entry.num_tokens);
    step_.seq_lens.push_back(static_cast<int32_t>(first + entry.num_tokens));
  }
  for (int g = 0; g < static_cast<int>(groups_.size()); ++g) {
    GroupStep& group = step_.groups[g];
    group.slots.resize(step_.positions.size());
    group.row_stride = 0;
    for (const StepEntry& entry : entries) {
      group.row_stride = std::max(group.row_stride, sequences_[entry.sequence].table(g).size());
    }
    group.block_ids.assign(group.row_stride * entries.size(), cache::kNoBlock);
    group.wide_head.clear();
    group.wide_tail.clear();
    for (size_t i = 0; i < entries.size(); ++i) {
      const cache::Sequence& sequence = sequences_[entries[i].sequence];
      const std::span<int64_t> slots(group.slots.data() + step_.q_starts[i], entries[i].num_tokens);
      sequence.slots(g, sequence.num_tokens(), slots);
      const cache::BlockTable& table = sequence.table(g);
      std::copy_n(table.data(), table.size(), group.block_ids.begin() + i * group.row_stride);
      group.wide_head.push_back(static_cast<int32_t>(sequence.wide_head(g)));
      group.wide_tail.push_back(static_cast<int32_t>(sequence.wide_tail(g)));
    }
  }
}

Status KvCache::append_and_attend(int layer, const AttentionParams& params, FloatRows q,
                                  FloatRows k, FloatRows v, MutableFloatRows out) {
  if (layer < 0 || layer >= config_.geometry.num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer,
                            config_.geometry.num_layers - 1);
  }
  if (!step_.is_open) return invalid_argument("no step is open; call begin_step first");
  const LayerStore& store = *layers_[layer];
  const int g = group_of_layer_[layer];
  const GroupStep& group = step_.groups[g];

  ops::AppendArgs append;
  append.cache = has_wide_ends() ? store.wide() : store.packed();
  append.transform = store.transform();
  append.k = k;
  append.v = v;
  append.slot_mapping = group.slots;
  append.positions = step_.positions;
  KVX_ASSIGN_OR_RETURN(const ops::AppendReport report, ops::append(context_, append));
  nonfinite_inputs_ += report.nonfinite_inputs;

  ops::AttendArgs attend;
  attend.packed = store.packed();
  if (has_wide_ends()) {
    attend.wide = store.wide();
    attend.wide_head_blocks = group.wide_head.data();
    attend.wide_tail_block = group.wide_tail.data();
  }
  attend.transform = store.transform();
  attend.num_sequences = static_cast<int>(step_.entries.size());
  attend.block_table = {group.block_ids.data(), group.row_stride};
  attend.max_blocks_per_sequence = group.row_stride;
  attend.seq_lens = step_.seq_lens.data();
  attend.q_starts = step_.q_starts.data();
  attend.num_q_heads = params.num_q_heads;
  attend.q = q;
  attend.out = out;
  attend.softmax_scale = params.softmax_scale;
  attend.softcap = params.softcap;
  attend.window = groups_[g].window;
  attend.sinks = params.sinks;
  return ops::attend(context_, attend);
}

Status KvCache::end_step() {
  if (!step_.is_open) return invalid_argument("no step is open; call begin_step first");
  for (const StepEntry& entry : step_.entries) sequences_[entry.sequence].advance(entry.num_tokens);
  step_.is_open = false;
  warn_of_nonfinite_inputs();
  return {};
}

// Once a cache: a model that makes one NaN makes many.
void KvCache::warn_of_nonfinite_inputs() {
  if (nonfinite_inputs_ == 0 || has_warned_of_nonfinite_) return;
  has_warned_of_nonfinite_ = true;
  log(LogLevel::kWarning, "{} NaN or infinite inputs are stored as zeros", nonfinite_inputs_);
}

// The blocks that the step has reserved go back, so that a fork does not share them.
Status KvCache::cancel_step() {
  if (!step_.is_open) return invalid_argument("no step is open; call begin_step first");
  step_.is_open = false;
  for (const StepEntry& entry : step_.entries) {
    cache::Sequence& sequence = sequences_[entry.sequence];
    KVX_RETURN_IF_ERROR(sequence.truncate(*pool_, sequence.num_tokens()));
  }
  return {};
}

// ---- reading back and accounting
// ------------------------------------------------------------------------------------

Status KvCache::gather(int sequence, int layer, int64_t first_token, int64_t num_tokens,
                       MutableFloatRows k, MutableFloatRows v) const {
  if (sequence < 0 || sequence >= config_.max_sequences || !in_use_[sequence]) {
    return invalid_argument("sequence is {}; it is not in use", sequence);
  }
  if (layer < 0 || layer >= config_.geometry.num_layers) {
    return invalid_argument("layer is {}; the cache has layers 0 to {}", layer,
                            config_.geometry.num_layers - 1);
  }
  const cache::Sequence& tokens = sequences_[sequence];
  if (first_token < 0 || num_tokens < 0 || num_tokens > tokens.num_tokens() - first_token) {
    return out_of_range("tokens {} to {} are wanted; the sequence has {}", first_token,
                        first_token + num_tokens, tokens.num_tokens());
  }
  const int g = group_of_layer_[layer];
  const int64_t bs = config_.block_size;
  const int64_t last = first_token + num_tokens;
  ops::GatherArgs args;
  args.transform = layers_[layer]->transform();
  args.block_table = {tokens.table(g).data(), tokens.table(g).size()};
  args.max_blocks_per_sequence = tokens.table(g).size();
  args.num_sequences = 1;
  args.k = k;
  args.v = v;
  const int64_t head_end = tokens.wide_head(g) * bs;
  const int64_t tail_begin = tokens.wide_tail(g) * bs;
  // The wide head, the packed middle and the wide tail, each as far as the range reaches into it.
  const auto gather_part = [&](const ops::LayerView& view, int64_t begin, int64_t end) -> Status {
    begin = std::max(begin, first_token);
    end = std::min(end, last);
    if (begin >= end) return {};
    const ops::GatherRange range{0, begin, end - begin, begin - first_token};
    args.cache = view;
    args.ranges = {&range, 1};
    return ops::gather(context_, args);
  };
  const LayerStore& store = *layers_[layer];
  KVX_RETURN_IF_ERROR(gather_part(store.wide(), 0, head_end));
  KVX_RETURN_IF_ERROR(gather_part(store.packed(), head_end, tail_begin));
  return gather_part(store.wide(), std::max(head_end, tail_begin), last);
}

cache::PoolAccount KvCache::account() const {
  std::vector<cache::BlockLayout> layouts;
  for (const GroupPlan& group : groups_) {
    layouts.push_back(group.packed);
    if (has_wide_ends()) layouts.push_back(group.wide);
  }
  return cache::account_pool(*pool_, layouts);
}

cache::ByteCount KvCache::sequence_bytes(int64_t num_tokens) const {
  return cache::sequence_bytes(sizes_of(groups_, wide_ends_), num_tokens);
}

int64_t KvCache::bytes_read_per_step(int64_t num_tokens) const {
  return cache::bytes_read_per_step(sizes_of(groups_, wide_ends_), num_tokens);
}

Result<RecipeCost> cost_of(const KvCacheConfig& config, int64_t num_tokens) {
  if (num_tokens < 1) return invalid_argument("num_tokens is {}; expected 1 or more", num_tokens);
  const CacheGeometry& geometry = config.geometry;
  KVX_ASSIGN_OR_RETURN(const std::vector<LayerPlan> plans,
                       plan_layers(geometry, config.recipe, config.overrides));
  KVX_ASSIGN_OR_RETURN(const std::vector<GroupPlan> groups,
                       plan_groups(geometry, plans, config.recipe, config.block_size));
  KVX_ASSIGN_OR_RETURN(const cache::WideEnds wide_ends,
                       wide_ends_of(config.recipe, config.block_size));
  const std::vector<cache::GroupSizes> sizes = sizes_of(groups, wide_ends);
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
